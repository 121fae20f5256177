"""What can be refused is refused before anything is sent, and no repo is made for it, or it is said to be there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from huggingface_hub import HfApi
from safetensors.numpy import save_file

import hubshard
from hubshard.errors import ConflictError, FormatError, HubshardError, NotFoundError, StoreError
from hubshard.events import Event
from tests.faults.proxy import Fault, change, done_then, drop, lose, proxied, say

if TYPE_CHECKING:
    from tests.conftest import Hub


class Lab:
    """A repo that may not exist yet."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.hub = hub
        self.repo = f"org/{name}"
        self.api = HfApi(endpoint=hub.url, token="hf_test")

    def push(self, source: Any, endpoint: str | None = None, **options: Any) -> hubshard.Published:
        return hubshard.push_to_hub(source, self.repo, endpoint=endpoint or self.hub.url, token="hf_test", **options)

    def received(self) -> int:
        counted = self.hub.counters(f"models/{self.repo}")
        return int(counted["xet_received"]) + int(counted["lfs_received"]) + int(counted["regular_received"])

    @property
    def exists(self) -> bool:
        return self.api.repo_exists(self.repo)


@pytest.fixture
def lab(module_hub: Hub, request: pytest.FixtureRequest) -> Lab:
    return Lab(module_hub, re.sub(r"[^a-z0-9]+", "-", request.node.name)[5:90].strip("-"))


def weights(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    return {"w": np.random.default_rng(seed).standard_normal((64, 128), dtype=np.float32)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    made.mkdir()
    save_file(weights(), made / "model.safetensors", metadata={"format": "pt"})
    (made / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    return made


def test_a_broken_model_card_is_refused_with_the_hubs_words_before_a_repo_is_made(lab: Lab, folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: [\n---\n# A model\n")
    with pytest.raises(FormatError, match=r"README\.md: .*YAML") as told:
        lab.push(folder)
    assert told.value.hint is not None
    assert "between the '---' lines" in told.value.hint
    assert not lab.exists
    lab.push(folder, exclude=["README.md"])


def test_what_the_hub_finds_odd_in_a_card_is_a_warning_and_a_hub_that_checks_none_is_fine(
    lab: Lab, folder: Path
) -> None:
    (folder / "README.md").write_text("# A model\n")
    events: list[Event] = []
    lab.push(folder, on_event=events.append)
    assert [e.detail for e in events if e.path == "README.md"][:1] == ["empty or missing yaml metadata in repo card"]
    (folder / "README.md").write_text("# Another model\n")
    with proxied(lab.hub.port) as proxy:
        proxy.fail("POST /api/validate-yaml", say(404, "no such route"))
        assert lab.push(folder, proxy.url).changed
        assert not proxy.faults


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"expected_head": "0123456"}, ConflictError),
        ({"expected_head": "not a commit"}, FormatError),
        ({"expected_head": ""}, FormatError),
        ({"revision": "refs/pr/1"}, NotFoundError),
        ({"message": "\udcff"}, FormatError),
    ],
)
def test_what_no_new_repo_can_meet_makes_none(lab: Lab, options: dict[str, Any], error: type[HubshardError]) -> None:
    with pytest.raises(error):
        lab.push(weights(), **options)
    assert not lab.exists


def test_a_tag_that_is_elsewhere_is_refused_before_anything_is_sent(lab: Lab) -> None:
    for seed in (0, 1):
        lab.push(weights(seed), tag=f"v{seed}")
    before = lab.received()
    with pytest.raises(ConflictError, match="the tag 'v0' is on commit") as told:
        lab.push(weights(2), tag="v0")
    assert told.value.hint == "choose another tag, or move this one with --move-tag (in Python, move_tag=True)"
    assert lab.received() == before


@pytest.mark.parametrize(
    "fault", [lose, drop, done_then(say(504)), say(500), say(503), say(429, "slow", Retry_After="0")]
)
def test_a_repo_whose_making_fails_for_a_while_is_made(lab: Lab, fault: Fault) -> None:
    events: list[Event] = []
    with proxied(lab.hub.port) as proxy:
        proxy.fail("POST /api/repos/create", fault)
        assert lab.push(weights(), proxy.url, on_event=events.append).changed
    assert [event.path for event in events if event.kind == "retry"] == ["create the repo"]


def test_a_repo_that_is_made_by_something_else_than_a_hub_is_refused(lab: Lab) -> None:
    with proxied(lab.hub.port) as proxy:
        proxy.always("POST /api/repos/create", change(body=b"<html>log in</html>"))
        with pytest.raises(StoreError, match="something else than a Hub would"):
            lab.push(weights(), proxy.url)


def test_all_files_that_a_repo_ignores_are_named_before_anything_is_sent(lab: Lab, folder: Path) -> None:
    lab.push(weights())
    lab.api.upload_file(path_or_fileobj=b"*.log\n*.safetensors\n", path_in_repo=".gitignore", repo_id=lab.repo)
    before = lab.received()
    (folder / "train.log").write_text("done")
    with pytest.raises(FormatError, match=r"\.gitignore of .* refuses model\.safetensors, train\.log"):
        lab.push(folder)
    assert lab.received() == before


def test_a_name_that_only_the_case_tells_from_one_in_the_repo_is_refused_before_anything_is_sent(
    lab: Lab, folder: Path
) -> None:
    there = "SUB/Vocab.json"
    lab.push(folder)
    lab.api.upload_file(path_or_fileobj=b"{}", path_in_repo=there, repo_id=lab.repo)
    lab.push(folder)
    before = lab.received()
    (folder / "sub").mkdir()
    (folder / "sub" / "vocab.json").write_text("[]")
    with pytest.raises(FormatError, match=f"'sub/vocab.json', and '{there}' in {lab.repo}, are one file") as told:
        lab.push(folder)
    assert told.value.hint == "delete or rename the one in the repo, or rename the one to publish"
    assert lab.received() == before
    lab.api.delete_file(there, lab.repo)
    assert lab.push(folder).changed


def warnings_of(lab: Lab, source: Any, **options: Any) -> list[str]:
    events: list[Event] = []
    lab.push(source, on_event=events.append, **options)
    return [event.detail for event in events if event.kind == "warning" and not event.path]


def test_weights_of_another_model_that_stay_in_the_repo_are_told_of_once(lab: Lab, tmp_path: Path) -> None:
    plain, pipeline = tmp_path / "plain", tmp_path / "pipeline"
    for place in (plain, pipeline / "unet", pipeline / "vae"):
        place.mkdir(parents=True)
        save_file(weights(), place / "model.safetensors")
        (place / "config.json").write_text("{}")
    (pipeline / "model_index.json").write_text('{"unet": ["diffusers", "A"], "vae": ["diffusers", "B"], "x": 1}')
    assert warnings_of(lab, plain) == []
    lab.api.upload_file(path_or_fileobj=b"x", path_in_repo="checkpoint-5/model.safetensors", repo_id=lab.repo)
    assert warnings_of(lab, plain) == []
    told = f"{lab.repo} keeps weights that this publish leaves alone in"
    [root] = warnings_of(lab, pipeline)
    assert root.startswith(f"{told} the root: ")
    assert f"`hf repos delete-files {lab.repo} model.safetensors`" in root
    assert not warnings_of(lab, pipeline, exclude=["*.md"], variant="fp16")
    lab.api.delete_file("model.safetensors", lab.repo)
    assert warnings_of(lab, pipeline) == []
    assert warnings_of(lab, pipeline, exclude=["vae/*"]) == [], "it names the component that is in the repo already"
    [folders] = warnings_of(lab, plain)
    assert folders.startswith(f"{told} unet, vae: ")
    assert f"`hf repos delete-files {lab.repo} 'unet/*' 'vae/*' model_index.json`" in folders


def test_a_repo_that_was_made_for_a_publish_that_fails_is_said_to_be_there_and_empty(lab: Lab) -> None:
    with proxied(lab.hub.port) as proxy:
        proxy.always(r"POST /api/models/.*/preupload/", say(400, "not today"))
        with pytest.raises(HubshardError, match="not today") as told:
            lab.push(weights(), proxy.url)
        assert f"{lab.repo} was made for this publish, and shows nothing of it" in str(told.value.hint)
        with pytest.raises(HubshardError) as again:
            lab.push(weights(), proxy.url)
        assert "was made" not in str(again.value.hint), "it was there"
    assert lab.push(weights()).changed


def test_a_home_that_cannot_be_written_to_is_not_laid_at_the_hubs_door(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "file" / "xet"))
    with pytest.raises(HubshardError, match="I/O error") as told:
        lab.push(weights())
    assert "set HF_HOME or HF_XET_CACHE to a folder that can be written to" in str(told.value.hint)


def test_a_dry_run_refuses_what_a_publish_refuses_and_writes_nothing(lab: Lab, folder: Path) -> None:
    lab.push(folder, tag="v0")
    head = lab.push(weights(1), tag="v1").commit
    lab.api.create_branch(lab.repo, branch="side")
    before = lab.api.list_repo_refs(lab.repo)
    for options, error, words in (
        ({"tag": "v0"}, ConflictError, "the tag 'v0' is on commit"),
        ({"tag": "v1", "variant": "fp16"}, ConflictError, "the tag 'v1' is on commit"),
        ({"tag": "side"}, FormatError, "'side' is the name of a branch"),
        ({"expected_head": "0123456"}, ConflictError, "is at"),
        ({"revision": "v0"}, FormatError, "only branches move"),
        ({"revision": "refs/pr/7"}, NotFoundError, "no pull request"),
        ({"private": True}, FormatError, "should be private"),
    ):
        for dry_run in (True, False):
            with pytest.raises(error, match=words) as told:
                lab.push(folder, dry_run=dry_run, **options)
            if "expected_head" in options:
                assert f"hubshard diff {lab.repo}@0123456 {lab.repo}@{head}" in str(told.value.hint)
    assert lab.push(folder, dry_run=True, tag="v0", move_tag=True, expected_head=head).commit is None
    (folder / "README.md").write_text("---\nlicense: [\n---\n# A model\n")
    with pytest.raises(FormatError, match=r"README\.md: .*YAML"):
        lab.push(folder, dry_run=True)
    assert lab.api.list_repo_refs(lab.repo) == before


def test_a_dry_run_refuses_what_the_repo_ignores_and_without_rights_says_that_it_cannot_know(
    lab: Lab, folder: Path
) -> None:
    lab.push(weights())
    lab.api.upload_file(path_or_fileobj=b"*.safetensors\n", path_in_repo=".gitignore", repo_id=lab.repo)
    with pytest.raises(FormatError, match=r"\.gitignore of .* refuses model\.safetensors"):
        lab.push(folder, dry_run=True)
    for status in (401, 403):  # without a login, or without rights
        with proxied(lab.hub.port) as proxy:
            proxy.always(r"POST /api/models/.*/preupload/", say(status, "you may not write"))
            notes = warnings_of(lab, folder, endpoint=proxy.url, dry_run=True)
        assert [note.partition(":")[0] for note in notes] == ["whether the repo takes all files cannot be said"]


def test_a_dry_run_says_what_only_the_hashes_can_tell_and_that_a_repo_would_be_made(lab: Lab, folder: Path) -> None:
    [new] = warnings_of(lab, folder, dry_run=True)
    assert new == f"{lab.repo} does not exist, or the token may not see it: a publish would make it"
    assert not lab.exists
    first = lab.push(folder, tag="v0")
    [there] = warnings_of(lab, folder, dry_run=True, tag="v0")
    assert there.startswith(f"the tag 'v0' is on {first.commit} already")
    assert lab.push(folder, tag="v0").commit == first.commit
