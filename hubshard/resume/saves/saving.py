"""Saving a snapshot to the disk, and what is on the disk to the Hub: what goes on while the training does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import TYPE_CHECKING

from hubshard.errors import ConflictError, FormatError
from hubshard.events import Operation
from hubshard.protocols import Staged
from hubshard.resume.ranks import LostRankError
from hubshard.resume.saves.disk_line import DiskLine
from hubshard.resume.saves.hub_branch import HubBranch
from hubshard.resume.saves.local_steps import LocalSteps
from hubshard.resume.saves.push_queue import PushQueue
from hubshard.resume.saves.sending import Sending, check_time
from hubshard.steps.canonical import decode
from hubshard.steps.parts import FileReceipt, merge
from hubshard.steps.retention import Retention
from hubshard.steps.save_cost import SaveCost
from hubshard.steps.step import MANIFEST_NAME, Step, StepFile
from hubshard.steps.step_json import encode_step
from hubshard.steps.writing import PieceStream, prepare_folder, write_local, write_manifest

if TYPE_CHECKING:
    from hubshard.resume.saves.snapshot import Snapshot
    from hubshard.resume.team import Team

__all__ = ["Written", "push_step", "write_step"]


@dataclass(frozen=True, slots=True)
class Written:
    """A step that is on the disk.

    Attributes:
        number: of the step.
        files: those that this rank sends to the Hub.
        step: all of it, and
        raw: its manifest: on rank 0 alone, else None and b"".
        cost: of the save so far; None where it is not known.
        since: when it was on the disk, on the monotonic clock (seconds).
    """

    number: int
    files: Sequence[StepFile]
    step: Step | None
    raw: bytes
    cost: SaveCost | None = None
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class _Receipt:
    # what each rank tells rank 0
    files: Sequence[FileReceipt]
    scalars: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class _Merged:
    # what rank 0 tells each rank
    raw: bytes
    names: frozenset[str]  # of the files that stay in its folder
    kept: frozenset[int]
    rollbacks: tuple[str, ...] | None  # of the branch, that the step goes on from


def write_step(
    snapshot: Snapshot,
    number: int,
    *,
    local: LocalSteps,
    line: DiskLine,
    hub: HubBranch | None,
    team: Team,
    retention: Retention,
    queue: PushQueue,
    broken: Collection[int],
    max_file_bytes: int,
    is_first_of_disk: bool,
    on_merged: Callable[[bytes], None],
    op: Operation,
) -> Written:
    """Write a step: the files of all ranks, then its manifest; then remove the steps that it makes needless.

    A kill at any moment leaves the older steps as they were. Rank 0 calls `on_merged` with the manifest before any disk
    shows it.

    Raises:
        StoreError: the disk is full, or refuses.
        FormatError: what the ranks wrote is not one whole.
    """
    planned = snapshot.plan.files(max_file_bytes)
    team.each(local.remove_unfinished if is_first_of_disk else lambda: None)
    streams = [
        PieceStream(
            file,
            stem=f"rank-{team.rank:05d}-{position:05d}",
            read=snapshot.read,
            block_bytes=snapshot.plan.block_bytes,
            most_behind=None,
        )
        for position, file in enumerate(planned, start=1)
    ]
    folder = local.folder(number)
    merged_step: list[Step] = []

    def write() -> _Receipt:
        prepare_folder(folder, rank=team.rank, nbytes=sum(file.nbytes for file in planned))
        for stream in streams:
            write_local(folder, stream)
        return _Receipt([stream.receipt for stream in streams], snapshot.scalars)

    def join(receipts: list[_Receipt]) -> _Merged:
        step = _merged(receipts, number, paths=snapshot.plan.paths)
        merged_step.append(step)
        there = local.numbers() - {*broken}
        if max(there, default=-1) > number:
            raise ConflictError(
                f"{local.root} holds step {max(there)}, newer than {number}: another run saves there",
                hint="give each run a folder of its own",
            )
        kept = {*there, number} - {*retention.expired(there, number)} | queue.needed()
        names = {*step.file_of} | queue.files_in_flight(number)
        rollbacks = None if hub is None else hub.rollbacks
        raw = encode_step(step)
        on_merged(raw)
        return _Merged(raw, frozenset(names), frozenset(kept), rollbacks)

    def show() -> None:
        if is_first_of_disk:
            if hub is not None and merged.rollbacks is not None:
                line.follow(hub.where, merged.rollbacks, number)
            write_manifest(folder, merged.raw, merged.names)

    try:
        merged = team.join(write, join)
        team.each(show)
    except LostRankError:  # which may have shown the step by now
        raise
    except BaseException:
        if not team.any_of([os.path.lexists(folder / MANIFEST_NAME)])[0]:  # else another disk shows it
            local.remove_files(number, [stream.receipt.file.name for stream in streams if stream.is_whole])
        raise
    newest = max(number, *broken, 0)  # no older step goes before all disks show this one
    team.each(lambda: local.keep_only(merged.kept, newest=newest) if is_first_of_disk else [])
    op.tell("commit", str(folder), sum(file.nbytes for file in planned))
    step = merged_step[0] if merged_step else None
    return Written(number, [stream.receipt.file for stream in streams], step, merged.raw if step is not None else b"")


def push_step(
    written: Written,
    *,
    local: LocalSteps,
    line: DiskLine,
    saved: Collection[int],
    hub: HubBranch,
    team: Team,
    retention: Retention,
    broken: Collection[int],
    op: Operation,
    is_over: Event,
    is_late: bool = False,
) -> Collection[str]:
    """Make the files of a step durable on the Hub, then show it in one commit, which removes those past the retention.

    A step that `is_late` may go behind newer ones of this run. Where the Hub has not answered before, the branch judges
    the disks now; the steps that this run has `saved` count.

    Returns:
        The ids of the rollbacks of the branch.

    Raises:
        ConflictError: another run saves to the branch.
        FormatError: see `DiskLine.judge`.
        StoreError: the Hub cannot be reached, or refuses.
        OutOfTimeError: `is_over` was set: the time for it has run out.
    """
    if team.is_first:
        hub.on_retry = op.retry
    team.first(lambda: hub.claim(local.holds))
    if not team.first(lambda: line.is_judged):
        branch = team.first(lambda: hub.line)
        team.each(lambda: line.judge(branch, saved=saved))

    def stage() -> list[Staged]:
        sending = Sending(hub, op, is_over)
        return [sending.stage(local.folder(written.number) / file.name, file) for file in written.files]

    def commit(staged: list[list[Staged]]) -> tuple[str, tuple[str, ...]]:
        check_time(is_over)
        if written.step is None:
            raise FormatError(f"step {written.number}: rank 0 does not know what it wrote")
        files = [item for of_rank in staged for item in of_rank]
        cost = written.cost and replace(written.cost, push_seconds=time.monotonic() - written.since)
        revision = hub.commit(
            written.step, written.raw, files, cost=cost, retention=retention, broken=broken, is_late=is_late
        )
        return revision.commit, hub.rollbacks or ()

    revision, rollbacks = team.join(stage, commit)
    if team.is_first:
        op.tell("commit", hub.branch, written.step.nbytes if written.step is not None else 0, revision)
    return rollbacks


def _merged(receipts: Sequence[_Receipt], number: int, *, paths: Mapping[str, tuple[str | int, ...]]) -> Step:
    scalars = {name: decode(raw, path=name) for receipt in receipts for name, raw in receipt.scalars.items()}
    return merge(
        [file for receipt in receipts for file in receipt.files],
        step=number,
        world_size=len(receipts),
        scalars=scalars,
        paths=paths,
        metadata={},
    )
