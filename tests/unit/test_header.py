"""The header codec, with safetensors as the oracle in both directions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hubshard.errors import FormatError
from hubshard.header import (
    METADATA_KEY,
    PREFIX_BYTES,
    aliases_in,
    decode_header,
    encode_header,
    entry_nbytes,
    header_extent,
    header_nbytes,
)
from hubshard.tensors import DTYPE_BITS, TensorSpec

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
METADATA = st.dictionaries(TEXT, TEXT, max_size=4)


@st.composite
def specs_lists(draw: st.DrawFn) -> list[TensorSpec]:
    names = draw(st.lists(TEXT.filter(lambda name: name != METADATA_KEY), unique=True, max_size=6))
    specs = []
    for name in names:
        dtype = draw(st.sampled_from(list(DTYPE_BITS)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        if DTYPE_BITS[dtype] % 8:
            shape.append(4)
        specs.append(TensorSpec(name, dtype, tuple(shape)))
    return specs


def _deserialize(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    return list(safetensors.deserialize(raw))  # type: ignore[no-untyped-call]


def _decode(raw: bytes, path: str = "f.safetensors") -> tuple[Sequence[TensorSpec], Mapping[str, str]]:
    header = decode_header(raw, file_nbytes=len(raw), path=path)
    return header.specs, header.metadata


@given(specs_lists(), METADATA)
@settings(max_examples=150, deadline=None)
def test_what_we_encode_safetensors_reads_and_we_decode(specs: list[TensorSpec], metadata: dict[str, str]) -> None:
    data = b"".join(bytes([number + 1]) * spec.nbytes for number, spec in enumerate(specs))
    raw = encode_header(specs, metadata) + data
    found = {name: (value["dtype"], tuple(value["shape"]), bytes(value["data"])) for name, value in _deserialize(raw)}
    expected = {
        spec.name: (spec.dtype, spec.shape, bytes([number + 1]) * spec.nbytes) for number, spec in enumerate(specs)
    }
    assert found == expected
    header = decode_header(raw, file_nbytes=len(raw), path="f")
    # empty tensors share their place, so only the set and the places are certain
    assert set(header.specs) == set(specs)
    assert header.metadata == metadata
    assert (header.nbytes % 8, header.file_nbytes) == (0, len(raw))
    for spec, start in zip(header.specs, header.starts, strict=True):
        assert raw[start : start + spec.nbytes] == expected[spec.name][2]


WRITER_NAMES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
"""What its writer calls the dtypes; it has no way to write the packed ones element by element."""


@given(specs_lists(), METADATA)
@settings(max_examples=150, deadline=None)
def test_what_safetensors_writes_we_decode(specs: list[TensorSpec], metadata: dict[str, str]) -> None:
    specs = [spec for spec in specs if spec.dtype in WRITER_NAMES]
    data = np.arange(max([spec.nbytes for spec in specs], default=0) + 1, dtype=np.uint8)
    pointer = data.__array_interface__["data"][0]
    tensors = {
        spec.name: safetensors.TensorSpec(
            dtype=WRITER_NAMES[spec.dtype], shape=list(spec.shape), data_ptr=pointer, data_len=spec.nbytes
        )
        for spec in specs
    }
    found, found_metadata = _decode(bytes(safetensors.serialize(tensors, metadata or None)))
    assert set(found) == set(specs)
    assert found_metadata == metadata


def test_arrays_of_numpy_come_back_from_a_file_with_our_header() -> None:
    rng = np.random.default_rng(1)
    arrays = {"a": rng.random((3, 5)), "b": rng.integers(0, 9, (7,), np.int16), "c": np.array(2.5, np.float32)}
    specs = [TensorSpec("a", "F64", (3, 5)), TensorSpec("b", "I16", (7,)), TensorSpec("c", "F32", ())]
    raw = encode_header(specs, {"format": "pt"}) + b"".join(arrays[spec.name].tobytes() for spec in specs)
    loaded = load(raw)
    assert loaded.keys() == arrays.keys()
    assert all(np.array_equal(loaded[name], arrays[name]) for name in arrays)
    assert set(_decode(save(arrays))[0]) == set(specs)


@given(specs_lists(), METADATA)
@settings(max_examples=100, deadline=None)
def test_the_size_of_a_header_is_never_underestimated(specs: list[TensorSpec], metadata: dict[str, str]) -> None:
    entries = sum(entry_nbytes(spec, offset_digits=12) for spec in specs)
    real = len(encode_header(specs, metadata))
    assert real <= header_nbytes(entries, metadata) <= real + 26 * len(specs) + 32


def test_metadata_is_written_in_one_order_whatever_order_it_comes_in() -> None:
    specs = [TensorSpec("w", "F32", (1,))]
    assert encode_header(specs, {"b": "1", "a": "2"}) == encode_header(specs, {"a": "2", "b": "1"})


def test_the_bytes_of_a_header_are_those_of_compact_json() -> None:
    specs = [TensorSpec('a"\\\n\u00e9\u2028', "F32", (2, 3)), TensorSpec("b", "U8", ())]
    metadata = {"k\t": "v\x7f\x00"}
    raw = encode_header(specs, metadata)
    table = {
        METADATA_KEY: metadata,
        specs[0].name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "U8", "shape": [], "data_offsets": [24, 25]},
    }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    assert raw[PREFIX_BYTES:].rstrip(b" ") == text
    assert int.from_bytes(raw[:PREFIX_BYTES], "little") == len(raw) - PREFIX_BYTES


def test_tensor_names_that_differ_only_by_case_are_two_tensors() -> None:
    specs = (TensorSpec("W", "U8", (1,)), TensorSpec("w", "U8", (1,)))
    assert _decode(encode_header(specs, {}) + b"ab")[0] == specs


def test_a_good_header_is_no_pickle_although_its_length_begins_like_one() -> None:
    # 640 bytes: the file begins with 80 02, as a pickle of protocol 2 does
    for length in (0x0280, 0x0380, 0x0480, 0x0580):
        name = "n" * (length - 52)
        raw = encode_header([TensorSpec(name, "U8", (1,))], {}) + b"x"
        assert raw[:2] == length.to_bytes(2, "little")
        assert header_extent(raw[:8], file_nbytes=len(raw), path="f") == 8 + length
        assert header_extent(raw, file_nbytes=len(raw), path="f") == 8 + length


def test_a_header_may_be_read_before_the_rest_of_the_file() -> None:
    raw = encode_header([TensorSpec("w", "F32", (1000,))], {})
    header = decode_header(raw, file_nbytes=len(raw) + 4000, path="f")
    assert (header.starts, header.nbytes) == ((len(raw),), len(raw))
    with pytest.raises(FormatError, match="f: the header has"):
        decode_header(raw[:-1], file_nbytes=len(raw) + 4000, path="f")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (TensorSpec(METADATA_KEY, "U8", (1,)), METADATA_KEY),
        (TensorSpec("\ud800", "U8", (1,)), "no valid Unicode"),
        (TensorSpec("w", "F128", (1,)), "'w' has dtype 'F128'"),
        (TensorSpec("w", "F4", (1,)), "'w': 1 elements"),
        (TensorSpec("w", "U8", (-1, -1)), "'w' has the negative shape"),
        (TensorSpec("w", "U8", (1,) * 65), "'w' has 65 dimensions"),
    ],
)
def test_what_no_file_can_hold_is_not_encoded(spec: TensorSpec, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        encode_header([spec], {})


@pytest.mark.parametrize("metadata", [{"k": "\udfff"}, {"\ud800": "v"}, {"k": 1}])
def test_metadata_that_is_no_text_is_not_encoded(metadata: dict[str, str]) -> None:
    with pytest.raises(FormatError, match="metadata"):
        encode_header([TensorSpec("w", "U8", (1,))], metadata)


def test_aliases_are_the_metadata_that_name_a_tensor_but_for_reserved_keys() -> None:
    metadata = {"format": "pt", "head": "emb", "total_size": "emb", "author": "me"}
    assert aliases_in(metadata, {"emb", "pt"}) == {"head": "emb"}


SMALL_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**65) | st.floats() | st.sampled_from(["U8", "F4", "F32", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", METADATA_KEY, "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(SMALL_JSON, st.binary(max_size=6), st.sampled_from([b"", b" ", b"\n", b"\0", b"{"]))
@settings(max_examples=200, deadline=None)
def test_whatever_we_accept_safetensors_accepts(value: object, data: bytes, tail: bytes) -> None:
    text = json.dumps(value).encode() + tail
    raw = len(text).to_bytes(8, "little") + text + data
    try:
        specs, _ = _decode(raw)
    except FormatError as error:
        message: str | None = error.message
    else:
        message = None
        assert {name for name, _ in _deserialize(raw)} == {spec.name for spec in specs}
    assert message is None or message.startswith("f.safetensors: ")


ENTRY = '{"dtype":"U8","shape":[%s],"data_offsets":[%s,%s]}'


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["1", "2", "0", "-0", "1.0", "1e0", "true", "18446744073709551616", "1,1", "0,3", ""]),
            st.sampled_from(["0", "1", "2", "-0", "00", "0.0"]),
            st.sampled_from(["0", "1", "2", "3", "1e0"]),
        ),
        max_size=3,
    )
)
@settings(max_examples=200, deadline=None)
def test_counts_are_read_as_safetensors_reads_them(entries: list[tuple[str, str, str]]) -> None:
    text = ("{" + ",".join(f'"t{number}":{ENTRY % entry}' for number, entry in enumerate(entries)) + "}").encode()
    for data in (b"", b"x", b"xy", b"xyz"):
        raw = len(text).to_bytes(8, "little") + text + data
        try:
            theirs: set[str] | None = {name for name, _ in _deserialize(raw)}
        except SafetensorError:
            theirs = None
        try:
            ours: set[str] | None = {spec.name for spec in _decode(raw)[0]}
        except FormatError:
            ours = None
        assert ours == theirs, text
