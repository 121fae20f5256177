"""What Python's files leave to their callers: exactly so many bytes, names that are durable, disks that refuse."""

from __future__ import annotations

import errno
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path

from hubshard.errors import HubshardError, StoreError

__all__ = [
    "FULL",
    "MORE_FILES",
    "hint_for",
    "is_full",
    "is_out_of_files",
    "read_exactly",
    "refusal",
    "refused",
    "remove_unless_open",
    "replace_file",
    "sync_folder",
    "write_all",
]

FULL = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})
"""What the system calls a full disk, or one of which one user may take no more; not every system has quotas."""
MORE_FILES = "raise the limit: `ulimit -n 1024`"
"""What to do where too many files are open."""
_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE})  # of a process, of all
_TOO_MANY = "too many open files"  # as the C library says it, and hf_xet after it
_HINTS = {
    **dict.fromkeys(FULL, "free some space, or choose another disk"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "it belongs to somebody else, or is protected: choose another folder"),
    errno.EFBIG: "the disk, or the system (`ulimit -f`), takes no file that large",
    errno.EROFS: "it can only be read: mount it to be written to, or choose another folder",
}


def read_exactly(file: RawIOBase, into: memoryview) -> int:
    """Fill `into` from where an unbuffered file stands; the bytes that the file lacks for that, 0 when it is full."""
    rest = into.cast("B")
    while rest.nbytes:
        count = file.readinto(rest)
        if not count:
            break
        rest = rest[count:]
    return rest.nbytes


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all of `data` where an open file stands.

    Raises:
        OSError: the disk is full, or failed.
    """
    rest = data.cast("B")
    while rest.nbytes:
        rest = rest[os.write(descriptor, rest) :]


def sync_folder(*folders: Path) -> None:
    """Make the names in these folders durable. Windows cannot, and journals its renames."""
    if sys.platform != "win32":
        for folder in folders:
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file anew, durably: a kill at any moment leaves the old one or the new one.

    Raises:
        OSError: the disk is full, or refuses.
    """
    part = path.with_name(f"{path.name}-{uuid.uuid4().hex}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_unless_open(path: Path) -> None:
    """Remove a file that is of no use, if it is there. On Windows one that somebody has open stays.

    Raises:
        StoreError: this process may not remove it.
    """
    try:
        path.unlink(missing_ok=True)
    except PermissionError as error:
        if sys.platform != "win32":  # which says the same of a file that is open
            raise StoreError(
                f"{path} is of no use any more, and cannot be removed: {error.strerror}",
                hint="it or its folder belongs to somebody else, or is protected: remove it yourself",
            ) from error


def is_full(error: OSError) -> bool:
    """Whether it says that a disk is full, or the part of it that one user may take."""
    return error.errno in FULL


def refusal(error: OSError, path: Path) -> StoreError:
    """Our error for what the system has refused: says where and, as far as that is known, what to do about it.

    Args:
        error: of the system.
        path: is named where the error names none.
    """
    place = error.filename2 or error.filename or path
    return StoreError(f"{place}: {error.strerror or error}", hint=hint_for(error))


def hint_for(error: BaseException) -> str | None:
    """What to do about what the system has refused, also where another error came of it; None where that is not known.

    Args:
        error: of the system or of a library, with its causes.
    """
    if is_out_of_files(error):
        return f"too many files were open; {MORE_FILES}"
    return _HINTS.get(error.errno or 0) if isinstance(error, OSError) else None


def is_out_of_files(error: BaseException | None) -> bool:
    """Whether it came of too many open files: by its number, or in the words of a library, as are its causes."""
    while error is not None:
        is_number = isinstance(error, OSError) and error.errno in _OUT_OF_FILES
        if is_number or _TOO_MANY in str(error).lower() or "TooManyOpenFiles" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Raise `refusal` in the place of what the system raises.

    Args:
        path: is named where the error names none.
    """
    try:
        yield
    except HubshardError:
        raise
    except OSError as error:
        raise refusal(error, path) from error
