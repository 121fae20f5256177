"""What Python's files leave to their callers: exactly so many bytes, names that are durable, disks that are full."""

from __future__ import annotations

import errno
import os
import sys
from io import RawIOBase
from pathlib import Path

from hubshard.errors import StoreError

__all__ = ["FULL", "is_full", "read_exactly", "remove_unless_open", "sync_folder", "write_all"]

FULL = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})
"""What the system calls a full disk, or one of which one user may take no more; not every system has quotas."""


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
