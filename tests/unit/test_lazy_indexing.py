from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hubshard.lazy.indexing import Selection, select
from hubshard.tensors import Box

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)


def cut(array: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    return array[tuple(slice(o, s) for o, s in zip(box.offset, box.stop, strict=True))]


def apply(selection: Selection, array: np.ndarray[Any, Any], max_gap_bytes: int) -> np.ndarray[Any, Any]:
    bits = array.dtype.itemsize * 8
    boxes = list(selection.boxes(tensor_shape=array.shape, bits=bits, max_gap_bytes=max_gap_bytes))
    raw = b"".join(cut(array, box).tobytes() for box in boxes)
    shape = selection.staged_shape(tensor_shape=array.shape, bits=bits, max_gap_bytes=max_gap_bytes)
    staged = np.frombuffer(raw, array.dtype).reshape(shape)
    picked = staged[selection.thinning(shape)]
    return np.flip(picked, selection.reversed_dims).reshape(selection.shape)


@st.composite
def arrays_and_indices(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], Any]:
    shape = draw(SHAPES)
    index = draw(hnp.basic_indices(shape, allow_newaxis=True, max_dims=8))
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape), index


@given(arrays_and_indices(), st.sampled_from([0, 8, 64, 10**6]))
def test_a_selection_picks_what_numpy_picks(case: tuple[np.ndarray[Any, Any], Any], max_gap_bytes: int) -> None:
    array, index = case
    selection = select(index, array.shape)
    wanted = array[index]
    assert selection.shape == np.shape(wanted)
    np.testing.assert_array_equal(apply(selection, array, max_gap_bytes), wanted)


@given(arrays_and_indices(), st.sampled_from([0, 8, 10**6]))
def test_no_element_outside_the_smallest_box_is_read(
    case: tuple[np.ndarray[Any, Any], Any], max_gap_bytes: int
) -> None:
    array, index = case
    selection = select(index, array.shape)
    whole = Box((0,) * array.ndim, array.shape)
    for box in selection.boxes(tensor_shape=array.shape, bits=32, max_gap_bytes=max_gap_bytes):
        assert box in whole
        assert box in selection.box
    if math.prod(selection.shape) == 0:
        assert selection.box.numel == 0


def test_wide_steps_over_rows_read_only_the_rows() -> None:
    selection = select(slice(1, None, 100), (1000, 64))
    boxes = list(selection.boxes(tensor_shape=(1000, 64), bits=16, max_gap_bytes=1024))
    assert [box.offset[0] for box in boxes] == list(range(1, 1000, 100))
    assert all(box.shape == (1, 64) for box in boxes)


def test_narrow_steps_over_rows_read_through_the_gaps() -> None:
    selection = select(slice(None, None, 2), (1000, 64))
    assert list(selection.boxes(tensor_shape=(1000, 64), bits=16, max_gap_bytes=1024)) == [Box((0, 0), (999, 64))]


def test_a_wide_step_under_an_integer_reads_only_the_rows() -> None:
    selection = select((3, slice(None, None, -50)), (4, 100, 64))
    boxes = list(selection.boxes(tensor_shape=(4, 100, 64), bits=16, max_gap_bytes=1024))
    assert [box.offset for box in boxes] == [(3, 49, 0), (3, 99, 0)]


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (4, IndexError),
        (-5, IndexError),
        ((0, 0, 0), IndexError),
        ((..., 0, ...), IndexError),
        (slice(None, None, 0), ValueError),
        ([0, 1], TypeError),
        (True, TypeError),
        (1.0, TypeError),
        ("a", TypeError),
        (np.array([True, False, True, False]), TypeError),
    ],
)
def test_an_index_that_numpy_refuses_or_that_is_not_basic_is_refused(index: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        select(index, (4, 5))


def test_integers_of_numpy_are_integers() -> None:
    assert select(np.int64(-1), (4, 5)) == select(3, (4, 5))
