"""Readers and other publishers at the same time; publishes that keep nothing on a branch."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.numpy import load

from hubshard.errors import StoreError
from hubshard.events import Event
from hubshard.hubserver import Settings
from hubshard.publish import abandon, staging_branches
from tests.faults.clients import Clients, Ended, Victim, clients
from tests.faults.models import INDEX, SHARD_BYTES, Repo, Weights, equal, new_repo, weights
from tests.faults.proxy import Answer, Exchange, Proxy, proxied, say

if TYPE_CHECKING:
    from tests.conftest import Hub, StartHub

pytest.importorskip("starlette")

FINAL = r"POST /api/models/.*/commit/main"
STAGING = r"POST /api/models/.*/commit/hubshard%2Fstaging"


# A reader that polls all the while


class Reader:
    """Looks at main again and again, and loads all that it lists."""

    def __init__(self, repo: Repo) -> None:
        self.seen: dict[str, Weights] = {}
        self.looks = 0
        self._repo = repo
        self._is_done = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._poll)

    @contextmanager
    def polling(self) -> Iterator[Reader]:
        self._thread.start()
        try:
            yield self
        finally:
            self._is_done.set()
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _poll(self) -> None:
        try:
            while not self._is_done.is_set():
                self._look()
        except BaseException as failure:  # noqa: BLE001  raised in the test's own thread
            self._failure = failure

    def _look(self) -> None:
        get = self._repo.hub.api()
        commit = get("GET", f"/api/models/{self._repo.repo_id}/revision/main").json["sha"]
        self.looks += 1
        if commit in self.seen:
            return
        names = self._repo.files(commit)
        weights_here = [name for name in names if name.endswith(".safetensors")]
        files = {n: get("GET", f"/{self._repo.repo_id}/resolve/{commit}/{n}").body for n in (*weights_here, INDEX)}
        if "model.safetensors" in names:
            assert INDEX not in names
            assert weights_here == ["model.safetensors"]
            self.seen[commit] = load(files["model.safetensors"])
            return
        weight_map: dict[str, str] = json.loads(files[INDEX])["weight_map"]
        assert sorted(set(weight_map.values())) == sorted(weights_here)
        tensors = {name: tensor for path in weights_here for name, tensor in load(files[path]).items()}
        assert tensors.keys() == weight_map.keys()
        self.seen[commit] = tensors


def test_a_reader_that_polls_all_the_while_never_sees_half_a_model(module_hub: Hub) -> None:
    repo = new_repo(module_hub)
    repo.put(weights(0))
    with Reader(repo).polling() as reader:
        for seed in range(1, 13):
            size = (20_000, 40_000, 5_000_000, 80_000)[seed % 4]
            repo.push(weights(seed, layers=5 + seed % 3), max_shard_size=size)
    assert reader.looks > 12
    assert len(reader.seen) >= 6
    models = [weights(0), *(weights(seed, layers=5 + seed % 3) for seed in range(1, 13))]
    for seen in reader.seen.values():
        assert any(equal(seen, model) for model in models)


# Two publishers at once


@pytest.fixture(scope="module")
def two(module_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Clients, Clients]]:
    env = module_hub.client_env(tmp_path_factory.mktemp("home"))
    with ExitStack() as stack:
        yield stack.enter_context(clients(env)), stack.enter_context(clients(env))


def together(
    repo: Repo, two: tuple[Clients, Clients], proxy: Proxy, place: Path, *jobs: dict[str, Any]
) -> tuple[Ended, Ended]:
    """Both publish, in processes of their own; neither commits before both are about to."""
    meet = threading.Barrier(2, timeout=60)

    def at_once(exchange: Exchange) -> Answer:
        meet.wait()
        return exchange.forward()

    proxy.fail(FINAL, at_once, at_once)
    usual = {"repo_id": repo.repo_id, "endpoint": proxy.url, "token": "hf_test", "max_shard_size": SHARD_BYTES}
    usual |= {"staging_batch_size": 1}

    def run(number: int) -> Ended:
        return two[number].run("push", place / str(number), arguments=usual | jobs[number])

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(run, (0, 1))
    return one, other


@pytest.fixture
def repo(module_hub: Hub, proxy: Proxy) -> Repo:
    made = new_repo(module_hub, proxy.url)
    made.put(weights(1))
    return made


def test_of_two_publishers_one_wins_and_the_other_learns_who_and_what(
    repo: Repo, two: tuple[Clients, Clients], proxy: Proxy, tmp_path: Path
) -> None:
    jobs = ({"seed": 2, "message": "two"}, {"seed": 3, "message": "three"})
    ended = together(repo, two, proxy, tmp_path, *jobs)
    assert sorted(e.status for e in ended) == [0, 1]
    winner = 0 if ended[0].status == 0 else 1
    name, message, _ = ended[1 - winner].events[-1]
    assert name == "ConflictError"
    assert f"by hubshard: '{jobs[winner]['message']}'" in message
    assert "model-00001-of-00004.safetensors" in message
    assert equal(repo.tensors(tmp_path / "cache"), weights(winner + 2))
    assert repo.titles() == [jobs[winner]["message"], "a commit", "initial commit"]


def test_two_publishers_of_different_files_both_end_well(
    repo: Repo, two: tuple[Clients, Clients], proxy: Proxy, tmp_path: Path
) -> None:
    ended = together(repo, two, proxy, tmp_path, {"seed": 2}, {"seed": 3, "variant": "fp16"})
    assert [e.status for e in ended] == [0, 0]
    assert equal(repo.tensors(tmp_path / "cache"), weights(2))
    assert "model.safetensors.index.fp16.json" in repo.files()
    assert len(repo.titles()) == 4
    assert repo.branches() == ["main"]


def test_the_same_publish_twice_at_once_ends_well_twice_with_one_commit(
    repo: Repo, two: tuple[Clients, Clients], proxy: Proxy, tmp_path: Path
) -> None:
    ended = together(repo, two, proxy, tmp_path, {"seed": 2, "tag": "v1"}, {"seed": 2, "tag": "v1"})
    assert [e.status for e in ended] == [0, 0], [e.events[-1] for e in ended]
    assert equal(repo.tensors(tmp_path / "cache"), weights(2))
    assert len(repo.titles()) == 3
    assert repo.branches() == ["main"]
    assert list(repo.tags()) == ["v1"]


# No staging branch


@pytest.mark.parametrize("xet", [True, False])
def test_without_a_staging_branch_nothing_is_to_be_seen_and_a_killed_run_goes_on(
    repo: Repo, two: tuple[Clients, Clients], proxy: Proxy, tmp_path: Path, xet: bool
) -> None:
    if not xet:
        proxy.always(r"GET .*/xet-write-token/", say(404, "no Xet here"))
    victim, seen = Victim(), list[list[str]]()

    def look(exchange: Exchange) -> Answer:
        seen.append([*repo.branches(), *repo.titles()])
        return exchange.forward()

    proxy.always(r"POST .*/preupload/", look)
    proxy.fail(FINAL, victim.before())
    arguments = {"repo_id": repo.repo_id, "endpoint": proxy.url, "token": "hf_test", "max_shard_size": SHARD_BYTES}
    arguments |= {"staging": "none", "seed": 2}
    assert two[0].run("push", tmp_path / "1", victim=victim, arguments=dict(arguments)).is_killed
    assert seen
    assert all(there == ["main", "a commit", "initial commit"] for there in seen)
    before = repo.nbytes_received()
    assert before > 8 * 16_384
    assert two[0].run("push", tmp_path / "2", arguments=arguments).status == 0
    assert repo.nbytes_received() == before
    assert equal(repo.tensors(tmp_path / "cache"), weights(2))
    assert not proxy.lines(STAGING)


# Pull requests


def test_a_model_is_proposed_to_the_repo_of_another_without_a_branch(start_hub: StartHub, tmp_path: Path) -> None:
    hub = start_hub(Settings(tokens={"hf_test": "org:admin", "hf_other": "other"}))
    repo = new_repo(hub)
    repo.put(weights(1))
    events: list[Event] = []
    with pytest.raises(StoreError, match=f"must have write access to {repo.repo_id}"):
        repo.push(weights(2), token="hf_other")
    with proxied(hub.port) as proxy:
        proposing = repo.through(proxy.url)
        published = proposing.push(weights(2), token="hf_other", create_pr=True, on_event=events.append)
        assert len(proxy.lines(r"POST .*/branch/")) == 1
    assert published.pr_url is not None
    assert published.pr_url.endswith(f"{repo.repo_id}/discussions/1")
    assert repo.branches() == ["main"]
    assert equal(repo.tensors(tmp_path / "cache"), weights(1))
    assert equal(repo.tensors(tmp_path / "cache", "refs/pr/1"), weights(2))
    assert [event.kind for event in events if event.path.startswith("hubshard/staging/")] == ["warning"]


def test_a_proposal_that_was_killed_after_its_commit_is_made_once(
    repo: Repo, proxy: Proxy, two: tuple[Clients, Clients], tmp_path: Path
) -> None:
    victim = Victim()
    proxy.fail(FINAL, victim.after())
    arguments = {"repo_id": repo.repo_id, "endpoint": proxy.url, "token": "hf_test", "create_pr": True, "seed": 2}
    assert two[0].run("push", tmp_path / "1", victim=victim, arguments=dict(arguments)).is_killed
    assert two[0].run("push", tmp_path / "2", arguments=dict(arguments)).status == 0
    refs = repo.hub.api()("GET", f"/api/models/{repo.repo_id}/refs?include_prs=1").json
    assert [ref["ref"] for ref in refs["pullRequests"]] == ["refs/pr/1"]
    assert equal(repo.tensors(tmp_path / "cache", "refs/pr/1"), weights(2))
    assert repo.branches() == ["main"]
    answer = repo.hub.api()("POST", f"/api/models/{repo.repo_id}/discussions/1/status", {"status": "closed"})
    assert answer.status == 200, answer.body
    assert repo.push(weights(2), create_pr=True).pr_url == f"{proxy.url}/{repo.repo_id}/discussions/2"


# What failed publishes leave


def test_staging_branches_are_named_listed_and_abandoned(repo: Repo, proxy: Proxy) -> None:
    proxy.always(FINAL, say(403, "no"))
    repo.put_files({"a.txt": b"a"})
    events: list[Event] = []
    for size in (40_000, 80_000):
        with pytest.raises(StoreError):
            repo.push(weights(2), max_shard_size=size, on_event=events.append)
    proxy.heal()
    proxy.always(r"POST /api/models/.*/commit/next", say(403, "no"))
    with pytest.raises(StoreError):
        repo.push(weights(2), revision="next")
    options: dict[str, Any] = {"token": "hf_test", "endpoint": repo.hub.url}
    names = staging_branches(repo.repo_id, **options)
    assert [name.rpartition("/")[0] for name in names] == [f"hubshard/staging/{b}" for b in ("main", "main", "next")]
    assert staging_branches(repo.repo_id, revision="next", **options) == names[2:]
    kept = [event.path for event in events if event.kind == "warning" and "run again" in event.detail]
    assert sorted(kept) == list(names[:2])
    assert abandon(repo.repo_id, revision="main", **options) == names[:2]
    assert [name for name in repo.branches() if name.startswith("hubshard/")] == [names[2]]
    assert abandon(repo.repo_id, **options) == names[2:]
    assert abandon(repo.repo_id, **options) == ()


def test_a_run_names_the_staging_branch_that_it_goes_on_from_and_drops(repo: Repo, proxy: Proxy) -> None:
    proxy.fail(FINAL, say(403, "no"))
    with pytest.raises(StoreError):
        repo.push(weights(2))
    (name,) = staging_branches(repo.repo_id, token="hf_test", endpoint=repo.hub.url)
    events: list[Event] = []
    repo.push(weights(2), on_event=events.append)
    told = [(event.path, event.detail) for event in events if event.kind == "staging"]
    assert told == [(name, "4 files from an earlier run"), (name, "dropped")]


def test_a_publish_whose_staging_branch_is_abandoned_meanwhile_makes_it_anew(
    repo: Repo, proxy: Proxy, tmp_path: Path
) -> None:
    def abandoned(exchange: Exchange) -> Answer:
        assert abandon(repo.repo_id, token="hf_test", endpoint=repo.hub.url)
        return exchange.forward()

    proxy.fail(STAGING, Exchange.done, abandoned, Exchange.done, abandoned)
    repo.push(weights(2))
    assert not proxy.faults
    assert equal(repo.tensors(tmp_path / "cache"), weights(2))
    assert repo.branches() == ["main"]


def test_a_publish_to_an_expected_head_that_was_killed_after_its_commit_is_done_when_run_again(
    repo: Repo, proxy: Proxy, two: tuple[Clients, Clients], tmp_path: Path
) -> None:
    head = repo.put_files({"a.txt": b"a"})
    victim = Victim()
    proxy.fail(FINAL, victim.after())
    arguments = {"repo_id": repo.repo_id, "endpoint": proxy.url, "token": "hf_test", "max_shard_size": SHARD_BYTES}
    arguments |= {"expected_head": head, "seed": 2, "tag": "v1"}
    assert two[0].run("push", tmp_path / "1", victim=victim, arguments=dict(arguments)).is_killed
    assert two[0].run("push", tmp_path / "2", arguments=dict(arguments)).status == 0
    assert list(repo.tags()) == ["v1"]
    other = two[0].run("push", tmp_path / "3", arguments=arguments | {"seed": 3})
    assert other.events[-1][0] == "ConflictError"
    assert equal(repo.tensors(tmp_path / "cache"), weights(2))
