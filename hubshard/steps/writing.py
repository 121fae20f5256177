"""Writing a step: files first, durable and hashed on the way; the manifest last; on the Hub in one commit. No torch."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import uuid
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hubshard.disk import hint_for, is_full, refusal, remove_unless_open, sync_folder, write_all
from hubshard.errors import ConflictError, HubshardError, IntegrityError, StoreError
from hubshard.protocols import Buffer, Revision, Staged, Store
from hubshard.sizes import READ_BYTES
from hubshard.steps.parts import FileReceipt, Part, PlannedFile
from hubshard.steps.places import BranchPlace
from hubshard.steps.rollbacks import stage_rollback
from hubshard.steps.save_cost import SaveCost, step_message
from hubshard.steps.step import MANIFEST_NAME, Step, StepFile, step_folder
from hubshard.store.local_stage import check_free_space
from hubshard.tensors import Box

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "PieceStream",
    "ReadPart",
    "check_newest",
    "commit_rollback",
    "commit_step",
    "prepare_folder",
    "stage_local",
    "stage_stream",
    "write_local",
    "write_manifest",
]

_LOG = logging.getLogger("hubshard")
_BUFFERS_BEHIND = 4
_OURS = re.compile(r"rank-[0-9]{5,}-[0-9]{5,}-[0-9a-f]{12}\.safetensors\Z")

ReadPart = Callable[[Part, Box], Buffer]
"""Gives the row-major little-endian bytes of a box within a part; they stay as they are while they are held."""


class PieceStream:
    """The bytes of a planned file, hashed as they pass. Each call begins anew; a whole pass makes the `receipt`.

    Args:
        planned: what is in it.
        stem: its name without the digits of its hash and ".safetensors".
        read: where its parts come from.
        block_bytes: that one hash covers.
        most_behind: buffers that may wait to be hashed; None where they are there anyway, and cost nothing.
    """

    def __init__(
        self,
        planned: PlannedFile,
        *,
        stem: str,
        read: ReadPart,
        block_bytes: int,
        most_behind: int | None = _BUFFERS_BEHIND,
    ) -> None:
        self.planned = planned
        self.stem = stem
        self._read = read
        self._block_bytes = block_bytes
        self._most_behind = most_behind
        self._receipt: FileReceipt | None = None

    @property
    def receipt(self) -> FileReceipt:
        """What was written.

        Raises:
            IntegrityError: the stream was never read to its end.
        """
        if self._receipt is None:
            raise IntegrityError(f"{self.stem}: the file was not written to its end")
        return self._receipt

    @property
    def is_whole(self) -> bool:
        """Whether the stream was read to its end, so that there is a receipt."""
        return self._receipt is not None

    def __call__(self) -> Iterator[Buffer]:
        """Buffers of at most 8 MiB, wherever the dtype allows that cut."""
        whole, blocks = hashlib.sha256(), _BlockHash(self._block_bytes)
        has_blocks = self.planned.nbytes > self._block_bytes
        behind = self._most_behind
        with _InOrder(whole.update, behind) as hash_whole, _InOrder(blocks.update, behind) as hash_blocks:
            for buffer in self._buffers():
                view = memoryview(buffer).cast("B")
                hash_whole.add(view)
                if has_blocks:
                    hash_blocks.add(view)
                yield buffer
        digest = whole.hexdigest()
        file = StepFile(
            name=f"{self.stem}-{digest[:12]}.safetensors",
            nbytes=self.planned.nbytes,
            data_start=len(self.planned.header),
            sha256=digest,
            block_bytes=self._block_bytes,
            blocks=blocks.digests() if has_blocks else b"",
        )
        self._receipt = FileReceipt.of(self.planned, file)

    def _buffers(self) -> Iterator[Buffer]:
        yield self.planned.header
        for part in self.planned.parts:
            if not part.box.numel:
                continue
            for box in part.box.blocks(bits=part.spec.bits, max_bytes=READ_BYTES):
                buffer = self._read(part, box)
                nbytes = memoryview(buffer).nbytes
                if nbytes * 8 != box.numel * part.spec.bits:
                    raise IntegrityError(f"tensor {part.spec.name!r}: {nbytes} bytes came for {box} of {part.spec}")
                yield buffer


class _InOrder:
    """Calls a function with buffer after buffer in a thread of its own, at most so many behind."""

    def __init__(self, work: Callable[[memoryview], None], most_behind: int | None) -> None:
        self._work = work
        self._most_behind = most_behind
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hubshard-hash")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)
        self._drain()

    def _drain(self) -> None:
        while self._pending:
            self._pending.popleft().result()

    def add(self, buffer: memoryview) -> None:
        """Take a buffer, and wait where too many wait before it."""
        try:
            self._pending.append(self._pool.submit(self._work, buffer))
        except RuntimeError:  # the interpreter is ending: no thread takes work any more
            self._drain()
            self._work(buffer)
        if self._most_behind is not None and len(self._pending) > self._most_behind:
            self._pending.popleft().result()


class _BlockHash:
    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._done: list[bytes] = []
        self._hash = hashlib.sha256()
        self._room = block_bytes

    def update(self, data: memoryview) -> None:
        while data.nbytes:
            head, data = data[: self._room], data[self._room :]
            self._hash.update(head)
            self._room -= head.nbytes
            if not self._room:
                self._done.append(self._hash.digest())
                self._hash, self._room = hashlib.sha256(), self._block_bytes

    def digests(self) -> bytes:
        tail = [self._hash.digest()] if self._room < self._block_bytes else []
        return b"".join([*self._done, *tail])


# On a local disk


def prepare_folder(folder: Path, *, rank: int, nbytes: int) -> None:
    """Make the folder of a step, and remove what a killed save of this rank left half written there.

    Raises:
        StoreError: there is no room for `nbytes`, or the disk refuses.
    """
    with _whole_or_nothing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f".rank-{rank:05d}-*.part"):
            leftover.unlink(missing_ok=True)
        check_free_space(folder, nbytes, what=folder.name)


def write_local(folder: Path, stream: PieceStream) -> Path:
    """Write a file of a step: whole and durable under its name, or not there at all.

    Raises:
        StoreError: the disk is full, or refuses.
    """
    part = folder / f".{stream.stem}-{uuid.uuid4().hex}.part"
    with _whole_or_nothing(folder, part):
        with part.open("wb", buffering=0) as file:
            rest = stream.planned.nbytes
            for buffer in stream():
                write_all(file.fileno(), memoryview(buffer))
                rest -= memoryview(buffer).nbytes
                if not rest:
                    os.fsync(file.fileno())  # while the last of it is still being hashed
        path = folder / stream.receipt.file.name
        part.replace(path)
        sync_folder(folder)
    return path


def write_manifest(folder: Path, raw: bytes, names: Container[str]) -> None:
    """Make a step whose files are all durable visible, then remove the files of an older save of the same step.

    What cannot be removed is said, and is no part of the step.

    Args:
        folder: of the step.
        raw: its manifest.
        names: its files.

    Raises:
        StoreError: the disk is full, or refuses: nothing is shown, except where it cannot make what it shows durable.
    """
    part = folder / f".{MANIFEST_NAME}-{uuid.uuid4().hex}.part"
    with _whole_or_nothing(folder, part):
        for leftover in folder.glob(f".{MANIFEST_NAME}-*.part"):
            leftover.unlink(missing_ok=True)
        with part.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / MANIFEST_NAME)
        sync_folder(folder, folder.parent)
    try:
        for path in folder.iterdir():
            if _OURS.match(path.name) and path.name not in names:
                remove_unless_open(path)
    except OSError as error:
        _LOG.warning("%s: %s", folder, error)


@contextmanager
def _whole_or_nothing(folder: Path, part: Path | None = None) -> Iterator[None]:
    """While a file is written under another name: that one goes where it fails, and the error says where and why."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            if part is not None:
                part.unlink(missing_ok=True)
        if not isinstance(error, OSError) or isinstance(error, HubshardError):
            raise
        if is_full(error) or error.errno == errno.EFBIG:
            raise StoreError(
                f"no room for {folder.name} on the disk of {folder.parent}: {error.strerror}",
                hint="free some space, keep fewer steps, or choose another disk" if is_full(error) else hint_for(error),
            ) from error
        raise refusal(error, folder) from error


# On the Hub


def check_newest(place: BranchPlace, step: int, *, branch: str, ignored: Collection[int] = ()) -> None:
    """Refuse to save a step behind a newer one, which some other run must have saved.

    Args:
        place: the branch.
        step: to be saved.
        branch: its name.
        ignored: newer steps that are known to be broken.

    Raises:
        ConflictError: the branch holds a newer step.
    """
    newest = max((number for number in place.steps() if number not in ignored), default=-1)
    if newest > step:
        raise ConflictError(
            f"the branch {branch!r} holds step {newest} already, newer than {step}: another run saves there",
            hint="save on a branch of its own, or go on from the newest step, or roll the branch back first",
        )


def stage_local(store: Store, branch: str, path: Path, file: StepFile, *, step: int) -> Staged:
    """Make a file of a local step durable on the Hub, unseen; what is there already is not sent again."""
    target = f"{step_folder(step)}/{file.name}"
    return store.stage(branch, target, path, nbytes=file.nbytes, sha256=file.sha256)


def stage_stream(store: Store, branch: str, stream: PieceStream, *, step: int) -> Staged:
    """Make a file of a step durable on the Hub, unseen, straight from memory."""
    provisional = f"{step_folder(step)}/{stream.stem}.safetensors"
    staged = store.stage(branch, provisional, stream, nbytes=stream.planned.nbytes)
    file = stream.receipt.file
    if staged.sha256 != file.sha256:
        raise IntegrityError(f"{provisional}: it changed while it was sent", hint="save a copy of the state")
    return replace(staged, path=f"{step_folder(step)}/{file.name}")


def commit_step(
    store: Store,
    branch: str,
    *,
    parent: Revision | None,
    step: Step,
    raw: bytes,
    staged: Sequence[Staged],
    remove: Sequence[str] = (),
    cost: SaveCost | None = None,
    run: str | None = None,
) -> Revision:
    """Show a step on a branch: its files and its manifest, in one commit, on a head that nobody moved.

    Args:
        store: the repo.
        branch: what moves.
        parent: the head as it was when the save began; None where there is no branch yet.
        step: what is shown.
        raw: its manifest.
        staged: its files.
        remove: files to delete in the same commit, such as those of steps past the retention.
        cost: of the save, for the message of the commit; None where it is not known.
        run: whose it is, for the message too.

    Raises:
        ConflictError: somebody else pushed to the branch.
    """
    path = f"{step_folder(step.step)}/{MANIFEST_NAME}"
    manifest = store.stage(branch, path, lambda: [raw], nbytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())
    return store.commit(
        branch,
        parent=parent,
        add=[*staged, manifest],
        remove=remove,
        message=step_message(step.step, cost, run),
        publish_id=f"step-{step.step}-{uuid.uuid4().hex}",
    )


def commit_rollback(store: Store, branch: str, place: BranchPlace, step: int) -> tuple[Revision, str]:
    """Remove the steps after one from a branch, and tell the disks of the run, in one commit on the head of `place`.

    The commit is made also where the branch holds none of them: a disk may.

    Returns:
        The head, and the id of the rollback.

    Raises:
        ConflictError: somebody else pushed to the branch.
    """
    told, rollback = stage_rollback(store, branch, place.rollbacks, step)
    revision = store.commit(
        branch,
        parent=place.at,
        add=[told],
        remove=[path for number in sorted(place.steps()) if number > step for path in place.files(number)],
        message=f"Roll back to step {step}",
        publish_id=uuid.uuid4().hex,
    )
    return revision, rollback.id
