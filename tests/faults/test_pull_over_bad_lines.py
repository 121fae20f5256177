"""A pull over a bad line: continued, checked, bounded; nothing half is left where a loader would look."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hubshard.errors import IncompleteError, IntegrityError, StoreError
from hubshard.events import Event
from tests.conftest import Hub
from tests.faults.models import Repo, equal, new_repo, read_folder, weights
from tests.faults.proxy import (
    Answer,
    Exchange,
    Fault,
    Proxy,
    change,
    corrupt,
    cut,
    delay,
    done_then,
    drop,
    lose,
    proxied,
    redirect,
    say,
    skew,
    stall,
    without_range,
)

pytest.importorskip("starlette")

SHARD = re.compile(r"GET /org/.*/resolve/[0-9a-f]{40}/model-.*\.safetensors")
NAMED = re.compile(r"GET /org/.*/resolve/[0-9a-f]{40}/model-00002-of-00004\.safetensors")
LARGE = re.compile(r"GET /org/.*/resolve/[0-9a-f]{40}/model\.safetensors")


@pytest.fixture
def repo(module_hub: Hub, proxy: Proxy) -> Repo:
    """Holds a model in four shards, pulled through the proxy."""
    made = new_repo(module_hub, proxy.url)
    made.put(weights(2), shards=4)
    return made


@pytest.fixture
def target(tmp_path: Path) -> dict[str, Path]:
    """Where to: a cache."""
    return {"cache_dir": tmp_path / "target"}


@pytest.fixture(params=["cache_dir", "local_dir"])
def any_target(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Path]:
    """A cache, or a directory."""
    return {request.param: tmp_path / "target"}


def check_nothing_is_shown(target: dict[str, Path]) -> None:
    """A loader finds nothing."""
    root = next(iter(target.values()))
    assert not [path for path in root.glob("*.safetensors*") if path.is_file()]
    assert not list(root.glob("models--*/snapshots/*"))


def check_done(repo: Repo, target: dict[str, Path], **options: Any) -> None:
    folder = repo.pull(**target, **options)
    assert equal(read_folder(folder), weights(2))
    root = next(iter(target.values()))
    assert not [*root.rglob("*.part"), *root.rglob("*.map"), *root.rglob("new-*")]


@pytest.mark.parametrize(
    "fault",
    [
        drop,
        lose,
        cut(0),
        cut(20_000),
        say(500),
        say(502),
        say(503),
        say(408),
        say(429, Retry_After="1"),
        corrupt(12_345),
        change(headers={"Content-Range": "bytes 0-99/1000"}),
        say(200, "<html>please log in</html>"),
        say(416),
    ],
)
def test_a_piece_that_fails_once_is_fetched_again(
    repo: Repo, proxy: Proxy, target: dict[str, Path], fault: Fault
) -> None:
    proxy.fail(NAMED, fault)
    check_done(repo, target)
    assert not proxy.faults
    assert {len(proxy.lines(SHARD)), len(proxy.lines(NAMED))} == {5, 2}


def test_a_connection_that_stalls_is_given_up_and_the_rest_fetched(
    repo: Repo, proxy: Proxy, target: dict[str, Path]
) -> None:
    proxy.fail(NAMED, stall(20_000), delay(proxy, 60))
    check_done(repo, target, stall_seconds=0.5)
    ranges = [seen.headers["Range"] for seen in proxy.lines(NAMED)]
    assert [given.partition("-")[0] for given in ranges] == ["bytes=0", "bytes=20000", "bytes=20000"]


def test_a_server_that_stalls_for_ever_is_given_up(repo: Repo, proxy: Proxy, target: dict[str, Path]) -> None:
    proxy.always(NAMED, stall(100))
    with pytest.raises(StoreError, match=r"model-00002-of-00004\.safetensors") as caught:
        repo.pull(**target, stall_seconds=0.3, max_retries=1)
    assert caught.value.retryable
    assert len(proxy.lines(NAMED)) <= 4
    check_nothing_is_shown(target)
    proxy.heal()
    check_done(repo, target)


def test_bytes_that_stay_wrong_are_refused_by_name_and_nothing_half_is_left(
    repo: Repo, proxy: Proxy, any_target: dict[str, Path]
) -> None:
    proxy.always(NAMED, corrupt(12_345))
    with pytest.raises(IntegrityError, match=r"model-00002-of-00004\.safetensors: .* fetched 3 times"):
        repo.pull(**any_target)
    assert len(proxy.lines(NAMED)) == 3
    check_nothing_is_shown(any_target)
    with pytest.raises(FileNotFoundError):
        read_folder(next(iter(any_target.values())))
    proxy.heal()
    repo.hub.reset_counters()
    check_done(repo, any_target)
    assert repo.nbytes_sent() < 2 * 40_000  # that shard and the index


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_final_at_once_with_the_servers_words(
    repo: Repo, proxy: Proxy, target: dict[str, Path], status: int
) -> None:
    proxy.always(SHARD, say(status, "your access was withdrawn"))
    with pytest.raises(StoreError, match=r"read access to .*your access was withdrawn"):
        repo.pull(**target)
    assert len(proxy.lines(SHARD)) <= 4  # those that were under way
    check_nothing_is_shown(target)


def test_a_clock_that_is_wrong_is_said(repo: Repo, proxy: Proxy, target: dict[str, Path]) -> None:
    proxy.always(SHARD, skew(say(403, "not yet valid"), "Sat, 01 Jan 2000 00:00:00 GMT"))
    with pytest.raises(StoreError, match=r"not yet valid \(the clock here differs from the server's by \+\d+ s"):
        repo.pull(**target)


def test_a_server_that_is_down_is_given_up(repo: Repo, proxy: Proxy, target: dict[str, Path]) -> None:
    proxy.always(r".*", say(503, "down for ever"))
    with pytest.raises(StoreError, match="down for ever"):
        repo.pull(**target, max_retries=1)
    assert len(proxy.seen) == 2
    check_nothing_is_shown(target)


def test_over_a_line_that_fails_at_random_a_pull_ends_well(
    repo: Repo, proxy: Proxy, any_target: dict[str, Path]
) -> None:
    chance = random.Random(7)

    def at_random(exchange: Exchange) -> Answer:
        faults = [drop, lose, say(503), say(429, Retry_After="0"), done_then(say(504)), cut(10), corrupt(7)]
        is_listing = exchange.line.startswith("GET /api/")
        return chance.choice(faults[: 6 - is_listing])(exchange) if chance.random() < 0.15 else exchange.forward()

    proxy.always(r".*", at_random)
    check_done(repo, any_target, max_retries=8)


# Whole files of several pieces


@pytest.fixture
def large(repo: Repo) -> dict[str, Any]:
    """A model of 20 MB in one file: three pieces."""
    model = {"w": np.random.default_rng(5).standard_normal((2500, 2000), dtype=np.float32)}
    repo.put(model)
    return model


def test_where_ranges_are_not_heeded_nothing_wrong_is_taken(
    repo: Repo, proxy: Proxy, large: dict[str, Any], target: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    proxy.always(LARGE, without_range)
    with pytest.raises(IntegrityError, match=r"model\.safetensors: asked for bytes .*, but the answer is 200"):
        repo.pull(**target, max_retries=1)
    check_nothing_is_shown(target)
    proxy.heal()
    assert equal(read_folder(repo.pull(**target)), large)


def test_a_cut_piece_of_a_large_file_goes_on_at_the_byte(
    repo: Repo, proxy: Proxy, large: dict[str, Any], target: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    proxy.fail(LARGE, cut(3_000_000), cut(1_000_000))
    repo.hub.reset_counters()
    assert equal(read_folder(repo.pull(**target, workers=1)), large)
    starts = [int(seen.headers["Range"].removeprefix("bytes=").partition("-")[0]) for seen in proxy.lines(LARGE)]
    assert starts == [0, 3_000_000, 4_000_000, 8 << 20, 16 << 20]


def test_no_token_crosses_to_another_origin_by_any_redirect(
    repo: Repo, proxy: Proxy, large: dict[str, Any], target: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with proxied(repo.hub.port) as elsewhere:
        proxy.always(r"GET ", redirect(lambda exchange: elsewhere.url + exchange.line.partition(" ")[2]))
        assert equal(read_folder(repo.pull(**target)), large)
        assert elsewhere.lines(LARGE)
        assert elsewhere.lines(r"GET /api/.*/tree/")
        assert all(seen.has_token for seen in proxy.seen)
        assert not [seen.line for seen in elsewhere.seen if seen.has_token]


@pytest.mark.parametrize("line", [r"GET /api/", r"GET /org/.*/resolve/"])
def test_redirects_in_a_circle_end(repo: Repo, proxy: Proxy, target: dict[str, Path], line: str) -> None:
    proxy.always(line, redirect(lambda exchange: exchange.line.partition(" ")[2]))
    with pytest.raises(StoreError, match="redirects"):
        repo.pull(**target, max_retries=1)
    assert len(proxy.seen) < 60
    check_nothing_is_shown(target)


def test_when_the_line_goes_for_good_in_the_middle_the_next_pull_goes_on(
    repo: Repo, proxy: Proxy, any_target: dict[str, Path]
) -> None:
    proxy.always(NAMED, drop)
    events: list[Event] = []
    with pytest.raises(StoreError):
        repo.pull(**any_target, max_retries=1, workers=1, on_event=events.append)
    check_nothing_is_shown(any_target)
    with proxied(1) as nowhere, pytest.raises((StoreError, IncompleteError)):
        repo.through(nowhere.url).pull(**any_target, max_retries=0)
    check_nothing_is_shown(any_target)
    arrived = sum(event.nbytes for event in events if event.kind == "received")
    proxy.heal()
    repo.hub.reset_counters()
    check_done(repo, any_target)
    total = sum(len(weights(2)[name].tobytes()) for name in weights(2))
    assert repo.nbytes_sent() <= total - arrived + 5_000
