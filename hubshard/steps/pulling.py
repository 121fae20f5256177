"""A step of a branch on a local disk: every file checked, resumed after a kill, the manifest last. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from hubshard.disk import refused, remove_unless_open, sync_folder, write_all
from hubshard.engine import run
from hubshard.errors import ConflictError, FormatError, IncompleteError, IntegrityError, NotFoundError, StoreError
from hubshard.events import Gathered, Operation
from hubshard.locks import try_lock
from hubshard.protocols import Buffer
from hubshard.sizes import READ_BYTES
from hubshard.steps.checking import FileCheck
from hubshard.steps.folder_lock import PULL, FolderLock
from hubshard.steps.places import LocalPlace, OpenStep
from hubshard.steps.step import StepFile, step_folder
from hubshard.steps.writing import write_manifest
from hubshard.store.local_stage import check_free_space

__all__ = ["OpenStream", "pull_step"]

_WORKERS = 8
_LOCK_NAME = ".rank-00000-pull.part"  # as all that a save left half done, it goes with the next

OpenStream = Callable[[str, int, int], Iterator[Buffer]]
"""Gives the bytes of a file of the step, by its name, from one position to another, as they arrive."""


def pull_step(opened: OpenStep, raw: bytes, stream: OpenStream, local_dir: Path, *, op: Operation) -> Path:
    """Bring a step to a local folder of steps, where `HubReader` and `ResumeBranch` find it.

    Files that are there are hashed and kept; of one that a kill cut short, the blocks that are right are kept. Each
    becomes visible under its name when all of its bytes were found to be right, the manifest when all files are
    durable.

    Args:
        opened: the step.
        raw: its manifest.
        stream: reads its files.
        local_dir: holds a folder per step.
        op: is told.

    Returns:
        The folder of the step.

    Raises:
        ConflictError: the folder holds another step of the same number; or a run saves there.
        FormatError: `local_dir` is no folder.
        IntegrityError: bytes are not as they were saved.
        StoreError: there is no room, or the disk refuses; or another pull is writing the same.
    """
    step = opened.step
    folder = local_dir / step_folder(step.step)
    with _no_run(local_dir):
        _check_same(local_dir, opened)
        op.start(step.nbytes, f"step {step.step}")
        with refused(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _pull_files(folder, opened, raw, stream, op)
    op.tell("commit", str(folder), step.nbytes, opened.sha256[:12])
    return folder


@contextmanager
def _no_run(local_dir: Path) -> Iterator[None]:
    """While no run saves to the folder: its next save would remove what is half there."""
    lock = FolderLock(local_dir.absolute(), PULL)
    try:
        lock.acquire(waits=False)
    except ConflictError as error:
        raise ConflictError(error.message, hint="end it first; or pull into a folder that no run uses") from None
    try:
        yield
    finally:
        lock.release()


def _pull_files(folder: Path, opened: OpenStep, raw: bytes, stream: OpenStream, op: Operation) -> None:
    step = opened.step
    with _alone(folder):
        check_free_space(folder, sum(_missing_bytes(folder, file) for file in step.files), what=folder.name)
        for _ in run(
            step.files,
            cost=lambda file: min(file.nbytes, READ_BYTES),
            work=partial(_pull_file, folder, stream, op),
            budget_bytes=_WORKERS * READ_BYTES,
            workers=_WORKERS,
        ):
            pass
        write_manifest(folder, raw, step.file_of)


def _check_same(local_dir: Path, opened: OpenStep) -> None:
    try:
        there = LocalPlace(local_dir).open(opened.step.step)
    except (NotFoundError, IncompleteError, IntegrityError, FormatError):
        return  # nothing that anybody could restore
    if there.sha256 != opened.sha256:
        raise ConflictError(
            f"{there.folder.where} holds another step {opened.step.step} than {opened.folder.where}",
            hint="pull into another folder, or remove that one first",
        )


def _part_of(folder: Path, file: StepFile) -> Path:
    return folder / f".{file.name}.part"


def _missing_bytes(folder: Path, file: StepFile) -> int:
    for path in (folder / file.name, _part_of(folder, file)):
        with suppress(FileNotFoundError):
            return max(0, file.nbytes - path.stat().st_size)
    return file.nbytes


def _pull_file(folder: Path, stream: OpenStream, op: Operation, file: StepFile) -> None:
    path = folder / file.name
    if path.is_file() and path.stat().st_size == file.nbytes:
        check = FileCheck(file)
        _read(path, file.nbytes, lambda data: _hashed(check, data, file, op))
        if check.problem() is None:
            op.tell("skipped", file.name, file.nbytes, "it is there")
            return
    part = _part_of(folder, file)
    with part.open("a+b", buffering=0) as output:
        check = _kept(output, file, op)
        _receive(output, check, stream, op)
        os.fsync(output.fileno())
    part.replace(path)
    sync_folder(folder)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While no other pull writes the same step.

    Raises:
        StoreError: another one does.
    """
    path = folder / _LOCK_NAME
    while True:
        with path.open("ab") as lock:
            is_ours = True
            with suppress(OSError):  # a disk that knows no locks
                is_ours = try_lock(lock.fileno())
            if not is_ours:
                raise StoreError(f"{folder} is being written by another pull", hint="wait for it", retryable=True)
            if _is_open_at(lock, path):
                try:
                    yield
                finally:
                    if os.name == "nt":  # which removes no file that is open
                        lock.close()
                    remove_unless_open(path)  # as another pull may, that is just trying
                return


def _is_open_at(lock: BinaryIO, path: Path) -> bool:
    # another pull may have ended, and removed it, between our open and our lock
    try:
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _kept(output: BinaryIO, file: StepFile, op: Operation) -> FileCheck:
    """Cut what is there down to the whole blocks that are right, and check on from there."""
    size = file.block_bytes
    there = min(os.fstat(output.fileno()).st_size, file.nbytes)
    check = FileCheck(file)
    output.seek(0)
    kept = 0
    while there - kept >= size and not check.bad_blocks:
        _read_from(output, size, lambda data: _hashed(check, data, file, op))
        kept += 0 if check.bad_blocks else size
    if check.bad_blocks:  # its bytes are in the hash of the whole: hash anew what is right
        check = FileCheck(file)
        output.seek(0)
        _read_from(output, kept, check.add)
    output.truncate(kept)
    output.seek(kept)
    if kept:
        op.tell("skipped", file.name, kept, "it has arrived before")
    return check


def _receive(output: BinaryIO, check: FileCheck, stream: OpenStream, op: Operation) -> None:
    file = check.file
    told = Gathered(lambda nbytes: op.tell("received", file.name, nbytes))
    for data in stream(file.name, check.nbytes, file.nbytes):
        check.add(data)
        write_all(output.fileno(), memoryview(data))
        told.add(memoryview(data).nbytes)
        if check.bad_blocks:  # what came before it, perhaps in the same piece, is kept
            break
    told.flush()
    problem = check.problem()
    if problem is not None:
        output.truncate(min(check.bad_blocks, default=0) * file.block_bytes)
        raise IntegrityError(
            f"{op.path}: {file.name} {problem}", hint="see `hubshard resume verify`, or take another step"
        )
    op.tell("verify", file.name, file.nbytes)


def _read(path: Path, nbytes: int, then: Callable[[bytes], None]) -> None:
    with path.open("rb", buffering=0) as file:
        _read_from(file, nbytes, then)


def _read_from(file: BinaryIO, nbytes: int, then: Callable[[bytes], None]) -> None:
    while nbytes and (data := file.read(min(nbytes, READ_BYTES))):
        nbytes -= len(data)
        then(data)


def _hashed(check: FileCheck, data: Buffer, file: StepFile, op: Operation) -> None:
    check.add(data)
    op.tell("hashed", file.name, memoryview(data).nbytes)
