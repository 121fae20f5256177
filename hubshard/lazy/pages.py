"""Hints to the kernel about memory that shows a file, and about the file's cache. All may be ignored without harm.

Of Linux alone; elsewhere, and on kernels that are too old, every function does nothing, or takes a plain way round.
Python's `mmap.madvise` keeps all other threads waiting while the disk is read, so the C library is called directly.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from functools import cache
from typing import Any

__all__ = ["can_discard", "discard", "forget", "populate"]

# https://man7.org/linux/man-pages/man2/madvise.2.html
_MADV_DONTNEED = 4
_MADV_POPULATE_READ = 22  # Linux 5.14


def populate(address: int, nbytes: int) -> bool:
    """Bring mapped pages of a file into memory, reading what is not there yet.

    Args:
        address: of the first byte; the whole pages around the range are meant.
        nbytes: of the range.

    Returns:
        Whether the system did so; else pages come when they are touched.
    """
    return _advise(address, nbytes, _MADV_POPULATE_READ)


def can_discard() -> bool:
    """Whether `discard` does anything here."""
    return _libc() is not None


def discard(address: int, nbytes: int) -> bool:
    """Take mapped pages of a file out of this process; they come again from the file when they are touched.

    What was written to them is lost. The file's cache keeps them as long as the system has room.

    Args:
        address: of the first byte; the whole pages around the range are meant.
        nbytes: of the range.

    Returns:
        Whether the system did so.
    """
    return _advise(address, nbytes, _MADV_DONTNEED)


def forget(file: int, start: int, stop: int) -> bool:
    """Let the system drop its cache of bytes `start` to `stop` of an open file.

    Returns:
        Whether the system was told.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # a file system without a cache
            os.posix_fadvise(file, start, stop - start, os.POSIX_FADV_DONTNEED)
            return True
    return False


def _advise(address: int, nbytes: int, advice: int) -> bool:
    libc = _libc()
    if libc is None or nbytes <= 0:
        return False
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    return bool(libc.madvise(start, address + nbytes - start, advice) == 0)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None:
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.madvise.restype = ctypes.c_int
    return libc
