"""A line now and then in a log that nobody watches live: how far it is, also while nothing happens."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from hubshard.events import Event
from hubshard.periodic import Periodic
from hubshard.sizes import format_size

__all__ = ["LogLines", "is_wanted"]

_EVERY_SECONDS = 30.0
_MOVED = {"sent", "received", "skipped", "deduplicated"}
_READ = {"read", "hashed"}


def is_wanted() -> bool:
    """Whether this is a job of GitHub Actions, whose log would be silent otherwise until all is done.

    https://docs.github.com/en/actions/reference/workflows-and-actions/variables
    """
    return os.environ.get("GITHUB_ACTIONS") == "true"


class LogLines(Periodic):
    """Says every half minute how far an operation is; to be used as a context manager.

    Args:
        say: takes each line.
        every_seconds: between two lines.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        every_seconds: float = _EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(self._say_line, "hubshard-log", every_seconds=every_seconds)
        self._say = say
        self._clock = clock
        self._operation = ""
        self._whole = self._moved = self._read = 0
        self._last = (clock(), 0, 0)
        self._lock = threading.Lock()

    def take_in(self, event: Event) -> None:
        """Count an event."""
        with self._lock:
            if event.kind == "start":
                self._operation, self._whole, self._moved, self._read = event.operation, event.nbytes, 0, 0
                self._last = (self._clock(), 0, 0)
            elif event.kind in _MOVED:
                self._moved += event.nbytes
            elif event.kind in _READ:
                self._read += event.nbytes
            elif event.kind in {"end", "error"}:
                self._operation = ""

    def line(self) -> str | None:
        """How far it is, and how fast since the last line; None where nothing is under way."""
        with self._lock:
            if not self._operation:
                return None
            now, (before, moved, read) = self._clock(), self._last
            self._last = (now, self._moved, self._read)
            told = f"{self._operation}: {format_size(self._moved)} of {format_size(self._whole)}"
            if self._moved >= self._whole:
                return f"{told}, waiting for the Hub"
            seconds = max(now - before, 1e-3)
            rate = f"{format_size((self._moved - moved) / seconds)}/s"
            # of what is there already, nothing moves while it is read
            reading = f", {format_size((self._read - read) / seconds)}/s read" if self._moved == moved else ""
            return f"{told}, {rate}{reading}"

    def _say_line(self) -> None:
        line = self.line()
        if line is not None:
            self._say(line)
