"""Who saves what: each rank offers what it holds, rank 0 shares it out, so that everything is saved once.

What travels is plain data: not the items of DCP, which are objects of torch, but their names, boxes and dtypes one way,
and the numbers of those that fall to a rank the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from hubshard.errors import FormatError
from hubshard.resume.dcp.planners import SavePlanner
from hubshard.resume.dcp.torch_items import item_of, part_to_write, plain_item
from hubshard.steps.parts import Part, PlannedFile, block_bytes_for, plan_files
from hubshard.steps.step import TreePath

__all__ = ["Offer", "RankPlan", "Share", "offer_of", "share_out"]

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank could save.

    Attributes:
        items: those of its plan, as `plain_item` makes them.
        paths: of everything in its nested state.
    """

    items: Sequence[Any]
    paths: Mapping[str, TreePath]


@dataclass(frozen=True, slots=True)
class Share:
    """What falls to a rank.

    Attributes:
        numbers: of the items that it offered.
        paths: of everything in the nested state; for rank 0 alone.
        block_bytes: that one hash covers.
    """

    numbers: Sequence[int]
    paths: Mapping[str, TreePath]
    block_bytes: int


@dataclass(frozen=True)
class RankPlan:
    """What a rank is to write in each save, as long as the layout of the state stays.

    Attributes:
        items: those of DCP, of tensors.
        scalars: names of what is no tensor.
        paths: of everything in the nested state; on rank 0 alone.
        block_bytes: that one hash covers.
    """

    items: Sequence[WriteItem]
    scalars: Sequence[str]
    paths: Mapping[str, TreePath]
    block_bytes: int

    @classmethod
    def of(cls, plan: SavePlan, share: Share) -> RankPlan:
        """The share of a rank in what it has offered."""
        items = [plan.items[number] for number in share.numbers]
        tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
        scalars = [item.index.fqn for item in items if item.type == WriteItemType.BYTE_IO]
        return cls(tensors, scalars, share.paths, share.block_bytes)

    @cached_property
    def parts(self) -> Sequence[Part]:
        """The boxes of the items, in the same order."""
        return [part_to_write(item) for item in self.items]

    @cached_property
    def starts(self) -> Sequence[int]:
        """Where each part begins in a buffer (bytes), and where the last ends."""
        found = [0]
        for part in self.parts:
            found.append(found[-1] + -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer that takes them."""
        return self.starts[-1]

    def files(self, max_file_bytes: int) -> Sequence[PlannedFile]:
        """The files that this rank writes."""
        return plan_files(self.parts, max_file_bytes=max_file_bytes)


def offer_of(plan: SavePlan) -> Offer:
    """What a rank could save, out of its own plan."""
    paths = {name: tuple(path) for name, path in (plan.planner_data or {}).items()}
    return Offer([plain_item(item) for item in plan.items], paths)


def share_out(offers: Sequence[Offer]) -> list[Share]:
    """What falls to each rank: every tensor and every value once.

    Raises:
        FormatError: the ranks hold no whole state together, or differ in it.
    """
    plans = [SavePlan([item_of(each) for each in offer.items], planner_data=offer.paths) for offer in offers]
    try:
        shares, metadata = SavePlanner().create_global_plan([*plans])  # torch 2.6 changes the list it is given
    except (ValueError, AssertionError) as error:
        raise FormatError(
            f"the state of the ranks is not one whole: {error}",
            hint="what differs from rank to rank needs a name of its own on each",
        ) from error
    tensors = (item for share in shares for item in share.items if item.type != WriteItemType.BYTE_IO)
    block_bytes = block_bytes_for(sum(part_to_write(item).nbytes for item in tensors))
    return [
        Share(_numbers(plan, share), {} if rank else metadata.planner_data, block_bytes)
        for rank, (plan, share) in enumerate(zip(plans, shares, strict=True))
    ]


def _numbers(plan: SavePlan, share: SavePlan) -> list[int]:
    kept = {item.index for item in share.items}
    return [number for number, item in enumerate(plan.items) if item.index in kept]
