"""Damaged headers and indexes: whatever is done to good ones, they are read or refused, and soon."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from hubshard.errors import FormatError
from hubshard.header import decode_header, encode_header
from hubshard.index import decode_index, encode_index
from hubshard.tensors import TensorSpec

SPECS = [TensorSpec("a", "F32", (2, 3)), TensorSpec("b.\u00e9", "F4", (4,)), TensorSpec("c", "U8", ())]
FILE = encode_header(SPECS, {"format": "pt", "x": "a"}) + bytes(sum(spec.nbytes for spec in SPECS))
INDEX = encode_index({"a": "m-1-of-2.safetensors", "b": "m-2-of-2.safetensors"}, {"total_size": 30})

WORDS = [
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"0", b"-1", b"1e9", b"true", b"null", b"NaN", b"\\ud800", b"\\u0000"),
    *(
        b"99999999999999999999",
        b"../",
        b"\0",
        b"\xff",
        b"[[[[",
        b'{"a":',
        b'"dtype"',
        b'"__metadata__":',
        b"PK\x03\x04",
    ),
]


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """A good file with parts replaced, doubled, dropped or cut off."""
    raw = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(raw)))
        stop = draw(st.integers(start, min(len(raw), start + 8)))
        raw[start:stop] = draw(st.sampled_from(WORDS) | st.binary(max_size=4) | st.just(bytes(raw[start:stop]) * 2))
    return bytes(raw[: draw(st.integers(0, len(raw)))] if draw(st.booleans()) else raw)


def _outcome(read: Callable[[], object]) -> str | None:
    """The message of the error, if it was ours; any other error fails the test."""
    try:
        read()
    except FormatError as error:
        return error.message
    return None


@pytest.mark.timeout(120)
@given(st.binary(max_size=200) | damaged(FILE))
@settings(max_examples=250, deadline=None)
def test_a_damaged_file_is_read_as_safetensors_reads_it_or_refused(raw: bytes) -> None:
    message = _outcome(lambda: decode_header(raw, file_nbytes=len(raw), path="f"))
    assert message is None or (message.startswith("f: ") and message.isprintable())
    if message is None:
        deserialize(raw)  # type: ignore[no-untyped-call]


@pytest.mark.timeout(120)
@given(damaged(FILE[8:-27]))
@settings(max_examples=250, deadline=None)
def test_a_damaged_header_of_the_right_length_is_read_as_safetensors_reads_it_or_refused(text: bytes) -> None:
    raw = len(text).to_bytes(8, "little") + text + FILE[-27:]
    message = _outcome(lambda: decode_header(raw, file_nbytes=len(raw), path="f"))
    assert message is None or (message.startswith("f: ") and message.isprintable())
    try:
        deserialize(raw)  # type: ignore[no-untyped-call]
    except SafetensorError:
        assert message is not None


@pytest.mark.timeout(120)
@given(st.binary(max_size=200) | damaged(INDEX))
@settings(max_examples=250, deadline=None)
def test_a_damaged_index_is_read_or_refused(raw: bytes) -> None:
    message = _outcome(lambda: decode_index(raw, path="i"))
    assert message is None or (message.startswith("i: ") and message.isprintable())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("word", WORDS)
def test_a_long_repetition_of_anything_is_refused_in_time(word: bytes) -> None:
    text = b"{" + word * (4_000_000 // len(word))
    raw = len(text).to_bytes(8, "little") + text
    assert _outcome(lambda: decode_header(raw, file_nbytes=len(raw), path="f")) is not None
    assert _outcome(lambda: decode_index(text, path="i")) is not None
