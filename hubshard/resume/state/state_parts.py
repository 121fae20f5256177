"""The parts of a training state: each gives its tensors and a value for all else, and takes them back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from hubshard.errors import FormatError
from hubshard.resume.state.fitting import check_fits
from hubshard.resume.state.tree import assign, fill, join, split, tensor_names

__all__ = ["Part", "StatefulPart", "Tensors", "ValuePart", "check_same", "room_for", "spec_of"]

Tensors = dict[str, torch.Tensor]
Specs = Mapping[str, TensorStorageMetadata]
"""What a step holds of a part: its tensors by name."""


class Part(Protocol):
    """A part of the state.

    Attributes:
        path: what it is called in errors.
        per_rank: whether each rank has one of its own, which means nothing on another number of ranks.
    """

    path: str
    per_rank: bool

    def save(self, *, is_first: bool) -> tuple[object, Tensors]:
        """Its value and its tensors, live; of what all ranks hold alike, the first rank's counts.

        Raises:
            FormatError: something in it cannot be stored.
        """

    def wanted(self, value: Any, specs: Specs) -> Tensors:
        """Tensors to load a saved part into: those of this run where they fit.

        Raises:
            FormatError: it does not fit this run.
        """

    def load(self, value: Any, tensors: Tensors) -> None:
        """Take what was loaded."""


def check_same(path: str, saved: Specs, live: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors of a step that are not those of this run.

    Raises:
        FormatError: names some that are missing or superfluous, or one with another shape or dtype.
    """
    for what, names in (
        ("the step does not hold", live.keys() - saved.keys()),
        ("this run does not have", saved.keys() - live.keys()),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise FormatError(
                f"{path}: {what} {', '.join(map(repr, sorted(names)[:3]))}{more}",
                hint="build the run as it was when the step was saved",
            )
    for name, spec in saved.items():
        tensor = live[name]
        if tuple(tensor.shape) != tuple(spec.size) or tensor.dtype != spec.properties.dtype:
            raise FormatError(
                f"{path}: {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, and was saved as "
                f"{spec.properties.dtype} of shape {tuple(spec.size)}",
                hint="build the run as it was when the step was saved",
            )


def room_for(spec: TensorStorageMetadata, live: torch.Tensor | None) -> torch.Tensor:
    """The tensor of this run where it fits, else a new one on the CPU."""
    if live is not None and live.shape == spec.size and live.dtype == spec.properties.dtype:
        return live.detach()
    return torch.empty(tuple(spec.size), dtype=spec.properties.dtype)


@dataclasses.dataclass(slots=True)
class StatefulPart:
    """Anything with `state_dict` and `load_state_dict`."""

    path: str
    stateful: Any
    per_rank: bool = False

    def save(self, *, is_first: bool) -> tuple[object, Tensors]:
        """See `Part`."""
        value, tensors = split(self.stateful.state_dict(), path=self.path)
        return value, _own(tensors, is_first=is_first or self.per_rank)

    def wanted(self, value: Any, specs: Specs) -> Tensors:
        """See `Part`."""
        check_fits(self.path, self.stateful, value)
        return _room(value, specs, self._live(value), self.path)

    def load(self, value: Any, tensors: Tensors) -> None:
        """See `Part`."""
        live = self._live(value)
        filled = {name: fill(live.get(name), tensor) for name, tensor in tensors.items()}
        self.stateful.load_state_dict(join(value, filled, path=self.path))

    def _live(self, value: Any) -> Tensors:
        # a loader that is asked for its state may start its workers: asked only where there are tensors to find
        return split(self.stateful.state_dict(), path=self.path)[1] if any(tensor_names(value)) else {}


@dataclasses.dataclass(slots=True)
class ValuePart:
    """A value that can be stored as it is: `holder[key]`. What is a dict or list is changed in place."""

    path: str
    holder: dict[str, Any]
    key: str
    per_rank: bool = False

    def save(self, *, is_first: bool) -> tuple[object, Tensors]:
        """See `Part`."""
        value, tensors = split(self.holder[self.key], path=self.path)
        return value, _own(tensors, is_first=is_first)

    def wanted(self, value: Any, specs: Specs) -> Tensors:
        """See `Part`."""
        _, live = split(self.holder[self.key], path=self.path)
        return _room(value, specs, live, self.path)

    def load(self, value: Any, tensors: Tensors) -> None:
        """See `Part`."""
        _, live = split(self.holder[self.key], path=self.path)
        filled = {name: fill(live.get(name), tensor) for name, tensor in tensors.items()}
        self.holder[self.key] = assign(self.holder[self.key], join(value, filled, path=self.path))


def _own(tensors: Tensors, *, is_first: bool) -> Tensors:
    # of plain tensors, which all ranks should hold alike, exactly one copy is stored: the first rank's
    return tensors if is_first else {name: held for name, held in tensors.items() if isinstance(held, DTensor)}


def _room(value: object, specs: Specs, live: Tensors, path: str) -> Tensors:
    return {name: room_for(spec_of(specs, name, path), live.get(name)) for name in tensor_names(value)}


def spec_of(specs: Specs, name: str, path: str) -> TensorStorageMetadata:
    """The saved tensor of a name.

    Raises:
        FormatError: there is none.
    """
    if name not in specs:
        raise FormatError(f"{path}: the step lacks the tensor {name!r}", hint="it is damaged: restore another step")
    return specs[name]
