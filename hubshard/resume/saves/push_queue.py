"""Which of the steps that are safe on the disk goes to the Hub next. No torch, no network."""

from __future__ import annotations

import threading
from collections.abc import Collection

from hubshard.steps.retention import Retention

__all__ = ["PushQueue"]


class PushQueue:
    """Steps that wait for the Hub, oldest first. A newer one supersedes an older one that would not stay anyway.

    So a slow Hub, or one that is down, holds up neither the training nor the saves to the disk. Thread-safe.

    Args:
        retention: which steps stay for good.
    """

    def __init__(self, retention: Retention) -> None:
        self._retention = retention
        self._lock = threading.Lock()
        self._waiting: list[int] = []
        self._current: int | None = None
        self._files: Collection[str] = ()  # of the current one

    def add(self, step: int) -> None:
        """A step waits."""
        with self._lock:
            self._waiting.append(step)

    def begin(self, step: int, files: Collection[str]) -> bool:
        """The turn of a step has come; whether it is to be pushed, or another waits that makes it needless.

        Args:
            step: its number.
            files: their names.
        """
        with self._lock:
            self._waiting.remove(step)
            is_saved_again = step in self._waiting
            if is_saved_again or (any(other > step for other in self._waiting) and not self.stays(step)):
                return False
            self._current, self._files = step, files
            return True

    def again(self, step: int, files: Collection[str]) -> None:
        """A step is pushed that does not wait here: one that stays for good, and failed before."""
        with self._lock:
            self._current, self._files = step, files

    @property
    def is_waiting(self) -> bool:
        """Whether a step waits for its turn."""
        with self._lock:
            return bool(self._waiting)

    def end(self) -> None:
        """The push has ended, well or not."""
        with self._lock:
            self._current, self._files = None, ()

    def files_in_flight(self, step: int) -> set[str]:
        """The files of a step that are just being read for its push."""
        with self._lock:
            return {*self._files} if step == self._current else set()

    def needed(self) -> set[int]:
        """Steps whose local files will still be read; all others may go, and those that wait are then superseded."""
        with self._lock:
            newest = max(self._waiting, default=None)
            stay = [step for step in self._waiting if step == newest or self.stays(step)]
            return {*stay} | ({self._current} if self._current is not None else set())

    def stays(self, step: int) -> bool:
        """Whether a step is kept for good, however many newer ones there are."""
        alone = Retention(1, self._retention.keep_every, self._retention.pinned)
        return step not in alone.expired([step], newest=step + 1)
