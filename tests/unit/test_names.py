"""Names of weight files: what belongs to which variant, and what is no weight file of ours."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubshard.errors import FormatError
from hubshard.names import (
    STEMS,
    check_variant,
    index_name,
    index_names,
    indexed_suffix,
    is_numbered,
    is_of_training,
    is_weight_file,
    parse_weight_name,
    shard_name,
    stem_of,
    variant_of,
)

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


@pytest.mark.parametrize("stem", ["diffusion_pytorch_model", "adapter_model"])
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("{}.safetensors", None),
        ("{}-00001-of-00002.safetensors", None),
        ("{}.safetensors.index.json", None),
        ("{}.bin", None),
        ("{}-00001-of-00002.bin", None),
        ("{}.bin.index.json", None),
        ("{}.fp16.safetensors", "fp16"),
        ("{}.fp16-00001-of-00002.safetensors", "fp16"),
        ("{}.safetensors.index.fp16.json", "fp16"),
        ("{}.fp16.bin", "fp16"),
    ],
)
def test_a_publish_of_another_stem_replaces_its_own_and_their_pickles(
    stem: str, name: str, variant: str | None
) -> None:
    name = name.format(stem)
    assert is_weight_file(name, variant=variant, stem=stem)
    assert variant_of(name) == variant
    assert stem_of(name) == (None if ".bin" in name else stem)
    assert [other for other in STEMS if is_weight_file(name, variant=variant, stem=other)] == [stem]
    assert not any(is_weight_file(name, variant=other, stem=stem) for other in {None, "fp16", "bf16"} - {variant})


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "consolidated.safetensors", "x.safetensors"]
)
@pytest.mark.parametrize("stem", ["diffusion_pytorch_model", "adapter_model"])
def test_a_publish_of_another_stem_leaves_models_alone(name: str, stem: str) -> None:
    assert not is_weight_file(name, variant=None, stem=stem)


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


@given(VARIANTS | st.none(), st.integers(1, 200_000), st.integers(1, 200_000), st.sampled_from(STEMS))
@settings(max_examples=100, deadline=None)
def test_names_that_are_written_are_read_as_what_they_are(
    variant: str | None, number: int, count: int, stem: str
) -> None:
    try:
        check_variant(variant)
    except FormatError:
        return
    names = {shard_name(min(number, count), count, variant=variant, stem=stem), index_name(variant, stem=stem)}
    assert {(stem_of(name), variant_of(name)) for name in names} == {(stem, variant)}
    assert all(is_weight_file(name, variant=variant, stem=stem) for name in names)


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


@pytest.mark.parametrize("stem", ["model", "adapter_model", "diffusion_pytorch_model"])
@pytest.mark.parametrize("variant", [None, "fp16", "fp8-e4m3", "fp8.v2"])
def test_an_index_is_found_by_each_of_its_names(stem: str, variant: str | None) -> None:
    for name in index_names(variant, stem=stem):
        found = parse_weight_name(name)
        assert found is not None
        assert (found.stem, found.variant, found.is_index, found.suffix) == (stem, variant, True, "safetensors")
        assert indexed_suffix(name) == "safetensors"


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("pytorch_model.bin.index.json", "bin"),
        ("x.safetensors.index.json", "safetensors"),
        ("x.safetensors.index.fp8-e4m3.json", "safetensors"),
        ("tf_model.h5.index.json", "h5"),
        (".safetensors.index.json", None),
        ("index.json", None),
        ("model.safetensors", None),
    ],
)
def test_an_index_tells_of_which_files_it_is(name: str, suffix: str | None) -> None:
    assert indexed_suffix(name) == suffix


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x-1-of-2.safetensors", True),
        ("model.fp16-00001-of-00002.safetensors", True),
        ("model-00001-of-00002.fp8-e4m3.safetensors", True),
        ("one-of-2.safetensors", False),
        ("model-00001-of-00002", False),
        ("model.safetensors", False),
    ],
)
def test_a_shard_is_told_by_its_number(name: str, expected: bool) -> None:
    assert is_numbered(name) is expected


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state_0.pth", "training_args.bin", "trainer_state.json"])
def test_what_a_trainer_goes_on_from_is_told_by_its_name(name: str) -> None:
    assert is_of_training(name)
    assert not is_of_training(f"my_{name}")
