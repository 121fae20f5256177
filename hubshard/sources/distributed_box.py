"""Which part of a distributed tensor one rank holds. Pure: sizes and coordinates only.

A dimension is cut as torch.chunk cuts: into parts of equal size, rounded up, the last ones smaller or empty. Where it
is cut several times, each mesh dimension cuts what the one before it left; a strided cut, which FSDP makes over tensor
parallelism, first splits what is there into `split_factor` parts and takes its share of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Cut", "part_of", "runs_of"]


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh dimension's cut of a tensor dimension.

    Attributes:
        parts: ranks along the mesh dimension.
        coordinate: of this rank.
        split_factor: parts into which a strided cut splits first; 1 for a plain cut.
    """

    parts: int
    coordinate: int
    split_factor: int = 1


def part_of(length: int, cuts: Iterable[Cut]) -> range | None:
    """The positions of a dimension of `length` that are left after all cuts; None where they are not in one run."""
    runs = runs_of(length, cuts)
    if not runs:
        return range(0)
    return runs[0] if len(runs) == 1 else None


def runs_of(length: int, cuts: Iterable[Cut]) -> Sequence[range]:
    """The positions of a dimension of `length` that are left after all cuts, in runs, in the order they are held in."""
    runs: Sequence[range] = [range(length)] if length else []
    for cut in cuts:
        total = sum(map(len, runs))
        taken: list[range] = []
        for first, stop in _chunks(0, total, cut.split_factor):
            mine = list(_chunks(first, stop, cut.parts))
            if cut.coordinate < len(mine):
                taken += _slice(runs, *mine[cut.coordinate])
        runs = _joined(taken)
    return runs


def _chunks(start: int, stop: int, parts: int) -> Iterator[tuple[int, int]]:
    size = -(-(stop - start) // parts)
    return ((at, min(at + size, stop)) for at in range(start, stop, size or 1))


def _slice(runs: Sequence[range], start: int, stop: int) -> Iterator[range]:
    position = 0
    for run in runs:
        some = run[max(0, start - position) : max(0, stop - position)]
        if some:
            yield some
        position += len(run)


def _joined(runs: Sequence[range]) -> Sequence[range]:
    joined: list[range] = []
    for run in runs:
        if joined and joined[-1].stop == run.start:
            joined[-1] = range(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return joined
