"""Specs, dtypes and boxes, with numpy as the oracle."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from hubshard.errors import FormatError
from hubshard.tensors import DTYPE_BITS, Box, TensorSpec

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def boxes_within(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts = [draw(st.integers(0, n)) for n in shape]
    return Box(tuple(starts), tuple(draw(st.integers(0, n - start)) for n, start in zip(shape, starts, strict=True)))


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(SHAPES)
    return shape, draw(boxes_within(shape)), draw(boxes_within(shape))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.offset, box.stop, strict=True))


def _bytes(data: bytes, shape: tuple[int, ...], bits: int, box: Box) -> bytes:
    """The oracle: the bytes of a box, cut out bit by bit."""
    array = np.unpackbits(np.frombuffer(data, np.uint8)).reshape(*shape, bits)
    return np.packbits(array[_slices(box)]).tobytes()


@given(two_boxes())
@settings(max_examples=150, deadline=None)
def test_the_intersection_holds_the_elements_that_both_boxes_hold(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, one, other = case
    both = np.zeros(shape, np.int8)
    both[_slices(one)] += 1
    both[_slices(other)] += 1
    expected = both == 2
    found = np.zeros(shape, bool)
    box = one & other
    if box is not None:
        found[_slices(box)] = True
        assert box in one
        assert box in other
        assert box == other & one
    assert np.array_equal(found, expected)
    assert (box is None) == (not expected.any())


@given(two_boxes())
@settings(max_examples=100, deadline=None)
def test_a_box_within_another_counts_from_its_corner(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, one, other = case
    if other not in one:
        return
    array = np.arange(int(np.prod(shape))).reshape(shape)
    inner = array[_slices(one)][_slices(other.relative_to(one))]
    assert np.array_equal(inner, array[_slices(other)])


@given(
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    bits=st.sampled_from(sorted(set(DTYPE_BITS.values()))),
    max_bytes=st.integers(8, 200),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_blocks_follow_each_other_and_hold_the_bytes_of_the_box(
    shape: tuple[int, ...], bits: int, max_bytes: int, data: st.DataObject
) -> None:
    if bits % 8:
        shape = (*shape[:-1], shape[-1] * 4) if shape else (4,)
    numel = int(np.prod(shape))
    content = data.draw(st.binary(min_size=numel * bits // 8, max_size=numel * bits // 8))
    whole = Box((0,) * len(shape), shape)
    blocks = list(whole.blocks(bits=bits, max_bytes=max_bytes))
    assert b"".join(_bytes(content, shape, bits, block) for block in blocks) == content
    assert all(block.numel * bits % 8 == 0 for block in blocks)
    if bits % 8 == 0:
        assert all(block.numel * bits <= max_bytes * 8 for block in blocks)
    # few: of two neighbours, at least one could not have been joined to something within its dimension
    if numel and not bits % 8:
        assert len(blocks) <= 2 * numel * bits // 8 // max_bytes + max(1, numel // max(shape or (1,)))


def test_blocks_of_a_part_keep_its_offset() -> None:
    box = Box((3, 10), (2, 8))
    blocks = list(box.blocks(bits=16, max_bytes=8))
    assert blocks == [Box((row, column), (1, 4)) for row in (3, 4) for column in (10, 14)]


def test_blocks_of_a_packed_dtype_are_larger_than_asked_where_no_cut_falls_on_a_byte() -> None:
    # rows of twelve bits: only every second one ends on a byte
    assert list(Box((0, 0), (4, 3)).blocks(bits=4, max_bytes=1)) == [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]


def test_boxes_with_very_many_dimensions_are_cut_without_recursion() -> None:
    shape = (*(1,) * 3000, 64)
    blocks = list(Box((0,) * 3001, shape).blocks(bits=8, max_bytes=16))
    assert [block.offset[-1] for block in blocks] == [0, 16, 32, 48]


def test_boxes_of_other_dimensions_do_not_intersect() -> None:
    with pytest.raises(ValueError, match="1 and 2 dimensions"):
        Box((0,), (1,)) & Box((0, 0), (1, 1))


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_safetensors_itself_reads_every_dtype_of_the_table_with_its_size(dtype: str) -> None:
    spec = TensorSpec("w", dtype, (2, 4))
    entry = {"w": {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, spec.nbytes]}}
    header = json.dumps(entry).encode()
    raw = len(header).to_bytes(8, "little") + header + bytes(spec.nbytes)
    ((name, found),) = safetensors.deserialize(raw)  # type: ignore[no-untyped-call]
    assert (name, found["dtype"], found["shape"]) == ("w", dtype, [2, 4])


def test_a_spec_knows_its_sizes() -> None:
    spec = TensorSpec("w", "BF16", (3, 4))
    assert (spec.bits, spec.numel, spec.nbytes, spec.box) == (16, 12, 24, Box((0, 0), (3, 4)))
    assert (TensorSpec("s", "F64", ()).nbytes, TensorSpec("e", "F32", (0, 5)).nbytes) == (8, 0)
    assert TensorSpec("p", "F6_E2M3", (4,)).nbytes == 3


def test_a_dtype_that_safetensors_lacks_is_refused_with_the_names_of_tensor_and_dtype() -> None:
    with pytest.raises(FormatError, match=r"'w'.*'C128'") as caught:
        _ = TensorSpec("w", "C128", (1,)).nbytes
    assert "BF16" in (caught.value.hint or "")


def test_packed_elements_that_do_not_fill_whole_bytes_are_refused() -> None:
    with pytest.raises(FormatError, match="'w': 3 elements of F4"):
        _ = TensorSpec("w", "F4", (3,)).nbytes
