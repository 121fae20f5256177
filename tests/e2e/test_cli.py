"""The command line against an embedded Hub: what it prints, what it returns, what Ctrl-C leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hubshard.header import encode_header
from hubshard.tensors import TensorSpec
from tests import warm
from tests.systems import make_pipe

if TYPE_CHECKING:
    from tests.conftest import Hub, StartHub


def _write_model(folder: Path, *, tensors: int = 6, elements: int = 10_000, seed: int = 0) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}\n', encoding="utf-8")
    specs = [TensorSpec(f"layers.{number}.weight", "F32", (elements,)) for number in range(tensors)]
    with (folder / "model.safetensors").open("wb") as file:
        file.write(encode_header(specs, {"format": "pt"}))
        for number in range(tensors):
            file.write(bytes([(number + seed) % 256]) * (4 * elements))
    return folder


@pytest.fixture
def repo(request: pytest.FixtureRequest) -> str:
    """A repo of the test's own, on a Hub that all tests of this file share."""
    return "org/" + re.sub(r"[^a-z0-9]+", "-", request.node.name)[:80].strip("-")


@pytest.fixture
def hub(module_hub: Hub) -> Hub:
    return module_hub


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return _write_model(tmp_path / "model")


def _hubshard(hub: Hub, *arguments: str | Path, token: str | None = None) -> subprocess.CompletedProcess[str]:
    env = hub.client_env() | ({"HF_TOKEN": token} if token else {})
    return warm.run(["-m", "hubshard", *arguments], imports="client", env=env)


def test_publish_prints_where_it_is_and_what_was_sent(hub: Hub, repo: str, model: Path) -> None:
    done = _hubshard(hub, "publish", model, repo, "--max-shard-size", "100KB", "--tag", "v1")
    assert done.returncode == 0, done.stderr
    url, sizes, tag = done.stdout.splitlines()
    assert url.startswith(f"{hub.url}/{repo}/tree/")
    assert sizes.startswith("3 shards, 24")
    assert tag == "tagged v1"
    assert {"sent", "skipped", "saved", "retries", "wall", "mean"} <= set(done.stderr.split())


def test_publish_as_json_names_shards_and_bytes(hub: Hub, repo: str, model: Path) -> None:
    first = json.loads(_hubshard(hub, "publish", model, repo, "--max-shard-size", "100KB", "--json").stdout)
    assert [shard["path"] for shard in first["shards"]] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert first["shards"][0]["tensors"] == ["layers.0.weight", "layers.1.weight"]
    assert first["changed"] is True
    assert first["sent_bytes"] + first["skipped_bytes"] + first["deduplicated_bytes"] == first["total_bytes"]
    assert first["retries"] == 0
    second = json.loads(_hubshard(hub, "publish", model, repo, "--max-shard-size", "1MB", "--json").stdout)
    assert sorted(second["deleted"]) == [
        *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    third = json.loads(_hubshard(hub, "publish", model, repo, "--max-shard-size", "1MB", "--json").stdout)
    assert third["changed"] is False
    assert third["commit"] == second["commit"]


def test_publish_quietly_prints_the_url_alone(hub: Hub, repo: str, model: Path) -> None:
    done = _hubshard(hub, "publish", model, repo, "--quiet")
    assert len(done.stdout.splitlines()) == 1
    assert done.stdout.startswith(f"{hub.url}/{repo}/tree/")
    assert done.stderr == ""


def test_a_dry_run_prints_the_plan_and_touches_nothing(hub: Hub, repo: str, model: Path) -> None:
    done = _hubshard(hub, "publish", model, repo, "--max-shard-size", "100KB", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "model-00003-of-00003.safetensors" in done.stdout
    assert "layers.5.weight" in done.stdout
    assert "3 shards" in done.stdout
    assert hub.counters(f"models/{repo}")["commits"] == 0
    assert hub.api()("GET", f"/api/models/{repo}").status == 404


def test_a_dry_run_warns_of_a_tensor_over_the_bound(hub: Hub, repo: str, model: Path) -> None:
    done = _hubshard(hub, "publish", model, repo, "--max-shard-size", "1KB", "--dry-run")
    assert "each of these 6 tensors is larger than the bound of a shard: 'layers.0.weight', " in done.stderr
    assert "6 shards" in done.stdout


def test_an_unfinished_publish_can_be_abandoned(hub: Hub, repo: str, model: Path) -> None:
    assert _hubshard(hub, "publish", model, repo, "--quiet").returncode == 0
    api = hub.api()
    left = "hubshard/staging/main/0123456789abcdef"
    assert api("POST", f"/api/models/{repo}/branch/{left.replace('/', '%2F')}", {}).status == 200
    done = _hubshard(hub, "publish", repo, "--abandon")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [left]
    assert f"branch {left} dropped, with 0 finished files: 0 B to be sent again" in done.stderr
    again = _hubshard(hub, "publish", repo, "--abandon")
    assert again.returncode == 0
    assert again.stdout == ""
    assert "no unfinished publish" in again.stderr
    wrong = _hubshard(hub, "publish", model, repo, "--abandon")
    assert wrong.returncode == 2
    assert _hubshard(hub, "publish", model).returncode == 2


def test_events_are_recorded_as_lines_of_json(hub: Hub, repo: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert _hubshard(hub, "publish", model, repo, "--events", path).returncode == 0
    events = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert {"read", "sent", "staged", "commit", "verify"} <= set(kinds)
    moved = sum(event["nbytes"] for event in events if event["kind"] in {"sent", "skipped", "deduplicated"})
    assert moved == events[0]["nbytes"]
    assert events[-1]["totals"]["sent_bytes"] == events[-1]["nbytes"]


def test_a_failure_is_an_event_too(hub: Hub, repo: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert _hubshard(hub, "pull", repo, "--local-dir", tmp_path / "copy", "--events", path).returncode == 1
    last = json.loads(path.read_text("utf-8").splitlines()[-1])
    assert (last["operation"], last["kind"], last["path"]) == ("pull", "error", repo)
    assert last["detail"].startswith("NotFoundError: ")


def test_a_file_of_events_that_cannot_be_written_is_refused_before_anything_is_done(
    hub: Hub, repo: str, model: Path, tmp_path: Path
) -> None:
    done = _hubshard(hub, "publish", model, repo, "--events", tmp_path / "missing" / "events.jsonl")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "events.jsonl" in done.stderr.splitlines()[0]
    assert hub.api()("GET", f"/api/models/{repo}").status == 404


def test_pull_prints_the_folder_that_holds_the_model(hub: Hub, repo: str, model: Path, tmp_path: Path) -> None:
    assert _hubshard(hub, "publish", model, repo, "--max-shard-size", "100KB", "--tag", "v1").returncode == 0
    done = _hubshard(hub, "pull", f"{repo}@v1", "--local-dir", tmp_path / "copy")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "copy")
    assert (tmp_path / "copy" / "model-00002-of-00003.safetensors").exists()
    assert "received" in done.stderr
    cached = json.loads(_hubshard(hub, "pull", repo, "--json").stdout)
    assert cached["received_bytes"] > 240_000
    assert cached["bytes_per_second"] > 0
    assert (Path(cached["path"]) / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_weights_of_another_variant_are_a_note_of_a_pull_and_none_when_it_is_quiet(
    hub: Hub, repo: str, model: Path, tmp_path: Path
) -> None:
    for options in ((), ("--variant", "fp16")):
        assert _hubshard(hub, "publish", model, repo, *options).returncode == 0
    told = _hubshard(hub, "pull", repo, "--local-dir", tmp_path / "a").stderr
    assert "Note: not fetched, since nothing that is fetched needs them: model.fp16.safetensors\n" in told
    assert "Warning" not in told
    quiet = _hubshard(hub, "pull", repo, "--local-dir", tmp_path / "b", "--quiet")
    assert (quiet.stdout, quiet.stderr) == (f"{tmp_path / 'b'}\n", "")


def test_inspect_reads_a_repo_without_fetching_its_tensors(hub: Hub, repo: str, model: Path) -> None:
    assert _hubshard(hub, "publish", model, repo, "--max-shard-size", "100KB").returncode == 0
    hub.reset_counters()
    report = json.loads(_hubshard(hub, "inspect", repo, "--json").stdout)
    assert report["nbytes"] == 240_000
    assert [row["name"] for row in report["tensors"]] == [f"layers.{n}.weight" for n in range(6)]
    assert len(report["files"]) == 3


def test_verify_says_what_is_wrong_and_exits_with_1(hub: Hub, repo: str, model: Path) -> None:
    assert _hubshard(hub, "publish", model, repo).returncode == 0
    whole = _hubshard(hub, "verify", model, "--against", repo)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert "0 problems" in whole.stdout
    raw = bytearray((model / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (model / "model.safetensors").write_bytes(raw)
    damaged = _hubshard(hub, "verify", model, "--against", repo)
    assert damaged.returncode == 1
    assert damaged.stdout.startswith("model.safetensors: ")
    report = json.loads(_hubshard(hub, "verify", model, "--against", repo, "--json").stdout)
    assert report["ok"] is False
    assert [problem["path"] for problem in report["problems"]] == ["model.safetensors"]
    unaided = _hubshard(hub, "verify", model)
    assert unaided.returncode == 0
    assert ": no hash was checked, 0 problems\n" in unaided.stdout
    assert f"To check them: hubshard verify {model} --against REPO\n" in unaided.stdout


def test_verify_names_a_dozen_of_each_kind_of_problem_and_counts_the_others(hub: Hub, repo: str, model: Path) -> None:
    for n in range(20):
        (model / f"vocab-{n:02}.txt").write_text("a")
    assert _hubshard(hub, "publish", model, repo).returncode == 0
    for n in range(20):
        (model / f"vocab-{n:02}.txt").write_text("bb") if n % 4 else (model / f"vocab-{n:02}.txt").unlink()
    damaged = _hubshard(hub, "verify", model, "--against", repo)
    lines = damaged.stdout.splitlines()
    assert (damaged.returncode, len([line for line in lines if line.startswith("vocab-")])) == (1, 5 + 12)
    assert "and 3 more (size); --json has all" in lines
    report = json.loads(_hubshard(hub, "verify", model, "--against", repo, "--json").stdout)
    assert len(report["problems"]) == 20


def test_diff_and_rollback_work_on_revisions(hub: Hub, repo: str, model: Path, tmp_path: Path) -> None:
    assert _hubshard(hub, "publish", model, repo, "--tag", "v1").returncode == 0
    other = _write_model(tmp_path / "other", tensors=7, seed=3)
    assert _hubshard(hub, "publish", other, repo, "--max-shard-size", "100KB").returncode == 0
    lines = _hubshard(hub, "diff", f"{repo}@v1", repo).stdout.splitlines()
    assert lines[:2] == ["+ layers.6.weight", "~ layers.0.weight"]
    assert lines[-1].startswith("0 equal, 6 changed (~)")
    back = _hubshard(hub, "rollback", repo, "--to", "v1")
    assert back.returncode == 0, back.stderr
    assert "0 B sent" in back.stdout
    assert _hubshard(hub, "diff", f"{repo}@v1", repo, "--json").returncode == 0
    report = json.loads(_hubshard(hub, "diff", f"{repo}@v1", repo, "--json").stdout)
    assert report["same"] == 6
    assert report["added"] == report["removed"] == report["changed"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pull", "org/nothing"], "org/nothing"),
        (["pull", "org/name/more"], "org/name/more"),
        (["inspect", "org/nothing"], "org/nothing"),
        (["inspect", "EMPTY"], "@main: the folder holds no model.safetensors"),
        (["diff", "MODEL", "EMPTY"], "@main: the folder holds no model.safetensors"),
        (["publish", "nothing-here/", "REPO"], "nothing-here"),
        (["publish", "MODEL", "REPO", "--max-shard-size", "-5GB"], "-5GB"),
        (["publish", "MODEL", "not a repo"], "not a repo"),
        (["publish", "MODEL", "REPO", "--expected-head", "0123456789"], "0123456789"),
    ],
)
def test_known_errors_are_one_clear_line_and_change_nothing(
    hub: Hub, repo: str, model: Path, arguments: list[str], said: str
) -> None:
    words = {"MODEL": str(model), "REPO": repo, "EMPTY": "org/empty"}
    hub.api()("POST", "/api/repos/create", {"name": "empty", "organization": "org"})
    done = _hubshard(hub, *(words.get(word, word) for word in arguments))
    assert done.returncode == 1
    assert done.stdout == ""
    error = done.stderr.splitlines()[0]
    assert error.startswith("Error: ")
    assert said in error
    assert "Traceback" not in done.stderr
    assert hub.counters(f"models/{repo}")["commits"] == 0


def test_the_token_option_goes_before_hf_token(start_hub: StartHub, model: Path) -> None:
    from hubshard.hubserver import Settings

    hub = start_hub(Settings(tokens={"hf_good": "alice:write"}))
    refused = _hubshard(hub, "publish", model, "alice/model", token="hf_bad")
    assert refused.returncode == 1
    assert "Error:" in refused.stderr
    accepted = _hubshard(hub, "publish", model, "alice/model", "--token", "hf_good", token="hf_bad")
    assert accepted.returncode == 0, accepted.stderr


def test_serve_and_gc_run_from_the_command_line(tmp_path: Path, model: Path) -> None:
    root = tmp_path / "hub"
    command = [sys.executable, "-m", "hubshard", "hub", "serve", "--root", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
            env |= {"HF_ENDPOINT": server.stdout.readline().strip(), "HF_HOME": str(tmp_path / "home")}
            publish = [sys.executable, "-m", "hubshard", "publish", str(model), "org/model", "--token", "hf_any"]
            done = subprocess.run(publish, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        finally:
            server.terminate()
    gc = [sys.executable, "-m", "hubshard", "hub", "gc", "--root", str(root), "--grace-hours", "0", "--json"]
    report = json.loads(subprocess.run(gc, capture_output=True, text=True, check=True).stdout)
    assert report["lfs_files"] == 0
    assert set(report) == {"commits", "lfs_files", "objects", "xorbs", "blobs", "freed_bytes"}


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C cannot be sent to one process there")
def test_ctrl_c_during_a_publish_ends_it_at_once_with_one_line_and_the_next_run_goes_on(
    hub: Hub, repo: str, tmp_path: Path
) -> None:
    model = _write_model(tmp_path / "large", tensors=40, elements=1_000_000)
    events = tmp_path / "events.jsonl"
    make_pipe(events)
    options = ["--max-shard-size", "10MB", "--staging-batch-size", "1B"]
    command = [sys.executable, "-m", "hubshard", "publish", str(model), repo, *options]
    started = [*command, "--events", str(events)]
    with (
        subprocess.Popen(started, env=hub.client_env(), stdout=-1, stderr=-1, text=True) as process,
        events.open(encoding="utf-8") as lines,
    ):
        next(line for line in lines if json.loads(line)["kind"] == "staged")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate()
    assert process.returncode == 130
    assert output == ""
    assert errors.strip().startswith("Interrupted: readers see nothing of this publish")
    assert len(errors.strip().splitlines()) == 1
    done = subprocess.run([*command, "--json"], env=hub.client_env(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["skipped_bytes"] > 0
