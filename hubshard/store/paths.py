"""Paths inside a store: POSIX, relative, and the same on every operating system."""

from __future__ import annotations

from hubshard.errors import FormatError

__all__ = ["check_path"]

_HINT = "write it relative to the root, with '/' between folders"


def check_path(path: str) -> str:
    """`path` itself, when it stays inside the root on every operating system.

    Raises:
        FormatError: it is empty or absolute, or has a drive, a backslash, a control character, a `.git` folder, or a
            part that is empty, "." or "..".
    """
    parts = path.split("/")
    if not path or any(part in {"", ".", ".."} for part in parts):
        raise FormatError(f"{path!r} is no path of a file in a store", hint=_HINT)
    if "\\" in path or (len(parts[0]) == 2 and parts[0][1] == ":") or any(ord(char) < 32 for char in path):
        raise FormatError(f"{path!r} is no path of a file in a store", hint=_HINT)
    if any(part.casefold() == ".git" for part in parts):
        raise FormatError(f"{path!r}: nothing can be stored in a .git folder", hint="choose another folder")
    return path
