"""From what stands between the brackets of `tensor[...]` to the bytes to read, and what to do with them afterwards.

The rules are those of numpy's basic indexing (https://numpy.org/doc/stable/user/basics.indexing.html#basic-indexing):
integers, slices with any step, one Ellipsis and None. Pure: no array library is imported.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hubshard.tensors import Box

__all__ = ["Selection", "select"]


@dataclass(frozen=True, slots=True)
class Selection:
    """The elements that an index picks.

    To get the result: read the elements at the cross product of `ranges`, row-major; reverse the dimensions in
    `reversed_dims`; then lay the elements out in `shape`.

    Attributes:
        ranges: per dimension of the tensor, the positions that are picked, ascending.
        reversed_dims: dimensions whose positions were asked for in descending order.
        shape: of the result: dimensions of integers are gone, those of None stand as 1.
    """

    ranges: tuple[range, ...]
    reversed_dims: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def picked_shape(self) -> tuple[int, ...]:
        """Elements picked per dimension of the tensor."""
        return tuple(map(len, self.ranges))

    @property
    def box(self) -> Box:
        """The smallest box that holds all picked elements."""
        return Box(tuple(r.start for r in self.ranges), tuple(map(_extent, self.ranges)))

    def is_box(self) -> bool:
        """Whether the picked elements fill their box, that is, no range leaves one out."""
        return self.box.shape == self.picked_shape

    def boxes(self, *, tensor_shape: tuple[int, ...], bits: int, max_gap_bytes: int) -> Iterator[Box]:
        """Boxes to read one after the other, whose bytes in this order are the elements of `staged_ranges`.

        One box, unless the outermost dimension that is walked at all is walked in steps that leave out more than
        `max_gap_bytes` each: then one box per step.

        Args:
            tensor_shape: of the whole tensor.
            bits: bits per element.
            max_gap_bytes: bytes that are cheaper to read through than to skip.
        """
        dim = self._stepped_dim(tensor_shape, bits, max_gap_bytes)
        if dim is None:
            yield self.box
            return
        box = self.box
        for position in self.ranges[dim]:
            offset = (*box.offset[:dim], position, *box.offset[dim + 1 :])
            yield Box(offset, (*box.shape[:dim], 1, *box.shape[dim + 1 :]))

    def staged_shape(self, *, tensor_shape: tuple[int, ...], bits: int, max_gap_bytes: int) -> tuple[int, ...]:
        """Elements per dimension of what `boxes` brings, all boxes together."""
        dim = self._stepped_dim(tensor_shape, bits, max_gap_bytes)
        shape = self.box.shape
        return shape if dim is None else (*shape[:dim], len(self.ranges[dim]), *shape[dim + 1 :])

    def thinning(self, staged_shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The slices that pick the elements from what was staged."""
        return tuple(
            slice(None, None, r.step if staged > len(r) else 1)
            for r, staged in zip(self.ranges, staged_shape, strict=True)
        )

    def _stepped_dim(self, tensor_shape: tuple[int, ...], bits: int, max_gap_bytes: int) -> int | None:
        dim = next((d for d, r in enumerate(self.ranges) if len(r) > 1), None)
        if dim is None:
            return None
        left_out_bits = (self.ranges[dim].step - 1) * math.prod(tensor_shape[dim + 1 :]) * bits
        return dim if left_out_bits > max_gap_bytes * 8 else None


def select(index: Any, shape: tuple[int, ...]) -> Selection:
    """What `tensor[index]` picks from a tensor of `shape`.

    Raises:
        IndexError: too many indices, one out of bounds, or two Ellipses.
        TypeError: an index that is no integer, slice, Ellipsis or None, such as a list or a mask.
        ValueError: a step of zero.
    """
    items = _spread(index if isinstance(index, tuple) else (index,), len(shape))
    ranges: list[range] = []
    reversed_dims: list[int] = []
    result: list[int] = []
    for item in items:
        if item is None:
            result.append(1)
            continue
        dim = len(ranges)
        picked = _positions(item, shape[dim], dim)
        if picked.step < 0:
            reversed_dims.append(dim)
            picked = picked[::-1]
        ranges.append(picked)
        if isinstance(item, slice):
            result.append(len(picked))
    return Selection(tuple(ranges), tuple(reversed_dims), tuple(result))


def _spread(items: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    # replace the Ellipsis, given or implied, by whole slices
    ellipses = sum(item is Ellipsis for item in items)
    if ellipses > 1:
        raise IndexError("an index holds one Ellipsis ('...') at most")
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > ndim:
        raise IndexError(f"{used} indices are too many for a tensor of {ndim} dimensions")
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    return (*items[:at], *(slice(None),) * (ndim - used), *items[at + 1 :])


def _positions(item: Any, length: int, dim: int) -> range:
    if isinstance(item, slice):
        picked = range(*item.indices(length))
        return picked or range(0)
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise TypeError(
            f"{type(item).__name__} is no index that reads a part: use integers, slices, Ellipsis and None, "
            "or index the tensor that `[...]` returns"
        )
    position = operator.index(item)
    if not -length <= position < length:
        raise IndexError(f"index {position} is out of bounds for dimension {dim} of size {length}")
    position %= length
    return range(position, position + 1)


def _extent(picked: range) -> int:
    return picked[-1] - picked.start + 1 if picked else 0
