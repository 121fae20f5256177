"""A numpy array as a value of a state dict; numpy itself is never imported."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hubshard.protocols import Buffer
from hubshard.sources.dtypes import TORCH_CODES
from hubshard.tensors import Box, TensorSpec

__all__ = ["NumpyValue", "numpy_problem"]

# numpy and ml_dtypes call theirs as torch does, but have no packed float4
_CODES = {name: code for name, code in TORCH_CODES.items() if code != "F4"}


def numpy_problem(array: Any) -> tuple[str, str] | None:
    """Why `array` cannot be stored and what to do, or None when it can."""
    if array.dtype.name not in _CODES:
        return f"has dtype {array.dtype}, which safetensors cannot store", f"cast it to one of {', '.join(_CODES)}"
    return None


@dataclass(frozen=True)
class NumpyValue:
    """An array that `numpy_problem` has nothing against.

    Attributes:
        name: its key.
        array: as given.
    """

    name: str
    array: Any

    @cached_property
    def spec(self) -> TensorSpec:
        """Its name, dtype and shape."""
        return TensorSpec(self.name, _CODES[self.array.dtype.name], tuple(self.array.shape))

    @cached_property
    def identity(self) -> Hashable | None:
        """The address and layout of its elements."""
        array = self.array
        if not array.size:
            return None
        strides = tuple(stride for stride, n in zip(array.strides, array.shape, strict=True) if n > 1)
        return "cpu", array.__array_interface__["data"][0], array.dtype.str, array.shape, strides

    def read(self, box: Box) -> Buffer:
        """A view of the array's own memory where its bytes lie together and in order, else a copy of the box alone."""
        part = self.array[tuple(slice(*ends) for ends in zip(box.offset, box.stop, strict=True))]
        # reshape copies where it must, but leaves even steps; a 0-d array is indexed to a scalar, which has it too
        flat = part.reshape(-1)
        if not flat.flags.c_contiguous:
            flat = flat.copy()
        little = flat.astype(flat.dtype.newbyteorder("<"), copy=False)
        return memoryview(little.view("u1")).toreadonly()
