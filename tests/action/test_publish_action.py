"""The release action: its steps as they stand, from a fresh virtual environment, over the embedded Hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hubshard
from tests.action.models import TOKEN, Repo, model, ok, publish, save_step_of
from tests.faults.models import equal, read_folder, weights

if TYPE_CHECKING:
    from tests.action.conftest import NewJob
    from tests.conftest import Hub

pytest.importorskip("starlette")
pytestmark = pytest.mark.timeout(600)  # the first one installs, and the others wait for it


def test_a_release_is_read_back_checked_committed_once_and_tagged(module_hub: Hub, new_job: NewJob) -> None:
    job, repo = new_job(module_hub), Repo(module_hub, "org/first")
    job.event = {"release": {"tag_name": "model@1.0"}}
    check = 'test -f "$MODEL_PATH/config.json" && cp -r "$MODEL_PATH" judged'
    ran = ok(job.run({**model(job), "repo-id": repo.name, "check": check}))
    assert set(repo.heads) == {"main", "model@1.0"}, "no branch is left"
    assert repo.heads["model@1.0"] == repo.head == ran.outputs["commit-oid"]
    assert equal(read_folder(job.workspace / "judged"), weights())
    shards = {f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)}
    assert repo.files() == shards | {"model.safetensors.index.json", "config.json", "README.md"}
    assert repo.titles()[0] == "Release model@1.0"
    assert len(repo.titles()) == 2, "the empty repo's first, and the release"
    assert (ran.outputs["changed"], ran.outputs["shards"], ran.outputs["tag"]) == ("true", "4", "model@1.0")
    assert ran.outputs["commit-url"] == f"{module_hub.url}/org/first/commit/{repo.head}"
    assert ran.outputs["revision-url"] == f"{module_hub.url}/org/first/tree/model%401.0"
    listed = json.loads(Path(ran.outputs["manifest"]).read_text("utf-8"))
    assert listed["commit"] == repo.head
    assert {file["path"] for file in listed["files"]} == repo.files() | {".gitattributes"}
    assert all(len(file["sha256"]) == 64 for file in listed["files"] if file["path"] in shards)
    assert int(ran.outputs["total-bytes"]) > 8 * 16_384
    assert "### Released" in ran.summary
    assert f'<a href="{ran.outputs["commit-url"]}">' in ran.summary


def test_a_second_release_leaves_no_stale_shard_and_moves_a_tag_only_when_asked(
    module_hub: Hub, new_job: NewJob
) -> None:
    job, repo = new_job(module_hub), Repo(module_hub, "org/second")
    publish(repo, tag="v1")
    first = repo.heads
    inputs = {**model(job, seed=1, layers=4), "repo-id": repo.name, "tag": "v1"}
    refused = job.run(inputs)
    assert refused.outcome == "failure"
    assert "the tag v1 names what main holds now" in refused.errors
    assert "move-tag" in refused.errors
    assert repo.heads == first
    assert "Nothing was released" in refused.summary
    ran = ok(job.run({**inputs, "move-tag": "true"}))
    assert repo.heads == {"main": ran.outputs["commit-oid"], "v1": ran.outputs["commit-oid"]}
    assert {name for name in repo.files() if name.endswith(".safetensors")} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    deleted = json.loads(ran.outputs["deleted-files"])
    assert deleted == [f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)]


@pytest.mark.parametrize("verify", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_the_same_release_again_changes_and_sends_nothing(module_hub: Hub, new_job: NewJob, verify: str) -> None:
    job, repo = new_job(module_hub), Repo(module_hub, f"org/again-{verify}")
    publish(repo)
    start = repo.head
    inputs = {**model(job, seed=1), "repo-id": repo.name, "tag": "v1", "verify": verify, "expected-head": start}
    first = ok(job.run(inputs))
    before = repo.heads, repo.titles()
    received = repo.received()
    second = ok(job.run(inputs))
    assert (repo.heads, repo.titles()) == before
    assert (second.outputs["changed"], second.outputs["uploaded-bytes"]) == ("false", "0")
    assert second.outputs["commit-oid"] == first.outputs["commit-oid"]
    assert second.outputs["skipped-bytes"] == second.outputs["total-bytes"] != "0"
    assert repo.received() == received
    assert "### Unchanged" in second.summary


def test_an_old_release_run_again_does_not_come_back_over_newer_ones(module_hub: Hub, new_job: NewJob) -> None:
    job, repo = new_job(module_hub), Repo(module_hub, "org/old")
    for seed, tag in ((0, "v1"), (1, "v2")):
        publish(repo, seed, tag=tag)
    before = repo.heads
    ran = job.run({**model(job, 0), "repo-id": repo.name, "tag": "v1"})
    assert ran.outcome == "failure"
    assert "the tag v1 is on" in ran.errors
    assert repo.heads == before


def test_a_branch_that_is_elsewhere_than_expected_is_left_alone(module_hub: Hub, new_job: NewJob) -> None:
    job, repo = new_job(module_hub), Repo(module_hub, "org/elsewhere")
    publish(repo)
    before = repo.heads
    ran = job.run({**model(job, 1), "repo-id": repo.name, "expected-head": "0" * 40})
    assert ran.outcome == "failure"
    assert "somebody was faster" in ran.errors
    assert repo.heads == before


def test_what_moves_main_while_the_check_runs_is_not_overwritten(module_hub: Hub, new_job: NewJob) -> None:
    job, repo = new_job(module_hub), Repo(module_hub, "org/moved")
    publish(repo)

    def somebody_edits() -> None:
        repo.api.upload_file(path_or_fileobj=b"# Better\n", path_in_repo="NOTES.md", repo_id=repo.name)

    ran = job.run({**model(job, 1), "repo-id": repo.name, "tag": "v2"}, before={"release": somebody_edits})
    assert ran.outcome == "failure"
    assert "since the candidate was made from it: run the job again" in ran.errors
    assert set(repo.heads) == {"main"}
    assert "NOTES.md" in repo.files()
    assert repo.titles()[0] != "Release v2"


def test_a_check_that_fails_releases_nothing(module_hub: Hub, new_job: NewJob) -> None:
    job, repo = new_job(module_hub), Repo(module_hub, "org/checked")
    publish(repo, tag="v1")
    before = repo.heads
    inputs = {**model(job, 1), "repo-id": repo.name, "tag": "v2", "verify": "false"}

    def leave_shards() -> None:  # as a killed run of the same release does whose model was cut otherwise
        (candidate,) = set(repo.heads) - set(before)
        repo.api.create_branch(repo.name, branch=f"hubshard/staging/{candidate}/0123456789abcdef")

    check = 'ls "$MODEL_PATH" > seen; echo "perplexity 900"; exit 3'
    ran = job.run({**inputs, "check": check}, before={"check": leave_shards})
    assert ran.outcome == "failure"
    assert ran.steps["check"].outcome == "failure"
    assert ran.steps["release"].outcome == "skipped"
    assert "model-00001-of-00004.safetensors" in (job.workspace / "seen").read_text()
    assert repo.heads == before, "main and tags are where they were, the candidate and what led to it are gone"
    assert (ran.outputs["changed"], ran.outputs["commit-oid"]) == ("false", "")
    assert "Nothing was released&#58; the step check failed" in ran.summary


def test_the_check_gets_neither_the_identity_nor_the_token(module_hub: Hub, new_job: NewJob) -> None:
    job = new_job(
        module_hub, ACTIONS_ID_TOKEN_REQUEST_URL="http://127.0.0.1:9", ACTIONS_ID_TOKEN_REQUEST_TOKEN="secret"
    )
    check = "env > seen"
    ok(job.run({**model(job), "repo-id": "org/env", "check": check, "verify": "false"}))
    seen = (job.workspace / "seen").read_text()
    assert "MODEL_PATH=" in seen
    assert "ACTIONS_ID_TOKEN" not in seen
    assert "GITHUB_STEP_SUMMARY=" in seen
    assert not {f"GITHUB_{name}=" for name in ("ENV", "PATH", "OUTPUT", "STATE") if f"\nGITHUB_{name}=" in seen}
    assert TOKEN not in seen


def test_a_pull_request_is_opened_once_and_closed_when_its_check_fails(module_hub: Hub, new_job: NewJob) -> None:
    job, repo = new_job(module_hub), Repo(module_hub, "org/proposed")
    publish(repo)
    before = repo.heads
    inputs = {**model(job, 1), "repo-id": repo.name, "create-pr": "true", "tag": "v2"}
    ran = ok(job.run(inputs))
    assert ("notice", "A pull request is not tagged: make the tag v2 after it is merged") in ran.annotations
    assert ran.outputs["pr-url"] == f"{module_hub.url}/org/proposed/discussions/1"
    assert ran.outputs["revision-url"].endswith("/tree/refs%2Fpr%2F1")
    again = ok(job.run(inputs))
    assert (ran.outputs["changed"], again.outputs["changed"]) == ("true", "false")
    assert again.outputs["pr-url"] == ran.outputs["pr-url"]
    assert again.outputs["uploaded-bytes"] == "0"
    failed = job.run({**inputs, "check": "false"})
    assert failed.outcome == "failure"
    (pull,) = repo.api.get_repo_discussions(repo.name)
    assert pull.status == "closed"
    assert repo.heads == before


def test_a_dry_run_shows_the_plan_and_touches_nothing(module_hub: Hub, new_job: NewJob) -> None:
    job = new_job(module_hub)
    inputs = {**model(job), "repo-id": "org/planned", "create-pr": "true", "dry-run": "true", "token": ""}
    ran = ok(job.run(inputs))
    assert module_hub.api()("GET", "/api/models/org/planned").status == 404
    assert (ran.outputs["shards"], ran.outputs["changed"], ran.outputs["commit-oid"]) == ("4", "false", "")
    plan = json.loads(Path(ran.outputs["manifest"]).read_text("utf-8"))
    assert [shard["path"] for shard in plan["shards"]] == [f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)]
    assert "### Dry run" in ran.summary


def test_a_dry_run_refuses_what_the_release_would_refuse_and_needs_no_token_for_that(
    module_hub: Hub, new_job: NewJob
) -> None:
    job, repo = new_job(module_hub), Repo(module_hub, "org/foreseen")
    for seed, tag in ((0, "v1"), (1, "v2")):
        publish(repo, seed, 4, tag=tag)
    before = repo.heads
    inputs = {**model(job), "repo-id": repo.name, "dry-run": "true", "token": ""}
    taken = job.run({**inputs, "tag": "v1"})
    assert "the tag 'v1' is on commit" in taken.errors
    assert "is at" in job.run({**inputs, "tag": "", "expected-head": "0" * 40}).errors
    ok(job.run({**inputs, "tag": "v1", "move-tag": "true"}))
    ok(job.run({**inputs, "tag": "v1", "create-pr": "true"}))
    assert repo.heads == before


def test_a_rollback_gives_main_its_old_files_and_sends_none(module_hub: Hub, new_job: NewJob) -> None:
    job, repo = new_job(module_hub), Repo(module_hub, "org/back")
    for seed, layers, tag in ((0, 8, "v1"), (1, 4, "v2")):
        publish(repo, seed, layers, tag=tag)
    before = repo.heads
    inputs = {"repo-id": repo.name, "rollback-to": "v1", "token": TOKEN}
    dry = ok(job.run({**inputs, "dry-run": "true"}))
    assert ("notice", f"Dry run: main would get the files of {before['v1']}") in dry.annotations
    refused = job.run({**inputs, "check": "false"})
    assert refused.outcome == "failure"
    assert repo.heads == before
    received = repo.received(large=True)
    ran = ok(job.run(inputs))
    assert repo.files() == repo.files("v1")
    assert repo.heads == {**before, "main": ran.outputs["commit-oid"]}
    assert repo.titles()[0] == "Roll back to v1 with hubshard"
    sizes = {name: int(ran.outputs[name]) for name in ("shards", "total-bytes", "uploaded-bytes", "skipped-bytes")}
    assert sizes["shards"] == 4
    assert sizes["uploaded-bytes"] < 4_000 < 8 * 16_384 < sizes["skipped-bytes"] < sizes["total-bytes"]
    assert json.loads(ran.outputs["deleted-files"]) == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert (repo.received(large=True), ran.outputs["changed"]) == (received, "true")
    assert ok(job.run(inputs)).outputs["changed"] == "false"


def test_a_step_of_a_training_run_is_released_by_its_number(module_hub: Hub, new_job: NewJob, tmp_path: Path) -> None:
    job, repo = new_job(module_hub), Repo(module_hub, "org/trained")
    repo.api.create_repo(repo.name)
    saved = save_step_of(repo, tmp_path / "steps", 300)
    save_step_of(repo, tmp_path / "steps", 400)
    inputs = {"repo-id": repo.name, "from-step": "300", "tag": "v1", "token": TOKEN, "max-shard-size": "20KB"}
    planned = ok(job.run({**inputs, "dry-run": "true"}))
    assert set(repo.heads) == {"main", "resume"}
    ran = ok(job.run({**inputs, "check": 'cp -r "$MODEL_PATH" judged'}))
    assert set(repo.heads) == {"main", "resume", "v1"}
    assert planned.outputs["shards"] == ran.outputs["shards"] == "3"
    assert equal(read_folder(job.workspace / "judged"), saved)
    assert repo.heads["v1"] == repo.head == ran.outputs["commit-oid"]


def test_a_variant_of_another_dtype_is_released_beside_the_weights_that_are_there(
    module_hub: Hub, new_job: NewJob
) -> None:
    pytest.importorskip("torch")
    job, repo = new_job(module_hub), Repo(module_hub, "org/cast")
    job.given = {"install": {"python": sys.executable}}  # what `hubshard[torch]` would bring
    publish(repo)
    before = repo.files()
    inputs = {**model(job), "repo-id": repo.name, "dtype": "bfloat16", "variant": "half", "private": "false"}
    ran = ok(job.run({**inputs, "check": 'ls "$MODEL_PATH" > seen'}))
    shards = {"model.half-00001-of-00002.safetensors", "model.half-00002-of-00002.safetensors"}
    assert repo.files() == before | shards | {"model.safetensors.index.half.json"}
    assert shards <= set((job.workspace / "seen").read_text().split())
    assert ran.outputs["deleted-files"] == "[]"
    with hubshard.open_checkpoint(repo.name, variant="half", endpoint=module_hub.url, token=TOKEN) as checkpoint:
        assert {tensor.get_dtype() for tensor in checkpoint.values()} == {"BF16"}


def test_a_path_that_the_build_did_not_write_is_not_looked_for_on_the_hub(module_hub: Hub, new_job: NewJob) -> None:
    job = new_job(module_hub)
    publish(Repo(module_hub, "org/wanted"))
    ran = job.run({"repo-id": "org/target", "path": "org/wanted", "token": TOKEN})
    assert ran.outcome == "failure"
    assert "'org/wanted' does not exist" in ran.errors
    copied = ok(job.run({"repo-id": "org/target", "path": "hf://org/wanted", "token": TOKEN, "verify": "false"}))
    assert copied.outputs["changed"] == "true"


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({}, "exactly one of the inputs path, from-step and rollback-to"),
        ({"path": "out", "rollback-to": "v1"}, "there is path and rollback-to"),
        ({"rollback-to": "v1", "create-pr": "true"}, "a rollback moves the branch itself"),
        ({"path": "out", "dry-run": "yes"}, "input dry-run: 'yes' is neither true nor false"),
        ({"path": "out", "revision": "refs/pr/1"}, "is no branch to release to"),
        ({"path": "out", "repo-id": "org/two--dashes"}, "Cannot have -- or .. in repo_id: 'org/two--dashes'"),
        ({"path": "out", "token": ""}, "`permissions: id-token: write`"),
    ],
)
def test_what_cannot_be_meant_is_said_at_once(
    module_hub: Hub, new_job: NewJob, inputs: dict[str, Any], told: str
) -> None:
    job = new_job(module_hub)
    model(job)
    asked = module_hub.counters()["total"]
    ran = job.run({"repo-id": "org/refused", "token": TOKEN, **inputs})
    assert ran.outcome == "failure"
    assert told in ran.errors
    assert module_hub.counters()["total"] == asked


def test_a_folder_that_holds_no_model_is_refused_by_its_own_words(module_hub: Hub, new_job: NewJob) -> None:
    job = new_job(module_hub)
    inputs = {**model(job), "repo-id": "org/none"}
    (job.workspace / "out" / "model.safetensors").write_bytes(b"\x00" * 16)
    ran = job.run(inputs)
    assert ran.outcome == "failure"
    assert "model.safetensors" in ran.errors
    assert "### Nothing was released" in ran.summary
