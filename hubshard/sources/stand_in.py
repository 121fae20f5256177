"""Stand-ins for tensors that lie over several ranks: meta tensors that know where the values are.

Views of a stand-in (slices, permutations) know it too, since they share its storage. So what only looks at tensors, or
takes them apart, as the conversions of transformers models do, works on them as if they were whole.

Imports torch: import this module only where a torch tensor is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hubshard.sources.spread import Spread
from hubshard.tensors import Box

__all__ = ["Placed", "View", "placed_of", "stand_in", "view_of"]

_MARK = "hubshard_placed"


@dataclass(frozen=True, eq=False)
class Placed:
    """A whole tensor whose values lie over several ranks.

    Attributes:
        number: unique among those of one model, the same on all ranks.
        name: its key.
        spread: where its parts are.
        gather: called with it, a box and a dtype to cast to (or None): that box as a contiguous tensor on the CPU,
            whose elements are of some dtype of the right width; valid until the same thread asks again.
    """

    number: int
    name: str
    spread: Spread
    gather: Callable[[Placed, Box, torch.dtype | None], torch.Tensor]


def stand_in(placed: Placed, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without values that stands for a whole one."""
    tensor = torch.empty(placed.spread.shape, dtype=dtype, device="meta")
    setattr(tensor.untyped_storage(), _MARK, placed)
    return tensor


def placed_of(tensor: torch.Tensor) -> Placed | None:
    """What a stand-in, or a view of one, stands for; None for any other tensor."""
    if not tensor.is_meta or tensor.layout != torch.strided:
        return None
    return getattr(tensor.untyped_storage(), _MARK, None)


@dataclass(frozen=True, slots=True)
class View:
    """A box of a whole tensor with its axes in some order.

    Attributes:
        corner: where it begins in the whole tensor.
        axes: for each dimension of the view, the dimension of the whole tensor; None where it has but one element.
    """

    corner: tuple[int, ...]
    axes: tuple[int | None, ...]

    def box(self, ranges: Sequence[tuple[int, int]]) -> Box:
        """The box of the whole tensor that is at some ranges of the view's dimensions."""
        offset, shape = list(self.corner), [1] * len(self.corner)
        for axis, (start, stop) in zip(self.axes, ranges, strict=True):
            if axis is not None:
                offset[axis] += start
                shape[axis] = stop - start
        return Box(tuple(offset), tuple(shape))

    def arranged(self, part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """A box of the whole tensor, as `box` gave it, in the view's order of dimensions."""
        order = [axis for axis in self.axes if axis is not None]
        order += [axis for axis in range(part.ndim) if axis not in order]
        return part.permute(order).reshape(tuple(shape))


def view_of(tensor: torch.Tensor, placed: Placed) -> View | None:
    """Which part of a whole tensor a view is; None where it is not one box of it."""
    strides: dict[int, int] = {}  # of the dimensions of the whole tensor that have more than one element
    corner: list[int] = []
    step, rest = 1, int(tensor.storage_offset())
    for length in placed.spread.shape:
        step *= length
    for axis, length in enumerate(placed.spread.shape):
        step = step // length if length else 0
        if length > 1:
            strides[step] = axis
        index, rest = divmod(rest, step) if length > 1 else (0, rest)
        corner.append(index)
    axes: list[int | None] = []
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = strides.pop(stride, None) if length > 1 else None
        if length > 1 and (found is None or corner[found] + length > placed.spread.shape[found]):
            return None
        axes.append(found)
    return View(tuple(corner), tuple(axes))
