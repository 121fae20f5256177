"""One run at a time in a folder of steps: a lock that dies with the process that holds it. No torch.

Two runs in one folder would remove each other's steps, and files that the other, or a pull, is still writing.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import weakref
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hubshard.disk import hint_for, refused
from hubshard.errors import ConflictError, FormatError, HubshardError, StoreError
from hubshard.jsonfile import read_json
from hubshard.locks import try_lock

__all__ = ["NAME", "PULL", "FolderLock", "make_folder"]

_LOG = logging.getLogger("hubshard")

NAME = ".run.lock"
PULL = "pull"
"""Where a run is named: all pulls into a folder hold it together."""
WAIT_SECONDS = 10.0
"""For a run that is just being ended."""
_POLL_SECONDS = 0.1
_MOST_BYTES = 2**16  # of what is told in it
_LOCKED_BYTE = 2**30  # far behind the text, which Windows lets nobody read where it is locked


class FolderLock:
    """The right to save to a folder. Ranks of one run that share it are one holder.

    A process that was forked from the holder, such as a worker of a data loader, does not hold it: it is free as soon
    as the holder is dead. On a disk that knows no locks it is always free.

    Args:
        root: the folder; it is made.
        run: the same on all ranks of a run, and of no other.
    """

    def __init__(self, root: Path, run: str) -> None:
        self._root = root
        self._path = root / NAME
        self._run = run
        self._descriptor: int | None = None
        self._is_free = False  # nothing is held, and nothing need be
        _ALL.add(self)

    def acquire(self, *, waits: bool = True) -> None:
        """Hold it, once whoever holds it has let go.

        Args:
            waits: a while for a run to end; else it is refused at once.

        Raises:
            ConflictError: another run does not.
            StoreError: the disk refuses.
        """
        end, said = time.monotonic() + WAIT_SECONDS, False
        while not self._try():
            told = self._told()
            if told.get("run") == self._run:
                self._is_free = True
                return
            if time.monotonic() > end or (told and not waits):  # where nothing is told yet, it is about to be
                raise ConflictError(
                    f"{self._root} is in use: {_named(told)} saves there",
                    hint="give each run a folder of its own; or end the other one, and start again",
                )
            if not said and waits:
                _LOG.warning("%s is in use: waiting up to %.0f s for %s", self._root, WAIT_SECONDS, _named(told))
                said = True
            time.sleep(_POLL_SECONDS)

    def holder(self) -> str | None:
        """Another run that holds it, for people; None where there is none."""
        if self._descriptor is not None:
            return None
        try:
            is_free = self._try()
        except StoreError:  # a disk that can only be read: nobody saves there
            return None
        if is_free:
            self.release()
            return None
        told = self._told()
        return None if told.get("run") == self._run else _named(told)

    def is_there(self) -> bool:
        """Whether the file of the lock is still what others would lock; True on a disk that knows no locks."""
        return self._is_free or (self._descriptor is not None and self._is_at_path(self._descriptor))

    def release(self) -> None:
        """Let go; fine where it is not held."""
        if self._descriptor is None:
            return
        is_there = self._is_at_path(self._descriptor)
        if os.name == "nt":  # which removes no file that is open
            self.leave()
        if is_there:
            with suppress(OSError):  # on Windows, another run may hold it already
                self._path.unlink()
        self.leave()

    def leave(self) -> None:
        """Close the file, as a process does that dies, or that was forked."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _try(self) -> bool:
        if self._descriptor is not None:
            return True
        make_folder(self._root)
        while True:
            descriptor = self._opened()
            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            try:
                is_ours = try_lock(descriptor)
            except OSError:  # the disk knows no locks
                os.close(descriptor)
                self._is_free = True
                return True
            if is_ours and self._is_at_path(descriptor):
                break
            os.close(descriptor)
            if not is_ours:
                return False
        self._descriptor = descriptor
        self._tell(descriptor)
        return True

    def _opened(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise StoreError(
                f"{self._path} cannot be opened: {error.strerror}",
                hint=hint_for(error) or "it is the lock of the folder: see what is there",
            ) from error

    def _is_at_path(self, descriptor: int) -> bool:
        # who held it may have removed the file between our open and our lock
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _tell(self, descriptor: int) -> None:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        told = {"run": self._run, "process": os.getpid(), "host": socket.gethostname(), "since": now}
        with suppress(OSError):  # the disk is full: it is held nevertheless
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, json.dumps(told).encode())
            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)

    def _told(self) -> dict[str, Any]:
        try:
            return read_json(self._path, what="note of who holds the lock", most_bytes=_MOST_BYTES)
        except (OSError, HubshardError):
            return {}


def make_folder(root: Path) -> None:
    """Make the folder of a run, unless it is there.

    Raises:
        FormatError: a file is in its way, or something that is none where the lock should be.
        StoreError: the disk refuses.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise FormatError(f"local_dir {root} is a file, or lies in one", hint="name a folder; it is made") from error
    except OSError as error:
        hint = hint_for(error) or "choose another folder"
        raise StoreError(f"local_dir {root} cannot be made: {error.strerror}", hint=hint) from error
    lock = root / NAME
    with refused(lock):
        is_in_its_way = lock.exists() and not lock.is_file()
    if is_in_its_way:
        raise FormatError(f"{lock} is no file, and cannot be the lock of the folder", hint="remove it")


def _named(told: dict[str, Any]) -> str:
    if not told:
        return "another run"
    is_pull = told.get("run") == PULL
    if not is_pull and (told.get("process"), told.get("host")) == (os.getpid(), socket.gethostname()):
        return "another ResumeBranch of this process, which was not closed,"
    one = "a pull" if is_pull else "another run"
    return f"{one} (process {told.get('process')} on {told.get('host')}, since {told.get('since')})"


_ALL: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _leave_all() -> None:
    for lock in list(_ALL):
        lock.leave()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_leave_all)
