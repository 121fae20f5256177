"""A lock that belongs to a file and dies with the process that holds it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hubshard.fetch.on_disk import refused_by_disk
from hubshard.locks import try_lock, wait_for_lock

__all__ = ["locked"]

_UNLOCKABLE = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_UNWRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}


@contextmanager
def locked(path: Path, *, on_wait: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock of `path`, which is made where it is missing and stays; wait for who holds it now.

    Two threads of one process exclude each other as two processes do. A holder that is killed lets go.

    Args:
        path: the lock file; its folder is made.
        on_wait: called once, before the wait, when somebody else holds it.

    Yields:
        True while held; False where the disk is read-only or knows no locks.

    Raises:
        StoreError: there can be no such file.
    """
    descriptor = _open(path)
    try:
        yield descriptor is not None and _acquire(descriptor, on_wait)
    finally:
        if descriptor is not None:
            os.close(descriptor)  # lets go of the lock, on Windows too


def _open(path: Path) -> int | None:
    with refused_by_disk(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        except OSError as error:
            if error.errno in _UNWRITABLE:
                return None
            raise


def _acquire(descriptor: int, on_wait: Callable[[], None]) -> bool:
    try:
        if not try_lock(descriptor):
            on_wait()
            wait_for_lock(descriptor)
    except OSError as error:
        if error.errno in _UNLOCKABLE:
            return False
        raise
    return True
