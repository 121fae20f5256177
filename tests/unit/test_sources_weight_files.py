from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hubshard.errors import FormatError, HubshardError, IncompleteError, NotFoundError, UnsafeFormatError
from hubshard.protocols import Entry
from hubshard.sources.weight_files import WeightFiles, checkpoint_folders, find_weight_files

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def find(*names: str, folder: str = "", path: str | None = None, variant: str | None = None) -> WeightFiles:
    entries = {name: Entry(name, 1, None, name) for name in names}
    return find_weight_files(entries, folder=folder, path=path, variant=variant)


def test_a_single_file_is_found_among_stray_files() -> None:
    found = find("README.md", "model.safetensors", "consolidated.safetensors", "adapter_model.safetensors", "a/b.bin")
    assert found == WeightFiles("model.safetensors", is_index=False)


def test_an_index_is_found_among_its_shards_and_consolidated_weights() -> None:
    assert find(*SHARDS, INDEX, "consolidated.safetensors") == WeightFiles(INDEX, is_index=True)


def test_a_single_file_goes_before_an_index_and_a_note_says_so() -> None:
    found = find(*SHARDS, INDEX, "model.safetensors")
    assert (found.path, found.is_index) == ("model.safetensors", False)
    assert INDEX in found.notes[0]


@pytest.mark.parametrize(
    ("name", "is_index"),
    [
        ("model.fp16.safetensors", False),
        ("model.safetensors.index.fp16.json", True),
        ("model.fp16.safetensors.index.json", True),
    ],
)
def test_a_variant_is_found_under_each_of_its_names(name: str, is_index: bool) -> None:
    assert find("model.safetensors", INDEX, *SHARDS, name, variant="fp16") == WeightFiles(name, is_index)


@pytest.mark.parametrize("stem", ["diffusion_pytorch_model", "adapter_model"])
@pytest.mark.parametrize("name", ["{}.safetensors", "{}.safetensors.index.json"])
def test_names_of_diffusers_and_peft_are_usual_ones(stem: str, name: str) -> None:
    name = name.format(stem)
    beside = (f"{stem}.bin", f"{stem}.fp16.safetensors", "weights.safetensors", "config.json")
    assert find(name, *beside) == WeightFiles(name, is_index=name.endswith(".json"))
    fp16 = f"{stem}.fp16.safetensors"
    assert find(name, *beside, variant="fp16") == WeightFiles(fp16, is_index=False)
    assert find("model.safetensors", name) == WeightFiles("model.safetensors", is_index=False)


def test_an_adapter_beside_the_weights_of_diffusers_is_not_the_checkpoint() -> None:
    assert find("adapter_model.safetensors", "diffusion_pytorch_model.safetensors").path.startswith("diffusion")


def test_a_folder_is_searched_alone() -> None:
    found = find("model.safetensors", "unet/model.safetensors", "unet/x/model.safetensors", folder="unet/")
    assert found.path == "unet/model.safetensors"


def test_a_lone_checkpoint_of_another_name_is_taken_and_a_note_says_so() -> None:
    found = find("config.json", "weights.safetensors")
    assert (found.path, found.is_index) == ("weights.safetensors", False)
    assert "weights.safetensors" in found.notes[0]
    found = find("x-1-of-2.safetensors", "x-2-of-2.safetensors", "x.safetensors.index.json")
    assert (found.path, found.is_index) == ("x.safetensors.index.json", True)


def test_a_path_is_taken_as_it_is() -> None:
    assert find("f/a.safetensors", "f/b.safetensors", folder="f", path="b.safetensors").path == "f/b.safetensors"
    assert find(INDEX, "model.safetensors", path=INDEX) == WeightFiles(INDEX, is_index=True)


@pytest.mark.parametrize(
    ("names", "options", "error", "says"),
    [
        ((), {}, NotFoundError, "it is empty"),
        (("README.md", "x.txt"), {}, NotFoundError, "there are: README.md, x.txt"),
        (("model.safetensors",), {"variant": "fp16"}, NotFoundError, "model.fp16.safetensors"),
        (("model.fp16.safetensors",), {}, NotFoundError, "model.fp16.safetensors"),
        (("model.safetensors",), {"folder": "unet"}, NotFoundError, "unet: there is no such folder"),
        (("model.safetensors",), {"path": "modle.safetensors"}, NotFoundError, "modle.safetensors is not there"),
        (("a.safetensors", "b.safetensors"), {}, FormatError, "a.safetensors, b.safetensors"),
        (SHARDS, {}, IncompleteError, f"no {INDEX}"),
        ((*SHARDS, "adapter_model.safetensors"), {}, IncompleteError, f"no {INDEX}"),
        (("diffusion_pytorch_model-1-of-2.safetensors",), {}, IncompleteError, f"no diffusion_pytorch_{INDEX}"),
        (("adapter_model.fp16.safetensors",), {}, NotFoundError, "holds no adapter_model.safetensors"),
        (("adapter_model.safetensors",), {"variant": "fp16"}, NotFoundError, "adapter_model.fp16.safetensors"),
        (("diffusion_pytorch_model.bin",), {}, UnsafeFormatError, "diffusion_pytorch_model.bin"),
        (("model-00000-of-00001.safetensors",), {}, IncompleteError, f"no {INDEX}"),
        (("pytorch_model.bin", "README.md"), {}, UnsafeFormatError, "pytorch_model.bin"),
        (("consolidated.00.pth",), {}, UnsafeFormatError, "consolidated.00.pth"),
        (("model.safetensors",), {"path": "../model.safetensors"}, FormatError, "plain path"),
        (("model.safetensors",), {"variant": "../x"}, FormatError, "variant"),
    ],
)
def test_what_is_not_one_checkpoint_is_refused_with_what_is_there(
    names: tuple[str, ...], options: dict[str, str], error: type[HubshardError], says: str
) -> None:
    with pytest.raises(error) as caught:
        find(*names, **options)
    assert type(caught.value) is error
    assert says in str(caught.value)


def test_only_pickled_weights_are_refused_with_the_way_out() -> None:
    with pytest.raises(UnsafeFormatError) as caught:
        find("pytorch_model.bin")
    assert caught.value.hint is not None
    assert "safetensors" in caught.value.hint


@pytest.mark.parametrize(
    ("paths", "folders"),
    [
        ((), ()),
        (("model.safetensors", "config.json"), ("",)),
        ((*SHARDS, INDEX), ("",)),
        (SHARDS, ("",)),
        (
            (
                "model_index.json",
                "unet/config.json",
                "unet/diffusion_pytorch_model.fp16.safetensors",
                "vae/diffusion_pytorch_model.safetensors.index.json",
                "text_encoder/model.safetensors",
                "tokenizer/vocab.json",
                "scheduler/scheduler_config.json",
                "safety_checker/pytorch_model.bin",
            ),
            ("text_encoder", "unet", "vae"),
        ),
        (("model.safetensors", "1_Pooling/config.json", "2_Dense/model.safetensors"), ("", "2_Dense")),
        (("unet/lora/adapter_model.safetensors",), ("unet/lora",)),
        (("onnx/model.onnx", "original/consolidated.00.pth", "openvino/openvino_model.bin", "tf_model.h5"), ()),
        (("loras/style.safetensors", "vae/model.safetensors.bak"), ()),
        (
            (
                "checkpoint-500/model.safetensors",
                "checkpoint-500/unet/model.safetensors",
                "step-00000008/model.safetensors",
            ),
            (),
        ),
        ((".cache/a/model.safetensors", "unet/.git/model.safetensors", "__pycache__/model.safetensors"), ()),
    ],
)
def test_the_folders_of_checkpoints(paths: tuple[str, ...], folders: tuple[str, ...]) -> None:
    assert checkpoint_folders(paths) == folders


_FOLDERS = st.lists(st.sampled_from(["unet", "vae", "2_Dense", "a b", "checkpoint"]), max_size=3).map("/".join)
_WEIGHTS = st.sampled_from(["model.safetensors", INDEX, "diffusion_pytorch_model.fp16.safetensors", *SHARDS])
_OTHERS = st.sampled_from(["config.json", "pytorch_model.bin", "x.safetensors", "optimizer.bin", "model.onnx"])


@given(st.sets(st.tuples(_FOLDERS, _WEIGHTS)), st.sets(st.tuples(_FOLDERS, _OTHERS)))
def test_a_folder_counts_by_its_own_weights_alone(weights: set[tuple[str, str]], others: set[tuple[str, str]]) -> None:
    paths = [f"{folder}/{name}".lstrip("/") for folder, name in [*others, *weights]]
    assert checkpoint_folders(paths) == tuple(sorted({folder for folder, _ in weights}))
    assert checkpoint_folders(reversed(paths)) == checkpoint_folders(paths)
    assert checkpoint_folders(f"checkpoint-8/{path}" for path in paths) == ()
    assert checkpoint_folders(f"sub/{path}" for path in paths) == tuple(
        sorted(f"sub/{folder}".rstrip("/") for folder in checkpoint_folders(paths))
    )
