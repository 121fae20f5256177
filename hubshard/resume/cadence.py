"""When to save: every so many steps, every so much time, or as often as is best. No torch."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from statistics import fmean

from hubshard.errors import FormatError
from hubshard.resume.agreement import StepAgreement
from hubshard.steps.intervals import best_interval_seconds, format_seconds, seconds_of

__all__ = ["Cadence", "Every"]

_LOG = logging.getLogger("hubshard")

Every = int | str | timedelta | None
"""Steps, a duration such as "30m" or a timedelta, "auto", or None for never."""

_SAVES_REMEMBERED = 5
_GUESSED_COST_SECONDS = 60.0
_WORTH_SAYING = 0.2
_HINT = "give a number of steps, a duration such as 30m, or auto"


class Cadence:
    """Says after which steps to save, the same on every rank.

    A number of steps is the same on every rank by itself. Time is that of rank 0, which all follow one step later (two,
    on GPUs); no rank waits for it. "auto" saves at the first chance, to learn what a save costs, and then at the
    interval that `hubshard.steps.intervals.best_interval_seconds` finds best for the mean cost of the last five; never
    so often that a save would not have ended before the next. Each choice is logged.

    Args:
        every: steps: after each multiple of it; a duration; "auto"; None for never.
        mtbf_seconds: mean time between failures of the whole job; "auto" needs it.
        rank: of this process.
        agreement: with the other ranks, on time; None where there are none.
        clock: seconds, monotonic.

    Raises:
        FormatError: `every` is none of these, or "auto" without a mean time between failures.
    """

    def __init__(
        self,
        every: Every,
        *,
        mtbf_seconds: float | None = None,
        rank: int = 0,
        agreement: StepAgreement | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_steps, self._fixed_seconds = _parsed(every)
        self._is_auto = every == "auto"
        if self._is_auto and mtbf_seconds is None:
            raise FormatError(
                'every="auto" needs to know how often the job fails', hint="give mtbf_seconds, such as 4 * 3600"
            )
        self._mtbf_seconds = None if mtbf_seconds is None else seconds_of(mtbf_seconds)
        self._is_chooser = rank == 0
        self._agreement = agreement or StepAgreement(None, name="save", world_size=1)
        self._clock = clock
        self._last_time = clock()
        self._asked: tuple[int, bool] | None = None
        self._last_due = self._last_saved = -1
        self._stalls: deque[float] = deque(maxlen=_SAVES_REMEMBERED)
        self._totals: deque[float] = deque(maxlen=_SAVES_REMEMBERED)
        self._said_seconds = 0.0

    @property
    def interval_seconds(self) -> float | None:
        """Between two saves, as it stands; None where steps are counted, or nothing."""
        if not self._is_auto or self._mtbf_seconds is None:
            return self._fixed_seconds
        cost = fmean(self._stalls) if self._stalls else _GUESSED_COST_SECONDS
        return max(best_interval_seconds(cost, self._mtbf_seconds), max(self._totals, default=0.0))

    def due(self, step: int) -> bool:
        """Whether to save after this step; asked once per step, or again with the same answer until it is saved.

        Args:
            step: number of the step that has just ended; the same on all ranks call by call.
        """
        if self._asked is not None and step < self._asked[0]:  # the run went back
            self._asked, self._last_saved, self._last_due = None, -1, min(self._last_due, step)
        if self._asked is None or step != self._asked[0]:
            before = max(step - 1, 0) if self._asked is None else self._asked[0]
            self._asked = step, self._decide(step, before)
        return self._asked[1] and step > self._last_saved

    def saved(self, step: int, stall_seconds: float, total_seconds: float) -> None:
        """Say that a step was saved, and what it cost.

        Args:
            step: its number.
            stall_seconds: that the training stood still for it.
            total_seconds: from its beginning until it was safe.
        """
        self._last_saved = max(self._last_saved, step)
        if step > self._last_due:
            self._last_due, self._last_time = step, self._clock()
        self._stalls.append(stall_seconds)
        self._totals.append(total_seconds)
        if self._is_auto and self._is_chooser:
            self._say()

    def _decide(self, step: int, before: int) -> bool:
        if self._every_steps is not None:
            return step // self._every_steps > before // self._every_steps
        seconds = self.interval_seconds
        if seconds is None:
            return False
        is_first = self._is_auto and self._last_due < 0
        wanted = self._is_chooser and (is_first or self._clock() - self._last_time >= seconds)
        if self._agreement.at_end_of(step, {} if wanted else None) is None:
            return False
        self._last_due, self._last_time = step, self._clock()
        return True

    def _say(self) -> None:
        seconds = self.interval_seconds or 0.0
        if abs(seconds - self._said_seconds) > _WORTH_SAYING * self._said_seconds:
            self._said_seconds = seconds
            _LOG.info(
                "a save from now on every %s: it stops the training for %s (mean of the last %d), is safe after %s, "
                "and a failure is expected every %s",
                format_seconds(seconds),
                format_seconds(fmean(self._stalls)),
                len(self._stalls),
                format_seconds(max(self._totals)),
                format_seconds(self._mtbf_seconds or 0.0),
            )


def _parsed(every: Every) -> tuple[int | None, float | None]:
    """Steps or seconds."""
    if every is None or every == "auto":
        return None, None
    if isinstance(every, timedelta):
        return None, seconds_of(every)
    if isinstance(every, str) and not every.strip().isdecimal():
        return None, seconds_of(every)
    steps = every if type(every) is int else int(every) if isinstance(every, str) else 0
    if steps < 1:
        raise FormatError(f"every={every!r} says not how often to save", hint=_HINT)
    return steps, None
