"""Ranks find each other before they publish together, so that one that calls alone is told so, and never hangs.

Over the store of the process group, which needs no other rank to be there: nothing here is a collective.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from hubshard.errors import FormatError, HubshardError, StoreError
from hubshard.messages import listed, one_line

__all__ = ["KeyStore", "meet", "polled", "reachable"]

_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.01, 0.25
_LONG_WAIT_SECONDS = 10.0
_LOG = logging.getLogger("hubshard")
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

    def add(self, key: str, amount: int) -> int:
        """Count up, from 0; the sum."""


def meet(store: KeyStore, rank: int, size: int, *, limit_seconds: float) -> str:
    """Return once all ranks have called it.

    Args:
        store: that all of them see, for these ranks alone.
        rank: this one.
        size: how many there are.
        limit_seconds: how long to wait for the others.

    Returns:
        A name for what they do together: the same on all, and new.

    Raises:
        FormatError: some rank has not called it; names those.
        StoreError: the store is gone.
    """
    call = uuid.uuid4().hex
    with reachable():
        store.set(f"at/{rank}", call)
        try:
            if rank == 0:
                _call_all(store, size, call, limit_seconds)
                return call
            return _answer(store, call, limit_seconds)
        finally:
            store.delete_key(f"at/{rank}")


@contextmanager
def reachable() -> Iterator[None]:
    """Errors of the store as ours: whoever keeps it, often rank 0, is gone."""
    try:
        yield
    except RuntimeError as error:  # what torch.distributed raises
        raise StoreError(
            f"the ranks cannot reach each other any more: {one_line(str(error))[:200]}",
            hint="see what became of rank 0; then publish again: what was finished is not sent again",
        ) from error


def polled(
    limit_seconds: float,
    *,
    longest_seconds: float = _LONGEST_POLL_SECONDS,
    waits_for: Callable[[], str] | None = None,
) -> Iterator[None]:
    """Steps of a wait, further and further apart, until the time is over.

    Args:
        limit_seconds: that time.
        longest_seconds: between two steps.
        waits_for: says what is waited for; logged once the wait is long.
    """
    pause, began = _SHORTEST_POLL_SECONDS, time.monotonic()
    while time.monotonic() < began + limit_seconds:
        yield
        if waits_for is not None and time.monotonic() > began + _LONG_WAIT_SECONDS:
            _LOG.warning("waiting for %s, up to %.0f s", waits_for(), limit_seconds)
            waits_for = None
        time.sleep(pause)
        pause = min(pause * 1.5, longest_seconds)


def _call_all(store: KeyStore, size: int, call_of_first: str, limit_seconds: float) -> None:
    calls: dict[int, str] = {}

    def missing_ranks() -> str:
        return f"rank {_listed(set(range(1, size)) - calls.keys())} to call push_to_hub too: each holds a part"

    for _ in polled(limit_seconds, waits_for=missing_ranks):
        for rank in set(range(1, size)) - calls.keys():
            if store.check([f"at/{rank}"]):
                call = store.get(f"at/{rank}").decode()
                if call not in _seen:
                    calls[rank] = call
        if len(calls) == size - 1:
            break
    missing = sorted(set(range(1, size)) - calls.keys())
    _seen.update(calls.values())
    answer = json.dumps({"missing": missing, "name": call_of_first})
    for call in calls.values():
        store.set(f"go/{call}", answer)
    if missing:
        raise _alone([0, *calls], missing, limit_seconds)


def _answer(store: KeyStore, call: str, limit_seconds: float) -> str:
    for _ in polled(2 * limit_seconds):
        if store.check([f"go/{call}"]):
            break
    else:
        raise _alone([], [0], limit_seconds)
    answer = json.loads(store.get(f"go/{call}"))
    store.delete_key(f"go/{call}")
    if answer["missing"]:
        raise _alone([], answer["missing"], limit_seconds)
    return str(answer["name"])


def _alone(here: Iterable[int], missing: Iterable[int], limit_seconds: float) -> HubshardError:
    who = f"rank {_listed(here)} publishes" if here else "this rank publishes"
    return FormatError(
        f"{who} a model that is split over several ranks, and rank {_listed(missing)} has not come within "
        f"{limit_seconds:.0f} s",
        hint="call push_to_hub on all ranks, not on rank 0 alone: each of them holds a part",
    )


def _listed(ranks: Iterable[int]) -> str:
    return listed([str(rank) for rank in sorted(ranks)])
