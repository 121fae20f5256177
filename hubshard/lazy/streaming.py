"""Which layers are in memory: those that run, and ahead of them those that run next, within a budget.

It knows layers by number alone; how one is loaded and dropped is the `Loader`'s part.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from hubshard.errors import FormatError
from hubshard.lazy.reading import Job

__all__ = ["Loader", "Order", "Streamer"]


class Loader(Protocol):
    """Brings layers into memory and out again. All methods are called under one lock; jobs are not."""

    @property
    def nbytes(self) -> int:
        """Bytes that are held now."""

    def size(self, layer: int) -> int:
        """Bytes that it takes."""

    def cost(self, layer: int) -> int:
        """Bytes by which loading it would let `nbytes` grow: fewer than its size, where memory is used again."""

    def load(self, layer: int) -> tuple[Any, Sequence[Job]]:
        """Memory for a layer, and the jobs that fill it."""

    def drop(self, layer: int, loaded: Any) -> None:
        """Let go of a layer that was loaded."""

    def trim(self, nbytes: int) -> None:
        """Give so many bytes back that are held for no layer, or all such."""


class Order:
    """In which order layers run, again and again: when each is due next.

    Time counts the layers that have run; layer number `n` of a round of `len(order)` runs at `n`, at
    `n + len(order)` and so on.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._slots: dict[int, list[int]] = {}
        for slot, layer in enumerate(self.layers):
            self._slots.setdefault(layer, []).append(slot)

    def at(self, time: int) -> int:
        """The layer that is due at a time."""
        return self.layers[time % len(self.layers)]

    def next_use(self, layer: int, after: int) -> float:
        """The first time later than `after` when the layer is due; infinite where it never is."""
        slots = self._slots.get(layer)
        if slots is None:
            return math.inf
        length = len(self.layers)
        start = (after + 1) // length * length
        found = bisect_right(slots, after - start)
        return start + slots[found] if found < len(slots) else start + length + slots[0]

    def sooner(self, due: int, time: int) -> Order:
        """The order in which what is due at one time is due at an earlier time of the same round instead."""
        layers = list(self.layers)
        layers.insert(time % len(layers), layers.pop(due % len(layers)))
        return Order(layers)


@dataclass
class _Held:
    # a layer in memory, or on its way there
    loaded: Any
    jobs_left: int
    failure: BaseException | None = None
    users: int = 0

    @property
    def is_done(self) -> bool:
        return self.jobs_left == 0

    @property
    def is_idle(self) -> bool:
        return self.is_done and not self.users


@dataclass
class Streamer:
    """Holds layers within a budget.

    A layer that has run stays until its room is wanted; then that one goes which is due last (the rule of Belady, 1966,
    which is optimal where the order is known). Room that is free is filled at once with what is due next; but nothing
    is thrown out for what is due only later than `ahead_bytes` of others, since what runs until then is due later still
    and so the better to throw out. The order is that of the last pass, and before there was one, `order`.

    Attributes:
        loader: brings layers in and out.
        budget_bytes: of all that the loader holds.
        ahead_bytes: of layers that are due next and are loaded in place of others; one is, whatever its size.
        workers: threads that load.
        order: what is expected to run.
        peak_bytes: the most that was ever held.
    """

    loader: Loader
    budget_bytes: int
    ahead_bytes: int
    workers: int
    order: Order
    peak_bytes: int = 0
    bytes_read: int = 0
    _held: dict[int, _Held] = field(default_factory=dict)
    _trace: list[int] = field(default_factory=list)
    _now: int = -1
    _frontier: int = 0  # what is due before is in memory or on its way
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="hubshard-offload")

    def begin_pass(self) -> None:
        """A pass through the whole model begins: what the last one ran is what this one is expected to run."""
        with self._changed:
            if self._trace and tuple(self._trace) != self.order.layers:
                self.order = Order(self._trace)
            self._trace = []
            self._now, self._frontier = -1, 0

    def enter(self, layer: int) -> Any:
        """The layer runs: returns what the loader loaded, once all of it is there.

        Raises:
            FormatError: what runs at once is larger than the budget.
        """
        with self._changed:
            self._trace.append(layer)
            self._advance(layer)
            held = self._held.get(layer) or self._start(layer, wait=True)
            held.users += 1
            self._plan_ahead()
            self._changed.wait_for(lambda: held.is_done)
            if held.failure is not None:
                held.users -= 1
                if not held.users:
                    self._drop(layer)
                raise held.failure
            return held.loaded

    def leave(self, layer: int, take_out: Callable[[Any], None]) -> None:
        """The layer has run; `take_out` is called with what was loaded, unless somebody else still runs it.

        A layer that could not be loaded, and so did not run, is left alone.
        """
        with self._changed:
            held = self._held.get(layer)
            if held is None or not held.users:
                return
            held.users -= 1
            if not held.users:
                take_out(held.loaded)
            self._plan_ahead()

    def close(self) -> None:
        """Drop all layers; none may run."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._changed:
            for layer in list(self._held):
                self._drop(layer)
            self.loader.trim(self.loader.nbytes)

    def _advance(self, layer: int) -> None:
        due, expected = self.order.next_use(layer, self._now), self._now + 1
        if due == math.inf:
            return
        if due > expected and due // len(self.order.layers) == expected // len(self.order.layers):
            # sooner than expected: what was expected still comes
            self.order = self.order.sooner(int(due), expected)
            self._frontier += due >= self._frontier
            due = expected
        self._now = int(due)
        self._frontier = max(self._frontier, self._now + 1)

    def _start(self, layer: int, *, wait: bool) -> _Held:
        while not self._fits(layer):
            if layer in self._held:  # by another thread, while this one waited
                return self._held[layer]
            victim = self._last_due()
            if victim is not None:
                self._frontier = int(min(self._frontier, self.order.next_use(victim, self._now)))
                self._drop(victim)
            elif any(not held.is_done and not held.users for held in self._held.values()) and wait:
                self._changed.wait()
            else:
                raise self._too_small(layer)
        loaded, jobs = self.loader.load(layer)
        held = self._held[layer] = _Held(loaded, len(jobs))
        self.peak_bytes = max(self.peak_bytes, self.loader.nbytes)
        for job in jobs:
            self._pool.submit(self._work, job, held)
        return held

    def _work(self, job: Job, held: _Held) -> None:
        failure: BaseException | None = None
        nbytes = 0
        try:
            if held.failure is None:
                nbytes = job.work()
        except BaseException as error:  # noqa: BLE001  # raised where the layer is waited for
            failure = error
        with self._changed:
            held.failure = held.failure or failure
            held.jobs_left -= 1
            self.bytes_read += nbytes
            if held.is_done:
                self._changed.notify_all()

    def _plan_ahead(self) -> None:
        while self._frontier - self._now < len(self.order.layers):
            layer = self.order.at(self._frontier)
            if layer not in self._held:
                if not self._fits(layer) and self._is_soon(self._frontier):
                    self._make_room(layer, self._frontier)
                if not self._fits(layer):
                    return
                self._start(layer, wait=False)
            self._frontier += 1

    def _fits(self, layer: int) -> bool:
        excess = self.loader.nbytes + self.loader.cost(layer) - self.budget_bytes
        if excess > 0:
            self.loader.trim(excess)
            excess = self.loader.nbytes + self.loader.cost(layer) - self.budget_bytes
        return excess <= 0

    def _is_soon(self, time: int) -> bool:
        """Whether what is due until then, that time included, is little enough to be loaded in place of others."""
        nbytes = 0
        for due in range(self._now + 1, time + 1):
            nbytes += self.loader.size(self.order.at(due))
            if nbytes > self.ahead_bytes:
                return time == self._now + 1
        return True

    def _make_room(self, layer: int, time: int) -> None:
        """Drop what does not run and is due after a time, the last due first, until the layer fits."""
        while not self._fits(layer):
            victim = self._last_due()
            if victim is None or self.order.next_use(victim, self._now) <= time:
                return
            self._drop(victim)

    def _last_due(self) -> int | None:
        idle = [layer for layer, held in self._held.items() if held.is_idle]
        return max(idle, key=lambda layer: self.order.next_use(layer, self._now), default=None)

    def _drop(self, layer: int) -> None:
        held = self._held.pop(layer)
        self.loader.drop(layer, held.loaded)
        held.loaded = None

    def _too_small(self, layer: int) -> FormatError:
        running = sum(1 for held in self._held.values() if held.users)
        return FormatError(
            f"{self.loader.nbytes} bytes are in use by {running} layers that run, or are still referred to, and one "
            f"more needs {self.loader.cost(layer)}: that exceeds the budget of {self.budget_bytes} bytes",
            hint="raise the budget, or run under torch.inference_mode() so that no graph holds weights",
        )
