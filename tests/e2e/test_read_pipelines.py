"""Repos with a checkpoint in each of several folders: pulled, looked at, compared, opened; diffusers loads what comes.

Everything is uploaded by the plain client.
"""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("diffusers", reason="needs diffusers, which the extra `test` has")
pytest.importorskip("peft", reason="needs peft, which the extra `test` has")
pytest.importorskip("starlette", reason="needs the extra hub")

ROOT = Path(__file__).parents[2]
BEGIN = """
    import json, os, sys
    from pathlib import Path

    import torch
    from huggingface_hub import HfApi

    import hubshard

    repo, place, api = sys.argv[1], Path(sys.argv[2]), HfApi()

    def upload(folder, **options):
        api.create_repo(repo, exist_ok=True)
        return api.upload_folder(repo_id=repo, folder_path=folder, **options).oid

    def files(folder):
        found = (path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file())
        return {path.as_posix() for path in found if path.parts[0] not in {".cache", ".gitattributes"}}
"""
DIFFUSERS = """
    import diffusers
    from diffusers import StableDiffusionPipeline as Pipeline

    from tests.e2e.small_pipelines import equal, llama, lora, stable_diffusion
"""
SAVE = """
    pipe = stable_diffusion(place / "tokenizer", 1)
    pipe.save_pretrained(place / "pipe")
    pipe.unet.half().save_pretrained(place / "pipe" / "unet", variant="fp16", max_shard_size="200KB")
    (place / "pipe" / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"a pickle")
    upload(place / "pipe")
"""
OFFLINE = {"HF_HUB_OFFLINE": "1"}


class Lab:
    """A repo, and clients in processes of their own."""

    def __init__(self, hub: Hub, repo: str, place: Path) -> None:
        self.hub, self.repo, self.place = hub, repo, place

    def run(self, code: str, *, diffusers: bool = True, **options: Any) -> str:
        parts = [BEGIN, DIFFUSERS if diffusers else "", code]
        program = "\n".join(map(dedent, parts))
        return self.hub.client(program, self.repo, self.place, cwd=ROOT, imports="torch", **options)

    def cli(self, *arguments: str | Path, status: int = 0) -> str:
        code = "import sys; from hubshard.cli.app import main; sys.argv[0] = 'hubshard'; sys.exit(main())"
        done = self.hub.try_client(code, *arguments, cwd=self.place)
        assert done.returncode == status, (done.stdout, done.stderr)
        return done.stdout if status == 0 else done.stdout + done.stderr


@pytest.fixture(scope="module")
def pipeline(module_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A pipeline whose unet has a second variant, in shards."""
    lab = Lab(module_hub, "org/pipeline", tmp_path_factory.mktemp("pipeline"))
    lab.run(SAVE)
    return lab


@pytest.fixture
def lab(module_hub: Hub, tmp_path: Path, request: pytest.FixtureRequest) -> Lab:
    return Lab(module_hub, f"lab/{request.node.name.replace('_', '-')[:60].strip('-[]')}", tmp_path)


def test_a_pull_into_the_cache_is_what_diffusers_loads_offline(pipeline: Lab, tmp_path: Path) -> None:
    code = """
    got = files(hubshard.pull(repo))
    assert got == {path for path in files(place / "pipe") if "fp16" not in path and not path.endswith(".bin")}, got
    """
    pipeline.run(code, home=tmp_path)
    code = "assert equal(Pipeline.from_pretrained(repo), Pipeline.from_pretrained(place / 'pipe'))"
    pipeline.run(code, home=tmp_path, env=OFFLINE)


def test_of_a_variant_each_component_comes_as_diffusers_wants_it(pipeline: Lab, tmp_path: Path) -> None:
    code = """
    got = files(hubshard.pull(repo, variant="fp16"))
    plain = {path for path in files(place / "pipe") if not path.startswith("unet/") and not path.endswith(".bin")}
    unet = {path for path in files(place / "pipe" / "unet") if "fp16" in path or path == "config.json"}
    assert len(unet) > 3, unet
    assert got == plain | {f"unet/{path}" for path in unet}, got
    """
    pipeline.run(code, home=tmp_path)
    code = """
    here = Pipeline.from_pretrained(place / "pipe", variant="fp16")
    assert equal(Pipeline.from_pretrained(repo, variant="fp16"), here)
    hubshard.load_into(here.unet, repo, subfolder="unet", variant="fp16")  # of the cache
    """
    pipeline.run(code, home=tmp_path, env=OFFLINE)


def test_a_pull_over_an_older_one_leaves_nothing_of_it_in_the_components(lab: Lab) -> None:
    code = """
    old = stable_diffusion(place / "tokenizer", 1)
    old.save_pretrained(place / "old", max_shard_size="200KB")
    upload(place / "old")
    assert equal(Pipeline.from_pretrained(hubshard.pull(repo, local_dir=place / "copy")), old)
    new = stable_diffusion(place / "tokenizer", 2)
    new.save_pretrained(place / "new")
    upload(place / "new", delete_patterns="*")
    hubshard.pull(repo, local_dir=place / "copy")
    assert files(place / "copy") == files(place / "new"), files(place / "copy")
    assert equal(Pipeline.from_pretrained(place / "copy"), new)
    found = hubshard.diff(place / "old", f"hf://{repo}")
    assert {name.partition("/")[0] for name in found.changed} == {"text_encoder", "unet", "vae"}
    assert not (found.added or found.removed or found.reshaped)
    """
    lab.run(code)


def test_inspect_shows_every_component_or_one(pipeline: Lab) -> None:
    shown = json.loads(pipeline.cli("inspect", pipeline.repo, "--json"))
    parts = {part["folder"]: part for part in shown["checkpoints"]}
    assert list(parts) == ["text_encoder", "unet", "vae"]
    assert sum(part["tensors"] for part in parts.values()) == len(shown["tensors"])
    assert sum(part["parameters"] for part in parts.values()) == shown["parameters"]
    names = {row["name"]: row["file"] for row in shown["tensors"]}
    assert names["unet/conv_in.weight"] == "unet/diffusion_pytorch_model.safetensors"
    shown = json.loads(pipeline.cli("inspect", pipeline.repo, "--json", "--subfolder", "unet", "--variant", "fp16"))
    assert {row["name"]: row["dtype"] for row in shown["tensors"]}["conv_in.weight"] == "F16"
    assert [part["folder"] for part in shown["checkpoints"]] == ["unet"]
    shown = json.loads(pipeline.cli("inspect", pipeline.repo, "--json", "--variant", "fp16"))
    assert set(shown["dtypes"]) == {"F32", "F16"}
    table = pipeline.cli("inspect", pipeline.place / "pipe")
    assert all(folder in table for folder in parts)


def test_inspect_of_what_was_pulled_works_without_a_network(pipeline: Lab, tmp_path: Path) -> None:
    pipeline.run("hubshard.pull(repo)", diffusers=False, home=tmp_path)
    code = """
    from hubshard.lazy.opening import open_checkpoints
    assert list(open_checkpoints(repo)) == ["text_encoder", "unet", "vae"]
    """
    pipeline.run(code, diffusers=False, home=tmp_path, env={"HF_ENDPOINT": "http://127.0.0.1:1"})


def test_verify_checks_every_component_and_what_the_pipeline_names(pipeline: Lab, tmp_path: Path) -> None:
    found = json.loads(pipeline.cli("verify", pipeline.repo, "--json"))
    shown = json.loads(pipeline.cli("inspect", pipeline.repo, "--json"))
    assert found["tensors"] == len(shown["tensors"])
    assert found["unknown"] == 0
    copy = tmp_path / "copy"
    pipeline.cli("pull", pipeline.repo, "--local-dir", copy, "--variant", "fp16")
    assert "0 problems" in pipeline.cli("verify", copy, "--variant", "fp16")
    flipped = bytearray((copy / "vae/diffusion_pytorch_model.safetensors").read_bytes())
    flipped[-1] ^= 1
    (copy / "vae/diffusion_pytorch_model.safetensors").write_bytes(flipped)
    shards = sorted((copy / "unet").glob("*fp16-*.safetensors"))
    shards[0].rename(shards[0].with_suffix(".old"))
    (copy / "text_encoder/model.safetensors").unlink()
    other = json.dumps({"metadata": {}, "weight_map": {"a": "model-1-of-1.safetensors"}})
    (copy / "vae/model.safetensors.index.json").write_text(other)
    (copy / "scheduler/scheduler_config.json").unlink()
    (copy / "scheduler").rmdir()
    said = pipeline.cli("verify", copy, "--variant", "fp16", "--against", pipeline.repo, status=1)
    assert f"names are not there: {shards[0].name}" in said
    assert "vae/diffusion_pytorch_model.safetensors: has the hash" in said
    assert "vae/model.safetensors.index.json: 1 of the 1 shards that it names are not there" in said
    assert "text_encoder holds no model.safetensors" in said
    assert "model_index.json: names the component scheduler, but there is no such folder" in said


def test_nested_modules_are_verified_and_compared_beside_the_root(lab: Lab) -> None:
    code = """
    from safetensors.torch import save_file

    def save(folder, value):
        for name in ("", "2_Dense"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            save_file({"w": torch.full((4,), value if name else 0.0)}, folder / name / "model.safetensors")

    save(place / "a", 1.0)
    save(place / "b", 2.0)
    upload(place / "a")
    found = hubshard.diff(repo, place / "b")
    assert (found.changed, found.same) == (("2_Dense/w",), 1)
    assert hubshard.verify(repo).tensors == 2
    raw = (place / "b/2_Dense/model.safetensors").read_bytes()
    (place / "b/2_Dense/model.safetensors").write_bytes(raw[:-1])
    (problem,) = hubshard.verify(place / "b").problems
    assert "2_Dense/model.safetensors" in problem.what, problem
    with hubshard.open_checkpoint(repo) as checkpoint:
        assert list(checkpoint) == ["w"]
    """
    lab.run(code, diffusers=False)
    shown = json.loads(lab.cli("inspect", lab.repo, "--json"))
    assert [row["name"] for row in shown["tensors"]] == ["w", "2_Dense/w"]
    (lab.place / "a/2_Dense/model.safetensors").write_bytes(b"broken")
    assert "2_Dense/model.safetensors" in lab.cli("inspect", lab.place / "a", status=1)
    shown = json.loads(lab.cli("inspect", lab.place / "a", "--subfolder", ".", "--json"))
    assert [row["name"] for row in shown["tensors"]] == ["w"]


def test_a_component_is_opened_and_loaded_by_its_folder_alone(pipeline: Lab, tmp_path: Path) -> None:
    code = """
    want = Pipeline.from_pretrained(place / "pipe")
    half = Pipeline.from_pretrained(place / "pipe", variant="fp16", torch_dtype=torch.float16)
    with hubshard.open_checkpoint(repo, subfolder="vae") as checkpoint:
        names = want.vae.state_dict()
        assert {name: tuple(tensor.shape) for name, tensor in checkpoint.items()} == {
            name: tuple(tensor.shape) for name, tensor in names.items()
        }
        assert all(torch.equal(checkpoint[name][...], names[name]) for name in names)
    for name in ("unet", "vae", "text_encoder"):
        model = getattr(stable_diffusion(place / "tokenizer", 5), name)
        report = hubshard.load_into(model, repo, subfolder=name, verify=True)
        assert equal(model, getattr(want, name)), name
    model = stable_diffusion(place / "tokenizer", 5).unet
    hubshard.load_into(model, repo, subfolder="unet", variant="fp16", dtype="float16")
    assert equal(model, half.unet)
    with torch.device("meta"):
        empty = diffusers.UNet2DConditionModel.from_config(model.config)
    hubshard.load_into(empty, place / "pipe", subfolder="unet", variant="fp16", strict=True)
    assert equal(empty, half.unet)
    text = hubshard.from_pretrained(repo, subfolder="text_encoder")
    assert equal(text, want.text_encoder)
    """
    pipeline.run(code, home=tmp_path)


def test_where_an_index_and_a_single_file_lie_diffusers_and_we_take_the_same(lab: Lab) -> None:
    code = """
    import shutil

    single, sharded = (stable_diffusion(place / "tokenizer", seed).vae for seed in (1, 2))
    single.save_pretrained(place / "pipe" / "vae")
    sharded.save_pretrained(place / "shards", max_shard_size="50KB")
    shutil.copytree(place / "shards", place / "pipe" / "vae", dirs_exist_ok=True)
    upload(place / "pipe")
    got = hubshard.pull(repo, local_dir=place / "copy")
    assert "vae/diffusion_pytorch_model.safetensors" not in files(got)
    load = diffusers.AutoencoderKL.from_pretrained
    want = load(place / "pipe", subfolder="vae")
    assert equal(load(got, subfolder="vae"), want) and not equal(single, want)
    hubshard.load_into(single, repo, subfolder="vae")
    assert equal(single, want)
    """
    lab.run(code)


def test_an_adapter_is_opened_by_its_folder(lab: Lab) -> None:
    code = """
    def rename(name):
        return name.replace("lora_A", "lora_A.default").replace("lora_B", "lora_B.default")

    model = lora(llama())
    model.save_pretrained(place / "adapters" / "style")
    upload(place / "adapters")
    want = {name: tensor for name, tensor in model.state_dict().items() if "lora" in name}
    with hubshard.open_checkpoint(repo, subfolder="style") as checkpoint:
        got = {rename(name): tensor[...] for name, tensor in checkpoint.items()}
    assert got.keys() == want.keys()
    assert all(torch.equal(tensor, want[name]) for name, tensor in got.items())
    other = lora(llama())
    report = hubshard.load_into(other, repo, subfolder="style", rename=rename, strict=False)
    assert not report.unexpected and equal(other, model)
    """
    lab.run(code)


def test_where_a_folder_must_be_named_the_error_says_which_there_are(pipeline: Lab) -> None:
    code = """
    def refused(call, *says):
        try:
            call()
        except (hubshard.NotFoundError, hubshard.FormatError) as error:
            text = f"{error} {error.hint}"
            assert all(word in text for word in says), text
        else:
            raise AssertionError("nothing was raised")

    folders = "text_encoder, unet, vae: name one of them as the subfolder"
    for where in (repo, place / "pipe"):
        refused(lambda: hubshard.open_checkpoint(where), folders)
        refused(lambda: hubshard.from_pretrained(where), folders)
        missing = "vae holds no diffusion_pytorch_model.fp16"
        refused(lambda: hubshard.open_checkpoint(where, subfolder="vae", variant="fp16"), missing)
        refused(lambda: hubshard.from_pretrained(where, subfolder="unet"), "UNet2DConditionModel", "load_into")
        refused(lambda: hubshard.open_checkpoint(where, subfolder="scheduler"), "scheduler holds no")
    with hubshard.open_checkpoint(repo, subfolder="vae") as checkpoint:
        model = torch.nn.Linear(1, 1)
        refused(lambda: hubshard.load_into(model, checkpoint, subfolder="unet"), "open already", "subfolder")
    """
    pipeline.run(code, diffusers=False)


def test_a_rollback_brings_a_pipeline_back(lab: Lab) -> None:
    code = """
    old = stable_diffusion(place / "tokenizer", 1)
    old.save_pretrained(place / "old", max_shard_size="200KB")
    first = upload(place / "old")
    stable_diffusion(place / "tokenizer", 2).save_pretrained(place / "new")
    upload(place / "new", delete_patterns="*")
    assert not hubshard.diff(repo, f"{repo}@{first}").is_empty
    done = hubshard.rollback(repo, to=first)
    assert hubshard.diff(repo, f"{repo}@{first}").is_empty and hubshard.verify(repo).ok
    assert equal(Pipeline.from_pretrained(hubshard.pull(repo)), old)
    """
    lab.run(code)
