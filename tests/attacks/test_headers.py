"""Files that are no good safetensors file: each is refused with its error, a line that names the file, and at once."""

from __future__ import annotations

import json
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from hubshard.errors import FormatError, UnsafeFormatError
from hubshard.header import MAX_READ_HEADER_BYTES, decode_header, header_extent

FILE = "model-00001-of-00002.safetensors"
U8 = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}


def _file(header: str | bytes, data: bytes = b"") -> bytes:
    text = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    return struct.pack("<Q", len(text)) + text + data


def _json(table: Any, data: bytes = b"x") -> bytes:
    return _file(json.dumps(table), data)


def _entry(dtype: Any = "U8", shape: Any = (1,), offsets: Any = (0, 1), **more: Any) -> bytes:
    return _json({"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets} | more})


def _two(first: tuple[int, int], second: tuple[int, int], data: bytes) -> bytes:
    entries = {
        name: {"dtype": "U8", "shape": [offsets[1] - offsets[0]], "data_offsets": offsets}
        for name, offsets in (("a", first), ("b", second))
    }
    return _json(entries, data)


MALFORMED = {
    # the frame
    "empty": b"",
    "seven bytes": b"1234567",
    "length alone": struct.pack("<Q", 0),
    "header of length zero": struct.pack("<Q", 0) + b"data",
    "header past the end": struct.pack("<Q", 1000) + b"{}",
    "header past the end by one": struct.pack("<Q", 3) + b"{}",
    "header over 100 MB": struct.pack("<Q", MAX_READ_HEADER_BYTES + 1) + b"{}",
    "largest length there is": b"\xff" * 8 + b"{}",
    "big-endian length": struct.pack(">Q", 2) + b"{}",
    "trailing byte": _json({"w": U8}, b"xy"),
    "a byte too few": _json({"w": U8}, b""),
    "data without tensors": _file("{}", b"x"),
    # the JSON
    "leading space": _file(" {}"),
    "byte order mark": _file("\ufeff{}"),
    "not UTF-8": _file(b'{"\xff":1}'),
    "UTF-16": _file(json.dumps({"w": U8}).encode("utf-16"), b"x"),
    "an array": _file("[]"),
    "a string": _file('"w"'),
    "null": _file("null"),
    "cut off": _file('{"w":{"dtype":"U8"'),
    "two objects": _file("{}{}"),
    "NUL padding": _file("{}\0\0"),
    "trailing comma": _file('{"w":1,}'),
    "single quotes": _file("{'w':1}"),
    "raw control character": _file('{"a\nb":1}'),
    "nested in arrays": _file('{"w":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "nested in objects": _file('{"w":' * 100_000 + "1" + "}" * 100_000),
    "nested and never closed": _file('{"w":' + "[" * 1_000_000),
    "key twice": _file(f'{{"w":{json.dumps(U8)},"w":{json.dumps(U8)}}}', b"x"),
    "dtype twice": _file('{"w":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "metadata twice": _file('{"__metadata__":{},"__metadata__":{}}'),
    "metadata key twice": _file('{"__metadata__":{"a":"1","a":"2"}}'),
    # the metadata
    "metadata of numbers": _file('{"__metadata__":{"a":1}}'),
    "metadata of null": _file('{"__metadata__":{"a":null}}'),
    "metadata of objects": _file('{"__metadata__":{"a":{}}}'),
    "metadata as a list": _file('{"__metadata__":[]}'),
    "metadata as a tensor": _json({"__metadata__": U8}),
    "metadata key of a lone surrogate": _file('{"__metadata__":{"\\ud800":"x"}}'),
    "metadata of a lone surrogate": _file('{"__metadata__":{"x":"\\udc00"}}'),
    "NaN in the metadata": _file('{"__metadata__":{"x":NaN}}'),
    # the entries
    "name of a lone surrogate": _file('{"\\ud83d":' + json.dumps(U8) + "}", b"x"),
    "entry of null": _file('{"w":null}'),
    "entry as a list": _json({"w": ["U8", [1], [0, 1]]}),
    "entry without dtype": _json({"w": {"shape": [1], "data_offsets": [0, 1]}}),
    "entry without shape": _json({"w": {"dtype": "U8", "data_offsets": [0, 1]}}),
    "entry without offsets": _json({"w": {"dtype": "U8", "shape": [1]}}),
    "entry with more": _entry(strides=[1]),
    "unknown dtype": _entry(dtype="U7"),
    "lower-case dtype": _entry(dtype="u8"),
    "empty dtype": _entry(dtype=""),
    "dtype of null": _entry(dtype=None),
    "dtype as a nest": _file('{"w":{"dtype":' + "[" * 400 + "]" * 400 + ',"shape":[1],"data_offsets":[0,1]}}', b"x"),
    "very long dtype": _entry(dtype="U" * 1_000_000),
    "very long name": _json({"w" * 1_000_000: U8 | {"dtype": "?"}}),
    "shape of a float": _entry(shape=[1.0]),
    "shape of a bool": _entry(shape=[True]),
    "shape of a string": _entry(shape=["1"]),
    "shape as a string": _entry(shape="1"),
    "shape as an object": _entry(shape={"0": 1}),
    "shape of null": _entry(shape=None),
    "negative shape": _entry(shape=[-1]),
    "twice negative shape": _entry(shape=[-1, -1]),
    "shape of minus zero": _file('{"w":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
    "shape of NaN": _file('{"w":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"x"),
    "shape of infinity": _file('{"w":{"dtype":"U8","shape":[1e999],"data_offsets":[0,1]}}', b"x"),
    "shape over 64 bits": _entry(shape=[2**64]),
    "shape of ten thousand digits": _file(
        '{"w":{"dtype":"U8","shape":[' + "9" * 10_000 + '],"data_offsets":[0,1]}}', b"x"
    ),
    "shape whose product is over 64 bits": _entry(shape=[2**63, 2**63]),
    "shape of very many huge dimensions": _entry(shape=[2**63] * 100_000),
    "shape of very many ones": _entry(shape=[1] * 100_000),
    "shape of 65 dimensions": _entry(shape=[1] * 65),
    "one offset": _entry(offsets=[0]),
    "three offsets": _entry(offsets=[0, 1, 1]),
    "no offsets": _entry(offsets=[]),
    "offset of a bool": _entry(offsets=[False, True]),
    "offset of a float": _entry(offsets=[0, 1.0]),
    "negative offset": _entry(offsets=[-1, 0]),
    "offsets the wrong way round": _entry(offsets=[1, 0]),
    "offset over 64 bits": _entry(offsets=[2**64, 2**64 + 1]),
    "more bytes than the shape": _entry(shape=[1], offsets=[0, 2]),
    "fewer bytes than the shape": _entry(shape=[2], offsets=[0, 1]),
    "bytes of another dtype": _entry(dtype="F32", shape=[1], offsets=[0, 1]),
    "packed elements that end within a byte": _entry(dtype="F4", shape=[1], offsets=[0, 1]),
    "does not begin at zero": _entry(offsets=[1, 2]),
    "overlap": _two((0, 2), (1, 3), b"abc"),
    "the same bytes twice": _two((0, 2), (0, 2), b"ab"),
    "gap": _two((0, 1), (2, 3), b"abc"),
    "gap, listed from the end": _two((2, 3), (0, 1), b"abc"),
    "tensor past the end": _two((0, 1), (1, 9), b"ab"),
    "tensor far past the end": _two((0, 1), (1, 2**62), b"ab"),
    # something else altogether
    "LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
    "HTML page": b"<!DOCTYPE html><html><body>404</body></html>",
    "HTML page after blank lines": b"\n\n   <html><head></head></html>",
    "XML error": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    "JSON error": b'{"error":"Repository not found"}',
    "text": b"Entry not found, sorry about that",
    "zeros": bytes(4096),
    "GGUF": b"GGUF\x03\x00\x00\x00" + bytes(100),
    "gzip": b"\x1f\x8b\x08\x00" + bytes(100),
}

PICKLED = {
    **{f"pickle of protocol {n}": pickle.dumps({"w": list(range(1000))}, protocol=n) for n in range(2, 6)},
    "very short pickle": pickle.dumps(None, protocol=4),
    "pickle that claims a small header": b"\x80\x02" + bytes(6) + b"(lp0\n." + bytes(1000),
    "zip": b"PK\x03\x04\x14\x00\x08\x08" + bytes(100),
    "zip that claims a small header": b"PK\x03\x04" + bytes(4) + b"\x00" * 100,
}


def _refused(raw: bytes, expected: type[FormatError] = FormatError) -> FormatError:
    with pytest.raises(expected) as caught:
        decode_header(raw, file_nbytes=len(raw), path=FILE)
    return caught.value


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused_in_a_line_that_names_it(name: str) -> None:
    error = _refused(MALFORMED[name])
    assert not isinstance(error, UnsafeFormatError)
    assert error.message.startswith(f"{FILE}: ")
    assert len(error.message) < 1000
    assert error.message.isprintable()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", PICKLED)
def test_a_pickled_file_is_refused_as_unsafe(name: str) -> None:
    error = _refused(PICKLED[name], UnsafeFormatError)
    assert error.message.startswith(f"{FILE}: this is a pickled file")
    assert error.hint


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_saves_is_refused_as_unsafe(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=zipped)
    _refused(path.read_bytes(), UnsafeFormatError)


@pytest.mark.parametrize("kind", ["LFS pointer", "HTML page", "XML error", "JSON error"])
def test_what_came_instead_of_the_file_is_said(kind: str) -> None:
    words = {"LFS pointer": "Git LFS pointer", "HTML page": "HTML", "XML error": "XML", "JSON error": "JSON text"}
    assert words[kind] in _refused(MALFORMED[kind]).message


def test_a_wrong_file_is_told_from_its_first_bytes_without_the_header_that_they_promise() -> None:
    first = struct.pack("<Q", 90_000_000) + b"["
    with pytest.raises(FormatError, match="does not start with"):
        header_extent(first, file_nbytes=10**9, path=FILE)
    with pytest.raises(FormatError, match="100000001 bytes"):
        header_extent(struct.pack("<Q", 100_000_001), file_nbytes=10**9, path=FILE)


@pytest.mark.parametrize("name", ["header over 100 MB", "largest length there is", "header past the end"])
def test_a_promised_length_allocates_nothing(name: str) -> None:
    tracemalloc.start()
    _refused(MALFORMED[name])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_the_corpus_is_as_large_as_it_should_be() -> None:
    assert len(MALFORMED) + len(PICKLED) >= 80
    assert len(set(MALFORMED.values())) == len(MALFORMED)
