"""One copy of what a rank has to save, in memory that is used again and again: the training goes on once it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from hubshard.errors import FormatError
from hubshard.protocols import Buffer
from hubshard.resume.dcp.planners import SavePlanner
from hubshard.resume.dcp.torch_items import part_to_write
from hubshard.sources.torch_value import TorchValue, torch_problem
from hubshard.steps.canonical import encode
from hubshard.steps.parts import Part, PlannedFile, block_bytes_for, plan_files
from hubshard.steps.step import TreePath
from hubshard.tensors import Box

__all__ = ["LiveState", "RankPlan", "Snapshot", "SnapshotBuffer", "is_stateful", "plan_together", "tree_of"]

_ALIGNMENT = 64
_JOB_BYTES = 32 * 2**20


def tree_of(state: Any) -> dict[str, Any]:
    """The nested state dict of a state: what its `state_dict()` gives, or, of a plain dict, of each of its items."""
    if not isinstance(state, Mapping):
        tree: dict[str, Any] = state.state_dict()
        return tree
    return {key: item.state_dict() if is_stateful(item) else item for key, item in state.items()}


def is_stateful(item: object) -> TypeGuard[Stateful]:
    """Whether an item of a plain dict has a state of its own, as a model and an optimizer have."""
    return isinstance(item, Stateful)


class LiveState:
    """The state of this rank as the training holds it, flattened by names.

    Args:
        state: see `tree_of`.
        is_first: whether this is rank 0.

    Raises:
        FormatError: something in it cannot be stored: names its path.
    """

    def __init__(self, state: Any, *, is_first: bool) -> None:
        self._planner = SavePlanner()
        self._planner.set_up_planner(tree_of(state), None, is_first)
        self.scalars = {
            name: encode(value, path=name)
            for name, value in self._planner.state_dict.items()
            if not isinstance(value, torch.Tensor) and not _is_sharded(value)
        }

    @cached_property
    def signature(self) -> Mapping[str, object]:
        """What the plan of a save depends on: as long as it stays the same on every rank, the plan does."""
        return {
            name: (self._planner.mappings[name], _shape_of(item)) for name, item in self._planner.state_dict.items()
        }

    def plan(self) -> SavePlan:
        """What this rank could save.

        Raises:
            FormatError: a tensor that safetensors cannot store.
        """
        plan = self._planner.create_local_plan()
        for item in plan.items:
            if item.type != WriteItemType.BYTE_IO:
                self.tensor(item, part_to_write(item))
        return plan

    def tensor(self, item: WriteItem, part: Part) -> torch.Tensor:
        """The part of a tensor that lies on this rank."""
        tensor = self._planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise FormatError(f"tensor {part.spec.name!r}: a {type(tensor).__name__}, no tensor")
        problem = torch_problem(tensor)
        if problem is not None:
            raise FormatError(f"tensor {part.spec.name!r} {problem[0]}", hint=problem[1])
        return tensor.detach()


def _is_sharded(value: object) -> bool:
    return type(value).__name__ == "ShardedTensor"  # of FSDP1: a class that not every build of torch can import


def _shape_of(value: Any) -> object:
    if isinstance(value, DTensor):
        return value.dtype, value.shape, value.placements, value.device_mesh
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    if _is_sharded(value):
        return value.metadata()
    return None


@dataclass(frozen=True)
class RankPlan:
    """What a rank is to write in each save, as long as the layout of the state stays.

    Attributes:
        items: those of DCP, of tensors.
        scalars: names of what is no tensor.
        paths: of everything in the nested state; on rank 0 alone.
        block_bytes: that one hash covers.
    """

    items: Sequence[WriteItem]
    scalars: Sequence[str]
    paths: Mapping[str, TreePath]
    block_bytes: int

    @cached_property
    def parts(self) -> Sequence[Part]:
        """The boxes of the items, in the same order."""
        return [part_to_write(item) for item in self.items]

    @cached_property
    def starts(self) -> Sequence[int]:
        """Where each part begins in a buffer (bytes), and where the last ends."""
        found = [0]
        for part in self.parts:
            found.append(found[-1] + -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer that takes them."""
        return self.starts[-1]

    def files(self, max_file_bytes: int) -> Sequence[PlannedFile]:
        """The files that this rank writes."""
        return plan_files(self.parts, max_file_bytes=max_file_bytes)


def plan_together(plans: Sequence[SavePlan]) -> list[RankPlan]:
    """The plan of each rank out of what each could save: every tensor and every value is saved once.

    Raises:
        FormatError: the ranks hold no whole state together, or differ in it.
    """
    try:
        shares, metadata = SavePlanner().create_global_plan(list(plans))
    except (ValueError, AssertionError) as error:
        raise FormatError(
            f"the state of the ranks is not one whole: {error}",
            hint="what differs from rank to rank needs a name of its own on each",
        ) from error
    tensors = [[item for item in share.items if item.type != WriteItemType.BYTE_IO] for share in shares]
    total_bytes = sum(part_to_write(item).nbytes for items in tensors for item in items)
    paths = {name: tuple(path) for name, path in (metadata.planner_data or {}).items()}
    return [
        RankPlan(
            items=items,
            scalars=[item.index.fqn for item in share.items if item.type == WriteItemType.BYTE_IO],
            paths={} if rank else paths,
            block_bytes=block_bytes_for(total_bytes),
        )
        for rank, (share, items) in enumerate(zip(shares, tensors, strict=True))
    ]


class SnapshotBuffer:
    """Memory for one snapshot: page-locked where tensors come from a GPU, kept from save to save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._plan: RankPlan | None = None
        self._views: Sequence[torch.Tensor] = ()

    def take(self, live: LiveState, plan: RankPlan) -> Snapshot:
        """Copy what the plan says. What was taken before is gone."""
        sources = [live.tensor(item, part) for item, part in zip(plan.items, plan.parts, strict=True)]
        if plan is not self._plan:
            self._fit(plan, sources)
        _copy_all(list(zip(self._views, sources, strict=True)))
        for device in {source.device for source in sources if source.is_cuda}:
            torch.cuda.synchronize(device)
        scalars = {name: live.scalars[name] for name in plan.scalars}
        return Snapshot(plan, self._views, scalars)

    def _fit(self, plan: RankPlan, sources: Sequence[torch.Tensor]) -> None:
        pin = any(source.is_cuda for source in sources)
        if plan.nbytes != self._memory.nbytes or pin != self._memory.is_pinned():
            self._views, self._memory = (), torch.empty(0, dtype=torch.uint8)  # the old goes before the new comes
            self._memory = torch.empty(plan.nbytes, dtype=torch.uint8, pin_memory=pin)
        self._views = [
            self._memory[start : start + source.nbytes].view(source.dtype).view(source.shape)
            for start, source in zip(plan.starts, sources, strict=False)
        ]
        self._plan = plan


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy tensors; those of the CPU by several threads that meet once, and not at each of them."""
    jobs: list[list[tuple[Any, Any]]] = [[]]
    room = _JOB_BYTES
    for into, source in pairs:
        if source.device.type != "cpu" or not _is_plain(source):
            _copy(into, source)
            continue
        target, data = _bytes_of(into).numpy(), _bytes_of(source).numpy()
        for start in range(0, data.nbytes, _JOB_BYTES):
            if room <= 0:
                jobs.append([])
                room = _JOB_BYTES
            jobs[-1].append((target[start : start + _JOB_BYTES], data[start : start + _JOB_BYTES]))
            room -= min(_JOB_BYTES, data.nbytes - start)
    threads = min(torch.get_num_threads(), len(jobs))
    if threads == 1:
        for job in jobs:
            _do(job)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="hubshard-copy") as pool:
        list(pool.map(_do, jobs))


def _do(job: Sequence[tuple[Any, Any]]) -> None:
    for target, data in job:
        np.copyto(target, data)  # other threads go on meanwhile


def _is_plain(source: torch.Tensor) -> bool:
    return source.is_contiguous() and not source.is_conj() and not source.is_neg()


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    if not _is_plain(source):
        into.copy_(source, non_blocking=True)
    elif source.numel():  # bytes: some dtypes cannot be copied as such
        _bytes_of(into).copy_(_bytes_of(source), non_blocking=True)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class Snapshot:
    """A copy of what a rank saves, as long as its buffer is not filled again."""

    def __init__(self, plan: RankPlan, views: Sequence[torch.Tensor], scalars: Mapping[str, bytes]) -> None:
        self.plan = plan
        self.scalars = scalars
        self._held: dict[str, list[tuple[Box, TorchValue]]] = {}
        for part, view in zip(plan.parts, views, strict=True):
            self._held.setdefault(part.spec.name, []).append((part.box, TorchValue(part.spec.name, view, None)))

    def read(self, part: Part, box: Box) -> Buffer:
        """The bytes of a box within a part: a view of the copy."""
        held, value = next(found for found in self._held[part.spec.name] if part.box in found[0])
        return value.read(box.relative_to(held))
