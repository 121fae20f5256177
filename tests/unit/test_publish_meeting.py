"""Ranks that find each other over a store, on threads with the store of torch that lives in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hubshard.errors import ConflictError, FormatError, HubshardError
from hubshard.events import Operation, ignore
from hubshard.plan import plan_shards
from hubshard.publish.delivery import Published
from hubshard.publish.meeting import meet
from hubshard.publish.replicas import Replicas
from hubshard.tensors import TensorSpec

dist = pytest.importorskip("torch.distributed")


def on_threads(ranks: list[int], act: Callable[[int], object]) -> dict[int, str]:
    told: dict[int, str] = {}

    def run(rank: int) -> None:
        try:
            act(rank)
        except FormatError as error:
            told[rank] = error.message

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_all_meet_again_and_again_whoever_stayed_away_between(store: Any) -> None:
    names: list[str] = []
    for round_number in range(3):
        assert on_threads([0, 1, 2], lambda rank: names.append(meet(store, rank, 3, limit_seconds=20))) == {}
        assert len(set(names[-3:])) == 1  # the same on all
        assert len(set(names)) == round_number + 1  # and new
        some = [[0], [0, 2], [1, 2]][round_number]
        told = on_threads(some, lambda rank: meet(store, rank, 3, limit_seconds=0.3))
        assert set(told) == set(some)
        missing = {0, 1, 2} - set(some)
        for message in told.values():
            named = message.partition(", and rank ")[2]
            assert all(str(rank) in named for rank in missing)


class Kept:
    """A store that is gone once the process that keeps it has ended."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.is_gone = False
        self.is_asked = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if name == "check":
            self.is_asked.set()
        if self.is_gone:
            raise RuntimeError("connection refused")
        return getattr(self._store, name)


@pytest.mark.parametrize("fails", [False, True])
def test_replicas_learn_what_became_of_it_before_rank_0_ends_and_the_store_with_it(store: Any, fails: bool) -> None:
    kept, waits = Kept(store), threading.Event()
    plan = plan_shards([TensorSpec("a", "U8", (7,))], max_shard_bytes=1000)
    done = Published("c0ffee", "a url", None, None, (plan,), changed=True, total_bytes=7, deleted=("a", "b"))
    found: list[Published | HubshardError] = []

    def lead() -> None:
        assert kept.is_asked.wait(30)  # the two count their calls alike, and here in one process
        replicas = Replicas(kept, 0, limit_seconds=20, wait_seconds=20)
        replicas.agree("this")
        assert waits.wait(30)
        if fails:
            replicas.give_up(ConflictError("it moved", hint="look"))
        else:
            replicas.published(done)
        replicas.close()
        kept.is_gone = True

    def follow() -> None:
        replicas = Replicas(kept, 1, limit_seconds=20, wait_seconds=20)
        replicas.agree("this")
        waits.set()
        work: Any = SimpleNamespace(op=Operation("publish", "org/model", ignore))
        outgoing: Any = SimpleNamespace(plans=(plan,))
        to: Any = None
        try:
            found.append(replicas.follow(to, outgoing, work))
        except HubshardError as error:
            found.append(error)

    threads = [threading.Thread(target=act) for act in (lead, follow)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if fails:
        assert isinstance(found[0], ConflictError)
        assert (found[0].message, found[0].hint) == ("rank 0: it moved", "look")
    else:
        assert found == [done]


@pytest.fixture
def store() -> Any:
    return dist.PrefixStore("here", dist.HashStore())
