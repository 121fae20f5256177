"""Saving with PyTorch's distributed checkpoint (DCP), to a branch of the Hub, a local folder, or both.

Interface: `torch.distributed.checkpoint.StorageWriter`; format: `hubshard.steps.step`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from hubshard.errors import FormatError
from hubshard.protocols import Buffer, Revision, Staged
from hubshard.resume.dcp.planners import encoded_value
from hubshard.resume.dcp.staging import copy_in_memory
from hubshard.resume.dcp.torch_items import part_to_write
from hubshard.resume.saves.disk_line import BranchLine, DiskLine
from hubshard.resume.saves.local_steps import LocalSteps
from hubshard.sizes import parse_size
from hubshard.sources.torch_value import TorchValue, torch_problem
from hubshard.steps.canonical import decode
from hubshard.steps.parts import FileReceipt, Part, PlannedFile, block_bytes_for, merge, plan_files
from hubshard.steps.places import BranchPlace, check_places, hub_store, refuse_id
from hubshard.steps.step import MANIFEST_NAME, Step, TreePath, checked_number, step_folder
from hubshard.steps.step_json import encode_step
from hubshard.steps.writing import (
    PieceStream,
    check_newest,
    commit_step,
    prepare_folder,
    stage_local,
    stage_stream,
    write_local,
    write_manifest,
)
from hubshard.store.commit import check_head
from hubshard.tensors import Box

if TYPE_CHECKING:
    from hubshard.store.hub import HubStore
    from hubshard.store.hub_client import Token

__all__ = ["HubWriter"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Share:
    # what the coordinator tells each rank
    rank: int
    world_size: int
    block_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class _RankReceipt:
    # what each rank tells the coordinator
    files: tuple[FileReceipt, ...]
    staged: tuple[Staged, ...]
    scalars: Mapping[str, bytes]


class HubWriter(StorageWriter):
    """Saves one step of a training run: `dcp.save(state, storage_writer=HubWriter("org/run", step=1000))`.

    Every rank writes its own files of pieces, to the local folder first where there is one, and makes them durable on
    the Hub; then one commit shows the step on the branch. A kill at any moment leaves the older steps as they were.
    Works with `dcp.save` and `dcp.async_save`, with or without `hubshard.dcp.SavePlanner`: nothing that is stored is a
    pickle, and no pickle is read. What DCP itself sends from rank to rank during a save, its plans, goes as torch sends
    objects; `ResumeBranch` does without that.

    After the save, on the coordinator: `saved` is what was written, `revision` the commit that shows it.

    Args:
        repo_id: the repo, "org/name", which must exist; None to save to `local_dir` alone.
        step: number of the step.
        branch: of the repo; made by the first save.
        local_dir: folder that holds a folder per step, on a disk of this machine or one that all ranks share; None to
            send straight from memory.
        max_file_size: bound per file, such as "5GB" or a number of bytes.
        token: of the Hub; see `HubStore`.
        endpoint: the Hub's URL; None for huggingface_hub's.
        expected_head: the commit that the branch must be at, so that two runs on one branch find out; None for wherever
            it is when the save begins.

    Raises:
        FormatError: neither a repo nor a folder, or an invalid repo, step or size.
    """

    def __init__(
        self,
        repo_id: str | None,
        *,
        step: int,
        branch: str = "resume",
        local_dir: str | os.PathLike[str] | None = None,
        max_file_size: int | str = "5GB",
        token: Token = None,
        endpoint: str | None = None,
        expected_head: str | None = None,
    ) -> None:
        check_places(repo_id, local_dir)
        self.repo_id = repo_id
        self.step = checked_number(step)
        self.branch = branch
        self.local_dir = None if local_dir is None else Path(local_dir)
        self.saved: Step | None = None
        self.revision: Revision | None = None
        self._max_file_bytes = parse_size(max_file_size)
        self._token = token
        self._endpoint = endpoint
        self._expected_head = expected_head
        self._parent: Revision | None = None
        self._stale: Sequence[str] = ()
        self._line = BranchLine(f"{repo_id}@{branch}", {}, ())

    # The interface, in the order in which DCP calls it

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See `StorageWriter`; a checkpoint id is refused, since the step is the id."""
        refuse_id(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **options: Any) -> None:  # noqa: FBT001
        """See `StorageWriter`. The coordinator looks at the branch.

        Raises:
            ConflictError: the branch is not where it is expected, or holds a newer step.
            NotFoundError: no such repo.
        """
        if not options.get("use_collectives", True):
            raise FormatError("a step is one whole: it cannot be saved with use_collectives=False")
        self.saved = self.revision = None
        if is_coordinator and self.repo_id is not None:
            self._look(self._store(self.repo_id))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See `StorageWriter`.

        Raises:
            FormatError: a tensor that safetensors cannot store.
        """
        for item in plan.items:
            if item.type != WriteItemType.BYTE_IO:
                part_to_write(item)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See `StorageWriter`."""
        tensors = (item for plan in plans for item in plan.items if item.type != WriteItemType.BYTE_IO)
        block_bytes = block_bytes_for(sum(part_to_write(item).nbytes for item in tensors))
        return [
            dataclasses.replace(plan, storage_data=_Share(rank, len(plans), block_bytes))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See `StorageWriter`. Returns when the files of this rank are durable wherever they are to be."""
        share: _Share = plan.storage_data
        items = _RankItems(plan, planner)
        planned = plan_files(items.parts, max_file_bytes=self._max_file_bytes)
        files, staged = self._write(planned, items, share)
        receipt = _RankReceipt(files, staged, items.scalars)
        nbytes = sum(file.file.nbytes for file in files)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(f"rank {share.rank}"), nbytes, receipt)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See `StorageWriter`. Writes the manifest and makes the commit.

        Raises:
            ConflictError: somebody else pushed to the branch.
        """
        receipts: list[_RankReceipt] = [result.storage_data for of_rank in results for result in of_rank]
        step = self._merged(metadata, receipts, world_size=len(results))
        raw = encode_step(step)
        if self.local_dir is not None:
            folder = self.local_dir / step_folder(self.step)
            folder.mkdir(parents=True, exist_ok=True)
            if self._line.files or self._line.rollbacks:  # on an empty branch another run may be the first to save
                self._record(step)
            write_manifest(folder, raw, step.file_of)
        self.saved = step
        if self.repo_id is not None:
            staged = [file for receipt in receipts for file in receipt.staged]
            kept = {file.path for file in staged}
            self.revision = commit_step(
                self._store(self.repo_id),
                self.branch,
                parent=self._parent,
                step=step,
                raw=raw,
                staged=staged,
                remove=[path for path in self._stale if path not in kept and not path.endswith(f"/{MANIFEST_NAME}")],
            )
            self._record(step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See `StorageWriter`: no id leads to this writer by itself."""
        del checkpoint_id
        return False

    # `async_save` of torch 2.6 saves what lies in main memory as it is by then, unless the writer has these and copies;
    # that of a newer torch copies everything.

    _synchronize_after_execute = should_synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """See `AsyncStager`: what is saved is what was there when `async_save` was called."""
        staged: dict[str, Any] = copy_in_memory(state_dict)
        return staged

    def synchronize_staging(self) -> None:
        """See `AsyncStager`: nothing is under way once `stage` has returned."""

    # How

    def _store(self, repo_id: str) -> HubStore:
        return hub_store(repo_id, self._token, self._endpoint)

    def _look(self, store: HubStore) -> None:
        self._parent = store.head(self.branch)
        self._stale, self._line = (), BranchLine(f"{self.repo_id}@{self.branch}", {}, ())
        if self._parent is not None:
            place = BranchPlace(store, self._parent, self._line.where)
            check_newest(place, self.step, branch=self.branch)
            self._stale, self._line = list(place.files(self.step)), BranchLine.of(place, place.where)
        if self._expected_head is not None:
            check_head(self._parent or Revision(self.branch, "no commit"), self._expected_head)

    def _record(self, step: Step) -> None:
        """Tell the folder that it belongs to the branch; steps from before a rollback go, as with any save."""
        if self.local_dir is None:
            return
        files = {**self._line.files, step.step: list(step.file_of)}
        disk = DiskLine(LocalSteps(self.local_dir))
        with suppress(FormatError):  # it cannot tell which those are: a restore says so
            disk.judge(dataclasses.replace(self._line, files=files), saved=[step.step])
            disk.follow(self._line.where, [rollback.id for rollback in self._line.rollbacks], step.step)

    def _write(
        self, planned: Sequence[PlannedFile], items: _RankItems, share: _Share
    ) -> tuple[tuple[FileReceipt, ...], tuple[Staged, ...]]:
        streams = [
            PieceStream(
                file, stem=f"rank-{share.rank:05d}-{number:05d}", read=items.read, block_bytes=share.block_bytes
            )
            for number, file in enumerate(planned, start=1)
        ]
        store = None if self.repo_id is None else self._store(self.repo_id)
        staged: list[Staged] = []
        if self.local_dir is None and store is not None:
            staged += [stage_stream(store, self.branch, stream, step=self.step) for stream in streams]
        elif self.local_dir is not None:
            folder = self.local_dir / step_folder(self.step)
            prepare_folder(folder, rank=share.rank, nbytes=sum(file.nbytes for file in planned))
            paths = [write_local(folder, stream) for stream in streams]
            if store is not None:
                written = zip(paths, streams, strict=True)
                staged += [stage_local(store, self.branch, p, s.receipt.file, step=self.step) for p, s in written]
        return tuple(stream.receipt for stream in streams), tuple(staged)

    def _merged(self, metadata: Metadata, receipts: Sequence[_RankReceipt], *, world_size: int) -> Step:
        scalars = {name: decode(raw, path=name) for receipt in receipts for name, raw in receipt.scalars.items()}
        return merge(
            [file for receipt in receipts for file in receipt.files],
            step=self.step,
            world_size=world_size,
            scalars=scalars,
            paths=_paths_of(metadata),
            metadata={},
        )


class _RankItems:
    """The items of a rank's plan as parts of tensors and scalars; reads one tensor at a time."""

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._planner = planner
        self._held: dict[str, list[tuple[Box, WriteItem]]] = {}
        self.parts: list[Part] = []
        self.scalars: dict[str, bytes] = {}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                self.scalars[item.index.fqn] = encoded_value(planner, item)
                continue
            part = part_to_write(item)
            self.parts.append(part)
            self._held.setdefault(part.spec.name, []).append((part.box, item))
        self._last: tuple[Box, TorchValue] | None = None

    def read(self, part: Part, box: Box) -> Buffer:
        """The bytes of a box: a view where the tensor is contiguous on the CPU, else a copy of that box alone."""
        if self._last is None or self._last[1].name != part.spec.name or box not in self._last[0]:
            held, item = next(found for found in self._held[part.spec.name] if part.box in found[0])
            self._last = held, self._resolve(item, held)
        held, value = self._last
        return value.read(box.relative_to(held))

    def _resolve(self, item: WriteItem, box: Box) -> TorchValue:
        name, tensor = item.index.fqn, self._planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise FormatError(f"tensor {name!r}: the planner gave a {type(tensor).__name__}, no tensor")
        problem = torch_problem(tensor)
        if problem is not None:
            raise FormatError(f"tensor {name!r} {problem[0]}", hint=problem[1])
        value = TorchValue(name, tensor, None)
        if value.spec.shape != box.shape:
            raise FormatError(f"tensor {name!r} has shape {value.spec.shape} on this rank, not {box.shape} as planned")
        return value


def _paths_of(metadata: Metadata) -> dict[str, TreePath]:
    paths = metadata.planner_data
    return {name: tuple(path) for name, path in paths.items()} if isinstance(paths, dict) else {}
