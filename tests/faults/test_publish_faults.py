"""A publish over a bad line, to a Hub that refuses, to a branch that others move."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.numpy import save_file

from hubshard.errors import ConflictError, FormatError, StoreError
from hubshard.events import Event
from hubshard.hubserver import Settings
from hubshard.store.hub import HubStore
from tests.faults.models import Repo, equal, new_repo, weights
from tests.faults.proxy import (
    Answer,
    Exchange,
    Fault,
    Proxy,
    cut,
    delay,
    done_then,
    drop,
    lose,
    proxied,
    redirect,
    say,
    skew,
)

if TYPE_CHECKING:
    from tests.conftest import Hub, StartHub

pytest.importorskip("starlette")

FINAL = re.compile(r"POST /api/models/.*/commit/main")
STAGING = re.compile(r"POST /api/models/.*/commit/hubshard%2Fstaging")
BRANCH = re.compile(r"POST /api/models/.*/branch/")
TITLES = ["new", "a commit", "initial commit"]


@pytest.fixture
def repo(module_hub: Hub, proxy: Proxy) -> Repo:
    """Holds an old model; published to through the proxy."""
    made = new_repo(module_hub, proxy.url)
    made.put(weights(1))
    return made


def check_done(repo: Repo, cache: Path) -> None:
    """The new model is shown by one commit, and nothing else is left."""
    assert repo.titles() == TITLES
    assert equal(repo.tensors(cache), weights(2))
    assert repo.branches() == ["main"]


# Lost answers and conflicts


@pytest.mark.parametrize("fault", [lose, done_then(say(504)), done_then(say(502)), done_then(say(408))])
def test_a_final_commit_whose_answer_is_lost_is_made_once(
    repo: Repo, proxy: Proxy, tmp_path: Path, fault: Fault
) -> None:
    proxy.fail(FINAL, fault)
    published = repo.push(weights(2), message="new", tag="v1")
    check_done(repo, tmp_path / "cache")
    assert repo.tags() == {"v1": published.commit}
    assert len(proxy.lines(FINAL)) == 1


def test_lost_answers_of_staging_commits_and_branches_do_no_harm(repo: Repo, proxy: Proxy, tmp_path: Path) -> None:
    proxy.fail(STAGING, lose, done_then(say(504)))
    proxy.fail(BRANCH, lose)
    proxy.fail(r"POST .*/tag/", lose)
    proxy.fail(r"DELETE .*/branch/", lose)
    published = repo.push(weights(2), message="new", tag="v1")
    check_done(repo, tmp_path / "cache")
    assert repo.tags() == {"v1": published.commit}
    batches = [json.loads(line)["value"]["path"] for seen in proxy.lines(STAGING) for line in large_files(seen)]
    assert sorted(batches) == sorted(f"staged/model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4))


def test_lost_answers_while_a_tag_is_moved_do_no_harm(repo: Repo, proxy: Proxy) -> None:
    repo.push(weights(2), tag="v1")
    proxy.fail(r"DELETE .*/tag/", lose)
    proxy.fail(r"POST .*/tag/", Exchange.done, lose)
    published = repo.push(weights(3), tag="v1", move_tag=True)
    assert not proxy.faults
    assert repo.tags() == {"v1": published.commit}


def large_files(commit: Exchange) -> list[bytes]:
    return [line for line in commit.body.splitlines() if json.loads(line)["key"] == "lfsFile"]


@pytest.mark.parametrize("status", [409, 412])
def test_a_conflict_that_is_none_is_tried_again(repo: Repo, proxy: Proxy, tmp_path: Path, status: int) -> None:
    proxy.fail(FINAL, say(status, "please refresh"))
    repo.push(weights(2), message="new")
    check_done(repo, tmp_path / "cache")
    assert len(proxy.lines(FINAL)) == 2


def overtaken_by(act: Callable[[], object]) -> Fault:
    """Somebody else acts right before the request arrives."""

    def fault(exchange: Exchange) -> Answer:
        act()
        return exchange.forward()

    return fault


def done_then_fail(proxy: Proxy, line: str, act: Callable[[], object]) -> Fault:
    """Once the request is done, somebody else acts right before the next one of a kind arrives."""

    def fault(exchange: Exchange) -> Answer:
        proxy.fail(line, overtaken_by(act))
        return exchange.forward()

    return fault


def test_who_is_overtaken_in_the_same_files_is_told_by_whom_and_where(repo: Repo, proxy: Proxy, tmp_path: Path) -> None:
    direct = repo.through(repo.hub.url)
    proxy.fail(FINAL, overtaken_by(lambda: direct.push(weights(3), message="I was faster")))
    events: list[Event] = []
    with pytest.raises(ConflictError) as caught:
        repo.push(weights(2), message="new", on_event=events.append)
    assert re.search(r"by hubshard: 'I was faster'.*changed .*model-00001-of-00004\.safetensors", str(caught.value))
    assert equal(repo.tensors(tmp_path / "cache"), weights(3))
    assert repo.titles()[0] == "I was faster"
    assert any(event.kind == "warning" and event.path.startswith("hubshard/staging/main/") for event in events)


def test_who_is_overtaken_in_other_files_builds_upon_them(repo: Repo, proxy: Proxy, tmp_path: Path) -> None:
    proxy.fail(FINAL, overtaken_by(lambda: repo.put_files({"notes.txt": b"notes"})))
    repo.push(weights(2), message="new")
    assert repo.titles() == ["new", "a commit", *TITLES[1:]]
    assert "notes.txt" in repo.files()
    assert equal(repo.tensors(tmp_path / "cache"), weights(2))


def test_who_is_overtaken_by_the_same_model_is_done(repo: Repo, proxy: Proxy, tmp_path: Path) -> None:
    direct = repo.through(repo.hub.url)
    proxy.fail(FINAL, overtaken_by(lambda: direct.push(weights(2), message="new")))
    repo.push(weights(2), message="mine")
    check_done(repo, tmp_path / "cache")


def test_who_is_overtaken_by_the_same_model_with_the_same_tag_is_done_and_leaves_no_branch(
    repo: Repo, proxy: Proxy, tmp_path: Path
) -> None:
    other: list[str | None] = []

    def on_event(event: Event) -> None:
        if event.kind == "staging" and not other:
            other.append(None)
            other[0] = repo.through(repo.hub.url).push(weights(2), message="new", tag="v1").commit

    published = repo.push(weights(2), message="mine", tag="v1", on_event=on_event)
    assert [published.commit] == other
    assert repo.tags() == {"v1": published.commit}
    check_done(repo, tmp_path / "cache")


def test_a_tag_that_others_put_elsewhere_meanwhile_is_refused_before_the_commit(repo: Repo, proxy: Proxy) -> None:
    direct, before = HubStore(repo.repo_id, endpoint=repo.hub.url, token="hf_test"), repo.titles()
    elsewhere = direct.head("main")
    assert elsewhere is not None
    proxy.fail(r"POST .*/preupload/", overtaken_by(lambda: direct.tag("v1", elsewhere)))
    with pytest.raises(ConflictError, match="the tag 'v1' is on commit"):
        repo.push(weights(2), tag="v1")
    assert repo.titles() == before


@pytest.mark.parametrize("line", [r"GET .*/refs", r"POST .*/tag/"])
def test_a_tag_that_others_put_elsewhere_right_before_ours_is_not_taken_for_ours(
    repo: Repo, proxy: Proxy, line: str
) -> None:
    direct = HubStore(repo.repo_id, endpoint=repo.hub.url, token="hf_test")
    elsewhere = direct.head("main")
    assert elsewhere is not None
    proxy.fail(FINAL, done_then_fail(proxy, line, lambda: direct.tag("v1", elsewhere)))
    with pytest.raises(ConflictError, match="the tag 'v1' is at") as caught:
        repo.push(weights(2), message="new", tag="v1")
    assert repo.titles()[0] == "new"
    assert "shows all of it; it only lacks the tag" in str(caught.value.hint)
    assert repo.tags() == {"v1": elsewhere.commit}


def test_a_branch_that_others_make_meanwhile_gets_no_tag_of_its_name(repo: Repo, proxy: Proxy) -> None:
    direct = HubStore(repo.repo_id, endpoint=repo.hub.url, token="hf_test")
    head = direct.head("main")
    assert head is not None
    proxy.fail(FINAL, overtaken_by(lambda: direct.create_branch("v1", head)))
    with pytest.raises(FormatError, match="'v1' is the name of a branch") as caught:
        repo.push(weights(2), message="new", tag="v1")
    assert "shows all of it; it only lacks the tag" in str(caught.value.hint)
    assert repo.tags() == {}
    assert repo.titles()[0] == "new"


def test_a_staging_branch_that_cannot_be_dropped_is_told_of_and_the_publish_ends_well(
    repo: Repo, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.always(r"DELETE .*/branch/", say(403, "branches stay"))
    events: list[Event] = []
    published = repo.push(weights(2), message="new", on_event=events.append)
    assert equal(repo.tensors(tmp_path / "cache"), weights(2))
    assert events[-1].detail == published.commit
    (told,) = [event for event in events if event.kind == "warning" and "branches stay" in event.detail]
    assert told.path in repo.branches()


def test_with_an_expected_head_nothing_is_built_upon_what_others_did(repo: Repo, proxy: Proxy, tmp_path: Path) -> None:
    head = repo.put_files({"a.txt": b"a"})
    proxy.fail(FINAL, overtaken_by(lambda: repo.put_files({"notes.txt": b"notes"})))
    with pytest.raises(ConflictError, match="by hubshard: 'a commit'"):
        repo.push(weights(2), expected_head=head)
    assert equal(repo.tensors(tmp_path / "cache"), weights(1))


# Refusals


@pytest.mark.parametrize(
    "line",
    [
        r"POST .*/preupload/",
        r"GET .*/xet-write-token/",
        BRANCH,
        STAGING,
        FINAL,
        r"POST .*/tag/",
    ],
)
def test_a_403_is_final_at_once_and_says_why(repo: Repo, proxy: Proxy, tmp_path: Path, line: str) -> None:
    proxy.always(line, say(403, "your plan has no room left"))
    with pytest.raises(StoreError, match=rf"must have write access to {repo.repo_id}; .*your plan has no room left"):
        repo.push(weights(2), message="new", tag="v1")
    assert len(proxy.lines(line)) <= 4  # as many as streams were under way
    proxy.heal()
    repo.push(weights(2), message="new", tag="v1")
    check_done(repo, tmp_path / "cache")


def test_a_server_that_asks_to_come_back_later_is_obeyed(repo: Repo, proxy: Proxy, tmp_path: Path) -> None:
    busy = say(429, "slow down", Retry_After="1")
    for line in (r"GET .*/revision/", r"POST .*/preupload/", STAGING, FINAL, r"POST .*/xorbs/", r"DELETE .*/branch/"):
        proxy.fail(line, busy)
    repo.push(weights(2), message="new")
    assert not proxy.faults
    check_done(repo, tmp_path / "cache")


def test_a_clock_that_is_wrong_is_said(repo: Repo, proxy: Proxy) -> None:
    proxy.always(r"POST .*/preupload/", skew(say(403, "not yet valid"), "Sat, 01 Jan 2000 00:00:00 GMT"))
    with pytest.raises(StoreError, match=r"not yet valid \(the clock here differs from the server's by \+\d+ s"):
        repo.push(weights(2))


def test_a_file_that_the_repo_ignores_is_refused_by_name(repo: Repo, tmp_path: Path) -> None:
    repo.put_files({".gitignore": b"*.log\n"})
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(weights(2), folder / "model.safetensors")
    (folder / "train.log").write_text("step 1")
    with pytest.raises(FormatError, match=r"\.gitignore of .* refuses train\.log"):
        repo.push(folder)
    assert equal(repo.tensors(tmp_path / "cache"), weights(1))
    repo.push(folder, exclude=["*.log"])
    assert equal(repo.tensors(tmp_path / "cache"), weights(2))


# Tokens


def test_a_token_that_is_renewed_while_a_publish_runs_is_used(start_hub: StartHub, tmp_path: Path) -> None:
    hub = start_hub(Settings(tokens={"hf_first": "org", "hf_second": "org", "hf_test": "org:admin"}))
    tokens = ["hf_first"]
    with proxied(hub.port) as proxy:
        repo = new_repo(hub, proxy.url)

        def renew(exchange: Exchange) -> Answer:
            tokens.append("hf_second")
            return exchange.forward()

        def check(exchange: Exchange) -> Answer:
            is_old = "hf_first" in exchange.headers.get("Authorization", exchange.headers.get("authorization", ""))
            return say(401, "expired")(exchange) if is_old and len(tokens) > 1 else exchange.forward()

        proxy.fail(STAGING, renew)
        proxy.always(r"\w+ /api/", check)
        repo.push(weights(2), token=lambda: tokens[-1])
        assert equal(repo.tensors(tmp_path / "cache"), weights(2))
        sent = {seen.headers.get("authorization", seen.headers.get("Authorization")) for seen in proxy.lines(FINAL)}
        assert sent == {"Bearer hf_second"}


def test_a_token_that_has_expired_is_final_and_what_was_finished_is_kept(
    repo: Repo, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.always(FINAL, say(401, "Invalid credentials in Authorization header"))
    with pytest.raises(StoreError, match="Invalid credentials in Authorization header"):
        repo.push(weights(2), message="new")
    proxy.heal()
    repo.hub.reset_counters()
    repo.push(weights(2), message="new")
    check_done(repo, tmp_path / "cache")
    assert repo.nbytes_received() == 0


def test_a_token_of_the_xet_storage_that_expires_is_renewed(repo: Repo, proxy: Proxy, tmp_path: Path) -> None:
    line = r"GET .*/xet-write-token/"

    def expired(exchange: Exchange) -> Answer:
        answer = exchange.forward()
        answer.body = json.dumps(json.loads(answer.body) | {"exp": 1_000_000_000, "accessToken": "expired"}).encode()
        answer.headers |= {"X-Xet-Token-Expiration": "1000000000", "X-Xet-Access-Token": "expired"}
        return answer

    proxy.fail(line, expired)
    repo.push({"a": weights(2)["layers.0.weight"]}, message="new")
    assert len(proxy.lines(line)) > 1
    assert repo.titles() == TITLES


def test_a_token_for_one_repo_creates_no_repo(start_hub: StartHub, tmp_path: Path) -> None:
    hub = start_hub(Settings(tokens={"hf_test": "org:admin", "hf_one": "ci:repo:org/model"}))
    assert hub.api()("POST", "/api/repos/create", {"name": "model", "organization": "org"}).status == 200
    with proxied(hub.port) as proxy:
        repo = Repo(hub, "org/model", proxy.url)
        repo.push(weights(2), token="hf_one", message="new", tag="v1")
        assert equal(repo.tensors(tmp_path / "cache"), weights(2))
        assert repo.branches() == ["main"]
        assert not proxy.lines(r"POST /api/repos/create")


def test_no_token_crosses_to_another_origin(start_hub: StartHub, tmp_path: Path) -> None:
    hub = start_hub(Settings(lfs_part_bytes=10_000))
    with proxied(hub.port) as proxy, proxied(hub.port) as elsewhere:
        repo = new_repo(hub, proxy.url)

        def leads_elsewhere(exchange: Exchange) -> Answer:
            answer = exchange.forward()
            answer.body = answer.body.replace(proxy.url.encode(), elsewhere.url.encode())
            return answer

        proxy.always(r"POST .*/info/lfs/objects/batch", leads_elsewhere)
        proxy.always(r"GET .*/xet-write-token/", say(404, "no Xet here"))
        proxy.always(r"GET .*/tree/", redirect(lambda exchange: elsewhere.url + exchange.line.partition(" ")[2]))
        repo.push(weights(2))
        assert equal(repo.tensors(tmp_path / "cache"), weights(2))
        assert elsewhere.lines(r"PUT /lfs/part/")
        assert elsewhere.lines(r"POST /lfs/complete")
        assert elsewhere.lines(r"GET /api/.*/tree/")
        assert all(seen.has_token for seen in proxy.lines(r"POST /api/"))
        assert not [seen.line for seen in elsewhere.seen if seen.has_token]


# Many files, many faults


def test_more_than_a_hundred_files_go_in_one_commit(repo: Repo, proxy: Proxy, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "notes").mkdir(parents=True)
    save_file(weights(2), folder / "model.safetensors")
    for number in range(110):
        (folder / "notes" / f"{number}.txt").write_text(f"note {number}")
    repo.push(folder, message="new")
    check_done(repo, tmp_path / "cache")
    assert len(proxy.lines(FINAL)) == 1
    assert {f"notes/{number}.txt" for number in range(110)} <= repo.files().keys()


@pytest.mark.parametrize("seed", [1, 2])
def test_over_a_line_that_fails_at_random_a_publish_ends_well(
    repo: Repo, proxy: Proxy, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)

    def at_random(exchange: Exchange) -> Answer:
        faults = [drop, lose, say(503), say(429, Retry_After="0"), done_then(say(504)), cut(10)]
        return chance.choice(faults)(exchange) if chance.random() < 0.08 else exchange.forward()

    proxy.always(r".*", at_random)
    repo.push(weights(2), message="new")
    check_done(repo, tmp_path / "cache")


def test_an_upload_that_stalls_is_given_up_and_sent_again(start_hub: StartHub, tmp_path: Path) -> None:
    hub = start_hub(Settings(lfs_part_bytes=10_000))
    with proxied(hub.port) as proxy:
        repo = new_repo(hub, proxy.url)
        proxy.always(r"GET .*/xet-write-token/", say(404, "no Xet here"))
        proxy.fail(r"PUT /lfs/part/2", delay(proxy, 60))
        repo.push(weights(2), stall_seconds=0.6)
        assert not proxy.faults
        assert equal(repo.tensors(tmp_path / "cache"), weights(2))


def test_an_upload_by_xet_that_stalls_is_given_up_and_sent_again(repo: Repo, proxy: Proxy, tmp_path: Path) -> None:
    proxy.fail(r"POST .*/xorbs/", delay(proxy, 200))
    repo.push(weights(2), message="new", stall_seconds=1.0)
    check_done(repo, tmp_path / "cache")
    assert len(proxy.lines(r"POST .*/xorbs/")) == 5


@pytest.mark.parametrize("line", [FINAL, STAGING, r"GET .*/revision/"])
def test_a_server_that_stays_down_is_given_up_and_the_next_run_sends_nothing_again(
    repo: Repo, proxy: Proxy, tmp_path: Path, line: str
) -> None:
    proxy.always(line, say(503, "down for ever"))
    with pytest.raises(StoreError, match="down for ever") as caught:
        repo.push(weights(2), message="new", max_retries=1)
    assert caught.value.retryable
    assert equal(repo.tensors(tmp_path / "cache"), weights(1))
    proxy.heal()
    repo.hub.reset_counters()
    repo.push(weights(2), message="new")
    check_done(repo, tmp_path / "cache")
    if line == FINAL:
        assert repo.nbytes_received() == 0


def test_redirects_in_a_circle_end(repo: Repo, proxy: Proxy) -> None:
    proxy.always(r"GET /api/models/.*/revision/", redirect(lambda exchange: exchange.line.partition(" ")[2]))
    with pytest.raises(StoreError, match="redirects"):
        repo.push(weights(2), max_retries=1)
    assert len(proxy.seen) < 60
