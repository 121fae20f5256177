"""Ranks that agree on the step after which all of them do something, without a collective per step and without waiting.

At the end of each step every rank calls `StepAgreement.at_end_of`. The rank that wants something writes it into a store
that all ranks share, with the number of the step that it has just ended, before it goes on; every rank looks into the
store at the end of each step. It takes effect at the first call after that step. That all see it by then rests on the
ranks moving in step: a rank cannot end a step before every other has begun it, since in each step it waits for
something from each of them, as it does for the sum of the gradients. To wait here instead would deadlock: the others
may wait for this rank already, within their next step.

On a GPU the program runs ahead of the work that it queues. It is held back so far that the work of the step before the
last one has ended, and what was agreed takes effect one step later.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from typing import Any, Protocol

from hubshard.errors import FormatError, StoreError

__all__ = ["SharedStore", "StepAgreement"]

_MOST_LAG = 1


class SharedStore(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key that is not there; what it holds then."""


class StepAgreement:
    """Agrees on a step, again and again.

    Args:
        store: shared by all ranks; nobody else may use keys that begin with `name` in it. None for one process.
        name: the same on every rank, and used once per store.
        world_size: number of ranks.

    Raises:
        FormatError: there are several ranks and no store.
    """

    def __init__(self, store: SharedStore | None, *, name: str, world_size: int) -> None:
        if store is None and world_size > 1:
            raise FormatError(
                f"{world_size} ranks cannot agree on a step without a store that they share",
                hint="call torch.distributed.init_process_group() first",
            )
        self._store = store if world_size > 1 else None
        self._name = name
        self._number = 0
        self._noted: dict[str, Any] | None = None
        self._ended: deque[tuple[int, int]] = deque(maxlen=_MOST_LAG + 1)  # time round, step
        self._fence = _Fence()

    def at_end_of(self, step: int, proposal: dict[str, Any] | None) -> dict[str, Any] | None:
        """Say that a step has ended on this rank, once per step, and what this rank would have all ranks do.

        Args:
            step: its number, the same on all ranks call by call. One that is not greater than that of the last call
                says that the run went back to an earlier step.
            proposal: JSON values; None for nothing. The first proposal is taken, whichever rank made it.

        Returns:
            What all ranks do now, or None. It is given once; then the next proposal counts.

        Raises:
            StoreError: the store is gone, as it is when the process that keeps it has died.
        """
        time_round, last = self._ended[-1] if self._ended else (0, step - 1)
        self._ended.append((time_round + (step <= last), step))
        if self._store is None:
            return proposal
        lag = self._fence.pass_by()
        if self._noted is None:
            self._noted = self._look(self._store, None if proposal is None else [self._ended[-1], lag, proposal])
        if self._noted is None:
            return None
        after, lag, agreed = self._noted["value"]
        if sum(ended > tuple(after) for ended in self._ended) <= lag:
            return None
        self._number, self._noted = self._number + 1, None
        return dict(agreed)

    def _look(self, store: SharedStore, value: list[Any] | None) -> dict[str, Any] | None:
        key = f"{self._name}/{self._number}"
        try:
            if value is None and not store.check([key]):
                return None
            found = store.compare_set(key, "", json.dumps({"value": value}))
        except RuntimeError as error:  # torch's DistError and its kinds
            raise StoreError(
                f"the store that the ranks share cannot be reached: {error}",
                hint="the process that keeps it has ended: start the job again, it restores the newest step",
            ) from error
        noted: dict[str, Any] = json.loads(found)
        return noted


class _Fence:
    """Keeps a program from running more than a step ahead of the GPU that it queues work on."""

    def __init__(self) -> None:
        self._last: Any = None

    def pass_by(self) -> int:
        """Wait for the work of the step before the one that was just queued; by how many steps ranks may be apart."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return 0
        if self._last is not None:
            self._last.synchronize()
        self._last = torch.cuda.Event()
        self._last.record()
        return 1
