"""Indexes that nobody should follow: each is refused with a line that names it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hubshard.errors import FormatError, UnsafeFormatError
from hubshard.index import decode_index

FILE = "model.safetensors.index.json"


def _map(weight_map: Any, **more: Any) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map} | more).encode()


MALFORMED = {
    "empty": b"",
    "not UTF-8": b"\xff\xfe{}",
    "UTF-16": json.dumps({"weight_map": {"w": "a.safetensors"}}).encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + _map({"w": "a.safetensors"}),
    "cut off": _map({"w": "a.safetensors"})[:-3],
    "trailing text": _map({"w": "a.safetensors"}) + b"x",
    "HTML page": b"<!DOCTYPE html>",
    "LFS pointer": b"version https://git-lfs.github.com/spec/v1\n",
    "an array": b"[]",
    "null": b"null",
    "no weight_map": b'{"metadata":{}}',
    "weight_map of null": _map(None),
    "weight_map as a list": _map([["w", "a.safetensors"]]),
    "weight_map as text": _map("a.safetensors"),
    "empty weight_map": _map({}),
    "file of null": _map({"w": None}),
    "file as a list": _map({"w": ["a.safetensors"]}),
    "file as a number": _map({"w": 1}),
    "metadata as text": _map({"w": "a.safetensors"}, metadata="x"),
    "metadata of null": _map({"w": "a.safetensors"}, metadata=None),
    "NaN": b'{"metadata":{"total_size":NaN},"weight_map":{"w":"a.safetensors"}}',
    "name twice": b'{"weight_map":{"w":"a.safetensors","w":"b.safetensors"}}',
    "weight_map twice": b'{"weight_map":{"w":"a.safetensors"},"weight_map":{"w":"b.safetensors"}}',
    "ten thousand digits": b'{"metadata":{"total_size":' + b"9" * 10_000 + b'},"weight_map":{"w":"a.safetensors"}}',
    "nested": b'{"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested and never closed": b'{"weight_map":' * 100_000,
    "name of a lone surrogate": b'{"weight_map":{"\\ud800":"a.safetensors"}}',
    "the reserved name": _map({"__metadata__": "a.safetensors"}),
    "another kind of file": _map({"w": "config.json"}),
    "another kind of file in upper case": _map({"w": "a.SAFETENSORS"}),
    "two files equal but for case": _map({"w": "a.safetensors", "v": "A.safetensors"}),
    "very long file": _map({"w": "a" * 1_000_000 + ".safetensors"}),
    **{
        f"path {path!r}": _map({"w": f"{path}x.safetensors"})
        for path in (
            *("../", "../../", "a/../../", "./", "a//", "/", "//host/share/", "/proc/self/fd/", "~/../", "..\\", "\\"),
            *(
                "\\\\host\\share\\",
                "\\\\?\\C:\\",
                "C:\\",
                "C:/",
                "C:",
                "file:///",
                "http://host/",
                "a\0",
                "a\n",
                "\u202e",
            ),
            *("con/", "nul.", "a /", "a./", ".. /", "aux/", "COM1.", "a:", "\udc80"),
        )
    },
}

PICKLED = ["pytorch_model-00001-of-00002.bin", "a.pt", "a.pth", "a.ckpt", "a.pkl", "a.pickle"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_index_is_refused_in_a_line_that_names_it(name: str) -> None:
    with pytest.raises(FormatError) as caught:
        decode_index(MALFORMED[name], path=FILE)
    assert not isinstance(caught.value, UnsafeFormatError)
    assert caught.value.message.startswith(f"{FILE}: ")
    assert len(caught.value.message) < 1000
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("file", PICKLED)
def test_an_index_of_pickled_files_is_refused_as_unsafe(file: str) -> None:
    with pytest.raises(UnsafeFormatError, match=FILE):
        decode_index(_map({"w": file}), path=FILE)
