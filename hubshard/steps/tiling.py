"""How a tensor is cut into boxes, for thousands of ranks: tensors of one shape that are cut alike share a `Tiling`."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hubshard.errors import FormatError
from hubshard.steps.columns import Column
from hubshard.tensors import MAX_DIMENSIONS, Box

__all__ = ["Tiling"]


@dataclass(frozen=True)
class Tiling:
    """The boxes of the pieces of a tensor, one column per dimension.

    Attributes:
        shape: of the tensor (elements).
        offsets: where each box begins, per dimension.
        sizes: of each box (elements), per dimension.
    """

    shape: tuple[int, ...]
    offsets: tuple[Column, ...]
    sizes: tuple[Column, ...]

    @classmethod
    def from_json(cls, value: Any, *, path: str) -> Tiling:
        """Read what `to_json` wrote.

        Raises:
            FormatError: something else, or a box outside the shape; names `path`.
        """
        if not isinstance(value, list) or len(value) != 3 or not all(isinstance(part, list) for part in value):
            raise FormatError(f"{path}: a tiling needs a shape, offsets and sizes")
        shape, offsets, sizes = value
        if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
            raise FormatError(f"{path}: a tiling whose shape is no list of counts")
        if not len(shape) == len(offsets) == len(sizes):
            raise FormatError(f"{path}: a tiling of {len(shape)} dimensions needs as many columns of each kind")
        columns = [Column.from_json(column, path=path) for column in (*offsets, *sizes)]
        tiling = cls(tuple(shape), tuple(columns[: len(shape)]), tuple(columns[len(shape) :]))
        tiling._check_bounds(path)
        return tiling

    def to_json(self) -> list[Any]:
        """As a list of shape, offsets and sizes."""
        return [
            list(self.shape),
            [column.to_json() for column in self.offsets],
            [column.to_json() for column in self.sizes],
        ]

    def __len__(self) -> int:
        return len(self.offsets[0]) if self.offsets else 1

    def box(self, at: int) -> Box:
        """The box of a piece."""
        return Box(tuple(column[at] for column in self._offset_lists), tuple(column[at] for column in self._size_lists))

    @cached_property
    def numels(self) -> Sequence[int]:
        """Elements of each piece."""
        return list(map(math.prod, zip(*self._size_lists, strict=True))) if self.shape else [1]

    @cached_property
    def is_grid(self) -> bool:
        """Whether the boxes are known to tile the shape exactly, because they are all the cells of a grid.

        Tilings that are no grids may be exact too; that takes a look at every pair.
        """
        if not math.prod(self.shape):
            return True
        cells = 1
        for size, offsets, sizes in zip(self.shape, self._offset_lists, self._size_lists, strict=True):
            cuts = sorted(set(zip(offsets, sizes, strict=True)))
            end = 0
            for offset, length in cuts:
                if offset != end or not length:
                    return False
                end += length
            if end != size:
                return False
            cells *= len(cuts)
        return cells == len(self) == (len(set(zip(*self._offset_lists, strict=True))) if self.shape else 1)

    def touching(self, box: Box) -> list[int]:
        """The pieces whose boxes share an element with `box`, in ascending order."""
        if not self.shape or len(self) == 1:
            return [at for at in range(len(self)) if self.box(at) & box]
        along, order, starts, widest = self._sweep
        first = bisect_right(starts, box.offset[along] - widest)
        found = order[first : bisect_left(starts, box.stop[along])]
        return sorted(at for at in found if self.box(at) & box)

    def _check_bounds(self, path: str) -> None:
        if len({len(column) for column in (*self.offsets, *self.sizes)}) > 1:
            raise FormatError(f"{path}: a tiling whose columns have different lengths")
        for size, offsets, sizes in zip(self.shape, self._offset_lists, self._size_lists, strict=True):
            if any(map(size.__lt__, map(int.__add__, offsets, sizes))):
                raise FormatError(f"{path}: a tiling whose boxes leave the shape {self.shape}")

    @cached_property
    def _offset_lists(self) -> tuple[list[int], ...]:
        return tuple(map(list, self.offsets))

    @cached_property
    def _size_lists(self) -> tuple[list[int], ...]:
        return tuple(map(list, self.sizes))

    @cached_property
    def _sweep(self) -> tuple[int, list[int], list[int], int]:
        # the dimension that is cut most, the pieces in its order, where they begin there, and the widest of them
        along = max(range(len(self.shape)), key=lambda dim: len(set(self._offset_lists[dim])))
        offsets = self._offset_lists[along]
        order = sorted(range(len(offsets)), key=offsets.__getitem__)
        return along, order, [offsets[at] for at in order], max(self._size_lists[along])
