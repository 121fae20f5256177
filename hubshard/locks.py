"""Locks on open files that die with the process that holds them; on POSIX `flock`, on Windows a locked byte."""

from __future__ import annotations

import sys
from contextlib import suppress

if sys.platform == "win32":
    import msvcrt
    import time
else:
    import fcntl

__all__ = ["try_lock", "wait_for_lock"]


if sys.platform == "win32":

    def try_lock(descriptor: int) -> bool:
        """Lock an open file unless somebody holds it; whether it is locked now.

        Raises:
            OSError: the disk knows no locks.
        """
        with suppress(PermissionError):  # somebody holds it
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            return True
        return False

    def wait_for_lock(descriptor: int) -> None:
        """Lock an open file once nobody else holds it."""
        while not try_lock(descriptor):
            time.sleep(0.2)

else:

    def try_lock(descriptor: int) -> bool:
        """Lock an open file unless somebody holds it; whether it is locked now.

        Raises:
            OSError: the disk knows no locks.
        """
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def wait_for_lock(descriptor: int) -> None:
        """Lock an open file once nobody else holds it."""
        fcntl.flock(descriptor, fcntl.LOCK_EX)
