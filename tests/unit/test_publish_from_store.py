"""Which checkpoints of a directory are published, under which names, and what goes along. Nothing is sent here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hubshard.errors import FormatError, HubshardError, IncompleteError, NotFoundError, UnsafeFormatError
from hubshard.plan import MAX_FILE_BYTES, plan_shards
from hubshard.publish.from_store import from_store
from hubshard.publish.outgoing import Layout, Outgoing
from hubshard.publish.staging import publish_key
from hubshard.sizes import READ_BYTES
from hubshard.sources.safetensors import SafetensorsSource
from hubshard.store.opening import open_path
from hubshard.tensors import TensorSpec

UNET, VAE = "unet/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors"
PIPELINE = ("model_index.json", "unet/config.json", UNET, "vae/config.json", VAE, "text_encoder/model.safetensors")
SPECS = [TensorSpec(f"w{n}", "U8", (400,)) for n in range(4)]


def tensors_file() -> bytes:
    (shard,) = plan_shards(SPECS, max_shard_bytes=10**9).shards
    return shard.header + bytes(sum(spec.nbytes for spec in SPECS))


def write(folder: Path, *paths: str, **contents: str) -> Path:
    """Files of these paths: safetensors with some tensors, JSON objects, and others with a few bytes."""
    for path in paths:
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".safetensors"):
            file.write_bytes(tensors_file())
        else:
            file.write_text(contents.get(file.name.partition(".")[0], "{}"))
    return folder


def outgoing(folder: Path, *, max_shard_bytes: int = 10**9, variant: str | None = None, **more: list[str]) -> Outgoing:
    return from_store(open_path(folder), Layout(max_shard_bytes, variant), **more)


def paths_of(out: Outgoing) -> set[str]:
    return {file.path for file in out.all_files}


def test_each_folder_of_a_pipeline_is_a_component_and_all_else_goes_along(tmp_path: Path) -> None:
    more = ("README.md", "scheduler/scheduler_config.json", "v1-5-pruned.safetensors", "tokenizer/vocab.json")
    folder = write(tmp_path, *PIPELINE, *more)
    out = outgoing(folder)
    assert [(plan.folder, plan.stem) for plan in out.plans] == [
        ("text_encoder", "model"),
        ("unet", "diffusion_pytorch_model"),
        ("vae", "diffusion_pytorch_model"),
    ]
    assert paths_of(out) == {*PIPELINE, *more}
    assert out.notes == ()
    for shard in out.shards:
        assert b"".join(map(bytes, shard.data())) == tensors_file()


def test_components_are_cut_to_the_bound_each_with_an_index_of_its_own(tmp_path: Path) -> None:
    out = outgoing(write(tmp_path, *PIPELINE), max_shard_bytes=1200)
    for plan in out.plans:
        (index,) = (file for file in out.files if file.path == plan.index_path)
        weight_map = json.loads(b"".join(map(bytes, index.data())))["weight_map"]
        assert {plan.path_of(name) for name in weight_map.values()} == {shard.path for shard in plan.shards}
        assert len(plan.shards) == 2
    assert len(out.shards) == 6


def test_twins_and_other_variants_of_a_component_stay_and_are_named(tmp_path: Path) -> None:
    left = {
        "unet/diffusion_pytorch_model.bin",
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "text_encoder/pytorch_model.bin",
    }
    out = outgoing(write(tmp_path, *PIPELINE, *left, "unet/adapter_model.safetensors"))
    assert paths_of(out) == {*PIPELINE, "unet/adapter_model.safetensors"}
    assert {note.partition(" is left out")[0] for note in out.notes} == left


def test_what_a_component_replaces_lies_in_its_folder_and_has_its_stem_and_variant(tmp_path: Path) -> None:
    out = outgoing(write(tmp_path, *PIPELINE))
    replaced = ["unet/diffusion_pytorch_model.bin", "vae/diffusion_pytorch_model-1-of-2.safetensors"]
    replaced += ["text_encoder/pytorch_model.bin", "text_encoder/model.safetensors.index.json"]
    kept = ["diffusion_pytorch_model.bin", "model.safetensors", "unet/model.safetensors", "text_encoder_2/model.bin"]
    kept += ["unet/diffusion_pytorch_model.fp16.safetensors", "unet/x/diffusion_pytorch_model.safetensors"]
    assert [path for path in replaced + kept if out.replaces(path)] == replaced


def test_weights_that_go_along_take_the_place_of_those_of_their_folder_stem_and_variant(tmp_path: Path) -> None:
    out = outgoing(write(tmp_path, "model.safetensors", "a/model.safetensors", "b/model.fp16.safetensors"))
    replaced = ["a/model-1-of-2.safetensors", "a/pytorch_model.bin", "b/model.fp16-00001-of-00002.safetensors"]
    replaced += ["model.safetensors.index.json"]
    kept = ["b/model.safetensors", "a/b/model.safetensors", "c/model.safetensors", "c/adapter_model.safetensors"]
    assert [path for path in replaced + kept if out.replaces(path)] == replaced


def test_an_adapter_gives_way_to_a_model_beside_it_unless_the_source_holds_both(tmp_path: Path) -> None:
    adapter = ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"]
    others = ["adapter_config.json.md", "style/adapter_model.safetensors", "config.json", "adapters.json"]
    out = outgoing(write(tmp_path, "model.safetensors", "b/model.safetensors"))
    in_folder = [f"b/{path}" for path in adapter]
    assert [path for path in adapter + in_folder + others if out.replaces(path)] == adapter + in_folder
    out = outgoing(write(tmp_path, "adapter_model.safetensors"))
    assert [path for path in adapter + in_folder + others if out.replaces(path)] == [
        "adapter_model.safetensors",
        "adapter_model.bin",
        *in_folder,
    ]
    out = outgoing(write(tmp_path / "lora", *adapter[:2]))
    assert not out.replaces("adapter_config.json")


@pytest.mark.parametrize(
    ("configs", "weights", "chosen"),
    [
        ({"config": {"_diffusers_version": "0.42.1"}}, "diffusion_pytorch_model", "diffusion_pytorch_model"),
        ({"config": {"model_type": "llama"}}, "diffusion_pytorch_model", "model"),
        ({"adapter_config": {}}, "adapter_model", "adapter_model"),
        ({"adapter_config": {}, "config": {}}, "adapter_model", "model"),
        ({}, "adapter_model", "model"),
    ],
)
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_where_weights_of_two_loaders_lie_the_config_tells_which_are_the_checkpoint(
    tmp_path: Path, configs: Mapping[str, object], weights: str, chosen: str, variant: str | None
) -> None:
    paths = [f"a/{stem}{f'.{variant}' if variant else ''}.safetensors" for stem in ("model", weights)]
    write(tmp_path, "modules.json", *paths)
    for name, config in configs.items():
        (tmp_path / "a" / f"{name}.json").write_text(json.dumps(config))
    want = next(path for path in paths if path.startswith(f"a/{chosen}."))
    if variant is None or chosen != "adapter_model":
        out = outgoing(tmp_path, variant=variant)
        assert [shard.path for shard in out.shards] == [want]
    opened = open_path(tmp_path)
    assert SafetensorsSource(opened.store, opened.at, folder="a", variant=variant).weight_files == (want,)


@pytest.mark.parametrize("also", [(), ("1_Pooling/config.json",), ("modules.json",)])
def test_beside_a_checkpoint_in_the_root_those_in_folders_go_along(tmp_path: Path, also: tuple[str, ...]) -> None:
    paths = {"model.safetensors", "config.json", "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin", *also}
    out = outgoing(write(tmp_path, *paths), max_shard_bytes=1200)
    assert [plan.folder for plan in out.plans] == [""]
    assert paths_of(out) >= {"2_Dense/model.safetensors", "2_Dense/pytorch_model.bin"}
    assert len(out.shards) == 2


def test_a_checkpoint_in_the_root_of_a_pipeline_is_one_more_component(tmp_path: Path) -> None:
    out = outgoing(write(tmp_path, *PIPELINE, "model.safetensors"))
    assert [plan.folder for plan in out.plans] == ["", "text_encoder", "unet", "vae"]


@pytest.mark.parametrize(
    ("paths", "folders"),
    [
        (
            ("modules.json", "0_Transformer/model.safetensors", "2_Dense/model.safetensors"),
            ["0_Transformer", "2_Dense"],
        ),
        (("modular_model_index.json", UNET), ["unet"]),
        (("README.md", "style/adapter_model.safetensors", "tone/adapter_model.safetensors"), ["style", "tone"]),
        (("model_index.json", "pipe/unet/diffusion_pytorch_model.safetensors"), ["pipe/unet"]),
    ],
)
def test_other_things_that_lie_in_several_folders(tmp_path: Path, paths: tuple[str, ...], folders: list[str]) -> None:
    out = outgoing(write(tmp_path, *paths))
    assert [plan.folder for plan in out.plans] == folders
    assert paths_of(out) == set(paths)


@pytest.mark.parametrize(
    ("paths", "error", "says"),
    [
        ((*PIPELINE, "safety_checker/pytorch_model.bin"), UnsafeFormatError, "safety_checker/pytorch_model.bin"),
        (("model_index.json", "unet/diffusion_pytorch_model.bin"), UnsafeFormatError, "unet/diffusion_pytorch_model"),
        ((*PIPELINE, "lora/adapter_model.bin"), UnsafeFormatError, "lora holds only pickled"),
        (("pytorch_model.bin", "2_Dense/model.safetensors"), UnsafeFormatError, "pytorch_model.bin"),
        ((*PIPELINE, "vae_2/model-1-of-2.safetensors"), IncompleteError, "vae_2 holds shards"),
        ((*PIPELINE, "vae_2/model.bf16.safetensors"), NotFoundError, "vae_2 holds no model.safetensors"),
        (("final/model.safetensors",), NotFoundError, "only folders"),
        (("README.md", "a/unet/model.safetensors"), NotFoundError, "holds no weights; there are: README.md"),
        (("a/model.safetensors", "b/model.safetensors", "README.md"), NotFoundError, "README.md"),
        (("model_index.json", "scheduler/scheduler_config.json"), NotFoundError, "holds no model.safetensors"),
    ],
)
def test_a_component_that_is_none_is_refused_by_name(
    tmp_path: Path, paths: tuple[str, ...], error: type[HubshardError], says: str
) -> None:
    with pytest.raises(error) as caught:
        outgoing(write(tmp_path, *paths))
    assert type(caught.value) is error
    assert says in str(caught.value)


COMPONENTS = {"unet": ["diffusers", "UNet"], "vae": ["diffusers", "VAE"], "scheduler": ["diffusers", "DDIM"]}
INDEX = json.dumps({"_class_name": "P", "safety_checker": [None, None], "_n": ["a", "b"], **COMPONENTS})
SCHEDULER = "scheduler/scheduler_config.json"


@pytest.mark.parametrize(
    ("lost", "says", "excludes"),
    [
        (VAE, "vae holds no weights", ["vae/*", "vae", "vae/*.safetensors"]),
        ("vae", "the component vae, but there is no such folder", ["vae/*", "vae/"]),
        (SCHEDULER, "the component scheduler, but there is no such folder", ["scheduler/*", "sched*"]),
    ],
)
def test_a_pipeline_without_a_component_that_it_names_is_refused_unless_that_is_excluded(
    tmp_path: Path, lost: str, says: str, excludes: list[str]
) -> None:
    write(tmp_path, *PIPELINE, SCHEDULER, "text_encoder/config.json", model_index=INDEX)
    whole = outgoing(tmp_path)
    for path in paths_of(whole):
        if path == lost or path.startswith(f"{lost}/"):
            (tmp_path / path).unlink()
    with pytest.raises(NotFoundError, match=says) as caught:
        outgoing(tmp_path)
    assert "`exclude`" in str(caught.value.hint)
    with pytest.raises(NotFoundError, match=says):
        outgoing(tmp_path, exclude=["unet/*", "*.md"])
    for pattern in excludes:
        assert "unet" in {plan.folder for plan in outgoing(tmp_path, exclude=[pattern]).plans}


@pytest.mark.parametrize("raw", ["[]", "{", "3"])
def test_a_list_of_components_that_is_no_object_is_refused(tmp_path: Path, raw: str) -> None:
    write(tmp_path, *PIPELINE, model_index=raw)
    with pytest.raises(FormatError, match=r"model_index\.json"):
        outgoing(tmp_path)


def test_where_only_folders_hold_checkpoints_the_hint_says_what_to_publish(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        outgoing(write(tmp_path, "README.md", UNET, VAE))
    assert str(tmp_path / "unet") in str(caught.value.hint)


def test_where_all_weights_are_excluded_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        NotFoundError, match=r"`exclude` leaves no weights: .*text_encoder, unet, vae .*\*\.safetensors"
    ):
        outgoing(write(tmp_path, *PIPELINE), exclude=["*.safetensors"])


def sharded(folder: Path, *, names: int = 2) -> Path:
    """Two shards and an index that names so many of them."""
    plan = plan_shards(SPECS, max_shard_bytes=1200)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for shard in plan.shards:
        (folder / shard.name).write_bytes(shard.header + bytes(sum(spec.nbytes for spec in shard.specs)))
        weight_map |= {spec.name: shard.name for spec in shard.specs}
    named = {tensor: file for tensor, file in weight_map.items() if file <= f"model-0000{names}-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))
    return folder


def test_an_index_that_omits_a_shard_of_its_own_is_refused(tmp_path: Path) -> None:
    write(sharded(tmp_path, names=1), "model-00001-of-00003.safetensors", "model.fp16-00002-of-00002.safetensors")
    omitted = "model-00002-of-00002.safetensors"
    with pytest.raises(FormatError, match=rf"index\.json: does not name {omitted}, by its name") as told:
        outgoing(tmp_path)
    assert "leave it out with `exclude`" in str(told.value.hint)
    out = outgoing(tmp_path, exclude=[omitted, "model.fp16*"])
    assert paths_of(out) == {"model.safetensors"}
    assert [note for note in out.notes if "model-00001-of-00003.safetensors is left out" in note], "an earlier save"
    sharded(tmp_path)
    assert len(outgoing(tmp_path).shards) == 2


@pytest.mark.parametrize(
    ("make", "says", "pattern"),
    [
        (lambda sub: (sub / "model-00001-of-00002.safetensors").unlink(), "1 of the 2 shards", "sub/*"),
        (lambda sub: (sub / "model.safetensors.index.json").unlink(), "sub/model-00001-of-00002.*no index", "sub/*"),
        (lambda sub: (sub / "model.safetensors.index.json").write_text("{"), "sub/model.safetensors.index", "sub/*"),
        (lambda sub: (sub / "lora.safetensors").write_bytes(b"garbage"), "sub/lora.safetensors: 7 bytes", "*/lora*"),
        (lambda sub: (sub / "../adapter_model.safetensors").write_bytes(b"x"), ": adapter_model.safetens", "adapter*"),
    ],
)
def test_weights_that_go_along_are_looked_at_as_a_pull_will(
    tmp_path: Path, make: Callable[[Path], object], says: str, pattern: str
) -> None:
    write(tmp_path, "model.safetensors")
    whole = paths_of(outgoing(sharded(tmp_path / "sub").parent))
    assert len(whole) == 4
    make(tmp_path / "sub")
    with pytest.raises(HubshardError, match=says) as told:
        outgoing(tmp_path)
    assert str(told.value).startswith(str(tmp_path))
    assert "leave it out with `exclude`" in str(told.value.hint)
    assert "model.safetensors" in paths_of(outgoing(tmp_path, exclude=[pattern]))


def test_a_shard_that_is_excluded_is_missed_by_its_index(tmp_path: Path) -> None:
    sharded(write(tmp_path, "model.safetensors") / "sub")
    with pytest.raises(NotFoundError, match="1 of the 2 shards"):
        outgoing(tmp_path, exclude=["sub/*-00001-*"])


UNET_CONFIG = {"_class_name": "UNet2DConditionModel"}


@pytest.mark.parametrize(
    ("config", "has", "gets"),
    [
        (UNET_CONFIG, "model", "diffusion_pytorch_model"),
        ({"_diffusers_version": "0.42.1"}, "model", "diffusion_pytorch_model"),
        ({"model_type": "clip_text_model"}, "diffusion_pytorch_model", "model"),
        ({"hidden_size": 3}, "diffusion_pytorch_model", "diffusion_pytorch_model"),
        (UNET_CONFIG, "adapter_model", "adapter_model"),
    ],
)
@pytest.mark.parametrize("folder", ["", "unet/"])
def test_weights_get_the_name_that_the_loader_of_their_config_looks_for(
    tmp_path: Path, folder: str, config: Mapping[str, str], has: str, gets: str
) -> None:
    paths = [f"{folder}{has}.safetensors", f"{folder}config.json"]
    write(tmp_path, *paths, *(["model_index.json"] if folder else []), config=json.dumps(config))
    out = outgoing(tmp_path)
    assert [shard.path for shard in out.shards] == [f"{folder}{gets}.safetensors"]
    note = f"{paths[0]} is published under the name that loaders look for: {folder}{gets}.safetensors"
    assert [each for each in out.notes if each.startswith(note)] == list(out.notes)
    assert bool(out.notes) == (has != gets)
    many = outgoing(tmp_path, max_shard_bytes=1200)
    assert {shard.path.partition("-0")[0] for shard in many.shards} <= {
        f"{folder}{gets}",
        f"{folder}{gets}.safetensors",
    }


def test_components_that_diffusers_could_not_load_are_told_of(tmp_path: Path) -> None:
    write(tmp_path, *PIPELINE, SCHEDULER, "text_encoder/config.json", model_index=INDEX)
    assert outgoing(tmp_path).notes == ()
    (tmp_path / "vae" / "config.json").unlink()
    assert outgoing(tmp_path).notes == (
        "vae holds weights, but no config.json, by which loaders know what to make of them",
    )
    (tmp_path / VAE).rename(tmp_path / "vae" / "notes.txt")
    (note,) = outgoing(tmp_path).notes
    assert note == "vae: model_index.json names this component, but it holds neither a config nor weights"
    assert outgoing(tmp_path, exclude=["vae/*"]).notes == ()
    for name in ("preprocessor_config.json", "vocab.txt", "spiece.model"):
        (tmp_path / "vae" / "notes.txt").rename(tmp_path / "vae" / name)
        assert outgoing(tmp_path).notes == ()
        (tmp_path / "vae" / name).rename(tmp_path / "vae" / "notes.txt")


def test_a_component_without_a_tensor_is_named(tmp_path: Path) -> None:
    write(tmp_path, *PIPELINE)
    (tmp_path / VAE).write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(FormatError, match=rf"^{tmp_path}: vae: there is no tensor"):
        outgoing(tmp_path)


@pytest.mark.parametrize("paths", [("adapter_model.safetensors",), (*PIPELINE, "lora/adapter_model.safetensors")])
def test_a_variant_of_an_adapter_is_refused_since_peft_loads_none(tmp_path: Path, paths: tuple[str, ...]) -> None:
    with pytest.raises(FormatError, match=r"adapter_model\.fp16\.safetensors: peft loads no variant") as caught:
        outgoing(write(tmp_path, *paths), variant="fp16")
    assert "another repo or branch" in str(caught.value.hint)


@pytest.mark.parametrize("max_shard_bytes", [10**9, MAX_FILE_BYTES])
def test_shards_of_an_adapter_are_joined_whatever_the_bound(tmp_path: Path, max_shard_bytes: int) -> None:
    plan = plan_shards(SPECS, max_shard_bytes=1200)
    for shard in plan.shards:
        content = shard.header + bytes(sum(spec.nbytes for spec in shard.specs))
        (tmp_path / f"adapter_{shard.name}").write_bytes(content)
    (tmp_path / "adapter_model.safetensors.index.json").write_bytes(plan.index().replace(b"model-", b"adapter_model-"))
    out = outgoing(tmp_path, max_shard_bytes=max_shard_bytes)
    assert [shard.path for shard in out.shards] == ["adapter_model.safetensors"]


def test_a_component_that_is_excluded_stays(tmp_path: Path) -> None:
    folder = write(tmp_path, *PIPELINE, "safety_checker/pytorch_model.bin", "vae/notes.txt")
    out = outgoing(folder, exclude=["safety_checker/*", "vae/*"])
    assert [plan.folder for plan in out.plans] == ["text_encoder", "unet"]
    assert not any(path.startswith(("vae", "safety_checker")) for path in paths_of(out))


def test_folders_of_a_training_run_are_no_components(tmp_path: Path) -> None:
    folder = write(tmp_path, *PIPELINE, "checkpoint-500/unet/diffusion_pytorch_model.safetensors", "step-8/x.json")
    out = outgoing(folder)
    assert [plan.folder for plan in out.plans] == ["text_encoder", "unet", "vae"]
    assert any(note.startswith("checkpoint-500/") for note in out.notes)


def test_a_variant_is_read_where_there_is_one_and_all_components_get_its_name(tmp_path: Path) -> None:
    folder = write(tmp_path, *PIPELINE, "unet/diffusion_pytorch_model.fp16.safetensors")
    out = outgoing(folder, variant="fp16")
    assert {shard.path for shard in out.shards} == {
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "vae/diffusion_pytorch_model.fp16.safetensors",
        "text_encoder/model.fp16.safetensors",
    }
    note = "no weights of the variant fp16 are in text_encoder, vae: the plain ones go under that name"
    assert note in out.notes
    (tmp_path / "unet" / "diffusion_pytorch_model.fp16.safetensors").unlink()
    assert note not in outgoing(folder, variant="fp16").notes


def test_pickles_of_a_variant_are_no_reason_not_to_read_the_plain_weights(tmp_path: Path) -> None:
    pickles = {"unet/diffusion_pytorch_model.fp16.bin", "text_encoder/pytorch_model.fp16.bin"}
    out = outgoing(write(tmp_path, *PIPELINE, *pickles, "vae/diffusion_pytorch_model.fp16.safetensors"), variant="fp16")
    assert {shard.path for shard in out.shards} == {
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "vae/diffusion_pytorch_model.fp16.safetensors",
        "text_encoder/model.fp16.safetensors",
    }
    assert "no weights of the variant fp16 are in text_encoder, unet: the plain ones go under that name" in out.notes
    assert {note.partition(" is left out")[0] for note in out.notes} >= pickles


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({}, "model.safetensors"),
        ({"_class_name": "UNet2DModel", "_diffusers_version": "0.42.1"}, "diffusion_pytorch_model.safetensors"),
    ],
)
def test_a_name_that_no_loader_looks_for_gives_way_to_one_that_the_configs_does(
    tmp_path: Path, config: Mapping[str, str], name: str
) -> None:
    folder = write(tmp_path, "foo.safetensors", "config.json", config=json.dumps(config))
    for opened in (folder, folder / "foo.safetensors"):
        out = from_store(open_path(opened), Layout(10**9))
        assert out.shards[0].path == (name if opened == folder else "model.safetensors")
        assert any("foo.safetensors is published under the name" in note for note in out.notes)
        assert any(out.shards[0].path in note for note in out.notes)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "diffusion_pytorch_model.safetensors"])
def test_a_file_that_is_named_keeps_its_stem(tmp_path: Path, name: str) -> None:
    write(tmp_path, name, "model.safetensors")
    out = from_store(open_path(tmp_path / name), Layout(10**9))
    assert [file.path for file in out.all_files] == [name]
    assert out.notes == ()


def test_the_key_of_one_checkpoint_is_what_it_was_and_of_several_depends_on_each(tmp_path: Path) -> None:
    whole = outgoing(write(tmp_path / "p", *PIPELINE))
    single = outgoing(write(tmp_path / "s", "model.safetensors"))
    assert publish_key(single.plans, repo_id="org/model", revision="main") == "f8a2063ab44095e6"
    keys = {publish_key(plans, repo_id="org/model", revision="main") for plans in (whole.plans, whole.plans[:2])}
    assert len(keys) == 2


def test_a_config_of_several_blocks_is_read_whole(tmp_path: Path) -> None:
    config = json.dumps({"padding": "x" * READ_BYTES})
    out = outgoing(write(tmp_path, "model.safetensors", "config.json", config=config))
    (file,) = out.files
    assert file.content() == config.encode()


def test_a_config_that_is_none_names_its_folder(tmp_path: Path) -> None:
    write(tmp_path, *PIPELINE)
    (tmp_path / "vae" / "config.json").write_text("[1")
    with pytest.raises(FormatError, match=rf"^{tmp_path}: vae/config\.json"):
        outgoing(tmp_path)
