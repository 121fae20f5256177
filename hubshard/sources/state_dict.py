"""Tensors in memory: a state dict of torch tensors or numpy arrays."""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from hubshard.errors import FormatError
from hubshard.header import RESERVED_KEYS, check_name
from hubshard.messages import listed
from hubshard.plan import natural_key
from hubshard.protocols import Buffer
from hubshard.sources.dtypes import CASTABLE, parse_float_dtype
from hubshard.sources.numpy_value import NumpyValue, numpy_problem
from hubshard.sources.values import Value, kind_of
from hubshard.tensors import Box, TensorSpec

__all__ = ["StateDictSource", "check_values"]

_SHOWN = 10


class StateDictSource:
    """A state dict as a source of tensors. Nothing is copied until it is read, and then only the box that is asked for.

    Names that hold the very same elements (one address, dtype, shape and strides, as tied weights do) are stored once.
    Views of one storage that are disjoint, or overlap in part, are each stored on their own.
    """

    def __init__(self, state_dict: Mapping[str, Any], *, dtype: str | None = None, keep: Collection[str] = ()) -> None:
        """Look at the tensors, not at their values.

        Args:
            state_dict: torch tensors on any device, or numpy arrays, by name. It must not change while it is read.
            dtype: "bfloat16", "float16", "float32" or "float64": cast floating tensors of 16 bits and more to it, as
                they are read; others stay.
            keep: of tied names, those to store; else the first in natural order is.

        Raises:
            FormatError: a value that cannot be stored (by name: meta, sparse, quantized, distributed or no tensor, an
                unknown dtype), a name in `keep` that is not there, or a dtype that is none.
        """
        if sys.byteorder != "little":
            raise FormatError("this machine is big-endian, and safetensors files are little-endian")
        cast_to = None if dtype is None else parse_float_dtype(dtype)
        check_values(state_dict, cast_to)
        values = [_value(name, value, cast_to) for name, value in state_dict.items()]
        unknown = sorted(set(keep) - state_dict.keys())
        if unknown:
            raise FormatError(f"the names to keep {unknown} are not in the state dict")
        self._aliases = _aliases(values, frozenset(keep))
        self._values = {value.spec.name: value for value in values}
        self._specs = tuple(value.spec for value in values if value.spec.name not in self._aliases)

    def specs(self) -> Sequence[TensorSpec]:
        """All stored tensors, in the order of the state dict."""
        return self._specs

    def aliases(self) -> Mapping[str, str]:
        """Tied names: alias to stored name."""
        return self._aliases

    def read(self, name: str, box: Box) -> Buffer:
        """The row-major little-endian bytes of `box` of the tensor `name`.

        A read-only view of the tensor's memory where it is on the CPU, contiguous there and not cast.

        Raises:
            FormatError: there is no such tensor or box.
        """
        value = self._values.get(name)
        if value is None:
            raise FormatError(f"there is no tensor {name!r} in this state dict")
        value.spec.check_box(box)
        return value.read(box)


def check_values(state_dict: Mapping[str, Any], cast_to: str | None = None) -> None:
    """Refuse what cannot be stored.

    Args:
        state_dict: values by name.
        cast_to: code that floating tensors would be cast to, or None.

    Raises:
        FormatError: names all the tensors that share the first reason.
    """
    names: list[str] = []
    first: tuple[str, str] | None = None
    for name, value in state_dict.items():
        if not isinstance(name, str):
            raise FormatError(f"the state dict has the key {name!r}, which is no string")
        check_name(name)
        problem = _problem(value, cast_to)
        first = first or problem
        if problem and problem == first:
            names.append(name)
    if first:
        reason, hint = first
        raise FormatError(f"tensor {listed([repr(name) for name in names], most=_SHOWN)} {reason}", hint=hint)


def _problem(value: Any, cast_to: str | None) -> tuple[str, str] | None:
    kind = kind_of(value)
    if kind == "torch":
        from hubshard.sources.torch_value import torch_problem  # noqa: PLC0415  # imports torch

        return torch_problem(value)
    if kind == "numpy":
        problem = numpy_problem(value)
        if problem is None and cast_to and NumpyValue("", value).spec.dtype in CASTABLE:
            return "is a numpy array, and only torch tensors are cast", "cast it first, or give torch tensors"
        return problem
    return f"is a {type(value).__name__}, not a tensor", "leave it out of the state dict, or store it in the config"


def _value(name: str, value: Any, cast_to: str | None) -> Value:
    if kind_of(value) == "numpy":
        return NumpyValue(name, value)
    from hubshard.sources.torch_value import value_of  # noqa: PLC0415  # imports torch

    return value_of(name, value, cast_to)


def _aliases(values: Sequence[Value], keep: Collection[str]) -> dict[str, str]:
    groups: dict[Hashable, list[str]] = {}
    for value in values:
        if value.identity is not None:
            groups.setdefault(value.identity, []).append(value.spec.name)
    aliases: dict[str, str] = {}
    for names in groups.values():
        # what the metadata of a file holds under these names is no alias, so they must be stored themselves
        kept = min(names, key=lambda name: (name not in RESERVED_KEYS, name not in keep, natural_key(name), name))
        aliases |= {name: kept for name in names if name != kept}
    return aliases
