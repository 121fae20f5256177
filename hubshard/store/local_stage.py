"""Staged files beside a directory: durable, named by their sha256, in one folder per process."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import time
import uuid
from pathlib import Path

from hubshard.disk import sync_folder, write_all
from hubshard.errors import IntegrityError, StoreError
from hubshard.protocols import Content
from hubshard.sizes import format_size
from hubshard.store.content import CheckedContent
from hubshard.store.local_swap import OnStep

__all__ = ["StagingArea", "check_free_space"]

_FOREIGN_LIFETIME_SECONDS = 7 * 24 * 3600


class StagingArea:
    """The staged files of all processes that write one directory.

    Args:
        workspace: the folder that holds the folders of the processes.
        on_step: called before each step.
    """

    def __init__(self, workspace: Path, on_step: OnStep) -> None:
        self._workspace = workspace
        self._on_step = on_step
        self._host = "".join(char if char.isalnum() else "_" for char in socket.gethostname())
        self._id = uuid.uuid4().hex[:8]

    @property
    def _own(self) -> Path:
        # The process is asked for its id each time: a store may be used on both sides of a fork.
        return self._workspace / f"staged-{self._host}-{os.getpid()}-{self._id}"

    def find(self, sha256: str, nbytes: int) -> str | None:
        """The name of a staged file with this content, or None."""
        for file in sorted(self._workspace.glob(f"staged-*/{sha256}")):
            if file.stat().st_size == nbytes:
                return f"{file.parent.name}/{file.name}"
        return None

    def add(self, data: Content, *, path: str, nbytes: int, sha256: str | None) -> tuple[str, str]:
        """Write content durably; its name here and its sha256.

        Raises:
            IntegrityError: it is not as promised.
            StoreError: no room.
        """
        part = self._new_part()
        checked = CheckedContent(data, path=path, nbytes=nbytes, sha256=sha256)
        try:
            check_free_space(part, nbytes, what=path)
            self._write(part, checked)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        self._on_step("staged")
        final = self._own / checked.sha256
        part.replace(final)
        sync_folder(self._own)
        return f"{self._own.name}/{final.name}", checked.sha256

    def _new_part(self) -> Path:
        while True:  # until no commit removes our empty folder between the two calls
            part = self._own / f"part-{uuid.uuid4().hex}"
            part.parent.mkdir(parents=True, exist_ok=True)
            try:
                part.touch(exist_ok=False)
            except FileNotFoundError:
                continue
            return part

    def _write(self, part: Path, checked: CheckedContent) -> None:
        with part.open("r+b", buffering=0) as file:
            self._on_step("part")
            for block in checked:
                write_all(file.fileno(), block)
            os.fsync(file.fileno())

    def file_of(self, name: str, nbytes: int) -> Path:
        """The staged file of a receipt.

        Raises:
            StoreError: it is not there any more.
            IntegrityError: it has another size.
        """
        file = self._workspace / name
        if not name.startswith("staged-") or name.count("/") != 1 or "\\" in name or ".." in name:
            raise StoreError(f"{name!r} is no name of a staged file")
        if not file.is_file():
            raise StoreError(f"the staged file {file} is gone", hint="stage it again", retryable=True)
        if file.stat().st_size != nbytes:
            raise IntegrityError(f"the staged file {file} has {file.stat().st_size} bytes, not {nbytes}")
        return file

    def clean(self) -> None:
        """Remove what processes that are gone left staged, then all folders that are empty."""
        for folder in self._workspace.glob("staged-*"):
            if self._is_abandoned(folder):
                shutil.rmtree(folder)
            else:
                _remove_empty(folder)
        lock = self._workspace / "lock"
        if os.name == "nt" or not self._workspace.exists() or any(file != lock for file in self._workspace.iterdir()):
            return
        _remove_empty(self._workspace)

    def _is_abandoned(self, folder: Path) -> bool:
        _, host, process, _ = folder.name.split("-")
        if host == self._host and os.name != "nt":
            return not _is_alive(int(process))
        return time.time() - folder.stat().st_mtime > _FOREIGN_LIFETIME_SECONDS


def check_free_space(place: Path, nbytes: int, *, what: str) -> None:
    """Refuse to begin what cannot end.

    Raises:
        StoreError: the file system of `place` has less than `nbytes` bytes free.
    """
    free = shutil.disk_usage(place).free
    if free < nbytes:
        raise StoreError(
            f"no room for {what} on the disk of {place.parent}: it needs {format_size(nbytes)}, "
            f"{format_size(free)} are free, {format_size(nbytes - free)} are missing",
            hint="free some space, or choose another disk",
        )


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}:
            raise


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True
