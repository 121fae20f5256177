"""Waiting for what is under way when a run ends, or in the midst of it: for how long, and what is said. No torch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hubshard.messages import listed
from hubshard.steps.intervals import format_seconds

if TYPE_CHECKING:
    from hubshard.resume.saves.saver import Saver

__all__ = ["INTERRUPTED_SECONDS", "give_up", "settle"]

_LOG = logging.getLogger("hubshard")

INTERRUPTED_SECONDS = 10.0
"""For the Hub, after Ctrl-C."""
_QUIET_SECONDS = 3.0
_POLL_SECONDS = 0.1  # between two looks at the time, which a signal may shorten
_PARTING_SECONDS = 0.5  # for a push that is told to give up
_MOST_NAMED = 5


def settle(saver: Saver, seconds_left: Callable[[], float], *, says_at_once: bool = False) -> bool:
    """Wait until all is on the disk, however long that takes, and then on the Hub, as long as there is time for it.

    What is waited for is said where it takes more than a moment.

    Args:
        saver: writes and pushes.
        seconds_left: for the Hub; asked again and again.
        says_at_once: also where it takes no more than a moment.

    Returns:
        False where pushes are still under way.
    """
    said = _Said(0.0 if says_at_once else _QUIET_SECONDS)
    while not saver.wait_for_disk(_POLL_SECONDS):
        said.once("disk", "waiting until the last step is on the disk; Ctrl-C leaves without it")
    while not saver.wait_for_hub(_POLL_SECONDS):
        left = seconds_left()
        if left <= 0:
            return False
        said.once("hub", f"{_named(saver)} on the disk; waiting {_at_most(left)}for the Hub; Ctrl-C leaves at once")
    return True


def give_up(saver: Saver) -> None:
    """End the pushes that are under way; one that hangs is left behind, and said."""
    saver.give_up_pushing()
    if not saver.wait_for_hub(_PARTING_SECONDS):
        _LOG.warning(
            "%s on the disk, but may not be on the Hub, which has not answered in time: the next start sends the "
            "newest, and those that stay for good",
            _named(saver),
        )


class _Said:
    def __init__(self, quiet_seconds: float) -> None:
        self._end = time.monotonic() + quiet_seconds
        self._said: set[str] = set()

    def once(self, what: str, sentence: str) -> None:
        if what not in self._said and time.monotonic() >= self._end:
            self._said.add(what)
            _LOG.warning(sentence)


def _named(saver: Saver) -> str:
    steps = saver.unsent
    one = len(steps) == 1
    return f"{'step' if one else 'steps'} {listed(list(map(str, steps)), most=_MOST_NAMED)} {'is' if one else 'are'}"


def _at_most(seconds: float) -> str:
    return "" if math.isinf(seconds) else f"up to {format_seconds(seconds)} "
