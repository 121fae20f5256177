"""Limits of an operation: how often it may try again, how long it may stand still, how slow it may be."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hubshard.errors import FormatError, StoreError
from hubshard.events import Event, OnEvent, ignore
from hubshard.periodic import Periodic
from hubshard.sizes import format_size

__all__ = ["LimitError", "Limits", "Watch"]

_MOVED = {"sent", "received"}
_PREPARED = {"read", "hashed"}
_LOOK_SECONDS = 0.5


class LimitError(StoreError):
    """An operation that went beyond a limit of its `Watch`; running it again goes on from what is finished."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is too much, or too little; None for no limit.

    Attributes:
        max_retries: of the whole operation.
        stall_seconds: without a byte that moves, while some are to be moved. To move is to be sent or received; or to
            be read from the source or the disk, or hashed, to learn whether it must be. What is read once more, as the
            store has taken nothing of it, does not count; and a wait that the store asks for is silence too.
        min_rate: mean bytes per second over the last `window_seconds`, while some are to be moved: of those sent and
            received, or of those read and hashed, whichever are more.
        window_seconds: for `min_rate`; the first window may pass before it counts.
    """

    max_retries: int | None = None
    stall_seconds: float | None = None
    min_rate: float | None = None
    window_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.max_retries is not None and self.max_retries < 0:
            raise FormatError(f"max_retries={self.max_retries} is negative", hint="0 allows none")
        for name in ("stall_seconds", "min_rate", "window_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise FormatError(f"{name}={value} is not a positive number", hint="leave it out for no limit")


class Watch(Periodic):
    """An `OnEvent` that ends the operation when a limit is broken; to be used as a context manager.

    A thread looks at the clock, so that what stands still is seen too. Once a limit is broken, `then` gets an "error"
    event, `on_break` is called (by that thread, or by the one that told the event), and each event of progress raises
    the error in whoever tells it, which ends the operation. What hangs tells nothing: it ends when the store's own
    limit of silence has passed, unless `on_break` ends the process.

    Args:
        limits: what is watched.
        then: gets every event.
        on_break: is called once, with the error.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        limits: Limits,
        then: OnEvent = ignore,
        *,
        on_break: Callable[[LimitError], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(self.check, "hubshard-watch", every_seconds=_LOOK_SECONDS)
        self._limits = limits
        self._then = then
        self._on_break = on_break
        self._clock = clock
        self._lock = threading.Lock()
        self._operation = ""
        self._to_move: int | None = None
        self._settled: set[str] = set()
        self._retries = 0
        self._began = self._alive = clock()
        self._steps: deque[tuple[float, int, int]] = deque()
        self._sums = [0, 0]  # bytes in the window: moved, and prepared
        self._error: LimitError | None = None

    def __call__(self, event: Event) -> None:
        """Take an event in and pass it on.

        Raises:
            LimitError: a limit is broken.
        """
        if event.kind != "error" or self._error is None:  # our own has been told
            self._then(event)
        with self._lock:
            self._take_in(event, self._clock())
        self.check()
        if self._error is not None and event.kind in {"retry", *_MOVED, *_PREPARED}:
            raise self._error

    def check(self) -> None:
        """Look whether a limit is broken now."""
        with self._lock:
            found = None if self._error is not None else self._broken(self._clock())
            if found is None:
                return
            self._error = found
        self._then(Event(self._operation, "error", detail=f"{type(found).__name__}: {found}"))
        self._on_break(found)

    def _take_in(self, event: Event, now: float) -> None:
        if event.kind == "start":
            self._operation = event.operation
            self._settled = {"staged" if event.operation == "publish" else "received", "skipped"}
            self._to_move, self._began = event.nbytes, now
            self._steps.clear()
            self._sums = [0, 0]
        elif event.kind == "retry":
            self._retries += 1
        elif event.kind in {"commit", "end", "error"}:
            self._to_move = None
        if self._to_move is not None and event.kind in self._settled:
            self._to_move -= event.nbytes
        if event.kind in {"start", "skipped", "staged", *_MOVED, *_PREPARED}:
            self._alive = now
        if event.kind in {*_MOVED, *_PREPARED}:
            which = int(event.kind in _PREPARED)
            self._steps.append((now, which, event.nbytes))
            self._sums[which] += event.nbytes

    def _broken(self, now: float) -> LimitError | None:
        limits = self._limits
        if limits.max_retries is not None and self._retries > limits.max_retries:
            retries = "1 retry" if self._retries == 1 else f"{self._retries} retries"
            return _error(f"{retries}, and {limits.max_retries} are allowed")
        if self._to_move is None or self._to_move <= 0:
            return None
        if limits.stall_seconds is not None and now - self._alive > limits.stall_seconds:
            return _error(f"no byte has moved for {_seconds(now - self._alive)}")
        if limits.min_rate is not None and now - self._began > limits.window_seconds:
            rate = self._rate(now)
            if rate < limits.min_rate:
                return _error(
                    f"{format_size(rate)}/s over the last {_seconds(limits.window_seconds)}, and "
                    f"{format_size(limits.min_rate)}/s is the least allowed"
                )
        return None

    def _rate(self, now: float) -> float:
        """Mean bytes per second over the window: of what moved, or was read to be moved or skipped, if that is more."""
        while self._steps and self._steps[0][0] < now - self._limits.window_seconds:
            _, which, nbytes = self._steps.popleft()
            self._sums[which] -= nbytes
        return max(self._sums) / self._limits.window_seconds


def _seconds(seconds: float) -> str:
    """Whole ones, but of few the first two digits: half a second is not 0 s."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _error(what: str) -> LimitError:
    return LimitError(what, hint="what is finished is kept: run it again, it goes on from there")
