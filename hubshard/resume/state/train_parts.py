"""The parts that a `TrainState` is made of, and those of a step that was saved from one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hubshard.errors import FormatError
from hubshard.messages import counted
from hubshard.resume.data.adapters import StatefulLoader
from hubshard.resume.dcp.torch_items import metadata_of
from hubshard.resume.ranks import reading_ranks
from hubshard.resume.state.model_state import ModelPart, extra_state_part
from hubshard.resume.state.optimizer_state import OptimizerPart
from hubshard.resume.state.replicas import Replica
from hubshard.resume.state.rng import generators_state, restore_generators, seed_rank
from hubshard.resume.state.state_parts import Part, Specs, StatefulPart, ValuePart, room_for, spec_of
from hubshard.steps.step import Step

__all__ = ["Parts"]

_LOG = logging.getLogger("hubshard")
_PROGRESS = "progress"  # the value that says how far the run has come
_VERSION = 1


class Parts:
    """The parts of a state by their paths.

    Args:
        model: holds the parameters of all optimizers.
        optimizer: None, one, or several.
        others: kind to None, one, or several with `state_dict` and `load_state_dict`.
        ema: "ema" to None or the averaged weights.
        extras: whatever else, by name.

    Attributes:
        ranks: the rank of this process and the number of ranks, among those that hold the state; None for all.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        others: Mapping[str, Any],
        ema: dict[str, Any],
        extras: dict[str, Any],
    ) -> None:
        parts: list[Part] = list(_module_parts("model", model))
        parts += [OptimizerPart(name, one, model) for name, one in _several("optimizer", optimizer)]
        for kind, given in others.items():
            parts += [_stateful(name, one) for name, one in _several(kind, given)]
        if ema["ema"] is not None:
            parts += _extra_parts("ema", ema, "ema")
        for name in extras:
            parts += _extra_parts(f"extras.{name}", extras, name)
        self._parts = parts
        self.ranks: tuple[int, int] | None = None
        self._restored_step: int | None = None

    def replica(self) -> Replica:
        """What this rank holds, in brief, for it to be compared with what the first one does."""
        names = {part.path: part.names() for part in self._parts if isinstance(part, ModelPart | OptimizerPart)}
        models = [part for part in self._parts if isinstance(part, ModelPart)]
        return Replica(names, {name: held for part in models for name, held in part.samples().items()})

    def save(self, progress: Mapping[str, object]) -> dict[str, Any]:
        """The live tensors of this rank and the values, nested, for DCP.

        Args:
            progress: how far the run has come, and its seed.

        Raises:
            FormatError: something cannot be stored: names its path.
        """
        rank, world_size = self.ranks or reading_ranks(None, None)
        values: dict[str, tuple[object]] = {}
        state: dict[str, Any] = {"values": values, "rng": {_key(rank): generators_state()}}
        for part in self._parts:
            name = _stored_name(part, rank)
            value, tensors = part.save(is_first=rank == 0)
            if rank == 0 or part.per_rank:
                values[name] = (value,)
            if tensors:
                state[name] = tensors
        if rank == 0:
            values[_PROGRESS] = ({**progress, "version": _VERSION, "world_size": world_size},)
        return state

    def wanted(self, step: Step) -> dict[str, Any]:
        """What to load a step into.

        Raises:
            FormatError: the step was saved from something else; says what differs.
        """
        rank, world_size = self.ranks or reading_ranks(None, None)
        saved = _SavedStep(step)
        is_same_world = saved.progress["world_size"] == world_size
        self._refuse_other_parts(saved, rank, is_same_world=is_same_world)
        names = [_stored_name(part, rank) for part in self._parts]
        state: dict[str, Any] = {"values": dict.fromkeys([*names, _PROGRESS], ("",))}  # DCP puts the values here
        for name, part in zip(names, self._parts, strict=True):
            tensors = part.wanted(saved.values[name], saved.specs(name))
            if tensors:
                state[name] = tensors
        if is_same_world:
            key = _key(rank)
            state["rng"] = {key: room_for(spec_of(saved.specs("rng"), key, "rng"), None)}
        self._restored_step = step.step
        return state

    def load(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take what was loaded; how far the run had come.

        Raises:
            FormatError: it is incomplete, or a part refuses it.
        """
        rank, world_size = self.ranks or reading_ranks(None, None)
        values = {name: value[0] for name, value in state.get("values", {}).items()}
        names = [_stored_name(part, rank) for part in self._parts]
        is_same_world = values.get(_PROGRESS, {}).get("world_size") == world_size
        generators = state.get("rng", {}).get(_key(rank))
        missing = [name for name in [*names, _PROGRESS] if name not in values]
        if missing or (is_same_world and generators is None):
            raise FormatError(
                f"the state to be loaded lacks {', '.join(missing) or f'the random generators of rank {rank}'}",
                hint="load into what prepare_load() gives, as ResumeBranch.restore does",
            )
        for name, part in zip(names, self._parts, strict=True):
            _load(part, values[name], state.get(name, {}))
        progress: Mapping[str, Any] = values[_PROGRESS]
        if is_same_world:
            restore_generators(generators)
        else:
            self._seed_generators(progress, rank, world_size)
        return progress

    def _refuse_other_parts(self, saved: _SavedStep, rank: int, *, is_same_world: bool) -> None:
        held = saved.part_names()
        for part in self._parts:
            if part.per_rank and not is_same_world and part.path in held:
                ranks = counted(saved.progress["world_size"], "rank")
                raise FormatError(
                    f"{part.path}: it was saved on {ranks}, each of which had its own",
                    hint="go on with as many, or begin it anew: restore into a TrainState without it",
                )
            if _stored_name(part, rank) not in saved.values:
                raise FormatError(
                    f"{part.path}: the step does not hold it; it holds {', '.join(sorted(held))}",
                    hint="restore into a TrainState without it, then save from one that has it",
                )
        unused = held - {part.path for part in self._parts}
        if unused:
            _LOG.warning("step %d also holds what is not restored: %s", saved.step, ", ".join(sorted(unused)))

    def _seed_generators(self, progress: Mapping[str, Any], rank: int, world_size: int) -> None:
        seed, step = progress["seed"], progress["step"] if self._restored_step is None else self._restored_step
        seed_rank(seed, rank, step)
        _LOG.warning(
            "saved on %s, going on with %d: the random generators of rank %d are seeded from (seed %d, rank %d, "
            "step %d)",
            *(counted(progress["world_size"], "rank"), world_size, rank, seed, rank, step),
        )


class _SavedStep:
    """A step that was saved from a TrainState: the values and tensors of each part."""

    def __init__(self, step: Step) -> None:
        self.step = step.step
        self.values: dict[str, Any] = {}
        for name, value in step.scalars.items():
            section, _, rest = name.partition(".")
            if section == "values" and isinstance(value, tuple) and len(value) == 1:
                self.values[rest] = value[0]
        self.progress: Mapping[str, Any] = self.values.get(_PROGRESS, {})
        if self.progress.get("version") != _VERSION:
            raise FormatError(
                f"step {step.step} was not saved from a TrainState of this version",
                hint="restore it into what it was saved from, or update hubshard",
            )
        self._specs = {
            name: spec
            for name, spec in metadata_of(step).state_dict_metadata.items()
            if isinstance(spec, TensorStorageMetadata)
        }

    def specs(self, part: str) -> Specs:
        """The tensors of a part."""
        prefix = f"{part}."
        return {name.removeprefix(prefix): spec for name, spec in self._specs.items() if name.startswith(prefix)}

    def part_names(self) -> set[str]:
        """The parts of the step."""
        return {_without_rank(name) for name in self.values} - {_PROGRESS}


def _load(part: Part, value: Any, tensors: dict[str, torch.Tensor]) -> None:
    try:
        part.load(value, tensors)
    except Exception as error:
        why = error.message if isinstance(error, FormatError) else f"{type(error).__name__}: {error}"
        raise FormatError(
            f"{part.path}: it does not take what the step holds: {why}; the state is partly overwritten",
            hint="do not train on: begin with a new state, built as it was when the step was saved",
        ) from error


def _module_parts(path: str, module: torch.nn.Module) -> Iterator[Part]:
    yield ModelPart(path, module)
    extra = extra_state_part(f"{path}_extra", module)
    if extra is not None:
        yield extra


def _extra_parts(path: str, holder: dict[str, Any], key: str) -> Sequence[Part]:
    value = holder[key]
    if isinstance(value, torch.nn.Module):
        return list(_module_parts(path, value))
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return [_stateful(path, value)]
    return [ValuePart(path, holder, key)]


def _several(kind: str, given: Any) -> list[tuple[str, Any]]:
    if given is None:
        return []
    if isinstance(given, Mapping):
        wrong = [name for name in given if not isinstance(name, str) or not name.isidentifier()]
        if wrong:
            raise FormatError(f"{kind}: {wrong[0]!r} names one of several", hint="name them like variables of Python")
        return [(f"{kind}.{name}", one) for name, one in given.items()]
    if isinstance(given, list | tuple):
        return [(f"{kind}.{number}", one) for number, one in enumerate(given)]
    return [(kind, given)]


def _stateful(path: str, value: Any) -> Part:
    if _is_a(value, "torchdata.stateful_dataloader", "StatefulDataLoader"):
        value = StatefulLoader(value)  # each rank has a position of its own
    if _is_a(value, "datasets", "IterableDataset"):
        raise FormatError(
            f"{path}: a datasets.IterableDataset knows what this process has read, not what a loader has",
            hint="give a StreamedDataset of hubshard.resume.data.adapters, or the StatefulDataLoader that reads it",
        )
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        raise FormatError(
            f"{path}: {type(value).__name__} has no state_dict() and load_state_dict()",
            hint="for data, see hubshard.ResumableLoader and hubshard.resume.data.adapters",
        )
    return StatefulPart(path, value, bool(getattr(value, "per_rank", False)))


def _is_a(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)  # where it is not imported, there is none
    return kind is not None and isinstance(value, kind)


def _key(rank: int) -> str:
    return f"{rank:05d}"


def _stored_name(part: Part, rank: int) -> str:
    return f"{part.path}@{_key(rank)}" if part.per_rank else part.path


def _without_rank(name: str) -> str:
    path, at, rank = name.rpartition("@")
    return path if at and rank.isdecimal() else name
