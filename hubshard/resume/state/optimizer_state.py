"""The state of an optimizer by the names of the model's parameters, brought back bit by bit.

torch's helpers make state that does not exist yet by a step with gradients of zero, which counts as a step; and
`Optimizer.load_state_dict` casts what it gets to the dtype of the parameter. Here what is empty stays empty, and a
tensor is what was saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate

from hubshard.errors import FormatError
from hubshard.messages import counted
from hubshard.resume.state.model_state import PlainNames
from hubshard.resume.state.state_parts import Specs, Tensors, room_for, spec_of
from hubshard.resume.state.tree import fill, join, split, tensor_names

__all__ = ["OptimizerPart"]

_CLASS = "class"
_STEP = "step"  # torch's optimizers keep it on the CPU, unless "capturable" or "fused"


@dataclasses.dataclass(slots=True)
class OptimizerPart:
    """An optimizer of parameters of a model."""

    path: str
    optimizer: torch.optim.Optimizer
    model: torch.nn.Module
    per_rank: bool = False
    _names: PlainNames = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._names = PlainNames(self.model)

    def names(self) -> list[str]:
        """The parameters and their groups: every rank has the same."""
        groups = self._tree(self._named())["param_groups"]
        return [f"{name} in group {number}" for number, group in enumerate(groups) for name in group["params"]]

    def save(self, *, is_first: bool) -> tuple[object, Tensors]:
        """See `Part`."""
        del is_first  # replicas are equal: which rank stores one is the planner's choice
        named = self._named()
        tree = self._tree(named) | {_CLASS: type(self.optimizer).__name__}
        for name, param in named:
            for key, value in tree["state"].get(name, {}).items():
                _check_share(f"{self.path}.state.{name}.{key}", value, param)
        return split(tree, path=self.path)

    def wanted(self, value: Any, specs: Specs) -> Tensors:
        """See `Part`. State that this run does not have yet is made, empty."""
        kind, ours = value.get(_CLASS), type(self.optimizer).__name__
        if kind not in {None, ours}:
            raise FormatError(
                f"{self.path}: it is {ours}, and the step was saved from {kind}",
                hint="go on with that; or restore into a TrainState without the optimizer, and begin it anew",
            )
        params, live = self._fitting(value)
        wanted: Tensors = {}
        for name, values in value["state"].items():
            on_device = any(
                group.get("capturable") or group.get("fused")
                for group in value["param_groups"]
                if name in group["params"]
            )
            for found in tensor_names(values):
                spec = spec_of(specs, found, self.path)
                is_step = not on_device and found.rpartition(".")[2] == _STEP
                wanted[found] = _room_beside(spec, live.get(found), params.get(name), on_cpu=is_step)
        for found in tensor_names(value["param_groups"]):
            wanted[found] = room_for(spec_of(specs, found, self.path), live.get(found))
        return wanted

    def load(self, value: Any, tensors: Tensors) -> None:
        """See `Part`."""
        params, live = self._fitting(value)
        filled = {name: fill(live.get(name), tensor) for name, tensor in tensors.items()}
        tree = join(value, filled, path=self.path)
        number = {name: number for number, name in enumerate(params)}
        # within a group the order is that of this run, whatever it was
        groups = [
            dict(group) | {"params": sorted(number[name] for name in group["params"])} for group in tree["param_groups"]
        ]
        ordered = sorted(tree["state"].items(), key=lambda item: number.get(item[0], len(number)))
        state = {number.get(name, name): values for name, values in ordered}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        if type(self.optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            self._put_exactly(tree, params)

    def _put_exactly(self, tree: Any, params: Mapping[str, torch.Tensor]) -> None:
        """Undo the casts, and keep tensors of the groups the same objects."""
        for name, param in params.items():
            if name in tree["state"]:
                self.optimizer.state[param] = tree["state"][name]
        for group, saved in zip(self.optimizer.param_groups, tree["param_groups"], strict=True):
            group.update({key: item for key, item in saved.items() if isinstance(item, torch.Tensor)})

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters with their names, in the optimizer's order."""
        names = {id(param): self._names(name) for name, param in self.model.named_parameters()}
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        strangers = [param for param in params if id(param) not in names]
        if strangers:
            raise FormatError(
                f"{self.path}: it holds {counted(len(strangers), 'parameter')} not of the model, the first of shape "
                f"{tuple(strangers[0].shape)}: their values would be lost",
                hint="give a model that holds them all, such as torch.nn.ModuleDict",
            )
        return [(names[id(param)], param) for param in params]

    def _tree(self, params: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        held = self.optimizer.state_dict()
        names = [name for name, _ in params]

        def named(key: Any) -> Any:
            return names[key] if type(key) is int and 0 <= key < len(names) else key

        groups = [dict(group) | {"params": list(map(named, group["params"]))} for group in held["param_groups"]]
        return {"state": {named(key): values for key, values in held["state"].items()}, "param_groups": groups}

    def _fitting(self, value: Any) -> tuple[dict[str, torch.Tensor], Tensors]:
        """The parameters by name, in the optimizer's order, and the tensors of its state, if the saved groups fit."""
        named = self._named()
        tree = self._tree(named)
        saved = [sorted(group["params"]) for group in value["param_groups"]]
        live = [sorted(group["params"]) for group in tree["param_groups"]]
        if saved != live:
            sizes = " and ".join(f"{[len(group) for group in groups]}" for groups in (saved, live))
            raise FormatError(
                f"{self.path}: its groups hold other parameters than when the step was saved (numbers: {sizes})",
                hint="build the optimizer as it was when the step was saved",
            )
        return dict(named), split(tree, path=self.path)[1]


def _check_share(path: str, value: object, param: torch.Tensor) -> None:
    """Refuse a rank's own share of a state that is not marked as one, of which a single rank's would be stored."""
    if not isinstance(param, DTensor) or isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
        return
    if value.dim() and value.shape == param.to_local().shape != param.shape:
        raise FormatError(
            f"{path}: it is a plain tensor of the size of this rank's share of a parameter that is sharded",
            hint="use an optimizer that keeps its state as DTensors, like those of torch.optim",
        )


def _room_beside(
    spec: TensorStorageMetadata, live: torch.Tensor | None, param: torch.Tensor | None, *, on_cpu: bool
) -> torch.Tensor:
    """Where a tensor of a parameter's state is loaded to: sharded like the parameter where it has its shape."""
    size, dtype = tuple(spec.size), spec.properties.dtype
    if param is None or on_cpu or (live is not None and live.shape == spec.size and live.dtype == dtype):
        return room_for(spec, live)
    if size == tuple(param.shape):
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    if isinstance(param, DTensor) and size:
        whole = torch.empty(size, dtype=dtype, device=param.to_local().device)
        mesh = param.device_mesh
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return torch.empty(size, dtype=dtype, device=param.device)
