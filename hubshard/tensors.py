"""What a tensor is, apart from its values: a name, a dtype, a shape, and boxes within it.

Dtypes are the codes of the safetensors format (https://github.com/huggingface/safetensors#format); `DTYPE_BITS` is the
one table of them. Offsets and shapes count elements, sizes count bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

from hubshard.errors import FormatError

__all__ = ["DTYPE_BITS", "MAX_DIMENSIONS", "Box", "TensorSpec", "dtype_bits"]

MAX_DIMENSIONS = 64
"""Most dimensions of a tensor: numpy and torch take no more."""

_BITS = {
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
DTYPE_BITS: Mapping[str, int] = MappingProxyType(_BITS)
"""Bits per element of each safetensors dtype code."""


def dtype_bits(dtype: str, *, tensor: str) -> int:
    """Bits per element of `dtype`.

    Raises:
        FormatError: the dtype is none that safetensors can store; names `tensor`.
    """
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise FormatError(
            f"tensor {tensor!r} has dtype {dtype!r}, which safetensors cannot store",
            hint=f"cast it to one of {', '.join(DTYPE_BITS)}",
        )
    return bits


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its values.

    Attributes:
        name: its key in the state dict.
        dtype: a safetensors code, such as "BF16".
        shape: elements per dimension; () is a scalar.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Bits per element."""
        return dtype_bits(self.dtype, tensor=self.name)

    @property
    def numel(self) -> int:
        """Elements in all; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in all.

        Raises:
            FormatError: unknown dtype, or a packed dtype whose elements do not fill whole bytes.
        """
        bits = math.prod(self.shape) * (_BITS.get(self.dtype) or self.bits)  # asked a million times over
        if bits % 8:
            raise FormatError(
                f"tensor {self.name!r}: {self.numel} elements of {self.dtype} do not fill whole bytes",
                hint="pad its last dimension, or store the packed bytes as U8",
            )
        return bits // 8

    @property
    def box(self) -> Box:
        """The box that covers the whole tensor."""
        return Box((0,) * len(self.shape), self.shape)

    def holds(self, box: Box) -> bool:
        """Whether `box` is one of as many dimensions within the tensor."""
        is_box = len(box.offset) == len(box.shape) == len(self.shape) and min((*box.shape, 0)) >= 0
        return is_box and box in self.box

    def check_box(self, box: Box) -> None:
        """Refuse a box that is none of this tensor.

        Raises:
            FormatError: it lies outside, or has another number of dimensions.
        """
        if not self.holds(box):
            raise FormatError(f"box {box.offset}+{box.shape} lies outside tensor {self.name!r} of shape {self.shape}")


@dataclass(frozen=True, slots=True)
class Box:
    """A box of elements within a global tensor: dimension d covers `offset[d]` to `offset[d] + shape[d]`, half-open."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in all; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The first element past the box, per dimension."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def __and__(self, other: Box) -> Box | None:
        """The intersection, or None where the two share no element."""
        if len(self.offset) != len(other.offset):
            raise ValueError(f"boxes of {len(self.offset)} and {len(other.offset)} dimensions do not intersect")
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(a, b) - o for a, b, o in zip(self.stop, other.stop, offset, strict=True))
        return Box(offset, shape) if all(n > 0 for n in shape) else None

    def __contains__(self, other: Box) -> bool:
        """Whether `other` lies wholly within this box."""
        inside = all(a <= b for a, b in zip(self.offset, other.offset, strict=True))
        return inside and all(a >= b for a, b in zip(self.stop, other.stop, strict=True))

    def relative_to(self, outer: Box) -> Box:
        """The same elements, counted from the corner of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)

    def blocks(self, *, bits: int, max_bytes: int) -> Iterator[Box]:
        """Cut the box into boxes that follow each other in row-major order, each contiguous and of at most `max_bytes`.

        Concatenated, the bytes of the blocks are the bytes of the box. Every block of a packed dtype holds whole bytes;
        where that forbids a cut, the block is larger than asked.

        Args:
            bits: bits per element.
            max_bytes: bytes per block, at least one element.
        """
        row_bits = math.prod(self.shape[1:]) * bits
        if not self.shape or self.numel * bits <= max_bytes * 8:
            yield self
            return
        # walk outer dimensions one index at a time, as long as their rows are too large and fill whole bytes
        depth = 0
        while row_bits > max_bytes * 8 and row_bits % 8 == 0 and depth + 1 < len(self.shape):
            depth += 1
            row_bits //= self.shape[depth]
        unit = 8 // math.gcd(row_bits, 8)  # rows that fill whole bytes
        step = max(unit, max_bytes * 8 // row_bits // unit * unit)
        for outer in product(*(range(n) for n in self.shape[:depth])):
            corner = tuple(o + i for o, i in zip(self.offset, outer, strict=False))
            for start in range(0, self.shape[depth], step):
                offset = (*corner, self.offset[depth] + start, *self.offset[depth + 1 :])
                rows = min(step, self.shape[depth] - start)
                yield Box(offset, (*(1,) * depth, rows, *self.shape[depth + 1 :]))
