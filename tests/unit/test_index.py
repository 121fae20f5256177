"""The index: the bytes that are written, and what is refused where one is read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubshard.errors import FormatError, UnsafeFormatError
from hubshard.index import decode_index, encode_index

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@given(st.dictionaries(TEXT, TEXT, max_size=5), st.dictionaries(TEXT, TEXT | st.integers(), max_size=3))
@settings(max_examples=100, deadline=None)
def test_an_index_has_the_bytes_that_transformers_would_write(
    weight_map: dict[str, str], metadata: dict[str, object]
) -> None:
    expected = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    assert encode_index(weight_map, metadata).decode() == expected


@given(
    st.dictionaries(
        TEXT.filter(lambda name: name != "__metadata__"),
        st.sampled_from(["a.safetensors", "b/c.safetensors"]),
        min_size=1,
    )
)
@settings(max_examples=50, deadline=None)
def test_an_index_comes_back(weight_map: dict[str, str]) -> None:
    index = decode_index(encode_index(weight_map, {"total_size": 3}), path="i.json")
    assert (index.weight_map, index.metadata) == (weight_map, {"total_size": 3})


def test_an_index_without_metadata_is_read() -> None:
    assert decode_index(b'{"weight_map": {"w": "a.safetensors"}}', path="i").metadata == {}


def test_an_index_of_pickles_is_refused_as_unsafe() -> None:
    with pytest.raises(UnsafeFormatError, match=r"i\.json: .*pytorch_model-00001-of-00002\.bin"):
        decode_index(encode_index({"w": "pytorch_model-00001-of-00002.bin"}, {}), path="i.json")


@pytest.mark.parametrize("file", ["../x.safetensors", "C:/x.safetensors", "a/nul.safetensors", "a\nb.safetensors"])
def test_an_index_names_plain_paths_alone(file: str) -> None:
    with pytest.raises(FormatError, match=r"^model\.safetensors\.index\.json: the file name"):
        decode_index(json.dumps({"weight_map": {"w": file}}).encode(), path="model.safetensors.index.json")


def test_tensor_names_that_differ_only_by_case_may_stand_in_an_index() -> None:
    index = decode_index(encode_index({"W": "a.safetensors", "w": "a.safetensors"}, {}), path="i")
    assert set(index.weight_map) == {"W", "w"}
