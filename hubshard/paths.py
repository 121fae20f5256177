"""Paths of files, relative to a root and with '/' between folders: how they are made, and what is refused.

There are two rules. `check_plain_path` is for names that somebody else wrote (an index, a manifest, the tree of a repo)
and for those that we publish: a file of that name must be one and the same on every disk. `check_store_path` is for
what a store is asked to write or to delete: a repo may hold names that some disks cannot, and one must be able to get
rid of them; it refuses what would leave the root, or what no repo takes.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from hubshard.errors import FormatError
from hubshard.messages import brief

__all__ = ["case_key", "check_case", "check_plain_path", "check_store_path", "file_and_folder", "path_in", "told_apart"]

_MAX_PART_BYTES = 255  # of a file name on all common file systems
_RESERVED_ON_WINDOWS = re.compile(
    r"(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9\u00b9\u00b2\u00b3])\s*(?:\.|\Z)", re.IGNORECASE
)
_MAX_PATH_CHARS = 1024  # of a path in a repo
_DRIVE = re.compile(r"[A-Za-z]:")


def path_in(folder: str, name: str) -> str:
    """The path of `name` in `folder`, "" of which is the root; of the name "", what all paths in it begin with."""
    return f"{folder}/{name}" if folder else name


def check_plain_path(file: str, *, path: str, hint: str = "do not load this checkpoint") -> None:
    """Refuse a file name that, on any system, may lie outside the folder it is relative to, or be no file at all.

    Args:
        file: the name.
        path: where it stands.
        hint: what to do about it.

    Raises:
        FormatError: absolute, with a drive, a backslash, `..`, an empty part, a control character, or a part that
            Windows reads as another one or as a device; names `path` as where it stands.
    """
    if "\\" in file or ":" in file or not file.isprintable() or not all(map(_is_plain_part, file.split("/"))):
        raise FormatError(
            f"{path}: the file name {brief(file)} is not a plain path within its folder",
            hint=hint,
        )


def _is_plain_part(part: str) -> bool:
    # Windows drops dots and spaces at the end, so that "..  " is ".."
    if not part or part[-1] in ". " or len(part.encode()) > _MAX_PART_BYTES:
        return False
    return not _RESERVED_ON_WINDOWS.match(part)


def case_key(file: str) -> str:
    """What two names have in common that some file system would hold to be one."""
    return (file if file.isascii() else unicodedata.normalize("NFC", file)).casefold()


def check_case(files: Iterable[str], *, path: str, hint: str = "rename one of them") -> None:
    """Refuse file names that some file system would hold to be one: without regard to case, or to Unicode's forms.

    Args:
        files: their names.
        path: where they stand.
        hint: what to do about it.

    Raises:
        FormatError: naming both.
    """
    seen: dict[str, str] = {}
    for file in sorted(files):
        other = seen.setdefault(case_key(file), file)
        if other != file:
            one, two, what = told_apart(other, file)
            raise FormatError(f"{path}: {one} and {two} are one file on a disk without regard to {what}", hint=hint)


def told_apart(one: str, other: str) -> tuple[str, str, str]:
    """Two names of one `case_key`, in quotes, and what sets them apart: escapes show it where they look the same."""
    if unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other):
        return ascii(one), ascii(other), "Unicode's forms"
    return repr(one), repr(other), "case"


def file_and_folder(new: Iterable[str], there: Iterable[str] = ()) -> tuple[str, str] | None:
    """A file whose path is also that of a folder, without regard to case, and a file in that folder.

    Args:
        new: paths of files.
        there: of further ones, which are not looked at but for those of `new`.

    Returns:
        Both paths, at least one of them of `new`; None where there are none.
    """
    mine = set(new)
    every = sorted(mine.union(there))
    files = {case_key(path): path for path in every}
    for path in every:
        parts = case_key(path).split("/")
        for depth in range(1, len(parts)):
            file = files.get("/".join(parts[:depth]))
            if file is not None and not mine.isdisjoint((file, path)):
                return file, path
    return None


def check_store_path(path: str) -> str:
    """`path` itself, when a store can hold it: it stays inside the root on every operating system.

    Raises:
        FormatError: it is empty or absolute, longer than 1024 characters, or has a drive, a backslash, a control
            character, a `.git` folder, or a part that is empty, "." or "..".
    """
    parts = path.split("/")
    is_inside = all(part not in {"", ".", ".."} for part in parts) and "\\" not in path and not _DRIVE.match(path)
    if not is_inside or any(ord(char) < 32 for char in path):
        raise FormatError(
            f"{path!r} is no path of a file in a store", hint="write it relative to the root, with '/' between folders"
        )
    if len(path) > _MAX_PATH_CHARS:
        raise FormatError(
            f"{brief(path)} has {len(path)} characters, and no repo takes paths of more than {_MAX_PATH_CHARS}",
            hint="move the file to a folder nearer to the root",
        )
    if any(part.casefold() == ".git" for part in parts):
        raise FormatError(f"{path!r}: nothing can be stored in a .git folder", hint="choose another folder")
    return path
