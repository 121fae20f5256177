"""What is no tensor comes back exactly, from one form only; what cannot be stored is refused by its path."""

from __future__ import annotations

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, deque
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubshard.errors import FormatError
from hubshard.steps.canonical import MAX_DEPTH, decode, encode


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: int


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["int", "tuple", "dict", "set"])
hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
values = st.recursive(
    hashable | st.integers(-(2**70), 2**70) | st.floats() | st.binary(max_size=8).map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(text, inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.dictionaries(text, inner, max_size=3).map(OrderedDict)
        | st.sets(hashable, max_size=3)
        | st.dictionaries(hashable, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=20,
)


def _marks(value: Any) -> Any:
    """A value as something that is equal only where types and bits are."""
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    if isinstance(value, OrderedDict):
        return "OrderedDict", [(_marks(key), _marks(item)) for key, item in value.items()]
    if isinstance(value, dict):
        return type(value).__name__, sorted(((_marks(key), _marks(item)) for key, item in value.items()), key=repr)
    if isinstance(value, list | tuple):
        return type(value).__name__, [_marks(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(map(_marks, value), key=repr)
    return type(value).__name__, value


@given(values)
@settings(max_examples=300, deadline=None)
def test_every_value_comes_back_with_its_types_and_bits(value: Any) -> None:
    raw = encode(value)
    assert _marks(decode(raw, path="f")) == _marks(value)
    assert encode(decode(raw, path="f")) == raw
    json.loads(raw)


@given(st.dictionaries(hashable, st.integers(), max_size=6), st.randoms())
@settings(max_examples=100, deadline=None)
def test_the_order_in_which_a_dict_was_filled_does_not_show(value: dict[Any, int], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert encode(dict(items)) == encode(value)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (2**53 - 1, b"9007199254740991"),
        (-(2**53), b'{"int":"-0x20000000000000"}'),
        (0.1, b"0.1"),
        (1.0, b"1.0"),
        (-0.0, b"-0.0"),
        (math.inf, b'{"float":"inf"}'),
        (math.nan, b'{"float":"nan"}'),
        (struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0], b'{"float":"nan:fff8000000000001"}'),
        (b"\x80\x04", b'{"bytes":"gAQ="}'),
        ((1, [2]), b'{"tuple":[1,[2]]}'),
        ({"b": None, "a": True}, b'{"a":true,"b":null}'),
        ({1: "x", (0, 1): 2.5}, b'{"dict":[[1,"x"],[{"tuple":[0,1]},2.5]]}'),
        ({"int": 5}, b'{"dict":[["int",5]]}'),
        ({"b", "a"}, b'{"set":["a","b"]}'),
        ("\u00e9\U0001f600", b'"\\u00e9\\ud83d\\ude00"'),
    ],
)
def test_each_kind_of_value_is_written_in_one_way(value: Any, written: bytes) -> None:
    assert encode(value) == written
    assert _marks(decode(written, path="f")) == _marks(value)


def test_integers_of_a_hundred_thousand_digits_are_exact() -> None:
    assert decode(encode(7**120_000), path="f") == 7**120_000


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"state": [{}, {"callback": len}]}, r"optimizer\.state\[1\]\.callback: a builtin_function_or_method"),
        ({"state": {3: {"hook": lambda: 0}}}, r"optimizer\.state\[3\]\.hook: a function"),
        ([object()], r"optimizer\[0\]: an object"),
        ({"x": {1: (2, deque())}}, r"optimizer\.x\[1\]\[1\]: a collections\.deque"),
        ({"a": Colour.RED}, r"optimizer\.a: a .*Colour"),
        ([Point(1, 2)], r"optimizer\[0\]: a .*Point"),
        ({object(): 1}, r"the key <object .*> of optimizer: an object"),
        ({"name": "\ud800"}, r"optimizer\.name: '\\ud800' is no valid Unicode"),
        ({"\ud800": 1}, r"a key of optimizer: '\\ud800' is no valid Unicode"),
        ({"z": 1j}, r"optimizer\.z: a complex"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(FormatError, match=path) as caught:
        encode(value, path="optimizer")
    assert caught.value.hint or "Unicode" in path


def test_a_value_that_contains_itself_is_refused_and_one_of_the_deepest_that_are_taken_comes_back() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(FormatError, match=f"deeper than {MAX_DEPTH} levels"):
        encode(loop)
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = {(1,): deep}
    with pytest.raises(FormatError, match="deeper"):
        encode({"x": deep})
    inner = deep[(1,)]
    assert decode(encode(inner), path="f") == inner


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"NaN",
        b"Infinity",
        b"9007199254740992",
        b"-0",
        b'{"a":1,"a":2}',
        b'{"int":"0x5"}',
        b'{"int":"12"}',
        b'{"int":7}',
        b'{"float":"nan:7ff8000000000000"}',
        b'{"float":"nan:7ff0000000000000"}',
        b'{"float":"1.5"}',
        b'{"tuple":{"a":1}}',
        b'{"tuple":"ab"}',
        b'{"dict":["ab"]}',
        b'{"dict":[[1,2],[1,3]]}',
        b'{"dict":[[[1],2]]}',
        b'{"set":[1,1]}',
        b'{"set":[[1]]}',
        b'{"bytes":"g"}',
        b'{"bytes":5}',
        b'"\xc3\xa9"',
        b"\x80\x04",
        b"[" * 100_000,
    ],
)
def test_other_json_is_refused(raw: bytes) -> None:
    with pytest.raises(FormatError, match="step/manifest"):
        decode(raw, path="step/manifest")


def test_numbers_of_numpy_are_floats_where_they_are_float64_and_refused_otherwise() -> None:
    numpy = pytest.importorskip("numpy")
    assert encode(numpy.float64(0.1)) == b"0.1"
    with pytest.raises(FormatError, match=r"lr: a numpy\.float32"):
        encode(numpy.float32(0.1), path="lr")
    with pytest.raises(FormatError, match=r"order: a numpy\.ndarray") as caught:
        encode(numpy.arange(3), path="order")
    assert "torch.from_numpy" in str(caught.value.hint)
