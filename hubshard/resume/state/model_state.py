"""The tensors of a module, under the names it has without wrappers, and what else its modules keep."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hubshard.errors import FormatError
from hubshard.resume.state.replicas import samples_of
from hubshard.resume.state.state_parts import Specs, StatefulPart, Tensors, check_same

__all__ = ["ModelPart", "PlainNames", "extra_state_part"]

_EXTRA = "_extra_state"  # as torch.nn.Module names what get_extra_state() gives
_CHECKPOINTING = "_checkpoint_wrapped_module"
_NOT_STRICT = StateDictOptions(strict=False)


@dataclasses.dataclass(slots=True)
class ModelPart:
    """A module: its parameters and persistent buffers. A tensor with several names is stored under the first."""

    path: str
    model: torch.nn.Module
    per_rank: bool = False
    _names: PlainNames = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._names = PlainNames(self.model)
        if any(isinstance(module, FullyShardedDataParallel) for module in self.model.modules()):
            raise FormatError(
                f"{self.path}: it is wrapped in FullyShardedDataParallel, whose flat parameters are not supported",
                hint="shard it with torch.distributed.fsdp.fully_shard",
            )

    def names(self) -> list[str]:
        """What every rank has, alike."""
        tensors, aliases = self._tensors()
        return [*tensors, *(f"{alias} tied to {name}" for alias, name in aliases.items())]

    def samples(self) -> dict[str, list[float]]:
        """Some numbers of what every rank has alike; see `replicas`."""
        return {f"{self.path}.{name}": held for name, held in samples_of(self._parameters()).items()}

    def save(self, *, is_first: bool) -> tuple[object, Tensors]:
        """See `Part`. Buffers that are whole on every rank are those of the first, as under DDP."""
        tensors, aliases = self._tensors(with_buffers=is_first)
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
        hollow = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
        if hollow is not None:
            raise FormatError(
                f"{self.path}: {hollow!r} is on the meta device, and has no memory to load into",
                hint='call model.to_empty(device="cpu"), or another device, before the restore',
            )
        return tensors

    def load(self, value: Any, tensors: Tensors) -> None:
        """See `Part`. Tensors that were loaded in place are not copied again."""
        every = dict(tensors) | {alias: tensors[name] for alias, name in value["aliases"].items()}
        set_model_state_dict(self.model, every, options=_NOT_STRICT)

    def _parameters(self) -> Tensors:
        return {self._names(name): param for name, param in self.model.named_parameters()}

    def _tensors(self, *, with_buffers: bool = True) -> tuple[Tensors, dict[str, str]]:
        """The tensors by name, and further names of them; with or without buffers that are not sharded."""
        first: dict[int, str] = {}
        aliases: dict[str, str] = {}
        tensors: Tensors = {}
        for key, tensor in self.model.state_dict(keep_vars=True).items():
            name = self._names(key)
            if name.rpartition(".")[2] == _EXTRA:
                continue
            if not isinstance(tensor, torch.Tensor):
                raise FormatError(
                    f"{self.path}: its state dict holds {name!r}, a {type(tensor).__name__} that is no tensor",
                    hint="keep it in get_extra_state() and set_extra_state(), or as an extra",
                )
            known = first.setdefault(id(tensor), name)
            if known != name:
                aliases[name] = known
            elif with_buffers or isinstance(tensor, torch.nn.Parameter | DTensor):
                tensors[name] = tensor.detach()
        return tensors, aliases


def extra_state_part(path: str, model: torch.nn.Module) -> StatefulPart | None:
    """What the modules of a model keep by `get_extra_state`; None where none keeps anything."""
    names = PlainNames(model)
    modules = {
        names(name): module
        for name, module in model.named_modules()
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


class PlainNames:
    """The names that parts of a model have without DDP, torch.compile and activation checkpointing; remembers them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._known: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """The plain name of a module, parameter or buffer."""
        plain = self._known.get(name)
        if plain is None:
            plain = self._known[name] = self._without_wrappers(name)
        return plain

    def _without_wrappers(self, name: str) -> str:
        module: Any = self._model
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
