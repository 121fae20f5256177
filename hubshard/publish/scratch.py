"""Scratch files: each large file is written to a disk while it is hashed, sent from there, and removed.

For sources that are expensive to read twice where Xet is off: plain LFS wants the hash before the first byte. A run
holds the lock of `hubshard-scratch-<id>.lock`, and its files are `hubshard-scratch-<id>-<n>.part`; those of runs that
were killed, whose locks are free, are removed by the next run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from hubshard.errors import StoreError
from hubshard.locks import try_lock
from hubshard.protocols import Buffer
from hubshard.sizes import format_size

__all__ = ["FILES_AT_ONCE", "Scratch", "scratch_in"]

FILES_AT_ONCE = 2
"""How many files may be there at any moment."""

_PREFIX = "hubshard-scratch-"


class Scratch:
    """The scratch files of one run; see `scratch_in`."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder
        self._run = run
        self._numbers = count(1)

    @contextmanager
    def holding(
        self, data: Callable[[], Iterable[Buffer]], name: str, on_bytes: Callable[[int], None]
    ) -> Iterator[tuple[Path, str]]:
        """A file with this content, as long as the block lasts, and its sha256.

        Args:
            data: starts the content.
            name: for messages.
            on_bytes: is told of the bytes written since its last call.

        Raises:
            StoreError: the disk is full, or refuses.
        """
        path = self._folder / f"{self._run}-{next(self._numbers)}.part"
        digest = hashlib.sha256()
        try:
            with path.open("xb", buffering=0) as file:
                for buffer in data():
                    _write(file.fileno(), memoryview(buffer).cast("B"), path, name)
                    digest.update(buffer)
                    on_bytes(memoryview(buffer).nbytes)
            yield path, digest.hexdigest()
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def scratch_in(folder: Path, sizes: Iterable[int]) -> Iterator[Scratch]:
    """Use a folder for scratch files; leftovers of killed runs in it are removed first.

    Args:
        folder: made where it is missing.
        sizes: of the files that will pass through it (bytes), to check for free space.

    Raises:
        StoreError: the folder cannot be used, or its disk lacks room for the two largest files; says how much.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)
        lock, descriptor = _own_lock(folder)
    except OSError as error:
        raise StoreError(
            f"{folder} cannot hold scratch files: {error.strerror or error}", hint="choose another folder"
        ) from error
    try:
        _check_space(folder, sizes)
        yield Scratch(folder, lock.stem)
    finally:
        _remove(lock, descriptor)


def _own_lock(folder: Path) -> tuple[Path, int]:
    while True:
        lock = folder / f"{_PREFIX}{uuid.uuid4().hex}.lock"
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
        try:
            if try_lock(descriptor) and lock.exists():
                return lock, descriptor
        except OSError:  # a disk without locks: nobody takes ours for leftovers there, nor we theirs
            return lock, descriptor
        os.close(descriptor)  # another run has just taken it for a leftover


def _check_space(folder: Path, sizes: Iterable[int]) -> None:
    need, free = sum(sorted(sizes)[-FILES_AT_ONCE:]), shutil.disk_usage(folder).free
    if need > free:
        raise StoreError(
            f"{folder} lacks {format_size(need - free)}: the {FILES_AT_ONCE} largest shards take {format_size(need)}, "
            f"{format_size(free)} are free",
            hint="free that much, choose another folder, or make the shards smaller",
        )


def _clean(folder: Path) -> None:
    """Remove what killed runs have left; what a live run holds is spared."""
    for lock in folder.glob(f"{_PREFIX}*.lock"):
        with suppress(FileNotFoundError, PermissionError):  # gone meanwhile, or another user's
            descriptor = os.open(lock, os.O_RDWR)
            if _is_free(descriptor):
                for file in folder.glob(f"{lock.stem}-*.part"):
                    file.unlink(missing_ok=True)
                _remove(lock, descriptor)
            else:
                os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    try:
        return try_lock(descriptor)
    except OSError:  # no locks here: whether somebody holds it cannot be known
        return False


def _remove(lock: Path, descriptor: int) -> None:
    # where an open file can be removed it goes before its lock, so that nobody gets the lock of a file that is gone
    if sys.platform == "win32":
        os.close(descriptor)
    with suppress(FileNotFoundError, PermissionError):
        lock.unlink()
    if sys.platform != "win32":
        os.close(descriptor)


def _write(descriptor: int, view: memoryview, path: Path, name: str) -> None:
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        raise StoreError(
            f"{name}: cannot write its scratch file {path}: {error.strerror}",
            hint="free some room there, choose another folder, or make the shards smaller",
        ) from error
