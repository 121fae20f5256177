"""What a state dict may hold: the few questions that a source asks of a value, answered for torch and numpy.

Neither library is imported unless a value of it is there.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from hubshard.protocols import Buffer
from hubshard.tensors import Box, TensorSpec

__all__ = ["Value"]


class Value(Protocol):
    """A tensor in memory."""

    @property
    def spec(self) -> TensorSpec:
        """Its name, dtype and shape as they are stored."""

    @property
    def identity(self) -> Hashable | None:
        """Equal for two names of the very same elements (bytes, dtype, shape, strides); None for no elements."""

    def read(self, box: Box) -> Buffer:
        """The row-major little-endian bytes of `box`."""


def kind_of(value: Any) -> str:
    """The library whose tensor `value` is, "torch" or "numpy"; "" for none."""
    for cls in type(value).__mro__:
        if (cls.__module__, cls.__name__) in {("torch", "Tensor"), ("numpy", "ndarray")}:
            return str(cls.__module__)
    return ""
