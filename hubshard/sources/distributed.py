"""Tensors that lie over several ranks, as DTensors (FSDP2, tensor parallelism) do: read whole, piece by piece.

Of a DTensor, each rank gives the part that it holds; of replicas, one near the reader. A plain tensor beside them, such
as a buffer, which may differ from rank to rank, is that of rank 0, as in a full state dict.

Imports torch: import this module only where a torch tensor is at hand.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from hubshard.errors import FormatError
from hubshard.messages import listed
from hubshard.sources.dtypes import CASTABLE
from hubshard.sources.spread import Spread, SpreadCut
from hubshard.sources.stand_in import Placed, stand_in
from hubshard.sources.thread_buffer import ThreadBuffer
from hubshard.sources.torch_value import TorchValue
from hubshard.tensors import Box

__all__ = ["Alone", "DistributedTensors", "Ranks", "Wanted", "is_distributed"]

_CASTS = (None, *(getattr(torch, name) for name in CASTABLE.values()))  # the same on all ranks
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # copied without looking at the values


@dataclass(frozen=True, slots=True)
class Wanted:
    """A part of a tensor that another rank holds.

    Attributes:
        rank: which.
        number: of the tensor.
        box: within what that rank holds.
        cast: how its elements are to be cast, as the ranks have agreed; 0 for not at all.
        nbytes: of the answer.
    """

    rank: int
    number: int
    box: Box
    cast: int
    nbytes: int


class Ranks(Protocol):
    """This rank among those that hold parts; see `RankGroup`."""

    rank: int
    size: int
    serve: Any

    def tell(self, rank: int, kind: str, body: Any = None) -> None:
        """Send a message."""

    def tell_all(self, kind: str, body: Any = None) -> None:
        """Send a message to all others."""

    def hear(self, rank: int, kind: str) -> Any:
        """Wait for a message."""

    def fetch(self, wanted: Sequence[Wanted]) -> Iterable[torch.Tensor]:
        """The bytes of parts that other ranks hold."""


class Alone:
    """The only rank, which has nobody to talk to."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.serve: Any = None

    def tell(self, rank: int, kind: str, body: Any = None) -> None:
        """See `Ranks`."""
        raise AssertionError(f"unreachable: there is no rank {rank} to tell {kind} {body}")

    def tell_all(self, kind: str, body: Any = None) -> None:
        """See `Ranks`: there are no others."""

    def hear(self, rank: int, kind: str) -> Any:
        """See `Ranks`."""
        raise AssertionError(f"unreachable: there is no rank {rank} to hear {kind} from")

    def fetch(self, wanted: Sequence[Wanted]) -> Iterable[torch.Tensor]:
        """See `Ranks`."""
        raise AssertionError(f"unreachable: nobody else holds {wanted}")


def is_distributed(source: Any) -> bool:
    """Whether a state dict or a module (bare, or compiled) holds DTensors."""
    values: Iterable[Any] = source.values() if isinstance(source, Mapping) else ()
    if isinstance(source, torch.nn.Module):
        # fully_shard leaves whole parameters behind a forward pass, until the state dict is asked for
        is_fsdp = any(cls.__name__ == "FSDPModule" for module in source.modules() for cls in type(module).__mro__)
        values = source.state_dict().values() if is_fsdp else (*source.parameters(), *source.buffers())
    return any(_is_dtensor(value) for value in values)


class DistributedTensors:
    """The tensors of a model that lies over ranks.

    Args:
        ranks: that hold it.
        members: the ranks of the default process group that those are, in order.
    """

    def __init__(self, ranks: Ranks, members: Sequence[int]) -> None:
        self._ranks = ranks
        self._numbers = {member: number for number, member in enumerate(members)}
        self._held: list[torch.Tensor] = []
        self._buffer = ThreadBuffer()
        ranks.serve = self._serve

    def whole(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict of the whole model: stand-ins in the place of all tensors, tied where the tensors are.

        Called by all ranks, once, with the same keys.

        Raises:
            FormatError: a placement that has no values of its own (partial sums), ranks that are not of the group, or
                ranks that hold different models.
        """
        names = [name for name, value in state_dict.items() if isinstance(value, torch.Tensor)]
        tensors = [state_dict[name].detach() for name in names]
        spreads = [self._spread(name, tensor) for name, tensor in zip(names, tensors, strict=True)]
        self._held = [tensor.to_local() if _is_dtensor(tensor) else tensor for tensor in tensors]
        mine = {
            "tensors": [
                [name, str(tensor.dtype), list(tensor.shape)] for name, tensor in zip(names, tensors, strict=True)
            ],
            "ties": _ties(self._held, [tensor.shape for tensor in tensors]),
        }
        spreads, firsts = self._agreed(mine, spreads)
        self._check_held(names, spreads)
        placed = [
            Placed(number, name, spread, self._gather)
            for number, (name, spread) in enumerate(zip(names, spreads, strict=True))
        ]
        whole = {
            name: stand_in(placed[number], tensors[number].dtype)
            for number, name in enumerate(names)
            if firsts[number] == number
        }
        whole |= {name: whole[names[first]] for name, first in zip(names, firsts, strict=True)}
        return {name: whole.get(name, value) for name, value in state_dict.items()}

    # What all ranks have to agree on

    def _agreed(self, mine: Mapping[str, Any], spreads: Sequence[Spread]) -> tuple[list[Spread], list[int]]:
        """Where everything is, as rank 0 sees it, and for each tensor the first one that it is tied to, or itself."""
        if self._ranks.rank != 0:
            self._ranks.tell(0, "tensors", mine)
            told = self._ranks.hear(0, "spreads")
            return _decoded(told["spreads"]), told["firsts"]
        ties = [mine["ties"]]
        for rank in range(1, self._ranks.size):
            theirs = self._ranks.hear(rank, "tensors")
            _check_same(mine["tensors"], theirs["tensors"], rank)
            ties.append(theirs["ties"])
        firsts = _joined([name for name, _, _ in mine["tensors"]], ties)
        self._ranks.tell_all("spreads", {"spreads": _encoded(spreads), "firsts": firsts})
        return list(spreads), firsts

    def _spread(self, name: str, tensor: Any) -> Spread:
        shape = tuple(tensor.shape)
        if not _is_dtensor(tensor):
            return Spread.on_one(shape, 0)
        cuts = []
        for mesh_dim, placement in enumerate(tensor.placements):
            kind = type(placement).__name__
            if kind not in {"Shard", "_StridedShard", "Replicate"}:
                raise FormatError(
                    f"tensor {name!r} is placed as {tensor.placements}: its values are not on any rank yet",
                    hint="redistribute it to placements of Shard and Replicate first",
                )
            if kind != "Replicate":
                cuts.append(SpreadCut(mesh_dim, placement.dim % tensor.ndim, getattr(placement, "split_factor", 1)))
        mesh = tensor.device_mesh.mesh
        strangers = sorted(set(mesh.flatten().tolist()) - self._numbers.keys())
        if strangers:
            raise FormatError(
                f"tensor {name!r} lies on rank {listed([str(rank) for rank in strangers], most=10)} too, "
                "which is not among the ranks that publish",
                hint="give a process_group of all ranks that the model lies on",
            )
        return Spread(shape, tuple(mesh.shape), tuple(self._numbers[r] for r in mesh.flatten().tolist()), tuple(cuts))

    def _check_held(self, names: Sequence[str], spreads: Sequence[Spread]) -> None:
        for name, spread, held in zip(names, spreads, self._held, strict=True):
            expected = spread.local_shape(self._ranks.rank)
            is_none = 0 in (expected or ()) and not held.numel()
            if expected is not None and expected != tuple(held.shape) and not is_none:
                raise FormatError(
                    f"tensor {name!r}: rank {self._ranks.rank} holds {tuple(held.shape)} of it, not {expected} as its "
                    f"placement says",
                    hint="gather the model first: get_model_state_dict with full_state_dict=True",
                )

    # Reading

    def _gather(self, placed: Placed, box: Box, cast_to: torch.dtype | None) -> torch.Tensor:
        parts = list(placed.spread.holders(box, near=self._ranks.rank))
        cast = _CASTS.index(cast_to)
        dtype = _raw_dtype(cast_to or self._held[placed.number].dtype)
        away = [part for part in parts if part.rank != self._ranks.rank]
        wanted = [Wanted(part.rank, placed.number, part.local, cast, part.box.numel * dtype.itemsize) for part in away]
        if len(parts) == 1:
            (whole,) = self._ranks.fetch(wanted) if away else [self._serve(placed.number, parts[0].local, cast)]
            return whole.view(dtype).reshape(box.shape)
        gathered = self._buffer.of(box.numel * dtype.itemsize).view(dtype).reshape(box.shape)
        for part in parts:
            if part.rank == self._ranks.rank:
                gathered[_slices(part.box.relative_to(box))] = self._serve(placed.number, part.local, cast)
        for part, raw in zip(away, self._ranks.fetch(wanted) if away else (), strict=True):
            gathered[_slices(part.box.relative_to(box))] = raw.view(dtype).reshape(part.box.shape)
        return gathered

    def _serve(self, number: int, box: Box, cast: int) -> torch.Tensor:
        part = self._held[number][_slices(box)].resolve_conj().resolve_neg()
        cast_to = _CASTS[cast]
        part = part if cast_to is None else part.to(cast_to)
        return part.view(_raw_dtype(part.dtype)).contiguous().cpu()


def _is_dtensor(value: Any) -> bool:
    return isinstance(value, DTensor)


def _raw_dtype(dtype: torch.dtype) -> torch.dtype:
    return _RAW[dtype.itemsize]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.offset, box.stop, strict=True))


# Ties: which tensors are one


def _ties(held: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
    """Of one rank: groups of tensors whose parts are the same memory, and those with no part to tell it by."""
    groups: dict[Hashable, list[int]] = {}
    empty = []
    for number, (tensor, shape) in enumerate(zip(held, shapes, strict=True)):
        identity = TorchValue("", tensor, None).identity
        if identity is None:
            empty.append(number)
        else:
            groups.setdefault((identity, tuple(shape)), []).append(number)
    return {"groups": [group for group in groups.values() if len(group) > 1], "empty": empty}


def _joined(names: Sequence[str], ties: Sequence[Mapping[str, list[Any]]]) -> list[int]:
    """For each tensor, the first one of those that some rank finds to be the same; itself where none does."""
    firsts = list(range(len(names)))
    for told in ties:
        for group in told["groups"]:
            joined = {firsts[number] for number in group}
            firsts = [min(joined) if first in joined else first for first in firsts]
    for rank, told in enumerate(ties):
        own = list(range(len(names)))
        for group in told["groups"]:
            for number in group:
                own[number] = group[0]
        seen: dict[int, int] = {}
        for number in sorted(set(range(len(names))) - set(told["empty"])):
            other = seen.setdefault(firsts[number], number)
            if own[number] != own[other]:
                raise FormatError(
                    f"{names[other]!r} and {names[number]!r} are one tensor on some ranks, and two on rank {rank}",
                    hint="tie them on all ranks, or on none",
                )
    return firsts


# What ranks tell each other


def _check_same(mine: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]], rank: int) -> None:
    if mine == theirs:
        return
    differ = [*(each for each in mine if each not in theirs), *(each for each in theirs if each not in mine)]
    what = listed([f"{name!r} {rest}" for name, *rest in differ], most=3) if differ else "their order"
    raise FormatError(
        f"rank {rank} holds another model than rank 0; they differ in {what}",
        hint="give the same model on all ranks; stages of a pipeline are published one by one, or gathered first",
    )


def _encoded(spreads: Iterable[Spread]) -> list[Any]:
    """JSON values; each mesh once."""
    meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    rows = [
        [list(s.shape), meshes.setdefault((s.mesh_shape, s.ranks), len(meshes)), [list(cut) for cut in s.cuts]]
        for s in spreads
    ]
    return [[[list(shape), list(ranks)] for shape, ranks in meshes], rows]


def _decoded(told: Sequence[Any]) -> list[Spread]:
    meshes = [(tuple(shape), tuple(ranks)) for shape, ranks in told[0]]
    return [
        Spread(tuple(shape), meshes[mesh][0], meshes[mesh][1], tuple(SpreadCut(*cut) for cut in cuts))
        for shape, mesh, cuts in told[1]
    ]
