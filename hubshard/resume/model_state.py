"""The tensors of a module, under the names it has without wrappers, and what else its modules keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hubshard.errors import FormatError
from hubshard.resume.state_parts import Specs, StatefulPart, Tensors, check_same

__all__ = ["ModelPart", "extra_state_part", "plain_names"]

_EXTRA = "_extra_state"  # as torch.nn.Module names what get_extra_state() gives
_CHECKPOINTING = "_checkpoint_wrapped_module"
_NOT_STRICT = StateDictOptions(strict=False)


@dataclasses.dataclass(slots=True)
class ModelPart:
    """A module: its parameters and persistent buffers. A tensor with several names is stored under the first."""

    path: str
    model: torch.nn.Module
    per_rank: bool = False

    def __post_init__(self) -> None:
        if any(isinstance(module, FullyShardedDataParallel) for module in self.model.modules()):
            raise FormatError(
                f"{self.path}: it is wrapped in FullyShardedDataParallel, whose flat parameters are not supported",
                hint="shard it with torch.distributed.fsdp.fully_shard",
            )

    def save(self, *, is_first: bool) -> tuple[object, Tensors]:
        """See `Part`. Buffers that are whole on every rank are those of the first, as under DDP."""
        tensors, aliases = self._tensors()
        if not is_first:
            buffers = {name for name, _ in plain_names(self.model, self.model.named_buffers(remove_duplicate=False))}
            tensors = {name: held for name, held in tensors.items() if isinstance(held, DTensor) or name not in buffers}
        return {"aliases": aliases}, tensors

    def wanted(self, value: Any, specs: Specs) -> Tensors:
        """See `Part`."""
        tensors, aliases = self._tensors()
        if value["aliases"] != aliases:
            raise FormatError(
                f"{self.path}: the step has the tied weights {value['aliases']}, this run {aliases}",
                hint="tie the weights as they were when the step was saved",
            )
        check_same(self.path, specs, tensors)
        return tensors

    def load(self, value: Any, tensors: Tensors) -> None:
        """See `Part`. Tensors that were loaded in place are not copied again."""
        every = dict(tensors) | {alias: tensors[name] for alias, name in value["aliases"].items()}
        set_model_state_dict(self.model, every, options=_NOT_STRICT)

    def _tensors(self) -> tuple[Tensors, dict[str, str]]:
        found = get_model_state_dict(self.model)
        named = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]
        holder = {name: id(tensor) for name, tensor in plain_names(self.model, named)}
        first: dict[int, str] = {}
        aliases: dict[str, str] = {}
        tensors: Tensors = {}
        for name, tensor in found.items():
            if name.rpartition(".")[2] == _EXTRA:
                continue
            if not isinstance(tensor, torch.Tensor):
                raise FormatError(
                    f"{self.path}: its state dict holds {name!r}, a {type(tensor).__name__} that is no tensor",
                    hint="keep it in get_extra_state() and set_extra_state(), or as an extra",
                )
            known = first.setdefault(holder.get(name, id(tensor)), name)
            if known != name:
                aliases[name] = known
            else:
                tensors[name] = tensor
        return tensors, aliases


def extra_state_part(path: str, model: torch.nn.Module) -> StatefulPart | None:
    """What the modules of a model keep by `get_extra_state`; None where none keeps anything."""
    modules = {
        name: module
        for name, module in plain_names(model, model.named_modules())
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    }
    return StatefulPart(path, _ExtraStates(modules)) if modules else None


@dataclasses.dataclass(frozen=True, slots=True)
class _ExtraStates:
    modules: dict[str, torch.nn.Module]

    def state_dict(self) -> dict[str, Any]:
        return {name: module.get_extra_state() for name, module in self.modules.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != self.modules.keys():
            raise FormatError(f"the step holds extra state of {sorted(state)}, this run has {sorted(self.modules)}")
        for name, module in self.modules.items():
            module.set_extra_state(state[name])


def plain_names(model: torch.nn.Module, named: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    """The same with the names that they have without DDP, torch.compile and activation checkpointing."""
    return [(_plain_name(model, name), value) for name, value in named]


def _plain_name(model: torch.nn.Module, name: str) -> str:
    module: Any = model
    kept: list[str] = []
    for key in name.split(".") if name else []:
        if not _is_wrapped(module, key):
            kept.append(key)
        module = getattr(module, key, None)
    return ".".join(kept)


def _is_wrapped(module: object, key: str) -> bool:
    if key == "module":
        return isinstance(module, DistributedDataParallel)
    if key == "_orig_mod":  # torch._dynamo, which is slow to import, names the wrapper of torch.compile
        return type(module).__name__ == "OptimizedModule"
    return key == _CHECKPOINTING
