"""What long operations tell while they run: one small record per step, for progress bars, logs and alerts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Event", "OnEvent", "ignore"]


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a long operation.

    Attributes:
        operation: "publish", "pull", "load", "save", "restore", "verify" or "convert".
        kind: "start" (total known), "sent", "received", "skipped" (bytes moved or saved since the last event of this
            file), "staged", "staging" (the branch that keeps finished shards), "commit", "verify", "tag",
            "retry", "warning", "end".
        path: the file, branch or revision it speaks of; "" for the whole.
        nbytes: bytes it speaks of; for "start" the bytes in all.
        detail: for people: a cause, a commit id, a sentence.
        time: seconds since the epoch.
    """

    operation: str
    kind: str
    path: str = ""
    nbytes: int = 0
    detail: str = ""
    time: float = field(default_factory=time.time)


OnEvent = Callable[[Event], None]
"""Takes each event; called from any thread, one call at a time is not promised."""


def ignore(_: Event) -> None:
    """An `OnEvent` for those who do not look."""
