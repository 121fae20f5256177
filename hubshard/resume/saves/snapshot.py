"""One copy of what a rank has to save, in memory that is used again and again: the training goes on once it is made."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from hubshard.resume.saves.plans import RankPlan
from hubshard.sources.torch_value import TorchValue, torch_problem
from hubshard.steps.canonical import encode
from hubshard.steps.parts import Part
from hubshard.tensors import Box

__all__ = ["LiveState", "Snapshot", "SnapshotBuffer", "is_stateful", "tree_of"]

_JOB_BYTES = 32 * 2**20


def tree_of(state: Any) -> dict[str, Any]:
    """The nested state dict of a state: what its `state_dict()` gives, or, of a plain dict, of each of its items."""
    if not isinstance(state, Mapping):
        if not hasattr(state, "state_dict"):
            raise FormatError(f"a state that is a {type(state).__name__}", hint="give a TrainState, or a dict")
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
        tree = tree_of(state)
        _check_nested(tree, ())
        try:
            self._planner.set_up_planner(tree, None, is_first)
        except ValueError as error:  # two keys that are one when joined by dots
            raise FormatError(f"the state: {error}", hint="give each value a path of its own, as text") from error
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


def _check_nested(item: object, keys: tuple[object, ...]) -> None:
    """Refuse nested tensors, which do not even have a shape.

    Raises:
        FormatError: names the path of one.
    """
    if isinstance(item, torch.Tensor) and item.is_nested:
        where = ".".join(map(str, keys))
        raise FormatError(f"tensor {where!r} is a nested tensor, not dense", hint="store its parts, from unbind()")
    if isinstance(item, Mapping):
        for key, value in item.items():
            _check_nested(value, (*keys, key))
    elif isinstance(item, list | tuple):
        for number, value in enumerate(item):
            _check_nested(value, (*keys, number))


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


class SnapshotBuffer:
    """Memory for one snapshot: page-locked where tensors come from a GPU, kept from save to save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._plan: RankPlan | None = None
        self._views: Sequence[torch.Tensor] = ()
        self._targets: Sequence[Any] = ()
        self._threads = ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), thread_name_prefix="hubshard-copy")

    def take(self, live: LiveState, plan: RankPlan) -> Snapshot:
        """Copy what the plan says. What was taken before is gone."""
        sources = [live.tensor(item, part) for item, part in zip(plan.items, plan.parts, strict=True)]
        if plan is not self._plan:
            self._fit(plan, sources)
        self._copy(sources)
        for device in {source.device for source in sources if source.is_cuda}:
            torch.cuda.synchronize(device)
        scalars = {name: live.scalars[name] for name in plan.scalars}
        return Snapshot(plan, self._views, scalars)

    def _fit(self, plan: RankPlan, sources: Sequence[torch.Tensor]) -> None:
        pin = any(source.is_cuda for source in sources)
        if plan.nbytes != self._memory.nbytes or pin != self._memory.is_pinned():
            # the old goes before the new comes
            self._views, self._targets, self._memory = (), (), torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(plan.nbytes, dtype=torch.uint8, pin_memory=pin)
        self._views = [
            self._memory[start : start + source.nbytes].view(source.dtype).view(source.shape)
            for start, source in zip(plan.starts, sources, strict=False)
        ]
        self._targets = [_bytes_of(view).numpy() for view in self._views]
        self._plan = plan

    def _copy(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy tensors; those of the CPU by several threads that meet once, and not at each of them."""
        plain = []
        for into, target, source in zip(self._views, self._targets, sources, strict=True):
            if source.device.type == "cpu" and _is_plain(source):
                plain.append((target, _bytes_of(source).numpy()))
            else:
                _copy(into, source)
        jobs = deque(_jobs(plain))
        others = [self._threads.submit(_do_all, jobs) for _ in range(min(torch.get_num_threads(), len(jobs)) - 1)]
        _do_all(jobs)
        for other in others:
            other.result()


def _jobs(pairs: Sequence[tuple[Any, Any]]) -> Iterator[list[tuple[Any, Any]]]:
    """Arrays of bytes to copy, into and from, in portions of about the same size."""
    job: list[tuple[Any, Any]] = []
    room = _JOB_BYTES
    for target, data in pairs:
        for start in range(0, data.nbytes, _JOB_BYTES):
            job.append((target[start : start + _JOB_BYTES], data[start : start + _JOB_BYTES]))
            room -= job[-1][0].nbytes
            if room <= 0:
                yield job
                job, room = [], _JOB_BYTES
    if job:
        yield job


def _do_all(jobs: deque[list[tuple[Any, Any]]]) -> None:
    while True:
        try:
            job = jobs.popleft()
        except IndexError:
            return
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
