"""Which rank holds which part of a tensor, against what torch says of the same placements."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from hubshard.sources.spread import Spread, SpreadCut
from hubshard.tensors import Box

torch = pytest.importorskip("torch")
utils = pytest.importorskip("torch.distributed.tensor._utils")
types = pytest.importorskip("torch.distributed.tensor.placement_types")

MESHES = [(4,), (2, 2), (2, 3), (3, 2, 2)]


def spread_of(shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Any, ...]) -> Spread:
    size = torch.Size(mesh).numel()
    cuts = [
        SpreadCut(mesh_dim, placement.dim, getattr(placement, "split_factor", 1))
        for mesh_dim, placement in enumerate(placements)
        if placement is not None
    ]
    return Spread(shape, mesh, tuple(range(10, 10 + size)), tuple(cuts))


def gathered(spread: Spread, whole: Any, local: dict[int, Any], box: Box, near: int) -> Any:
    found = torch.full(box.shape, -1)
    for held in spread.holders(box, near=near):
        part = local[held.rank][tuple(map(slice, held.local.offset, held.local.stop))]
        at = held.box.relative_to(box)
        target = found[tuple(map(slice, at.offset, at.stop))]
        assert (target == -1).all()
        target.copy_(part)
    return found


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shape", [(7,), (5, 3), (12, 8), (1, 9), (4, 3, 5)])
def test_the_holders_of_any_box_tile_it(mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    choices: list[Any] = [None, *(types.Shard(dim) for dim in range(len(shape)))]
    for placements in product(choices, repeat=len(mesh)):
        spread = spread_of(shape, mesh, placements)
        local = {}
        for rank in spread.ranks:
            part = whole
            coordinates = spread.coordinates(rank)
            assert coordinates is not None
            for size, at, placement in zip(mesh, coordinates, placements, strict=True):
                if placement is not None:
                    chunks = part.chunk(size, placement.dim) if part.shape[placement.dim] else ()
                    part = chunks[at] if at < len(chunks) else part.narrow(placement.dim, 0, 0)
            local[rank] = part
            held = spread.local_shape(rank)
            assert held == tuple(part.shape) or (held and 0 in held and not part.numel())
        for corner in ((0,) * len(shape), tuple(n // 2 for n in shape)):
            box = Box(corner, tuple(n - o for n, o in zip(shape, corner, strict=True)))
            for near in (spread.ranks[-1], 99):
                found = gathered(spread, whole, local, box, near)
                assert torch.equal(found, whole[tuple(map(slice, box.offset, box.stop))])


@pytest.mark.parametrize("rows", [12, 13])
def test_strided_parts_are_found_run_by_run(rows: int) -> None:
    strided = types._StridedShard(0, split_factor=2)
    spread = spread_of((rows, 2), (2, 2), (strided, types.Shard(0)))
    whole = torch.arange(2 * rows).reshape(rows, 2)
    try:
        pieces, _ = strided._split_tensor(whole, 2, with_padding=False, contiguous=False)
    except AssertionError as error:
        pytest.skip(f"torch {torch.__version__} refuses this: {error}")
    local = {}
    for number, (one, other) in enumerate(product(range(2), range(2))):
        chunks = pieces[one].chunk(2)
        local[10 + number] = chunks[other]
    assert torch.equal(gathered(spread, whole, local, Box((0, 0), (rows, 2)), 10), whole)


def test_of_replicas_a_rank_reads_its_own_first() -> None:
    spread = spread_of((8,), (2, 2), (None, types.Shard(0)))
    assert [held.rank for held in spread.holders(Box((0,), (8,)), near=12)] == [12, 13]
    assert [held.rank for held in spread.holders(Box((0,), (8,)), near=11)] == [10, 11]
    assert [held.rank for held in Spread.on_one((8,), 3).holders(Box((2,), (3,)), near=0)] == [3]
    (scalar,) = Spread.on_one((), 3).holders(Box((), ()), near=0)
    assert scalar.local == Box((), ())
