"""What is said of a publish that ends early, at its last steps: what readers see is never told wrongly."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import HfApi
from safetensors.numpy import save_file

from hubshard.errors import HubshardError, StoreError
from hubshard.events import Event
from tests.faults.models import Repo, equal, new_repo, weights
from tests.faults.proxy import Answer, Exchange, Fault, Proxy, done_then, lose, say

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("starlette")

FINAL, TAG = r"POST /api/models/.*/commit/main", r"POST /api/models/.*/tag/"


@pytest.fixture
def repo(module_hub: Hub, proxy: Proxy) -> Repo:
    """Holds an old model; published to through the proxy."""
    made = new_repo(module_hub, proxy.url)
    made.put(weights(1))
    return made


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C cannot be sent to one process there")
@pytest.mark.parametrize(
    ("at", "says"),
    [
        (FINAL, "its commit was under way: either it shows all of this publish, or nothing has changed;"),
        (TAG, "shows all of this publish; run the same command again for what may be missing, its check or tag."),
    ],
)
@pytest.mark.parametrize("done", [True, False])
def test_ctrl_c_while_an_answer_is_awaited_says_what_may_be(
    repo: Repo, proxy: Proxy, tmp_path: Path, at: str, says: str, *, done: bool
) -> None:
    started: list[subprocess.Popen[str]] = []

    def interrupt(exchange: Exchange) -> Answer:
        if done:
            exchange.forward()
        [process] = started
        process.send_signal(signal.SIGINT)
        process.wait(60)
        return Answer(0)

    save_file(weights(2), tmp_path / "model.safetensors", metadata={"format": "pt"})
    command = [sys.executable, "-m", "hubshard", "publish", str(tmp_path), repo.repo_id, "--tag", "v1"]
    environment = repo.hub.client_env() | {"HF_ENDPOINT": proxy.url}
    proxy.fail(at, interrupt)
    started.append(subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True))
    output, errors = started[0].communicate(timeout=120)
    assert (started[0].returncode, output) == (130, "")
    [line] = errors.strip().splitlines()
    assert line.startswith("Interrupted: ")
    assert says in line
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert repo.titles() == ["Publish 1 shard with hubshard", "a commit", "initial commit"]
    assert equal(repo.tensors(tmp_path / "cache"), weights(2))
    assert list(repo.tags()) == ["v1"]


def test_a_tag_that_is_there_though_no_answer_said_so_is_made(repo: Repo, proxy: Proxy) -> None:
    proxy.always(TAG, lose)
    published = repo.push(weights(2), tag="v1", max_retries=1)
    assert repo.tags() == {"v1": published.commit}


@pytest.mark.parametrize(
    ("fault", "look", "says"),
    [
        (say(503), Exchange.done, "shows all of it; it only lacks the tag"),
        (done_then(say(503)), say(503), "shows all of it; whether it has the tag cannot be said"),
        (say(403), Exchange.done, "shows all of it; it only lacks the tag"),
    ],
)
def test_a_tag_that_cannot_be_made_or_looked_up_is_told_as_that(
    repo: Repo, proxy: Proxy, fault: Fault, look: Fault, says: str
) -> None:
    def broken(exchange: Exchange) -> Answer:
        proxy.always(r"GET /api/models/.*/refs", look)
        return fault(exchange)

    proxy.always(TAG, broken)
    with pytest.raises(StoreError) as told:
        repo.push(weights(2), tag="v1", max_retries=0)
    assert told.value.hint is not None
    assert says in told.value.hint


def test_of_a_repo_that_is_deleted_meanwhile_nothing_is_said_to_be_kept(module_hub: Hub, proxy: Proxy) -> None:
    repo = new_repo(module_hub, proxy.url)
    HfApi(endpoint=repo.hub.url, token="hf_test").delete_repo(repo.repo_id)
    events: list[Event] = []

    def delete(exchange: Exchange) -> Answer:
        HfApi(endpoint=repo.hub.url, token="hf_test").delete_repo(repo.repo_id)
        return exchange.forward()

    proxy.fail(FINAL, delete)
    with pytest.raises(HubshardError) as told:
        repo.push(weights(2), on_event=events.append)
    assert "does not exist" in str(told.value)
    assert "was made for this publish" not in str(told.value.hint)
    assert not [event.detail for event in events if event.kind == "warning"]


def test_a_new_repo_whose_commit_may_have_been_made_is_not_said_to_show_nothing(module_hub: Hub, proxy: Proxy) -> None:
    repo = new_repo(module_hub, proxy.url)
    HfApi(endpoint=repo.hub.url, token="hf_test").delete_repo(repo.repo_id)
    proxy.always(FINAL, lose)
    proxy.always(r"GET /api/models/.*/commits/", say(503))
    with pytest.raises(StoreError) as told:
        repo.push(weights(2), max_retries=0)
    assert "shows nothing" not in str(told.value.hint)
    assert len(repo.titles()) == 2


@pytest.mark.parametrize("status", [400, 403])
def test_a_new_repo_whose_commit_was_refused_is_said_to_show_nothing(
    module_hub: Hub, proxy: Proxy, status: int
) -> None:
    repo = new_repo(module_hub, proxy.url)
    HfApi(endpoint=repo.hub.url, token="hf_test").delete_repo(repo.repo_id)
    proxy.always(FINAL, say(status))
    with pytest.raises(StoreError) as told:
        repo.push(weights(2))
    assert f"{repo.repo_id} was made for this publish, and shows nothing of it" in str(told.value.hint)
