"""Which bytes to read for which boxes: the bytes that arrive are those that numpy cuts out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubshard.errors import FormatError
from hubshard.manifest import Extent, FileDigest, Manifest, Piece
from hubshard.reads import Read, ReadPlan, plan_reads
from hubshard.tensors import DTYPE_BITS, Box, TensorSpec

Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Case:
    """A checkpoint in memory: its manifest, the bytes of its files, and the bits of its tensors."""

    manifest: Manifest
    files: Mapping[str, bytes]
    tensors: Mapping[str, Bits]


def _box_bytes(bits: Bits, box: Box) -> bytes:
    slices = tuple(slice(start, stop) for start, stop in zip(box.offset, box.stop, strict=True))
    return np.packbits(bits[slices]).tobytes()


def _unit(dtype: str) -> int:
    """Elements of the last dimension that fill whole bytes."""
    return 8 // math.gcd(DTYPE_BITS[dtype], 8)


@st.composite
def cuts(draw: st.DrawFn, size: int, unit: int) -> list[tuple[int, int]]:
    """A dimension cut into ranges, as offset and size."""
    if size <= unit:
        return [(0, size)]
    places = draw(st.sets(st.integers(1, size // unit - 1), max_size=3))
    edges = [0, *sorted(place * unit for place in places), size]
    return [(start, stop - start) for start, stop in pairwise(edges)]


@st.composite
def checkpoints(draw: st.DrawFn) -> Case:
    """One to three tensors, each cut by a grid of its own, the pieces scattered over two files with holes between."""
    tensors, specs = {}, {}
    todo: list[tuple[str, Box]] = []
    for name in draw(st.sampled_from(["a", "ab", "abc"])):
        dtype = draw(st.sampled_from(["U8", "F32", "BF16", "F4", "F6_E2M3", "C64"]))
        shape = draw(st.lists(st.integers(1, 6), max_size=3))
        shape = [*shape[:-1], shape[-1] * _unit(dtype)] if shape else [] if _unit(dtype) == 1 else [_unit(dtype)]
        specs[name] = TensorSpec(name, dtype, tuple(shape))
        seed = draw(st.integers(0, 2**32 - 1))
        tensors[name] = np.random.default_rng(seed).integers(0, 2, (*shape, DTYPE_BITS[dtype]), np.uint8)
        units = [1] * (len(shape) - 1) + [_unit(dtype)] * bool(shape)
        grid = [draw(cuts(size, unit)) for size, unit in zip(shape, units, strict=True)]
        todo += [(name, Box(tuple(o for o, _ in cell), tuple(n for _, n in cell))) for cell in product(*grid)]
    files = {"f": bytearray(b"#" * draw(st.integers(0, 9))), "g": bytearray()}
    pieces = []
    for name, box in draw(st.permutations(todo)):
        path = draw(st.sampled_from(["f", "g"]))
        data = _box_bytes(tensors[name], box)
        pieces.append(Piece(name, box, Extent(path, len(files[path]), len(files[path]) + len(data))))
        files[path] += data + b"#" * draw(st.sampled_from([0, 0, 0, 3, 40]))
    digests = {path: FileDigest(len(data)) for path, data in files.items()}
    manifest = Manifest(specs, pieces, digests).validate()
    return Case(manifest, {path: bytes(data) for path, data in files.items()}, tensors)


@st.composite
def wanted_boxes(draw: st.DrawFn, case: Case, *, on_bytes: bool = True) -> dict[str, Box]:
    wanted = {}
    for name, spec in case.manifest.tensors.items():
        if len(case.manifest.tensors) > 1 and draw(st.booleans()):
            continue
        offset, sizes = [], []
        for dim, size in enumerate(spec.shape):
            unit = _unit(spec.dtype) if on_bytes and dim == len(spec.shape) - 1 else 1
            start = draw(st.integers(0, size // unit)) * unit
            offset.append(start)
            sizes.append(draw(st.integers(0, (size - start) // unit)) * unit)
        wanted[name] = draw(st.sampled_from([Box(tuple(offset), tuple(sizes)), spec.box]))
    return wanted


def _arrived(case: Case, plan: ReadPlan, wanted: Mapping[str, Box]) -> Mapping[str, bytes]:
    """What lands, each byte once; and checks that the reads are what they should be."""
    out = {
        name: bytearray(box.numel * case.manifest.tensors[name].bits // 8) for name, box in wanted.items() if box.numel
    }
    landed = {name: np.zeros(len(buffer), int) for name, buffer in out.items()}
    for read in plan.reads:
        data = case.files[read.path][read.start : read.stop]
        assert len(data) == read.nbytes
        for copy in read.copies:
            for source, target, nbytes in copy.runs():
                assert source + nbytes <= len(data)
                out[copy.tensor][target : target + nbytes] = data[source : source + nbytes]
                landed[copy.tensor][target : target + nbytes] += 1
    assert all((count == 1).all() for count in landed.values())
    return {name: bytes(buffer) for name, buffer in out.items()}


def _unwanted_runs(read: Read) -> list[int]:
    """Lengths of the runs of bytes within a read that land nowhere."""
    used = np.zeros(read.nbytes, bool)
    for copy in read.copies:
        for source, _, nbytes in copy.runs():
            used[source : source + nbytes] = True
    assert used[0]
    assert used[-1]
    edges = np.flatnonzero(np.diff(used.astype(np.int8)))
    return [int(b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)]


GAPS = st.sampled_from([0, 1, 3, 8, 50, 10_000])
READ_SIZES = st.sampled_from([1, 8, 9, 64, 300, 1_000_000])


@given(st.data(), checkpoints(), GAPS, READ_SIZES)
@settings(max_examples=150, deadline=None)
def test_the_bytes_that_arrive_are_those_of_the_boxes(
    data: st.DataObject, case: Case, max_gap_bytes: int, max_read_bytes: int
) -> None:
    wanted = data.draw(wanted_boxes(case))
    plan = plan_reads(case.manifest, wanted, max_gap_bytes=max_gap_bytes, max_read_bytes=max_read_bytes)
    expected = {name: _box_bytes(case.tensors[name], box) for name, box in wanted.items() if box.numel}
    assert _arrived(case, plan, wanted) == expected

    for one, other in pairwise(plan.reads):
        assert (one.path, one.stop) <= (other.path, other.start), "sorted, and none overlaps another"
    assert plan.nbytes_wanted == sum(map(len, expected.values()))
    gaps = [gap for read in plan.reads for gap in _unwanted_runs(read)]
    assert max(gaps, default=0) <= max_gap_bytes
    assert plan.nbytes_read == plan.nbytes_wanted + sum(gaps)
    for read in plan.reads:
        if all(copy.bits % 8 == 0 for copy in read.copies):
            assert read.nbytes <= max(max_read_bytes, max(copy.bits for copy in read.copies) // 8)


@given(st.data(), checkpoints())
@settings(max_examples=80, deadline=None)
def test_a_packed_box_arrives_exactly_or_is_refused_by_name(data: st.DataObject, case: Case) -> None:
    wanted = data.draw(wanted_boxes(case, on_bytes=False))
    try:
        plan = plan_reads(case.manifest, wanted, max_gap_bytes=0, max_read_bytes=100)
    except FormatError as error:
        message: str | None = error.message
        plan = ReadPlan((), 0)
    else:
        message = None
        expected = {name: _box_bytes(case.tensors[name], box) for name, box in wanted.items() if box.numel}
        assert _arrived(case, plan, wanted) == expected
    packed = [name for name in wanted if case.manifest.tensors[name].bits % 8]
    assert message is None or any(message.startswith(f"tensor {name!r}") for name in packed)


def _whole(shape: tuple[int, ...], dtype: str = "U8") -> Manifest:
    spec = TensorSpec("w", dtype, shape)
    return Manifest({"w": spec}, [Piece("w", spec.box, Extent("f", 0, spec.nbytes))], {"f": FileDigest(spec.nbytes)})


def test_gaps_up_to_the_limit_are_read_through_and_larger_ones_skipped() -> None:
    column = {"w": Box((0, 0), (4, 2))}
    through = plan_reads(_whole((4, 110)), column, max_gap_bytes=108, max_read_bytes=1000)
    assert [(read.start, read.stop) for read in through.reads] == [(0, 332)]
    assert (through.nbytes_wanted, through.nbytes_read) == (8, 332)
    skipped = plan_reads(_whole((4, 110)), column, max_gap_bytes=107, max_read_bytes=1000)
    assert [(read.start, read.stop) for read in skipped.reads] == [(0, 2), (110, 112), (220, 222), (330, 332)]


def test_packed_rows_that_share_bytes_are_not_read_apart_however_small_a_read_may_be() -> None:
    manifest = _whole((4, 3), "F4")
    plan = plan_reads(manifest, {"w": Box((0, 0), (4, 3))}, max_gap_bytes=0, max_read_bytes=1)
    assert [(read.start, read.stop) for read in plan.reads] == [(0, 3), (3, 6)]


@pytest.mark.parametrize(
    "box",
    [Box((1,), (2,)), Box((1,), (1,)), Box((0,), (3,)), Box((3,), (5,))],
    ids=["begins and ends within bytes", "half a byte", "ends within a byte", "begins within a byte"],
)
def test_a_packed_box_that_begins_or_ends_within_a_byte_is_refused(box: Box) -> None:
    with pytest.raises(FormatError, match=r"tensor 'w': .* of packed F4 does not fall on whole bytes"):
        plan_reads(_whole((8,), "F4"), {"w": box}, max_gap_bytes=0, max_read_bytes=100)


def test_packed_rows_that_would_have_to_be_woven_together_within_bytes_are_refused() -> None:
    spec = TensorSpec("w", "F4", (2, 4))
    pieces = [Piece("w", Box((0, 0), (2, 1)), Extent("f", 0, 1)), Piece("w", Box((0, 1), (2, 3)), Extent("f", 1, 4))]
    manifest = Manifest({"w": spec}, pieces, {"f": FileDigest(4)}).validate()
    with pytest.raises(FormatError, match="tensor 'w'"):
        plan_reads(manifest, {"w": spec.box}, max_gap_bytes=0, max_read_bytes=100)


def test_a_large_read_is_cut_at_the_limit() -> None:
    plan = plan_reads(_whole((100,)), {"w": Box((5,), (90,))}, max_gap_bytes=0, max_read_bytes=40)
    assert [(read.start, read.stop) for read in plan.reads] == [(5, 45), (45, 85), (85, 95)]


def test_neighbouring_tensors_are_read_together() -> None:
    a, b = TensorSpec("a", "U8", (4,)), TensorSpec("b", "U8", (4,))
    pieces = [Piece("b", b.box, Extent("f", 6, 10)), Piece("a", a.box, Extent("f", 0, 4))]
    manifest = Manifest({"a": a, "b": b}, pieces, {"f": FileDigest(10)})
    plan = plan_reads(manifest, {"a": a.box, "b": b.box}, max_gap_bytes=2, max_read_bytes=100)
    ((read),) = plan.reads
    assert (read.start, read.stop, [copy.tensor for copy in read.copies]) == (0, 10, ["a", "b"])


def test_nothing_wanted_is_nothing_read() -> None:
    plan = plan_reads(_whole((4,)), {"w": Box((2,), (0,))}, max_gap_bytes=0, max_read_bytes=100)
    assert plan == ReadPlan((), 0)
    assert plan_reads(_whole((4,)), {}, max_gap_bytes=0, max_read_bytes=100) == ReadPlan((), 0)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"v": Box((0,), (1,))}, "no tensor 'v'"),
        ({"w": Box((0,), (5,))}, r"outside tensor 'w' of shape \(4,\)"),
        ({"w": Box((5,), (0,))}, "outside tensor 'w'"),
        ({"w": Box((-1,), (2,))}, "outside tensor 'w'"),
        ({"w": Box((0,), (-1,))}, "outside tensor 'w'"),
        ({"w": Box((), ())}, "outside tensor 'w'"),
        ({"w": Box((0, 0), (1, 1))}, "outside tensor 'w'"),
    ],
)
def test_what_is_not_there_is_refused_by_name(wanted: dict[str, Box], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        plan_reads(_whole((4,)), wanted, max_gap_bytes=0, max_read_bytes=100)


def test_a_box_that_no_pieces_hold_is_refused_rather_than_left_as_it_was() -> None:
    spec = TensorSpec("w", "U8", (4,))
    manifest = Manifest({"w": spec}, [Piece("w", Box((0,), (3,)), Extent("f", 0, 3))], {"f": FileDigest(3)})
    assert plan_reads(manifest, {"w": Box((1,), (2,))}, max_gap_bytes=0, max_read_bytes=9).nbytes_wanted == 2
    with pytest.raises(FormatError, match="hold 1 of the 2 elements"):
        plan_reads(manifest, {"w": Box((2,), (2,))}, max_gap_bytes=0, max_read_bytes=9)
