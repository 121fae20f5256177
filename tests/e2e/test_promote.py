"""The model of a saved step becomes what main shows: by ranged reads, in one commit, killed or not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hubshard
from hubshard.errors import ConflictError, FormatError, IncompleteError, IntegrityError, NotFoundError
from hubshard.promotion import Promoted, promote
from hubshard.steps.places import LocalPlace
from hubshard.steps.step import step_folder
from hubshard.steps.writing import commit_step, stage_local
from hubshard.store.hub import HubStore
from tests import warm
from tests.faults.models import INDEX, Repo, equal, new_repo
from tests.faults.proxy import Answer, Exchange, proxied
from tests.steps.saving import random_tensors, save_step

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("starlette")

Tensors = dict[str, tuple[str, Any]]
CONFIG = {"architectures": ["X"], "dtype": "float32", "text_config": {"dtype": "float32"}}


@pytest.fixture
def repo(module_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    """A repo of the test's own, with a config and a tokenizer on main."""
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))
    made = new_repo(module_hub)
    made.put_files({"config.json": json.dumps(CONFIG).encode(), "tokenizer.json": b"{}", "README.md": b"# Ours\n"})
    return made


def model(seed: int = 0, layers: int = 4, shape: tuple[int, ...] = (300, 64)) -> Tensors:
    """A model and what else a run keeps, which nobody wants to publish."""
    return random_tensors(layers, shape, seed=seed) | random_tensors(
        layers, shape, seed=seed + 1000, prefix="optimizer.m."
    )


def values(tensors: Tensors, part: str = "model.") -> dict[str, Any]:
    return {name.removeprefix(part): array for name, (_, array) in tensors.items() if name.startswith(part)}


def put_step(repo: Repo, root: Path, step: int, *, branch: str = "resume") -> None:
    """Commit a step of a local folder to the branch."""
    store = HubStore(repo.repo_id, token="hf_test", endpoint=repo.hub.url)
    opened = LocalPlace(root).open(step)
    folder = root / step_folder(step)
    staged = [stage_local(store, branch, folder / file.name, file, step=step) for file in opened.step.files]
    raw = (folder / "manifest.json").read_bytes()
    commit_step(store, branch, parent=store.head(branch), step=opened.step, raw=raw, staged=staged)


def run(repo: Repo, **options: Any) -> Promoted:
    return promote(repo.repo_id, token="hf_test", endpoint=repo.url, **options)


# What it does


def test_a_step_becomes_the_model_of_main_in_one_commit_and_everything_else_stays(repo: Repo, tmp_path: Path) -> None:
    repo.put_files({"model-00001-of-00002.safetensors": b"old", "model.fp16.safetensors": b"another variant"})
    before = repo.files()
    tensors = model(layers=16, shape=(500, 300))
    save_step(tmp_path / "steps", tensors, step=40, world=3, dims=(0, -1), block_bytes=2**16)
    put_step(repo, tmp_path / "steps", 40)
    moved = repo.nbytes_sent()
    done = run(repo, step=40, max_shard_size="5MB", tag="v1")
    moved = repo.nbytes_sent() - moved
    assert equal(repo.tensors(tmp_path / "cache"), values(tensors))
    assert repo.titles()[0] == "Promote step 40"
    assert len(repo.titles()) == 4
    assert repo.tags() == {"v1": done.commit}
    assert repo.branches() == ["main", "resume"]
    kept = {"config.json", "tokenizer.json", "README.md", "model.fp16.safetensors"}
    shards = {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    assert repo.files().keys() - {".gitattributes"} == kept | shards | {INDEX}
    assert {path: repo.files()[path] for path in kept} == {path: before[path] for path in kept}
    assert (done.step, done.read_from, done.changed, done.shards) == (
        40,
        f"{repo.repo_id}@resume/step-00000040",
        True,
        2,
    )
    # each byte of the model is fetched once; of the optimizer's, what shares a block with it
    wanted = sum(array.nbytes for array in values(tensors).values())
    assert wanted <= done.read_bytes <= 1.05 * wanted
    assert moved <= done.read_bytes + 200_000


def test_the_same_bytes_again_change_and_send_nothing(repo: Repo, tmp_path: Path) -> None:
    save_step(tmp_path, model(), step=7, world=2)
    put_step(repo, tmp_path, 7)
    first = run(repo, step=7, tag="v1")
    received = repo.nbytes_received()
    again = run(repo, step=7, tag="v1")
    assert (first.changed, again.changed) == (True, False)
    assert (again.commit, again.sent_bytes) == (first.commit, 0)
    assert repo.nbytes_received() == received
    # saved by another number of ranks, they are the same bytes still
    save_step(tmp_path, model(), step=9, world=5, dims=(-1,))
    put_step(repo, tmp_path, 9)
    assert not run(repo, step=9).changed


def test_the_newest_whole_step_is_taken_and_any_other_by_its_number(
    repo: Repo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (5, 30, 200):
        save_step(tmp_path / "steps", model(step), step=step, world=2)
        put_step(repo, tmp_path / "steps", step)
    store = HubStore(repo.repo_id, token="hf_test", endpoint=repo.hub.url)
    gone = next(path for path in repo.files("resume") if path.startswith("step-00000200/rank"))
    store.commit("resume", parent=store.head("resume"), add=[], remove=[gone], message="oops", publish_id="p")
    assert run(repo).step == 30
    assert "step 200 is passed over" in caplog.text
    assert equal(repo.tensors(tmp_path / "a"), values(model(30)))
    assert run(repo, step=5).step == 5
    assert equal(repo.tensors(tmp_path / "b"), values(model(5)))
    with pytest.raises(IncompleteError, match="missing: rank-"):
        run(repo, step=200)


def test_steps_may_lie_in_another_repo_or_in_a_folder(repo: Repo, module_hub: Hub, tmp_path: Path) -> None:
    save_step(tmp_path, model(1), step=1)
    runs = new_repo(module_hub)
    put_step(runs, tmp_path, 1, branch="run/a")
    run(repo, resume_repo_id=runs.repo_id, branch="run/a")
    assert equal(repo.tensors(tmp_path / "a"), values(model(1)))
    save_step(tmp_path, model(2), step=2)
    fresh = Repo(module_hub, f"org/fresh-{repo.repo_id[-6:]}", module_hub.url)
    done = run(fresh, local_dir=tmp_path, private=True)
    assert (done.step, fresh.branches()) == (2, ["main"])
    assert equal(fresh.tensors(tmp_path / "b"), values(model(2)))
    with pytest.raises(FormatError, match="not in both"):
        run(repo, resume_repo_id=runs.repo_id, local_dir=tmp_path)


def test_another_part_of_the_state_is_published_under_its_names(repo: Repo, tmp_path: Path) -> None:
    tensors = model() | random_tensors(2, (40, 8), seed=9, prefix="ema.module.")
    tensors["ema.n_averaged"] = ("I64", np.array(3))
    save_step(tmp_path, tensors, scalars={"ema.decay": 0.9})
    done = run(repo, local_dir=tmp_path, part="ema.module", revision="averaged", variant="ema")
    assert [shard.path for shard in done.plans[0].shards] == ["model.ema.safetensors"]
    assert {spec.name for spec in done.plans[0].shards[0].specs} == {"layers.0.weight", "layers.1.weight"}
    assert "model.ema.safetensors" not in repo.files()
    assert "model.ema.safetensors" in repo.files("averaged")


def test_tied_weights_are_stored_once_and_have_all_their_names(repo: Repo, tmp_path: Path) -> None:
    save_step(tmp_path, model(), world=2, scalars={"values.model": ({"aliases": {"head": "layers.2.weight"}},)})
    done = run(repo, local_dir=tmp_path)
    assert len(done.plans[0].shards[0].specs) == 4
    with hubshard.open_checkpoint(repo.repo_id, token="hf_test", endpoint=repo.url) as checkpoint:
        assert checkpoint.aliases == {"head": "layers.2.weight"}


def test_the_names_are_those_that_the_loader_of_the_config_looks_for(repo: Repo, tmp_path: Path) -> None:
    of_diffusers = {"_class_name": "UNet2DModel", "_diffusers_version": "0.42.1"}
    save_step(tmp_path / "steps", model())
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(of_diffusers))
    run(repo, local_dir=tmp_path / "steps")
    assert "model.safetensors" in repo.files()
    run(repo, local_dir=tmp_path / "steps", companions=base)
    assert "diffusion_pytorch_model.safetensors" in repo.files()
    done = run(repo, local_dir=tmp_path / "steps", max_shard_size="100kB")  # by the config that the repo has now
    assert done.deleted == ("diffusion_pytorch_model.safetensors",)
    assert f"diffusion_pytorch_{INDEX}" in repo.files()
    repo.put_files({"config.json": b"no JSON"})
    assert run(repo, local_dir=tmp_path / "steps").plans[0].stem == "model"


def test_a_cast_is_told_by_the_config(repo: Repo, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = model()
    save_step(tmp_path, tensors, world=2)
    done = run(repo, local_dir=tmp_path, dtype="bfloat16")
    assert {spec.dtype for spec in done.plans[0].shards[0].specs} == {"BF16"}
    with hubshard.open_checkpoint(repo.repo_id, token="hf_test", endpoint=repo.url) as checkpoint:
        config = json.loads(checkpoint.read_file("config.json") or b"")
        expected = torch.from_numpy(tensors["model.layers.1.weight"][1]).bfloat16()
        assert torch.equal(checkpoint["layers.1.weight"][:], expected)
    assert (config["dtype"], config["text_config"]["dtype"]) == ("bfloat16", "bfloat16")
    assert not run(repo, local_dir=tmp_path, dtype="bfloat16").changed


def test_a_cast_of_a_variant_leaves_the_config_that_all_variants_share(repo: Repo, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    save_step(tmp_path, model())
    run(repo, local_dir=tmp_path)
    before = repo.files()
    done = run(repo, local_dir=tmp_path, variant="fp16", dtype="float16")
    assert {spec.dtype for spec in done.plans[0].shards[0].specs} == {"F16"}
    assert repo.files()["config.json"] == before["config.json"]


def test_files_that_the_step_brings_are_for_a_repo_that_lacks_them(repo: Repo, tmp_path: Path) -> None:
    files = {"config.json": '{"dtype": "float32"}', "generation_config.json": b"{}"}
    save_step(tmp_path / "steps", model(), metadata={"files": files})
    before = repo.files()
    run(repo, local_dir=tmp_path / "steps")
    assert repo.files()["config.json"] == before["config.json"]
    assert "generation_config.json" in repo.files()
    bare = new_repo(repo.hub)
    pytest.importorskip("torch")
    run(bare, local_dir=tmp_path / "steps", dtype="float16")
    with hubshard.open_checkpoint(bare.repo_id, token="hf_test", endpoint=bare.url) as checkpoint:
        assert json.loads(checkpoint.read_file("config.json") or b"") == {"dtype": "float16"}


@pytest.mark.parametrize("path", ["../x", "/x", "a\\b", "model.safetensors"])
def test_files_of_a_step_that_are_no_plain_files_are_refused(repo: Repo, tmp_path: Path, path: str) -> None:
    save_step(tmp_path, model(), metadata={"files": {path: "x"}})
    with pytest.raises(FormatError):
        run(repo, local_dir=tmp_path)
    assert len(repo.titles()) == 2


def test_companions_go_along_and_what_is_unusual_is_said(
    repo: Repo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transformers = pytest.importorskip("transformers")
    bare = new_repo(repo.hub)
    tensors = random_tensors(2, (4, 4), prefix="model.module.")
    save_step(tmp_path, tensors, scalars={"model.version": 2})
    run(bare, local_dir=tmp_path, dry_run=True)
    for told in ("no config.json", "they stay in the step: model.version", "part='model.module'"):
        assert told in caplog.text
    config = transformers.BertConfig(hidden_size=8)
    caplog.clear()
    run(bare, local_dir=tmp_path, part="model.module", companions=[config])
    assert "config.json" in bare.files()
    assert caplog.text == ""
    for place in (tmp_path / "base", str(tmp_path / "base")):
        config.save_pretrained(place)
        other = new_repo(repo.hub)
        run(other, local_dir=tmp_path, part="model.module", companions=place)
        assert "config.json" in other.files()


def test_no_index_goes_along_as_a_companion_since_its_weights_do_not(repo: Repo, tmp_path: Path) -> None:
    base = tmp_path / "base"
    for name in ("tokenizer/vocab.json", f"2_Dense/{INDEX}", "unet/model.safetensors.index.fp16.json", INDEX):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    save_step(tmp_path / "steps", model())
    run(repo, local_dir=tmp_path / "steps", companions=base)
    assert "tokenizer/vocab.json" in repo.files()
    assert not [path for path in repo.files() if ".index." in path]


# What it refuses: before anything is written


def test_a_step_that_cannot_be_promoted_changes_nothing(repo: Repo, tmp_path: Path) -> None:
    before = repo.branches(), repo.titles(), repo.tags()
    with pytest.raises(NotFoundError, match="has no branch 'resume'"):
        run(repo)
    save_step(tmp_path, random_tensors(2, (4, 4), prefix="optimizer."), step=3)
    with pytest.raises(NotFoundError, match=r"no tensor under 'model'; it holds 'optimizer' \(2 tensors, 0 values\)"):
        run(repo, local_dir=tmp_path)
    with pytest.raises(NotFoundError, match="no step 4 is saved; there are 3"):
        run(repo, local_dir=tmp_path, step=4)
    with pytest.raises(NotFoundError, match="nowhere does not exist"):
        run(repo, local_dir=tmp_path / "nowhere")
    with pytest.raises(FormatError, match="cannot be tagged"):
        run(repo, local_dir=tmp_path, create_pr=True, tag="v1")
    save_step(tmp_path, model(), step=5)
    with pytest.raises(ConflictError, match="is at"):
        run(repo, local_dir=tmp_path, expected_head="0" * 40)
    with pytest.raises(ConflictError, match="is at"):
        run(repo, local_dir=tmp_path, expected_head="0" * 40, dry_run=True)
    dry = run(repo, local_dir=tmp_path, dry_run=True)
    assert (dry.commit, dry.step, dry.read_bytes, dry.shards) == (None, 5, 0, 1)
    assert (repo.branches(), repo.titles(), repo.tags()) == before


def test_a_damaged_step_is_never_shown(repo: Repo, tmp_path: Path) -> None:
    step = save_step(tmp_path, model(), step=5, block_bytes=2**14)
    path = tmp_path / step_folder(5) / step.files[0].name
    raw = bytearray(path.read_bytes())
    raw[step.files[0].data_start + 200_000] ^= 1
    path.write_bytes(raw)
    before = repo.files()
    with pytest.raises(IntegrityError, match="is not as it was saved"):
        run(repo, local_dir=tmp_path)
    assert repo.files() == before


def test_a_pull_request_is_opened_and_main_stays(repo: Repo, tmp_path: Path) -> None:
    save_step(tmp_path, model())
    before = repo.files()
    done = run(repo, local_dir=tmp_path, create_pr=True)
    assert done.pr_url is not None
    assert repo.files() == before


# Killed


KILLED = """
import sys
from hubshard.promotion import promote
promote(sys.argv[1], endpoint=sys.argv[2], max_shard_size=170_000, staging_batch_size=1, tag="v1")
"""


@pytest.mark.parametrize("number", [1, 3, 4])
def test_killed_after_some_shards_a_rerun_elsewhere_sends_only_the_others(
    repo: Repo, tmp_path: Path, number: int
) -> None:
    tensors = model(3, layers=8)
    save_step(tmp_path / "steps", tensors, step=12, world=2)
    put_step(repo, tmp_path / "steps", 12)
    before = repo.files()
    shard = 2 * 300 * 64 * 4
    with proxied(repo.hub.port) as proxy:
        command = [sys.executable, "-c", KILLED, repo.repo_id, proxy.url]
        with subprocess.Popen(command, env=repo.hub.client_env(tmp_path / "first")) as victim:

            def kill(exchange: Exchange) -> Answer:
                exchange.forward()
                victim.kill()
                return Answer(0)

            proxy.fail(r"POST .*/commit/hubshard%2Fstaging", *[Exchange.done] * (number - 1), kill)
            assert victim.wait(120) == (1 if sys.platform == "win32" else -9)
    assert repo.files() == before
    (staging,) = set(repo.branches()) - {"main", "resume"}
    staged = sum(path.startswith("staged/") for path in repo.files(staging))
    assert staged >= number
    received = repo.nbytes_received()
    repo.hub.client(KILLED, repo.repo_id, repo.hub.url, home=tmp_path / "second")
    assert repo.nbytes_received() - received <= (4 - staged) * (shard + 1000)
    assert equal(repo.tensors(tmp_path / "cache"), values(tensors))
    assert repo.branches() == ["main", "resume"]
    assert list(repo.tags()) == ["v1"]


# On the command line


def _hubshard(hub: Hub, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return warm.run(["-m", "hubshard", *arguments], imports="client", env=hub.client_env(), timeout=120)


def test_the_command_prints_what_it_did(repo: Repo, tmp_path: Path) -> None:
    save_step(tmp_path, model(4), step=30, world=2, block_bytes=2**14)
    put_step(repo, tmp_path, 30)
    planned = _hubshard(repo.hub, "promote", repo.repo_id, "--dry-run", "--max-shard-size", "170kB")
    assert planned.returncode == 0, planned.stderr
    assert "model-00001-of-00002.safetensors" in planned.stdout
    assert f"step 30 of {repo.repo_id}@resume/step-00000030" in planned.stderr
    done = _hubshard(repo.hub, "promote", repo.repo_id, "--step", "30", "--tag", "v2", "--max-shard-size", "170kB")
    assert done.returncode == 0, done.stderr
    url, *table = done.stdout.splitlines()
    assert url.endswith(next(iter(repo.tags().values())))
    row = next(line.split() for line in table if "v2" in line)
    assert row[:3] == ["30", "2", "4"], table
    again = _hubshard(repo.hub, "promote", repo.repo_id, "--json", "--max-shard-size", "170kB")
    record = json.loads(again.stdout)
    assert (record["changed"], record["step"], record["sent_bytes"]) == (False, 30, 0)
    assert record["read_bytes"] > 0
    bare, base = new_repo(repo.hub), tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "tokenizer.json", "README.md", "model.safetensors.index.json", ".env"):
        (base / name).write_text("{}")
    command = ["promote", bare.repo_id, "--resume-repo", repo.repo_id, "--companions", str(base), "--json"]
    assert _hubshard(repo.hub, *command).returncode == 0
    assert set(bare.files()) == {".gitattributes", "config.json", "model.safetensors", "tokenizer.json"}
    refused = _hubshard(repo.hub, *command, "--companions", repo.repo_id)
    assert f"{repo.repo_id}@main: another companion brings config.json, tokenizer.json too" in refused.stderr
    refused = _hubshard(repo.hub, "promote", repo.repo_id, "--step", "31")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "no step 31 is saved; there are 30" in refused.stderr


def test_no_torch_is_imported(repo: Repo, tmp_path: Path) -> None:
    save_step(tmp_path, model(), step=1)
    put_step(repo, tmp_path, 1)
    code = """
    import sys
    from hubshard import promote
    assert promote(sys.argv[1]).changed
    assert not {"torch", "numpy", "transformers"} & set(sys.modules)
    """
    repo.hub.client(code, repo.repo_id)
