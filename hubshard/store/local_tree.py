"""What a directory holds: its files, how they are told apart, and the id of the whole."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hubshard.errors import FormatError

__all__ = ["AT_REST", "FileState", "allowed_roots", "is_private", "revision_id", "scan", "state_of", "walk"]

AT_REST = "something writes there: when it is at rest, open it again, or run it again"
"""What to do about files that change while they are read."""

_PRIVATE = {".git", ".cache"}


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as it was when the directory was looked at.

    Attributes:
        path: POSIX, relative to the root.
        real: where its bytes are, links resolved.
        nbytes: its size (bytes).
        mtime_ns: its time of modification (nanoseconds since the epoch).
        inode: its number in the file system.
        device: the file system.
    """

    path: str
    real: Path
    nbytes: int
    mtime_ns: int
    inode: int
    device: int

    @property
    def mark(self) -> str:
        """Changes when the file is written or replaced."""
        return f"{self.nbytes}-{self.mtime_ns}-{self.inode}"


def scan(root: Path, passes_over: Callable[[str], bool] = lambda _: False) -> dict[str, FileState]:
    """All files of a directory by path, without `.git` and `.cache` at its top.

    A link to a file is followed where it stays inside; a link to a folder inside is left out, since its files are
    listed under their own folder.

    Args:
        root: the directory.
        passes_over: whether a path that could not be taken, of a file or a folder, is left out instead.

    Raises:
        FormatError: a link leads out of the directory or to nothing, or something is neither file, folder nor link.
    """
    roots = allowed_roots(root)
    found = (_file(root, entry, roots, passes_over) for entry in walk(root) if not is_private(_relative(root, entry)))
    return dict(sorted((state.path, state) for state in found if state is not None))


def walk(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder but the folders themselves, unless they are empty; links are not followed."""
    with os.scandir(folder) as entries:
        below = list(entries)
    for entry in below:
        if entry.is_dir(follow_symlinks=False) and not _is_empty(entry.path):
            yield from walk(entry.path)
        else:
            yield entry


def _is_empty(folder: str) -> bool:
    with os.scandir(folder) as entries:
        return next(entries, None) is None


def allowed_roots(root: Path) -> tuple[Path, ...]:
    """Where links may lead: the directory itself, and the blobs where it is a snapshot in the Hugging Face cache.

    The cache keeps blobs per repo, and those by sha256 once for all repos.
    """
    real = root.resolve()
    if real.parent.name != "snapshots":
        return (real,)
    repo = real.parent.parent
    return (real, *(blobs for blobs in (repo / "blobs", repo.parent / "blobs") if blobs.is_dir()))


def revision_id(files: Mapping[str, FileState]) -> str:
    """40 hexadecimal digits that change when a file is added, removed or written."""
    digest = hashlib.sha256()
    for path, state in sorted(files.items()):
        digest.update(f"{path}\0{state.nbytes}\0{state.mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:40]


def is_private(path: PurePosixPath) -> bool:
    """Whether a relative path belongs to a tool that keeps its notes in the directory, and not to a revision."""
    return path.parts[0] in _PRIVATE


def state_of(path: str, real: Path, status: os.stat_result) -> FileState:
    """A file's state from its `stat`."""
    return FileState(path, real, status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


def _relative(root: Path, entry: os.DirEntry[str]) -> PurePosixPath:
    return PurePosixPath(Path(entry.path).relative_to(root).as_posix())


def _file(
    root: Path, entry: os.DirEntry[str], roots: tuple[Path, ...], passes_over: Callable[[str], bool]
) -> FileState | None:
    try:
        return _state(root, entry, roots)
    except FormatError as error:
        if passes_over(_relative(root, entry).as_posix()):
            return None
        error.add_hint("a publish leaves it behind with `exclude`")
        raise


def _state(root: Path, entry: os.DirEntry[str], roots: tuple[Path, ...]) -> FileState | None:
    path, real = _relative(root, entry).as_posix(), Path(entry.path)
    if entry.is_symlink():
        real = Path(os.path.realpath(real))  # unlike resolve(), it takes a link to itself
        if not any(real.is_relative_to(allowed) for allowed in roots):
            raise FormatError(
                f"{path} in {root} links to {real}, outside the directory", hint="copy it in, or remove it"
            )
        if not real.exists():
            raise FormatError(f"{path} in {root} links to {real}, which does not exist", hint="remove the link")
    status = real.stat()
    if stat.S_ISDIR(status.st_mode):
        return None
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{path} in {root} is neither a file nor a folder", hint="remove it")
    return state_of(path, real, status)
