"""Ranks find each other before they publish together, so that one that calls alone is told so, and never hangs.

Over the store of the process group, which needs no other rank to be there: nothing here is a collective.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from hubshard.errors import FormatError, HubshardError
from hubshard.messages import listed

__all__ = ["KeyStore", "meet", "polled"]

_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.01, 0.25
_seen: set[str] = set()  # calls of other ranks that this one has answered


class KeyStore(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Put a value there."""

    def get(self, key: str) -> bytes:
        """The value that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""

    def delete_key(self, key: str) -> bool:
        """Take one away."""


def meet(store: KeyStore, rank: int, size: int, *, limit_seconds: float) -> None:
    """Return once all ranks have called it.

    Args:
        store: that all of them see, for these ranks alone.
        rank: this one.
        size: how many there are.
        limit_seconds: how long to wait for the others.

    Raises:
        FormatError: some rank has not called it; names those.
    """
    call = uuid.uuid4().hex
    store.set(f"at/{rank}", call)
    try:
        if rank == 0:
            _call_all(store, size, limit_seconds)
        else:
            _answer(store, call, limit_seconds)
    finally:
        store.delete_key(f"at/{rank}")


def polled(limit_seconds: float, *, longest_seconds: float = _LONGEST_POLL_SECONDS) -> Iterator[None]:
    """Steps of a wait, further and further apart, until the time is over."""
    pause, end = _SHORTEST_POLL_SECONDS, time.monotonic() + limit_seconds
    while time.monotonic() < end:
        yield
        time.sleep(pause)
        pause = min(pause * 1.5, longest_seconds)


def _call_all(store: KeyStore, size: int, limit_seconds: float) -> None:
    calls: dict[int, str] = {}
    for _ in polled(limit_seconds):
        for rank in set(range(1, size)) - calls.keys():
            if store.check([f"at/{rank}"]):
                call = store.get(f"at/{rank}").decode()
                if call not in _seen:
                    calls[rank] = call
        if len(calls) == size - 1:
            break
    missing = sorted(set(range(1, size)) - calls.keys())
    _seen.update(calls.values())
    answer = json.dumps(missing)
    for call in calls.values():
        store.set(f"go/{call}", answer)
    if missing:
        raise _alone([0, *calls], missing, limit_seconds)


def _answer(store: KeyStore, call: str, limit_seconds: float) -> None:
    is_called = False
    for _ in polled(2 * limit_seconds):
        is_called = is_called or store.check(["at/0"])
        if store.check([f"go/{call}"]):
            break
    else:
        raise _alone([], [0], limit_seconds)
    missing = json.loads(store.get(f"go/{call}"))
    store.delete_key(f"go/{call}")
    if missing:
        raise _alone([], missing, limit_seconds)


def _alone(here: Sequence[int], missing: Iterable[int], limit_seconds: float) -> HubshardError:
    who = f"rank {listed([str(rank) for rank in here])} publishes" if here else "this rank publishes"
    return FormatError(
        f"{who} a model that is split over several ranks, and rank {listed([str(rank) for rank in missing])} has not "
        f"come within {limit_seconds:.0f} s",
        hint="call push_to_hub on all ranks, not on rank 0 alone: each of them holds a part",
    )
