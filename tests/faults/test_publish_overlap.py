"""A shard of which nothing is left to be sent does not hold up the next one, and is not forgotten."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hubshard.errors import StoreError
from hubshard.events import Event
from hubshard.publish import outgoing
from tests.faults.models import Repo, equal, new_repo, weights
from tests.faults.proxy import Answer, Exchange, Fault, Proxy, say

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("starlette")

REGISTRATION = r"POST .*/v1/shards"
BLOCK = r"POST .*/xorbs/"
STAGING = r"POST .*/commit/hubshard%2Fstaging"
SHARD_BYTES = 2 * 16_384
BLOCK_BYTES = 64 * 2**20
PATIENCE_SECONDS = 30.0


@pytest.fixture
def repo(module_hub: Hub, proxy: Proxy) -> Repo:
    """Holds an old model; published to through the proxy."""
    made = new_repo(module_hub, proxy.url)
    made.put(weights(1))
    return made


def second_block_arrives(proxy: Proxy) -> threading.Event:
    """Happens when the second shard of a publish is sent."""
    arrived = threading.Event()

    def arrives(exchange: Exchange) -> Answer:
        arrived.set()
        return exchange.forward()

    proxy.fail(BLOCK, Exchange.done, arrives)
    return arrived


def after(event: threading.Event, then: Fault, seen: list[bool]) -> Fault:
    def fault(exchange: Exchange) -> Answer:
        seen.append(event.wait(PATIENCE_SECONDS))
        return then(exchange)

    return fault


@pytest.mark.parametrize("line", [REGISTRATION, STAGING])
def test_the_next_shard_is_sent_while_the_hub_takes_note_of_one(
    repo: Repo, proxy: Proxy, tmp_path: Path, line: str
) -> None:
    seen: list[bool] = []
    proxy.fail(line, after(second_block_arrives(proxy), Exchange.done, seen))
    repo.push(weights(2), message="new", streams=1)
    assert seen == [True]
    assert equal(repo.tensors(tmp_path / "cache"), weights(2))
    assert len(proxy.lines(BLOCK)) == 4


@pytest.mark.parametrize("line", [REGISTRATION, STAGING])
def test_a_shard_that_is_refused_at_its_end_ends_the_publish_with_the_next_one(
    repo: Repo, proxy: Proxy, tmp_path: Path, line: str
) -> None:
    seen: list[bool] = []
    proxy.always(line, after(second_block_arrives(proxy), say(403, "not this one"), seen))
    with pytest.raises(StoreError, match=r"model-00001|not allowed"):
        repo.push(weights(2), message="new", streams=1)
    proxy.heal()
    proxy.settle()
    assert seen[0]
    assert len(proxy.lines(BLOCK)) == 2, "no third shard was begun"
    assert equal(repo.tensors(tmp_path / "old"), weights(1))
    before = repo.nbytes_received()
    repo.push(weights(2), message="new")
    assert equal(repo.tensors(tmp_path / "new"), weights(2))
    assert repo.branches() == ["main"]
    assert repo.nbytes_received() - before < 2.1 * SHARD_BYTES, "what had arrived was not sent again"


@pytest.mark.parametrize(
    ("streams", "batch_bytes", "shards_a_commit"),
    [(1, SHARD_BYTES + 1, 1), (1, 3 * SHARD_BYTES - 1, 2), (2, 3 * SHARD_BYTES - 1, 1), (2, 4 * SHARD_BYTES - 1, 2)],
)
def test_what_waits_and_the_shards_on_their_way_are_no_more_than_a_batch(
    repo: Repo, streams: int, batch_bytes: int, shards_a_commit: int
) -> None:
    kept: list[str] = []
    done = repo.push(
        weights(2),
        staging_batch_size=batch_bytes,
        streams=streams,
        on_event=lambda event: kept.append(event.path) if "keeps all" in event.detail else None,
    )
    assert len(done.plans[0].shards) >= 2 * shards_a_commit
    assert len(kept) == len(done.plans[0].shards) // shards_a_commit


def test_of_the_next_shard_no_more_than_a_block_is_sent_before_the_last_one_is_durable(
    repo: Repo, proxy: Proxy, tmp_path: Path
) -> None:
    chance = np.random.default_rng(3)
    model = {"a": chance.bytes(20_000_000), "b": chance.bytes(150_000_000)}
    tensors = {name: np.frombuffer(value, np.uint8) for name, value in model.items()}
    seen, read = list[tuple[int, int]](), list[int]()

    def look(event: Event) -> None:
        if (event.kind, event.path) == ("read", "model-00002-of-00002.safetensors"):
            read.append(event.nbytes)

    def late(exchange: Exchange) -> Answer:
        count, until = -1, time.monotonic() + 2 * PATIENCE_SECONDS
        while (count < len(read) or sum(read) < BLOCK_BYTES) and time.monotonic() < until:  # it goes on
            count = len(read)
            proxy.wait(2.0)
        seen.append((sum(read), repo.nbytes_received()))
        return exchange.forward()

    proxy.fail(REGISTRATION, late)
    repo.push(tensors, max_shard_size="160MB", streams=1, on_event=look)
    ((read_bytes, received_bytes),) = seen
    assert BLOCK_BYTES <= read_bytes <= 2 * BLOCK_BYTES
    assert len(model["a"]) < received_bytes <= 1.01 * (len(model["a"]) + BLOCK_BYTES)
    assert equal(repo.tensors(tmp_path / "cache"), tensors)


def test_a_refusal_stops_the_shard_that_is_on_its_way(
    repo: Repo, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "READ_BYTES", 512)  # of each tensor alone
    model = {f"{number:03}": np.full(64, number) for number in range(200)}
    _, second = repo.push(model, max_shard_size=70_000, dry_run=True).plans[0].shards
    begun, reads = threading.Event(), list[int]()

    def look(event: Event) -> None:
        if (event.kind, event.path) == ("read", second.path):
            begun.set()
            reads.append(event.nbytes)
            time.sleep(0.02)

    proxy.always(STAGING, after(begun, say(403, "not this one"), []))
    with pytest.raises(StoreError, match="not this one"):
        repo.push(model, max_shard_size=70_000, streams=1, on_event=look)
    assert begun.is_set()
    assert len(reads) < len(second.specs)
