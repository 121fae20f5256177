"""Models and pipelines of diffusers, published: diffusers itself loads them, bit by bit, whole, old or new."""

from __future__ import annotations

import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import warm
from tests.systems import KILLED

if TYPE_CHECKING:
    from tests.conftest import Hub

# looked for, not imported: the clients do that
MISSING = [name for name in ("diffusers", "peft", "starlette") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the extra test is not installed: no {', '.join(MISSING)}")

ROOT = Path(__file__).parents[2]
BEGIN = """
    import json, sys
    from pathlib import Path

    import diffusers
    import torch
    from huggingface_hub import HfApi

    import hubshard
    from tests.e2e.small_pipelines import ddpm, equal, stable_diffusion, unet

    place, api = Path(sys.argv[1]), HfApi()

    def files(repo, revision="main"):
        return sorted(set(api.list_repo_files(repo, revision=revision)) - {".gitattributes"})

    def of_folder(folder):
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
"""


def run(hub: Hub, code: str, place: Path) -> str:
    """Run code as a client that has all of the above."""
    return hub.client(textwrap.dedent(BEGIN) + textwrap.dedent(code), place, cwd=ROOT)


def test_a_model_in_memory_comes_out_as_its_own_save_pretrained_writes_it(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    model = unet()
    model.save_pretrained(place / "own")
    done = hubshard.push_to_hub(model, "org/unet")
    assert files("org/unet") == ["README.md", *of_folder(place / "own")], files("org/unet")
    got = Path(api.snapshot_download("org/unet"))
    assert (got / "config.json").read_bytes() == (place / "own" / "config.json").read_bytes()
    assert "library_name: \\"diffusers\\"" in (got / "README.md").read_text()
    assert equal(model, diffusers.UNet2DModel.from_pretrained("org/unet"))

    done = hubshard.push_to_hub(model, "org/unet", max_shard_size="300KB")
    assert done.deleted == ("diffusion_pytorch_model.safetensors",)
    assert "diffusion_pytorch_model.safetensors.index.json" in files("org/unet")
    assert equal(model, diffusers.UNet2DModel.from_pretrained("org/unet"))
    with hubshard.open_checkpoint("org/unet") as checkpoint:
        hubshard.load_into(other := unet(1), checkpoint)
    assert equal(model, other)

    hubshard.push_to_hub(model.half(), "org/unet", max_shard_size="300KB", variant="fp16")
    half = diffusers.UNet2DModel.from_pretrained("org/unet", variant="fp16", torch_dtype=torch.float16)
    assert half.dtype.itemsize == 2 and equal(model, half)
    assert not equal(model, diffusers.UNet2DModel.from_pretrained("org/unet"))
    """
    run(module_hub, code, tmp_path)


@pytest.mark.parametrize("bound", ["10GB", "300KB"])
def test_a_directory_that_diffusers_wrote_keeps_its_names(module_hub: Hub, tmp_path: Path, bound: str) -> None:
    code = f"""
    model, repo = unet(), "org/folder-{bound}"
    model.save_pretrained(place / "own", max_shard_size="{bound}")
    hubshard.push_to_hub(place / "own", repo)
    assert files(repo) == of_folder(place / "own")
    assert equal(model, diffusers.UNet2DModel.from_pretrained(repo))
    hubshard.push_to_hub(place / "own", repo, max_shard_size="200KB")
    assert len(files(repo)) > 6
    assert equal(model, diffusers.UNet2DModel.from_pretrained(repo))
    assert hubshard.verify(repo).ok

    api.upload_file(path_or_fileobj=b"pickles", path_in_repo="diffusion_pytorch_model.bin", repo_id=repo)
    api.upload_file(path_or_fileobj=b"others", path_in_repo="pytorch_model.bin", repo_id=repo)
    done = hubshard.push_to_hub(place / "own", repo, max_shard_size="200KB")
    assert done.deleted == ("diffusion_pytorch_model.bin",)
    assert "pytorch_model.bin" in files(repo)

    hubshard.push_to_hub(repo, repo + "-copy")
    assert equal(model, diffusers.UNet2DModel.from_pretrained(repo + "-copy"))
    """
    run(module_hub, code, tmp_path)


def test_a_pipeline_is_published_whole_by_one_commit(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    pipeline, repo = stable_diffusion(place / "words"), "org/pipeline"
    pipeline.save_pretrained(place / "own")
    done = hubshard.push_to_hub(place / "own", repo, max_shard_size="300KB", message="The pipeline")
    assert [commit.title for commit in api.list_repo_commits(repo)] == ["The pipeline", "initial commit"]
    assert [plan.folder for plan in done.plans] == ["text_encoder", "unet", "vae"]
    there = files(repo)
    for path in ("unet/diffusion_pytorch_model.safetensors.index.json", "vae/config.json", "model_index.json",
                 "text_encoder/model.safetensors", "tokenizer/tokenizer.json", "scheduler/scheduler_config.json"):
        assert path in there, path
    assert "unet/diffusion_pytorch_model.safetensors" not in there
    assert equal(pipeline, diffusers.DiffusionPipeline.from_pretrained(repo))
    assert hubshard.verify(repo).ok

    again = hubshard.push_to_hub(place / "own", repo, max_shard_size="300KB")
    assert not again.changed and again.sent_bytes == 0
    whole = hubshard.push_to_hub(place / "own", repo)
    assert set(whole.deleted) == {path for path in there if "diffusion_pytorch_model" in path}
    assert files(repo) == of_folder(place / "own")
    assert equal(pipeline, diffusers.DiffusionPipeline.from_pretrained(repo))

    hubshard.push_to_hub(repo, "org/pipeline-copy", max_shard_size="300KB")
    assert files("org/pipeline-copy") == there
    assert equal(pipeline, diffusers.DiffusionPipeline.from_pretrained("org/pipeline-copy"))
    """
    run(module_hub, code, tmp_path)


def test_a_pipeline_in_memory_comes_out_as_its_own_save_pretrained_writes_it(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    pipeline = stable_diffusion(place / "words")
    hubshard.push_to_hub(pipeline, "org/memory", companions=[pipeline.tokenizer])
    pipeline.save_pretrained(place / "own")
    got = Path(api.snapshot_download("org/memory"))
    own = of_folder(place / "own")
    assert set(own) | {"README.md", "tokenizer.json", "tokenizer_config.json"} == set(files("org/memory"))
    for path in own:
        if not path.endswith(".safetensors"):
            assert (got / path).read_bytes() == (place / "own" / path).read_bytes(), path
    assert equal(pipeline, diffusers.DiffusionPipeline.from_pretrained("org/memory"))
    done = hubshard.push_to_hub(place / "own", "org/memory")
    assert not any(path.endswith(".safetensors") for path in done.deleted)

    hubshard.push_to_hub(ddpm(), "org/ddpm", max_shard_size="300KB", dtype="bfloat16")
    loaded = diffusers.DDPMPipeline.from_pretrained("org/ddpm", torch_dtype=torch.bfloat16)
    assert equal(ddpm().to(dtype=torch.bfloat16), loaded)
    """
    run(module_hub, code, tmp_path)


def test_a_pipeline_that_cannot_be_published_whole_is_refused_before_a_repo_is_made(
    module_hub: Hub, tmp_path: Path
) -> None:
    code = """
    def refused(source, repo, *says):
        try:
            hubshard.push_to_hub(source, repo)
        except hubshard.HubshardError as error:
            text = f"{error} {error.hint}"
            assert all(part in text for part in says), text
            assert not api.repo_exists(repo)
        else:
            raise AssertionError("nothing was raised")

    def control():
        blocks = dict(block_out_channels=(32, 32), down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"))
        sizes = dict(layers_per_block=1, cross_attention_dim=32, norm_num_groups=8, attention_head_dim=8)
        return diffusers.ControlNetModel(conditioning_embedding_out_channels=(16, 32), **blocks, **sizes)

    plain = stable_diffusion(place / "words")
    both = diffusers.StableDiffusionControlNetPipeline(
        **plain.components, controlnet=[control(), control()], requires_safety_checker=False
    )
    way_out = "save_pretrained, and publish the directory"
    refused(both, "org/refused", "controlnet: a MultiControlNetModel", way_out)
    refused(both.controlnet, "org/refused", "a MultiControlNetModel cannot be published from memory", way_out)
    both.save_pretrained(place / "both")
    done = hubshard.push_to_hub(place / "both", "org/both")
    assert {"controlnet", "controlnet_1"} < {plan.folder for plan in done.plans}
    assert files("org/both") == of_folder(place / "both")

    (place / "both" / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    refused(place / "both", "org/refused", "model_index.json names the component vae", "`exclude`")
    done = hubshard.push_to_hub(place / "both", "org/both", exclude=["vae/*"])
    assert not done.changed and hubshard.verify("org/both").ok

    cpu = torch.device("cpu")
    plain.unet.enable_group_offload(cpu, cpu, offload_type="leaf_level", offload_to_disk_path=str(place / "offloaded"))
    refused(plain, "org/refused", "unet: UNet2DConditionModel: group offloading", "enable_group_offload")
    """
    run(module_hub, code, tmp_path)


def test_nested_weights_that_go_along_leave_none_of_the_old_ones_beside_them(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    import transformers
    from tests.e2e.small_pipelines import llama

    llama().save_pretrained(place / "own")
    llama().save_pretrained(place / "own" / "decoder")
    hubshard.push_to_hub(place / "own", "org/nested")
    (place / "own" / "decoder" / "model.safetensors").unlink()
    llama(5).save_pretrained(place / "own" / "decoder", max_shard_size="20KB")
    done = hubshard.push_to_hub(place / "own", "org/nested")
    assert done.deleted == ("decoder/model.safetensors",)
    assert files("org/nested") == sorted(of_folder(place / "own"))
    loaded = transformers.LlamaForCausalLM.from_pretrained("org/nested", subfolder="decoder")
    assert equal(loaded, llama(5))
    """
    run(module_hub, code, tmp_path)


def test_a_variant_of_a_pipeline_is_read_where_there_is_one_and_leaves_the_plain_weights_alone(
    module_hub: Hub, tmp_path: Path
) -> None:
    code = """
    pipeline, repo = stable_diffusion(place / "words"), "org/variants"
    pipeline.save_pretrained(place / "own")
    hubshard.push_to_hub(place / "own", repo)
    halves = stable_diffusion(place / "words", 1)
    halves.save_pretrained(place / "half")
    halves.unet.save_pretrained(place / "own" / "unet", variant="fp16")
    events = []
    done = hubshard.push_to_hub(
        place / "own", repo, variant="fp16", max_shard_size="300KB", on_event=events.append
    )
    assert done.deleted == ()
    said = [event.detail for event in events if event.kind == "warning"]
    assert any("no weights of the variant fp16 are in text_encoder, vae" in detail for detail in said), said
    assert equal(pipeline, diffusers.DiffusionPipeline.from_pretrained(repo))
    loaded = diffusers.DiffusionPipeline.from_pretrained(repo, variant="fp16")
    assert equal(loaded.unet, halves.unet) and equal(loaded.vae, pipeline.vae)
    assert "unet/diffusion_pytorch_model.safetensors.index.fp16.json" in files(repo)
    assert "text_encoder/model.fp16.safetensors" in files(repo)

    hubshard.push_to_hub(place / "half", repo + "-made", variant="fp16", dtype="float16")
    made = diffusers.DiffusionPipeline.from_pretrained(repo + "-made", variant="fp16", torch_dtype=torch.float16)
    assert equal(halves.to(dtype=torch.float16), made)
    config = json.loads(Path(api.hf_hub_download(repo + "-made", "text_encoder/config.json")).read_text())
    assert config["dtype"] == "float32"  # that of the variants which may come beside it
    hubshard.push_to_hub(pipeline, repo + "-made", variant="bf16", dtype="bfloat16")
    config = json.loads(Path(api.hf_hub_download(repo + "-made", "text_encoder/config.json")).read_text())
    assert config["dtype"] == "float32"
    """
    run(module_hub, code, tmp_path)


def test_killed_half_way_diffusers_reads_the_old_pipeline_and_the_next_run_goes_on(
    module_hub: Hub, tmp_path: Path
) -> None:
    code = """
    import os, signal

    for seed in (0, 1):
        stable_diffusion(place / "words", seed).save_pretrained(place / str(seed))
    hubshard.push_to_hub(place / "0", "org/killed")

    def die(event):
        if event.kind == "staging" and "unet" in event.detail:
            os.kill(os.getpid(), signal.SIGKILL)

    hubshard.push_to_hub(place / "1", "org/killed", max_shard_size="300KB", staging_batch_size=1, on_event=die)
    """
    done = module_hub.try_client(textwrap.dedent(BEGIN) + textwrap.dedent(code), tmp_path, cwd=ROOT)
    assert done.returncode == KILLED, done.stderr
    module_hub.reset_counters()
    code = """
    old, new = (stable_diffusion(place / "words", seed) for seed in (0, 1))
    assert equal(old, diffusers.DiffusionPipeline.from_pretrained("org/killed"))
    done = hubshard.push_to_hub(place / "1", "org/killed", max_shard_size="300KB", staging_batch_size=1)
    first = {"text_encoder/model.safetensors", "unet/diffusion_pytorch_model-00001-of-00006.safetensors"}
    nbytes = {shard.path: shard.nbytes for plan in done.plans for shard in plan.shards}
    assert first < nbytes.keys(), nbytes
    assert done.skipped_bytes >= sum(nbytes[path] for path in first)
    assert equal(new, diffusers.DiffusionPipeline.from_pretrained("org/killed"))
    print(sum(nbytes[path] for path in nbytes.keys() - first))
    """
    nbytes = int(run(module_hub, code, tmp_path).split()[-1])
    counted = module_hub.counters("models/org/killed")
    assert counted["xet_received"] <= nbytes + 10_000


def test_a_dry_run_shows_the_folder_of_each_shard(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    stable_diffusion(place / "words").save_pretrained(place / "own")
    """
    run(module_hub, code, tmp_path)
    env = module_hub.client_env()
    done = warm.run(["-m", "hubshard", "publish", tmp_path / "own", "org/dry", "--dry-run"], imports="client", env=env)
    assert done.returncode == 0, done.stderr
    for path in ("text_encoder/model.safetensors", "unet/diffusion_pytorch_model.safetensors", "vae/diffusion"):
        assert path in done.stdout
    assert "3 shards" in done.stdout
    assert module_hub.api()("GET", "/api/models/org/dry").status == 404
