"""A repo as a store behind a proxy that loses answers, cuts bodies, says no, or leads elsewhere."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import set_client_factory
from huggingface_hub.utils import httpx
from huggingface_hub.utils._http import default_client_factory

from hubshard.errors import ConflictError, HubshardError, IntegrityError, NotFoundError, StoreError
from hubshard.hubserver import Settings
from hubshard.protocols import Revision, Staged
from hubshard.store.hub import HubStore
from hubshard.store.hub_client import HubClient
from hubshard.store.hub_read import RangeReader
from hubshard.store.patience import Patience
from tests.faults.proxy import Answer, Exchange, Fault, Proxy, change, cut, drop, lose, redirect, say

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Hub, StartHub

WEIGHTS = random.Random(3).randbytes(2_000_000)
COMMIT = re.compile(r"POST /api/models/.*/commit/")
RESOLVE = re.compile(r"GET /.*/resolve/")


@dataclass
class Setting:
    """A repo with one large file, seen through a proxy."""

    hub: Hub
    proxy: Proxy
    store: HubStore
    at: Revision

    def head(self) -> Revision:
        found = self.store.head("main")
        assert found is not None
        return found

    def commit(self, number: int = 1, *, create_pr: bool = False) -> Revision:
        content = b"%d" % number
        staged = self.store.stage("main", "a.json", lambda: [content], nbytes=len(content), create_pr=create_pr)
        return self.store.commit(
            "main",
            parent=self.at,
            add=[staged],
            remove=[],
            message=f"commit {number}",
            publish_id=f"id-{number}",
            create_pr=create_pr,
        )

    def titles(self) -> list[str]:
        items = self.hub.api()("GET", f"/api/models/{self.store.repo_id}/commits/main").json
        return [item["title"] for item in items]

    def read(self, start: int, stop: int) -> bytes:
        into = bytearray(stop - start)
        self.store.read(self.at, "m.safetensors", start, stop, memoryview(into))
        return bytes(into)


@contextmanager
def _setting(hub: Hub, *, xet: bool | None = None) -> Iterator[Setting]:
    proxy = Proxy(hub.port)
    try:
        store = HubStore(f"org/repo-{random.getrandbits(64):x}", endpoint=proxy.url, token="hf_test", xet=xet)
        store.create_repo()
        staged = store.stage("main", "m.safetensors", lambda: [WEIGHTS], nbytes=len(WEIGHTS))
        parent = store.head("main")
        at = store.commit("main", parent=parent, add=[staged], remove=[], message="start", publish_id="start")
        proxy.seen.clear()
        yield Setting(hub, proxy, store, at)
    finally:
        proxy.close()


@pytest.fixture
def setting(module_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))
    with _setting(module_hub) as made:
        yield made


# Commits


def test_a_commit_whose_answer_is_lost_is_made_once(setting: Setting) -> None:
    setting.proxy.fail(COMMIT, lose)
    made = setting.commit()
    assert setting.head() == made
    assert setting.titles() == ["commit 1", "start", "initial commit"]
    assert len(setting.proxy.lines(COMMIT)) == 1


def test_a_commit_whose_answer_is_an_error_of_a_gateway_is_made_once(setting: Setting) -> None:
    setting.proxy.fail(COMMIT, lambda exchange: (exchange.forward(), Answer(504))[1])
    assert setting.head() != setting.commit()
    assert setting.titles() == ["commit 1", "start", "initial commit"]


def test_a_commit_whose_answer_cannot_be_read_is_made_once(setting: Setting) -> None:
    setting.proxy.fail(COMMIT, change(body=b"<html>"))
    assert setting.commit() == setting.head()
    assert setting.titles() == ["commit 1", "start", "initial commit"]


def test_a_commit_that_never_arrived_is_sent_again(setting: Setting) -> None:
    setting.proxy.fail(COMMIT, drop)
    assert setting.commit() == setting.head()
    assert len(setting.proxy.lines(COMMIT)) == 2


def test_a_server_that_asks_to_wait_is_obeyed(setting: Setting) -> None:
    setting.proxy.fail(COMMIT, say(429, "slow down", Retry_After="17"))
    waits: list[float] = []
    patient = Patience(sleep=waits.append)
    setting.store = HubStore(setting.store.repo_id, endpoint=setting.proxy.url, token="hf_test", patience=patient)
    setting.commit()
    assert waits == [17.0]
    assert len(setting.proxy.lines(COMMIT)) == 2


def test_a_commit_that_is_overtaken_after_a_failure_is_a_conflict(setting: Setting) -> None:
    other = HubStore(setting.store.repo_id, endpoint=setting.hub.url, token="hf_test")

    def overtaken(exchange: Exchange) -> Answer:
        other.commit("main", parent=setting.at, add=[], remove=[], message="faster", publish_id="other")
        return Answer(503)

    setting.proxy.fail(COMMIT, overtaken)
    with pytest.raises(ConflictError, match="by hubshard: 'faster'"):
        setting.commit()
    assert setting.titles() == ["faster", "start", "initial commit"]


@pytest.mark.parametrize("status", [400, 403, 404, 413, 422])
def test_a_refusal_is_final_and_has_the_servers_words(setting: Setting, status: int) -> None:
    setting.proxy.fail(COMMIT, say(status, "the reason of the server"))
    with pytest.raises(StoreError, match="the reason of the server") as caught:
        setting.commit()
    assert not caught.value.retryable
    assert len(setting.proxy.lines(COMMIT)) == 1
    assert setting.head() == setting.at


def test_a_pull_request_whose_answer_is_lost_is_opened_once(setting: Setting) -> None:
    setting.proxy.fail(COMMIT, lose)
    made = setting.commit(create_pr=True)
    assert made.branch == "refs/pr/1"
    assert setting.store.head("refs/pr/1") == made
    assert setting.store.head("refs/pr/2") is None


def test_a_branch_and_a_tag_whose_answers_are_lost_are_made(setting: Setting) -> None:
    setting.proxy.fail(r"POST .*/branch/", lose)
    setting.proxy.fail(r"POST .*/tag/", lose)
    assert setting.store.create_branch("b", setting.at).commit == setting.at.commit
    assert setting.store.tag("v1", setting.at).commit == setting.at.commit


# Reads


@pytest.fixture(params=["plain connections", "a client made to order"])
def by(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "a client made to order":
        set_client_factory(lambda: default_client_factory())  # noqa: PLW0108  # another function
    yield
    set_client_factory(default_client_factory)


by_both = pytest.mark.usefixtures("by")


@by_both
def test_a_read_that_is_cut_goes_on_where_it_stopped(setting: Setting) -> None:
    setting.proxy.fail(RESOLVE, cut(700_000), cut(0), cut(300_000))
    assert setting.read(1000, 1_900_000) == WEIGHTS[1000:1_900_000]
    ranges = [exchange.headers["Range"] for exchange in setting.proxy.lines(RESOLVE)]
    starts = [int(given.removeprefix("bytes=").split("-")[0]) for given in ranges]
    assert starts == [1000, 701_000, 701_000, 1_001_000]


@by_both
def test_a_read_is_given_up_when_nothing_comes_any_more(setting: Setting) -> None:
    refused = [say(503, "down", Retry_After="0")] * 6
    setting.proxy.fail(RESOLVE, *refused)
    with pytest.raises(StoreError, match="down") as caught:
        setting.read(0, 10)
    assert caught.value.retryable
    assert len(setting.proxy.lines(RESOLVE)) == 6


@by_both
def test_a_read_that_stalls_is_taken_up_again(setting: Setting) -> None:
    client = HubClient(
        setting.store.repo_id,
        repo_type="model",
        token="hf_test",
        endpoint=setting.proxy.url,
        patience=Patience(stall_seconds=0.5),
    )
    reader = RangeReader(client)
    setting.proxy.fail(RESOLVE, change(cut=900_000, pause_seconds=3.0))
    assert b"".join(map(bytes, reader.stream(setting.at.commit, "m.safetensors", 0, len(WEIGHTS)))) == WEIGHTS
    assert len(setting.proxy.lines(RESOLVE)) == 2


@by_both
@pytest.mark.parametrize(
    "fault",
    [
        change(status=200),
        change(headers={"Content-Range": "bytes 0-999/2000000"}),
        change(headers={"Content-Range": "bytes 5-1003/2000000"}),
        change(headers={"Content-Range": ""}),
        change(headers={"Content-Encoding": "gzip"}),
        lambda _: Answer(200, {}, b"<html>log in</html>"),
    ],
)
def test_an_answer_that_is_not_the_range_asked_for_is_refused(setting: Setting, fault: Fault) -> None:
    setting.proxy.fail(RESOLVE, fault)
    with pytest.raises(IntegrityError, match=r"m\.safetensors: asked for bytes 5-1005, but the answer is"):
        setting.read(5, 1005)
    assert len(setting.proxy.lines(RESOLVE)) == 1


@by_both
def test_a_refusal_to_read_is_final(setting: Setting) -> None:
    setting.proxy.fail(RESOLVE, say(403, "not for you", Date="Thu, 01 Jan 1970 00:00:00 GMT"))
    with pytest.raises(StoreError, match=r"the token must have read access to .*; the server says: not for you"):
        setting.read(0, 10)
    setting.proxy.fail(RESOLVE, say(404, X_Error_Code="RepoNotFound"))
    with pytest.raises(NotFoundError, match="or it is private"):
        setting.read(0, 10)


@pytest.mark.parametrize("pattern", [r"GET .*/xet-read-token/", r"GET .*/reconstructions/", r"GET /xet/data/"])
@pytest.mark.parametrize("fault", [say(404), say(403)])
def test_a_read_that_fails_by_xet_goes_on_by_http(setting: Setting, pattern: str, fault: Fault) -> None:
    content = random.Random(9).randbytes(20_000_000)
    staged = setting.store.stage("main", "m.safetensors", lambda: [content], nbytes=len(content))
    at = setting.store.commit("main", parent=setting.at, add=[staged], remove=[], message="m", publish_id="large")
    setting.store.list(at)
    setting.proxy.fail(pattern, *[fault] * 99)
    into = bytearray(len(content))
    setting.store.read(at, "m.safetensors", 0, len(content), memoryview(into))
    assert into == content
    assert setting.proxy.lines(pattern)
    assert setting.proxy.lines(RESOLVE)


@by_both
def test_a_redirect_to_another_server_gets_no_token_and_is_remembered(setting: Setting) -> None:
    elsewhere = Proxy(setting.hub.port)
    try:
        path = f"/{setting.store.repo_id}/resolve/{setting.at.commit}/m.safetensors"
        setting.proxy.fail(RESOLVE, redirect(f"{elsewhere.url}{path}?signed=1"))
        for start in (0, 10, 20):
            assert setting.read(start, start + 10) == WEIGHTS[start : start + 10]
        assert len(setting.proxy.lines(RESOLVE)) == 1
        assert "authorization" in {name.lower() for name in setting.proxy.lines(RESOLVE)[0].headers}
        assert len(elsewhere.seen) == 3
        assert all("authorization" not in {name.lower() for name in seen.headers} for seen in elsewhere.seen)
        elsewhere.fail(RESOLVE, say(403, "the URL has expired"))
        assert setting.read(30, 40) == WEIGHTS[30:40]
        assert len(setting.proxy.lines(RESOLVE)) == 2
    finally:
        elsewhere.close()


@by_both
def test_redirects_in_a_circle_end(setting: Setting) -> None:
    setting.proxy.fail(RESOLVE, *[redirect("/x/y/resolve/main/z?secret=1")] * 20)
    with pytest.raises(StoreError, match=r"more than 5 redirects, the last to .*/resolve/main/z$") as caught:
        setting.read(0, 10)
    assert not caught.value.retryable
    assert len(setting.proxy.lines(RESOLVE)) == 6


@by_both
@pytest.mark.parametrize(
    "location", ["ftp://x/y?secret=1", "http://x:99999/?secret=1", "http://[::1?secret", "mailto:x"]
)
def test_a_redirect_to_no_server_is_an_error(setting: Setting, location: str) -> None:
    setting.proxy.fail(RESOLVE, *[redirect(location)] * 9)
    with pytest.raises(StoreError, match=r"m\.safetensors.*: .*(redirects to what is no address|location)") as caught:
        setting.read(0, 10)
    assert "secret" not in str(caught.value)
    release = tuple(map(int, httpx.__version__.split(".")[:2]))
    if release >= (2, 16) or not caught.value.retryable:  # before, a client made to order refuses it, and tries again
        assert not caught.value.retryable
        assert str(caught.value).endswith("m.safetensors: the server redirects to what is no address of HTTP")


@by_both
@pytest.mark.parametrize("status", [401, 403, 404, 500])
@pytest.mark.parametrize(
    "headers", [{}, {"X-Error-Code": "EntryNotFound"}, {"X-Error-Message": "no http://a/b?secret=1"}]
)
def test_an_error_does_not_show_a_signature(setting: Setting, status: int, headers: dict[str, str]) -> None:
    path = f"/{setting.store.repo_id}/resolve/{setting.at.commit}/m.safetensors?secret=1"
    setting.proxy.fail(RESOLVE, *[redirect(path), lambda _: Answer(status, headers)] * 9)
    with pytest.raises(HubshardError) as caught:
        setting.read(0, 10)
    assert "secret" not in str(caught.value)


@by_both
@pytest.mark.parametrize("body", [b"null", b"[1]", b'"x"'])
def test_an_error_whose_words_are_odd_is_one(setting: Setting, body: bytes) -> None:
    setting.proxy.fail(RESOLVE, lambda _: Answer(403, {"Date": "never", "Content-Type": "application/json"}, body))
    with pytest.raises(StoreError, match=r"the token must have read access to .*; the server says: "):
        setting.read(0, 10)


# Uploads


def _upload(setting: Setting, content: bytes) -> Staged:
    staged = setting.store.stage("main", "n.safetensors", lambda: [content[:9], content[9:]], nbytes=len(content))
    setting.store.commit("main", parent=setting.head(), add=[staged], remove=[], message="m", publish_id="n")
    into = bytearray(len(content))
    setting.store.read(setting.head(), "n.safetensors", 0, len(content), memoryview(into))
    assert into == content
    return staged


def test_an_xet_upload_survives_lost_answers(setting: Setting) -> None:
    content = random.Random(4).randbytes(3_000_000)
    setting.proxy.fail(r"POST .*/xorbs/", drop, lose)
    setting.proxy.fail(r"POST .*/shards", lose)
    setting.proxy.fail(r"GET .*/xet-write-token/", say(503))
    assert _upload(setting, content).receipt["mode"] == "xet"


def test_a_hub_without_xet_gets_plain_lfs(setting: Setting) -> None:
    content = random.Random(5).randbytes(100_000)
    setting.proxy.fail(r"GET .*/xet-write-token/", say(404, "no such route"))
    assert _upload(setting, content).receipt["mode"] == "lfs"


def test_a_part_that_fails_is_sent_again_alone(start_hub: StartHub) -> None:
    hub = start_hub(Settings(lfs_part_bytes=100_000))
    content = random.Random(6).randbytes(450_000)
    with _setting(hub, xet=False) as setting:
        setting.proxy.fail(r"PUT /lfs/part/3", drop, say(500))
        setting.proxy.fail(r"POST /lfs/complete", lose)
        _upload(setting, content)
        numbers = [exchange.line.split("/part/")[1][0] for exchange in setting.proxy.lines(r"PUT /lfs/part/")]
        assert numbers == ["1", "2", "3", "3", "3", "4", "5"]


@pytest.mark.parametrize("changed", [0, 150_000, 250_000, 449_999])
def test_content_that_changes_between_two_attempts_is_refused(start_hub: StartHub, changed: int) -> None:
    hub = start_hub(Settings(lfs_part_bytes=100_000))
    content = random.Random(7).randbytes(450_000)
    other = content[:changed] + bytes([content[changed] ^ 1]) + content[changed + 1 :]
    passes = [content, content, content, other]  # a sample, the hash, the parts, the parts again
    with _setting(hub, xet=False) as setting:
        setting.proxy.fail(r"PUT /lfs/part/4", drop)
        with pytest.raises(IntegrityError, match="is not the content with the sha256"):
            setting.store.stage("main", "n.safetensors", lambda: [passes.pop(0)], nbytes=450_000)
        assert passes == []
        assert setting.proxy.lines(r"POST /lfs/complete") == []
