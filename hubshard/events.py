"""What long operations tell while they run: one small record per step, for progress bars, logs and alerts.

An operation begins with "start" and ends with "end", or with "error" where it fails. In between, as they happen:

| kind | speaks of | nbytes | detail |
| --- | --- | --- | --- |
| start | the repo or target | bytes in all | the revision, where it is known |
| hashed | a file | bytes read to learn whether they must be sent, since its last such event | |
| read | a file | bytes on their way, since its last such event: from the source of a publish, or to a pull | |
| sent | a file | bytes that crossed the network to the store, since its last such event | |
| received | a file | bytes that came from the store to stay, since its last such event | |
| skipped | a file | bytes that did not have to move: they are where they should be | why |
| deduplicated | a file | bytes of a file that was sent which did not cross the network: known there, or compressed | |
| staged | a file | its size: it is durable, and not shown yet | |
| staging | the branch that keeps finished files | bytes that it kept for us | what becomes of it |
| retry | a file, branch or request | | the cause; `wait_seconds` says how long the pause before is |
| warning | a file or branch | | a sentence |
| note | a file or branch | | a sentence that may be of use: all is as it should be |
| verify | a file or revision | bytes that were found to be right | |
| look | the repo | | how far a look at its history is |
| removed | the folder of a step | its size: the branch shows it no more | |
| squash | a branch: its history is dropped | | the new commit |
| freed | a file that no revision names any more | its size: it is deleted for good | |
| committing | the branch | bytes that it is to show anew: its commit is asked for, and may be made from now on | |
| commit | the branch, or the folder that shows the files | bytes that it shows anew | the new commit |
| tag | the tag | | the commit |
| error | the repo or target | | the type of the error, and what it says |
| end | the repo or target | bytes moved | the commit or folder; `totals` has the sums |

A file that a publish reads once more is told of as "read" only if some of it was sent since it was read before.

hf_xet tries single requests again by itself and does not say so; all other retries are told. What it sends is looked up
several times a second.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Event", "Gathered", "OnEvent", "OnRetry", "Operation", "Totals", "ignore", "ignore_retry", "operation"]


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of an operation.

    Attributes:
        sent_bytes: that crossed the network to the store, those of failed attempts included.
        received_bytes: that came from the store to stay.
        skipped_bytes: of files, or parts of them, that did not have to move.
        deduplicated_bytes: of files that were sent which did not cross the network.
        retries: of requests, pieces, files and commits.
        seconds: from its start, on the clock of the wall.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    skipped_bytes: int = 0
    deduplicated_bytes: int = 0
    retries: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        """The mean rate of what moved."""
        return (self.sent_bytes + self.received_bytes) / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a long operation.

    Attributes:
        operation: "publish", "pull", "load", "save", "restore", "verify", "rollback", "prune", "squash" or "convert".
        kind: see the table at the top of `hubshard.events`.
        path: the file, branch or revision it speaks of; "" for the whole.
        nbytes: bytes it speaks of.
        detail: for people: a cause, a commit id, a sentence.
        time: seconds since the epoch.
        wait_seconds: of "retry": the pause before the next attempt.
        totals: of "end": the sums.
    """

    operation: str
    kind: str
    path: str = ""
    nbytes: int = 0
    detail: str = ""
    time: float = field(default_factory=time.time)
    wait_seconds: float = 0.0
    totals: Totals | None = None


OnEvent = Callable[[Event], None]
"""Takes each event; called from any thread, one call at a time is not promised. What it raises ends the operation."""

OnRetry = Callable[[str, str, float], None]
"""Is told of each retry: what is tried again, the cause, and the seconds until then."""


def ignore(_: Event) -> None:
    """An `OnEvent` for those who do not look."""


def ignore_retry(_what: str, _cause: str, _wait_seconds: float) -> None:
    """An `OnRetry` for those who do not look."""


class Operation:
    """One operation under way, as it tells of itself. Thread-safe.

    Args:
        name: of the operation.
        path: the repo or target.
        on_event: is told.
    """

    def __init__(self, name: str, path: str, on_event: OnEvent) -> None:
        self.name = name
        self.path = path
        self._on_event = on_event
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._began = time.monotonic()

    def __call__(self, event: Event) -> None:
        """Count an event and pass it on."""
        with self._lock:
            self._sums[event.kind] += 1 if event.kind == "retry" else event.nbytes
        self._on_event(event)

    def tell(self, kind: str, path: str = "", nbytes: int = 0, detail: str = "") -> None:
        """Tell of a step."""
        self(Event(self.name, kind, path, nbytes, detail))

    def retry(self, what: str, cause: str, wait_seconds: float) -> None:
        """Tell of a retry: an `OnRetry`."""
        self(Event(self.name, "retry", what, detail=cause, wait_seconds=wait_seconds))

    def start(self, nbytes: int, detail: str = "") -> None:
        """Tell of the beginning, now that the bytes in all are known."""
        self.tell("start", self.path, nbytes, detail)

    def end(self, detail: str = "") -> Totals:
        """Tell of the end; the sums."""
        totals = self.totals()
        moved = totals.sent_bytes + totals.received_bytes
        self(Event(self.name, "end", self.path, moved, detail, totals=totals))
        return totals

    def totals(self) -> Totals:
        """The sums so far."""
        with self._lock:
            sums, seconds = Counter(self._sums), time.monotonic() - self._began
        return Totals(
            sent_bytes=sums["sent"],
            received_bytes=sums["received"],
            skipped_bytes=sums["skipped"],
            deduplicated_bytes=sums["deduplicated"],
            retries=sums["retry"],
            seconds=seconds,
        )


class Gathered:
    """Gathers bytes until they are worth an event.

    Args:
        then: is told of them.
        least_bytes: how many those are.
    """

    def __init__(self, then: Callable[[int], None], *, least_bytes: int = 2**20) -> None:
        self._then = then
        self._least_bytes = least_bytes
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """Take in some."""
        self._nbytes += nbytes
        if self._nbytes >= self._least_bytes:
            self.flush()

    def flush(self) -> None:
        """Tell of those that are left."""
        if self._nbytes:
            told, self._nbytes = self._nbytes, 0
            self._then(told)


@contextmanager
def operation(name: str, path: str, on_event: OnEvent) -> Iterator[Operation]:
    """An operation whose failure is an event too."""
    made = Operation(name, path, on_event)
    try:
        yield made
    except BaseException as error:
        made.tell("error", path, detail=f"{type(error).__name__}: {error}")
        raise
