from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from hubshard.errors import FormatError, HubshardError, IncompleteError, NotFoundError, UnsafeFormatError
from hubshard.protocols import Entry
from hubshard.sources.selection import Selection, is_entry_point, only_pickled, select
from hubshard.sources.weight_files import checkpoint_folders

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
SHARDED = [*SHARDS, "model.safetensors.index.json", "config.json"]


def chosen(
    paths: Sequence[str],
    *,
    names: Sequence[str] = SHARDS,
    variant: str | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
) -> Selection:
    index = json.dumps({"weight_map": {str(number): name for number, name in enumerate(names)}}).encode()
    listing = [Entry(path, 1, None, f"{number:040}") for number, path in enumerate(sorted(paths))]
    return select(
        listing, variant=variant, include=include, exclude=exclude, read_index=lambda _: index, where="org/model@main"
    )


def paths_of(selection: Selection) -> list[str]:
    return [entry.path for entry in selection.files]


def test_what_the_index_names_and_all_that_holds_no_weights_is_taken_and_the_index_shown_last() -> None:
    strays = ["consolidated.safetensors", "model-00003-of-00003.safetensors", "pytorch_model.bin", "x.gguf", "tf.h5"]
    found = chosen([*SHARDED, "tokenizer.json", "modeling.py", "README.md", ".gitattributes", *strays])
    assert paths_of(found) == [
        *("README.md", "config.json", "modeling.py", "tokenizer.json"),
        *SHARDS,
        "model.safetensors.index.json",
    ]
    assert sorted(entry.path for entry in found.left_out) == sorted(strays)


def test_a_single_file_goes_before_an_index() -> None:
    assert paths_of(chosen([*SHARDED, "model.safetensors"])) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("shards", "index", "variant"),
    [
        (["model.fp16-00001-of-00001.safetensors"], "model.safetensors.index.fp16.json", "fp16"),
        (["model-00001-of-00001.fp16.safetensors"], "model.fp16.safetensors.index.json", "fp16"),
        (["model.fp8-e4m3-00001-of-00001.safetensors"], "model.safetensors.index.fp8-e4m3.json", "fp8-e4m3"),
    ],
)
def test_a_variant_is_found_in_both_orders_and_alone(shards: list[str], index: str, variant: str) -> None:
    everything = [*SHARDED, *shards, index]
    assert paths_of(chosen(everything, names=shards, variant=variant)) == ["config.json", *shards, index]
    assert paths_of(chosen(everything)) == ["config.json", *SHARDS, "model.safetensors.index.json"]


def test_of_two_indexes_of_a_variant_the_usual_name_is_taken() -> None:
    shards = ["model.fp16-00001-of-00001.safetensors"]
    both = ["model.fp16.safetensors.index.json", "model.safetensors.index.fp16.json"]
    assert paths_of(chosen([*shards, *both], names=shards, variant="fp16")) == [*shards, both[1]]


def test_a_folder_without_the_variant_gives_its_plain_weights() -> None:
    pipeline = ["model_index.json", "unet/diffusion_pytorch_model.fp16.safetensors", "vae/model.safetensors"]
    pipeline += ["unet/diffusion_pytorch_model.safetensors", "all_in_one_1.0.safetensors"]
    assert paths_of(chosen(pipeline, variant="fp16")) == [
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "vae/model.safetensors",
        "model_index.json",
    ]


def test_of_a_pipeline_the_indexes_come_after_all_shards_and_the_list_of_components_last() -> None:
    shards = [f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = "diffusion_pytorch_model.safetensors.index.json"
    pipeline = [f"{folder}/{name}" for folder in ("a", "z") for name in (*shards, index, "config.json")]
    assert paths_of(chosen([*pipeline, "model_index.json", "z/tokenizer.json"], names=shards)) == [
        *("a/config.json", "z/config.json", "z/tokenizer.json"),
        *(f"{folder}/{shard}" for folder in ("a", "z") for shard in shards),
        *(f"a/{index}", f"z/{index}", "model_index.json"),
    ]


def test_the_index_of_diffusers_goes_before_a_single_file_as_in_its_loader() -> None:
    shards = ["diffusion_pytorch_model-00001-of-00001.safetensors"]
    index = "diffusion_pytorch_model.safetensors.index.json"
    found = chosen(["diffusion_pytorch_model.safetensors", *shards, index], names=shards)
    assert paths_of(found) == [*shards, index]


def test_a_component_that_has_only_other_variants_is_refused_and_an_adapter_is_left() -> None:
    beside = ["vae/model.safetensors", "unet/adapter_model.fp16.safetensors"]
    assert paths_of(chosen(beside)) == ["vae/model.safetensors"]
    with pytest.raises(NotFoundError, match=r"unet/diffusion_pytorch_model.* fp16"):
        chosen([*beside, "unet/diffusion_pytorch_model.fp16.safetensors"])


def test_pickles_that_a_model_would_need_are_told_from_those_that_nothing_needs() -> None:
    paths = ["unet/config.json", "unet/model.safetensors", "unet/pytorch_model.bin"]
    pickled = ["safety_checker/pytorch_model.bin", "vae/diffusion_pytorch_model.bin"]
    paths += [*pickled, "safety_checker/config.json", "vae/config.json", "vae/optimizer.bin", "old/pytorch_model.bin"]
    listing = [Entry(path, 1, None, f"{number:040}") for number, path in enumerate(sorted(paths))]
    assert list(only_pickled(listing, chosen(paths).files)) == pickled


def test_training_folders_are_left_out_and_module_folders_are_not() -> None:
    training = ["checkpoint-500/model.safetensors", "step-00001000/manifest.json", "global_step4/x.json"]
    found = chosen(["model.safetensors", "2_Dense/model.safetensors", "2_Dense/config.json", *training])
    assert paths_of(found) == ["2_Dense/config.json", "2_Dense/model.safetensors", "model.safetensors"]


def test_files_of_unusual_names_are_taken_where_no_others_are() -> None:
    assert paths_of(chosen(["pytorch_lora_weights.safetensors", "README.md"])) == [
        "README.md",
        "pytorch_lora_weights.safetensors",
    ]


def test_include_replaces_the_choice_and_exclude_has_the_last_word() -> None:
    everything = [*SHARDED, "pytorch_model.bin", "onnx/model.onnx", "onnx/config.json"]
    assert paths_of(chosen(everything, include=["*.bin"])) == ["pytorch_model.bin"]
    assert paths_of(chosen(everything, include=["onnx/"], exclude=["*.json"])) == ["onnx/model.onnx"]
    assert paths_of(chosen(everything, exclude=["*.safetensors", "onnx/*"])) == [
        "config.json",
        "model.safetensors.index.json",
    ]


@pytest.mark.parametrize(
    ("paths", "variant", "include", "error", "said"),
    [
        (["pytorch_model.bin", "config.json"], None, None, UnsafeFormatError, "pytorch_model.bin"),
        (["x.gguf", "config.json"], None, None, FormatError, "x.gguf"),
        (SHARDED, "fp16", None, NotFoundError, "fp16"),
        (["model.fp16.safetensors"], None, None, NotFoundError, "fp16"),
        ([*SHARDS, "config.json"], None, None, IncompleteError, "no index"),
        ([SHARDS[0], *SHARDED[2:]], None, None, IncompleteError, SHARDS[1]),
        (SHARDED, None, ["nothing*"], NotFoundError, "no file"),
        (["../x.safetensors"], None, None, FormatError, "../x"),
        (["A.json", "a.json"], None, None, FormatError, "A.json"),
        (["C:x.json"], None, None, FormatError, "C:x"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(
    paths: list[str], variant: str | None, include: list[str] | None, error: type[HubshardError], said: str
) -> None:
    with pytest.raises(error) as caught:
        chosen(paths, variant=variant, include=include)
    assert type(caught.value) is error
    assert said in str(caught.value)
    assert "org/model@main" in str(caught.value)


def test_a_repo_without_any_weights_gives_what_it_has() -> None:
    assert paths_of(chosen(["tokenizer.json", "training_args.bin"])) == ["tokenizer.json"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model.safetensors", True),
        ("a/model.safetensors.index.fp16.json", True),
        ("pytorch_model.bin", True),
        ("pytorch_model.bin.index.json", True),
        ("model-00001-of-00002.safetensors", False),
        ("model.fp16-00001-of-00002.safetensors", False),
        ("config.json", False),
    ],
)
def test_entry_points_are_what_makes_a_loader_begin(path: str, expected: bool) -> None:
    assert is_entry_point(path) is expected


@pytest.mark.parametrize(
    ("paths", "patterns", "told", "hint"),
    [
        ([], {}, "there are no files yet", "publish to it first"),
        ([".gitattributes"], {}, "there are no files yet", "publish to it first"),
        ([".gitattributes"], {"exclude": ["*.bin"]}, "there are no files yet", "publish to it first"),
        (["checkpoint-5/optimizer.pt"], {}, "there are no files of a model, only checkpoint-5/optimizer.pt", "include"),
        (SHARDED, {"include": ["*.gguf"]}, "no file is left to fetch", "correct the patterns"),
        (SHARDED, {"exclude": ["*"]}, "no file is left to fetch", "correct the patterns"),
    ],
)
def test_where_there_is_nothing_to_take_it_is_said_why(
    paths: list[str], patterns: dict[str, Any], told: str, hint: str
) -> None:
    with pytest.raises(NotFoundError) as caught:
        chosen(paths, **patterns)
    assert str(caught.value) == f"org/model@main: {told}"
    assert hint in str(caught.value.hint)


ADAPTER = ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize("folder", ["checkpoint-5", "step-100", "checkpoint7", "deep/global_step1"])
def test_an_adapter_is_taken_whatever_its_folder_is_called(folder: str) -> None:
    adapter = [f"{folder}/{name}" for name in ADAPTER]
    assert set(paths_of(chosen([*ADAPTER, *adapter]))) == {*ADAPTER, *adapter}
    assert folder in checkpoint_folders([*ADAPTER, *adapter])


@pytest.mark.parametrize("file", ["trainer_state.json", "optimizer.pt", "training_args.bin", "rng_state.pth"])
def test_an_adapter_among_the_files_of_a_trainer_is_a_step_of_its_run(file: str) -> None:
    step = [f"checkpoint-5/{name}" for name in (*ADAPTER, file)]
    assert set(paths_of(chosen([*ADAPTER, *step]))) == set(ADAPTER)
    assert checkpoint_folders([*ADAPTER, *step]) == ("",)


@pytest.mark.parametrize("files", [["model.safetensors", "config.json"], ADAPTER[:1], ADAPTER[1:], ["x/y.txt"]])
def test_other_folders_of_steps_stay(files: list[str]) -> None:
    step = [f"checkpoint-5/{name}" for name in files]
    assert set(paths_of(chosen([*ADAPTER, *step]))) == set(ADAPTER)
    assert checkpoint_folders([*ADAPTER, *step]) == ("",)


def test_an_adapter_below_the_step_of_a_run_stays() -> None:
    step = ["checkpoint-5/trainer_state.json", *(f"checkpoint-5/checkpoint-6/{name}" for name in ADAPTER)]
    assert set(paths_of(chosen([*ADAPTER, *step]))) == set(ADAPTER)
    assert checkpoint_folders([*ADAPTER, *step]) == ("",)
