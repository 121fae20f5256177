"""How one tensor lies over several ranks, and which of them to ask for a box of it. Pure: shapes and ranks only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from operator import attrgetter
from typing import NamedTuple

from hubshard.sources.distributed_box import Cut, runs_of
from hubshard.tensors import Box

__all__ = ["Held", "Spread", "SpreadCut"]


class SpreadCut(NamedTuple):
    """A dimension of a mesh that cuts a dimension of the tensor.

    Attributes:
        mesh_dim: of the mesh.
        dim: of the tensor.
        split_factor: as in `Cut`.
    """

    mesh_dim: int
    dim: int
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class Held:
    """A box of a tensor that some rank holds.

    Attributes:
        rank: which.
        box: within the whole tensor.
        local: the same elements within what the rank holds.
    """

    rank: int
    box: Box
    local: Box


class _Run(NamedTuple):
    # positions start:stop of a dimension, which begin at `local` in what the ranks at these mesh coordinates hold
    start: int
    stop: int
    local: int
    coordinates: tuple[int, ...]


@dataclass(frozen=True)
class Spread:
    """A tensor over a mesh of ranks: mesh dimensions that cut it, in their order; along the others it is replicated.

    Attributes:
        shape: of the whole tensor (elements).
        mesh_shape: ranks per dimension of the mesh.
        ranks: of the mesh, in row-major order.
        cuts: at most one per dimension of the mesh.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    cuts: tuple[SpreadCut, ...] = ()

    @classmethod
    def on_one(cls, shape: tuple[int, ...], rank: int) -> Spread:
        """A tensor that lies whole on one rank."""
        return cls(shape, (), (rank,))

    def local_shape(self, rank: int) -> tuple[int, ...] | None:
        """The shape of what a rank holds; None where it is not of the mesh."""
        at = self.coordinates(rank)
        if at is None:
            return None
        lengths = []
        for dim, length in enumerate(self.shape):
            cuts = [Cut(self.mesh_shape[cut.mesh_dim], at[cut.mesh_dim], cut.split_factor) for cut in self._cuts(dim)]
            lengths.append(sum(map(len, runs_of(length, cuts))))
        return tuple(lengths)

    def coordinates(self, rank: int) -> tuple[int, ...] | None:
        """Where a rank stands in the mesh; None where it does not."""
        number = self._numbers.get(rank)
        if number is None:
            return None
        at = []
        for size in reversed(self.mesh_shape):
            number, coordinate = divmod(number, size)
            at.append(coordinate)
        return tuple(reversed(at))

    def holders(self, box: Box, *, near: int) -> Iterator[Held]:
        """Who holds which part of a box; the parts tile it.

        Args:
            box: within the tensor.
            near: a rank: of replicas, those with its coordinates in the mesh are taken, its own first of all.
        """
        base = self.coordinates(near) or (0,) * len(self.mesh_shape)
        per_dim = [
            list(self._runs_within(dim, start, stop))
            for dim, (start, stop) in enumerate(zip(box.offset, box.stop, strict=True))
        ]
        for runs in product(*per_dim):
            at = list(base)
            for dim, run in enumerate(runs):
                for cut, coordinate in zip(self._cuts(dim), run.coordinates, strict=True):
                    at[cut.mesh_dim] = coordinate
            shape = tuple(run.stop - run.start for run in runs)
            yield Held(
                self._rank_at(at),
                Box(tuple(run.start for run in runs), shape),
                Box(tuple(run.local for run in runs), shape),
            )

    def _rank_at(self, coordinates: Sequence[int]) -> int:
        number = 0
        for size, coordinate in zip(self.mesh_shape, coordinates, strict=True):
            number = number * size + coordinate
        return self.ranks[number]

    @cached_property
    def _numbers(self) -> Mapping[int, int]:
        return {rank: number for number, rank in enumerate(self.ranks)}

    def _cuts(self, dim: int) -> Sequence[SpreadCut]:
        return self._cuts_by_dim[dim]

    @cached_property
    def _cuts_by_dim(self) -> Sequence[Sequence[SpreadCut]]:
        return [[cut for cut in self.cuts if cut.dim == dim] for dim in range(len(self.shape))]

    @cached_property
    def _runs(self) -> Sequence[Sequence[_Run]]:
        return [sorted(self._runs_along(dim), key=attrgetter("start")) for dim in range(len(self.shape))]

    def _runs_along(self, dim: int) -> Iterator[_Run]:
        sizes = [self.mesh_shape[cut.mesh_dim] for cut in self._cuts(dim)]
        factors = [cut.split_factor for cut in self._cuts(dim)]
        for coordinates in product(*map(range, sizes)):
            local = 0
            for run in runs_of(self.shape[dim], map(Cut, sizes, coordinates, factors)):
                yield _Run(run.start, run.stop, local, coordinates)
                local += len(run)

    def _runs_within(self, dim: int, start: int, stop: int) -> Iterator[_Run]:
        runs = self._runs[dim]
        first = bisect_right(runs, start, key=attrgetter("start")) - 1
        for run in runs[max(first, 0) :]:
            if run.start >= stop:
                return
            low, high = max(run.start, start), min(run.stop, stop)
            if low < high:
                yield _Run(low, high, run.local + low - run.start, run.coordinates)
