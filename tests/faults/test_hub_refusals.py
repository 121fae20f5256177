"""Refusals of an upload are final at once, and say what is needed; what has merely expired is renewed once."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from hubshard.errors import StoreError
from hubshard.hubserver import Settings
from hubshard.store.hub import HubStore
from tests.faults.models import Repo, new_repo
from tests.faults.proxy import Answer, Exchange, Fault, Proxy, drop, proxied, redirect, say

if TYPE_CHECKING:
    from tests.conftest import Hub, StartHub

pytest.importorskip("starlette")

CONTENT = random.Random(8).randbytes(250_000)
XET_UPLOADS = [r"POST .*/xorbs/", r"POST .*/v1/shards"]
XET_TOKEN = r"GET .*/xet-write-token/"


@dataclass
class Place:
    """A repo behind a proxy, for uploads by Xet, or by plain LFS."""

    proxy: Proxy
    repo: Repo
    xet: bool | None = None

    def __post_init__(self) -> None:
        self.store = HubStore(self.repo.repo_id, endpoint=self.proxy.url, token="hf_test", xet=self.xet)

    def upload(self, content: bytes) -> None:
        """Stage a file, show it, and compare."""
        staged = self.store.stage("main", "n.safetensors", lambda: [content[:9], content[9:]], nbytes=len(content))
        parent = self.store.head("main")
        at = self.store.commit("main", parent=parent, add=[staged], remove=[], message="n", publish_id="n")
        into = bytearray(len(content))
        self.store.read(at, "n.safetensors", 0, len(content), memoryview(into))
        assert into == content


@pytest.fixture
def place(module_hub: Hub, proxy: Proxy) -> Place:
    return Place(proxy, new_repo(module_hub, proxy.url))


def expired(exchange: Exchange) -> Answer:
    """A token that has expired long ago: the client asks for another one before it uses it."""
    answer = exchange.forward()
    answer.body = json.dumps(json.loads(answer.body) | {"exp": 1_000_000_000}).encode()
    answer.headers = {}
    return answer


@pytest.mark.parametrize("line", XET_UPLOADS)
@pytest.mark.parametrize(("status", "tries"), [(401, 2), (403, 1)])
def test_a_refusal_of_xet_storage_is_final_and_says_what_is_needed(
    place: Place, line: str, status: int, tries: int
) -> None:
    place.proxy.always(line, say(status))
    with pytest.raises(StoreError, match=rf"not allowed to upload n\.safetensors: .*write access.*{status}") as caught:
        place.upload(CONTENT)
    assert not caught.value.retryable
    assert (
        caught.value.hint == f"log in with `hf auth login`, or pass a token with write access to {place.store.repo_id}"
    )
    assert len(place.proxy.lines(line)) == tries
    assert len(place.proxy.lines(XET_TOKEN)) == 2, "the Hub was asked whether the token may write still"


@pytest.mark.parametrize("line", XET_UPLOADS)
def test_a_refusal_of_xet_storage_is_told_by_the_hub_where_the_token_may_not_write_any_more(
    place: Place, line: str
) -> None:
    place.proxy.fail(XET_TOKEN, Exchange.done, say(403, "you have left the organization"))
    place.proxy.always(line, say(403))
    with pytest.raises(StoreError, match=r"must have write access.*; the server says: you have left") as caught:
        place.upload(CONTENT)
    assert not caught.value.retryable
    assert len(place.proxy.lines(line)) == 1


@pytest.mark.parametrize("line", XET_UPLOADS)
@pytest.mark.parametrize("refusals", [[say(401)], [say(500), say(401)], [drop, say(401), say(502)]])
def test_a_xet_token_that_is_not_valid_any_more_is_renewed_once(place: Place, line: str, refusals: list[Fault]) -> None:
    place.proxy.fail(line, *refusals)
    place.upload(CONTENT)
    assert len(place.proxy.lines(XET_TOKEN)) == 2
    assert not place.proxy.faults


def test_a_xet_token_that_expires_on_the_way_and_is_refused_is_renewed_once(place: Place) -> None:
    place.proxy.fail(XET_TOKEN, expired)
    place.proxy.fail(r"POST .*/v1/shards", say(403))
    place.upload(CONTENT)
    assert len(place.proxy.lines(r"POST .*/v1/shards")) == 2


@pytest.mark.parametrize("status", [401, 403])
def test_a_xet_token_that_cannot_be_renewed_ends_the_upload_at_once(place: Place, status: int) -> None:
    place.proxy.fail(XET_TOKEN, expired)
    place.proxy.always(XET_TOKEN, say(status, "no more of you"))
    with pytest.raises(StoreError, match=r"must have write access.*; the server says: no more of you") as caught:
        place.upload(CONTENT)
    assert not caught.value.retryable
    assert place.proxy.lines(r"POST .*/xorbs/") == []


@pytest.mark.parametrize("line", XET_UPLOADS)
def test_what_else_xet_storage_refuses_does_not_ask_whether_it_can_be_reached(place: Place, line: str) -> None:
    place.proxy.always(line, say(400))
    with pytest.raises(StoreError, match=r"cannot upload n\.safetensors: .*400") as caught:
        place.upload(CONTENT)
    assert caught.value.hint == "run it again: what was finished is not sent again"


@pytest.mark.parametrize(
    ("part_bytes", "line"),
    [(100_000, r"PUT /lfs/part/3"), (100_000, r"POST /lfs/complete"), (10_000_000, r"PUT /lfs/upload")],
)
@pytest.mark.parametrize("status", [401, 403])
def test_a_signed_url_that_has_expired_is_asked_for_again_once(
    start_hub: StartHub, part_bytes: int, line: str, status: int
) -> None:
    hub = start_hub(Settings(lfs_part_bytes=part_bytes))
    batch = r"POST .*/objects/batch"
    with proxied(hub.port) as proxy:
        place = Place(proxy, new_repo(hub, proxy.url), xet=False)
        proxy.fail(line, say(status, "Request has expired"))
        place.upload(CONTENT)
        assert len(proxy.lines(batch)) == 2
        proxy.seen.clear()
        proxy.always(line, say(status, "Request has expired"))
        with pytest.raises(StoreError, match="refuses the URL that the Hub has signed: Request has expired") as caught:
            place.upload(CONTENT[1:])
        assert not caught.value.retryable
        assert len(proxy.lines(line)) == 2
        proxy.heal()
        proxy.seen.clear()
        proxy.fail(batch, Exchange.done, say(403, "you have left"))
        proxy.fail(line, say(status))
        with pytest.raises(StoreError, match=r"must have write access .*; the server says: you have left"):
            place.upload(CONTENT[2:])
        assert len(proxy.lines(line)) == 1


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("line", [r"POST .*/objects/batch", r"POST /lfs/verify", r"POST .*/preupload/"])
def test_a_refusal_around_a_plain_upload_is_final(place: Place, line: str, status: int) -> None:
    store = Place(place.proxy, place.repo, xet=False).store
    place.proxy.always(line, say(status, "not you"))
    with pytest.raises(StoreError, match=r"must have write access to .*; the server says: not you") as caught:
        store.stage("main", "n.safetensors", lambda: [CONTENT], nbytes=len(CONTENT))
    assert not caught.value.retryable
    assert len(place.proxy.lines(line)) == 1


def test_a_signed_url_of_xet_storage_that_has_expired_is_asked_for_again(place: Place) -> None:
    content = random.Random(9).randbytes(20_000_000)
    staged = place.store.stage("main", "m.safetensors", lambda: [content], nbytes=len(content))
    parent = place.store.head("main")
    at = place.store.commit("main", parent=parent, add=[staged], remove=[], message="m", publish_id="m")
    place.store.list(at)
    place.proxy.fail(r"GET /xet/data/", say(403, "expired"))
    into = bytearray(len(content))
    place.store.read(at, "m.safetensors", 0, len(content), memoryview(into))
    assert into == content
    assert not place.proxy.faults
    assert place.proxy.lines(r"GET /.*/resolve/") == [], "by Xet to its end"


@pytest.mark.parametrize("status", [401, 403])
def test_a_storage_that_refuses_a_redirected_read_says_nothing_of_the_token(
    place: Place, module_hub: Hub, status: int
) -> None:
    place.upload(CONTENT)
    at = place.store.head("main")
    assert at is not None
    resolve = rf"GET /{place.repo.repo_id}/resolve/"
    with proxied(module_hub.port) as elsewhere:
        url = f"{elsewhere.url}/{place.repo.repo_id}/resolve/{at.commit}/n.safetensors?signed=secret"
        place.proxy.always(resolve, redirect(url))
        elsewhere.fail(resolve, Exchange.done, say(status, "expired"))
        into = bytearray(len(CONTENT))
        for _ in range(2):  # the second time, what was remembered has expired
            place.store.read(at, "n.safetensors", 0, len(CONTENT), memoryview(into))
        assert into == CONTENT
        elsewhere.always(resolve, say(status, "expired"))
        with pytest.raises(
            StoreError, match=r"n\.safetensors at .* refuses the URL that the Hub has signed: exp"
        ) as it:
            place.store.read(at, "n.safetensors", 0, len(CONTENT), memoryview(into))
        assert "secret" not in str(it.value)
        assert not it.value.retryable
