"""Ranks that find each other over a store, on threads with the store of torch that lives in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from hubshard.errors import FormatError
from hubshard.publish.meeting import meet

dist = pytest.importorskip("torch.distributed")


def on_threads(ranks: list[int], act: Callable[[int], None]) -> dict[int, str]:
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
    for round_number in range(3):
        assert on_threads([0, 1, 2], lambda rank: meet(store, rank, 3, limit_seconds=20)) == {}
        some = [[0], [0, 2], [1, 2]][round_number]
        told = on_threads(some, lambda rank: meet(store, rank, 3, limit_seconds=0.3))
        assert set(told) == set(some)
        missing = {0, 1, 2} - set(some)
        for message in told.values():
            named = message.partition(", and rank ")[2]
            assert all(str(rank) in named for rank in missing)


@pytest.fixture
def store() -> Any:
    return dist.PrefixStore("here", dist.HashStore())
