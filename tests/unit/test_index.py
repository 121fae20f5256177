"""Names of weight files and the index: what belongs to which variant, what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubshard.errors import FormatError, UnsafeFormatError
from hubshard.index import (
    check_case,
    check_path,
    check_variant,
    decode_index,
    encode_index,
    index_name,
    is_weight_file,
    shard_name,
    variant_of,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
VARIANTS = st.from_regex(r"[A-Za-z0-9_]{1,5}([.-][A-Za-z0-9_]{1,4}){0,2}", fullmatch=True)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("model.safetensors", None),
        ("model-00001-of-00002.safetensors", None),
        ("model-1-of-2.safetensors", None),
        ("model.safetensors.index.json", None),
        ("pytorch_model.bin", None),
        ("pytorch_model-00001-of-00002.bin", None),
        ("pytorch_model.bin.index.json", None),
        ("consolidated.safetensors", None),
        ("consolidated.00.pth", None),
        ("consolidated-00001-of-00051.safetensors", None),
        ("consolidated.safetensors.index.json", None),
        ("model.fp16.safetensors", "fp16"),
        ("model.fp16-00001-of-00002.safetensors", "fp16"),
        ("model-00001-of-00002.fp16.safetensors", "fp16"),
        ("model.safetensors.index.fp16.json", "fp16"),
        ("model.fp16.safetensors.index.json", "fp16"),
        ("pytorch_model.fp16.bin", "fp16"),
        ("pytorch_model-00001-of-00002.fp16.bin", "fp16"),
        ("pytorch_model.bin.index.fp16.json", "fp16"),
        ("model.non-ema.safetensors", "non-ema"),
        ("model.non-ema-00001-of-00002.safetensors", "non-ema"),
        ("model.fp8.v2-00001-of-00002.safetensors", "fp8.v2"),
    ],
)
def test_a_publish_replaces_the_weight_files_of_its_own_variant_alone(name: str, variant: str | None) -> None:
    assert is_weight_file(name, variant=variant)
    assert variant_of(name) == variant
    for other in {None, "fp16", "bf16", "non-ema", "fp8", "v2"} - {variant}:
        assert not is_weight_file(name, variant=other)


@pytest.mark.parametrize(
    "name",
    [
        "adapter_model.safetensors",
        "adapter_model.bin",
        "adapter_config.json",
        "optimizer.bin",
        "optimizer.pt",
        "scheduler.bin",
        "training_args.bin",
        "model.bin",  # of other runtimes
        "pytorch_model.safetensors",
        "pytorch_model_fsdp_0",
        "model.onnx",
        "model.gguf",
        "model.safetensors.bak",
        "model.safetensors\n",
        "my-model.safetensors",
        "model_ema.safetensors",
        "model-fp16.safetensors",
        "Model.safetensors",
        "vae/model.safetensors",
        "unet/diffusion_pytorch_model.safetensors",
        "config.json",
        "model.safetensors.index.json/model.safetensors",
        "model.a.safetensors.index.b.json",
        "consolidated.fp8.safetensors",
        "consolidated.md",
        "params.json",
        "",
    ],
)
def test_a_publish_never_replaces_anything_else(name: str) -> None:
    assert not any(is_weight_file(name, variant=variant) for variant in (None, "fp16", "a", "b", "fp8", "bak"))


@given(VARIANTS | st.none(), st.integers(1, 200_000), st.integers(1, 200_000))
@settings(max_examples=100, deadline=None)
def test_names_that_are_written_are_read_as_what_they_are(variant: str | None, number: int, count: int) -> None:
    try:
        check_variant(variant)
    except FormatError:
        return
    names = {shard_name(min(number, count), count, variant=variant), index_name(variant)}
    assert {variant_of(name) for name in names} == {variant}
    assert all(is_weight_file(name, variant=variant) for name in names)


@pytest.mark.parametrize(
    "variant", ["", ".", "a.", ".a", "a..b", "../x", "a/b", "a\\b", "a b", "fp16\n", "1-of-2", "x-00001-of-00002"]
)
def test_a_variant_that_cannot_stand_in_a_name_is_refused(variant: str) -> None:
    with pytest.raises(FormatError, match="the variant"):
        check_variant(variant)


def test_shards_are_named_as_the_hub_names_them() -> None:
    assert shard_name(1, 1) == "model.safetensors"
    assert shard_name(2, 12) == "model-00002-of-00012.safetensors"
    assert shard_name(1, 1, variant="fp16") == "model.fp16.safetensors"
    assert shard_name(1, 2, variant="fp16") == "model.fp16-00001-of-00002.safetensors"
    assert shard_name(7, 123456) == "model-00007-of-123456.safetensors"
    assert (index_name(), index_name("fp16")) == ("model.safetensors.index.json", "model.safetensors.index.fp16.json")


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


@pytest.mark.parametrize(
    "file",
    [
        "a.safetensors",
        "a/b.safetensors",
        "a b.txt",
        ".gitattributes",
        "\u00e9\u4e2d.txt",
        "console.txt",
        "com.txt",
        "nul-1.txt",
        "x" * 255,
    ],
)
def test_plain_paths_are_taken(file: str) -> None:
    check_path(file, path="i")


@pytest.mark.parametrize(
    "file",
    [
        *("", "/", ".", "..", "/etc/passwd", "../x", "a/../b", "a/./b", "a//b", "a/", "//server/share/x", "~/../x/.."),
        *("\\x", "a\\b", "..\\x", "\\\\server\\share\\x", "C:\\x", "C:/x", "c:x", "x:stream", "a/b:c"),
        *("a\0b", "a\nb", "a\x7fb", "a\x1b[2Jb", "a\u202eb", "a\ud800b", "a\u2028b", "a\u200bb"),
        *(
            "con",
            "CON",
            "con.safetensors",
            "a/nul.txt",
            "COM1",
            "lpt9.x",
            "aux .txt",
            "com\u00b9.txt",
            "CONOUT$",
            "prn.",
        ),
        *("a.", "a ", "... ", ".. /x", "a./b", "x" * 256, "\u4e2d" * 86),
    ],
)
def test_paths_that_mean_something_else_on_some_system_are_refused(file: str) -> None:
    with pytest.raises(FormatError, match=r"^i: the file name") as caught:
        check_path(file, path="i")
    assert caught.value.message.isprintable()
    with pytest.raises(FormatError, match=r"^model\.safetensors\.index\.json: "):
        decode_index(json.dumps({"weight_map": {"w": file}}).encode(), path="model.safetensors.index.json")


@pytest.mark.parametrize(
    ("one", "other"), [("a/x.safetensors", "A/x.safetensors"), ("\u00e9", "e\u0301"), ("stra\u00dfe", "STRASSE")]
)
def test_file_names_that_some_disk_holds_to_be_one_are_refused(one: str, other: str) -> None:
    with pytest.raises(FormatError, match="one file on a disk without regard to case"):
        check_case([one, "z", other], path="i")


def test_one_file_named_twice_is_no_clash() -> None:
    check_case(["a", "a", "b"], path="i")


def test_tensor_names_that_differ_only_by_case_may_stand_in_an_index() -> None:
    index = decode_index(encode_index({"W": "a.safetensors", "w": "a.safetensors"}, {}), path="i")
    assert set(index.weight_map) == {"W", "w"}
