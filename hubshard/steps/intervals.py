"""How often to save: the interval at which saving and losing work cost least together. Pure.

The first-order optimum, sqrt(2·C·M) for saves that cost C and failures every M on average, is from J. W. Young, "A
first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9), 1974, pp. 530-531. The
higher-order one, and the expected run time of which it is the minimum, are from J. T. Daly, "A higher order estimate of
the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22(3), 2006, pp. 303-312. Both
take failures to come at random and at a constant rate (a Poisson process).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from hubshard.errors import FormatError

__all__ = ["Advice", "IntervalCost", "advise", "best_interval_seconds", "format_seconds", "interval_cost", "seconds_of"]

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_PART = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*(ms|s|min|m|h|d)", re.ASCII | re.IGNORECASE)
_HINT = "write it as 800ms, 90s, 30m, 4h, 1h30m or 2d"
_SHOWN = (
    (60, 1, 3600, ("min", "s")),
    (3600, 60, 86400, ("h", "min")),
    (86400, 3600, 10 * 86400, ("d", "h")),
)
_MOST_EXPONENT = 700.0
_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)


def seconds_of(duration: float | str | timedelta) -> float:
    """Seconds of a duration such as 5400.0, "90m", "1h30m" or a timedelta.

    Raises:
        FormatError: no duration, or not positive.
    """
    if isinstance(duration, bool) or not isinstance(duration, int | float | str | timedelta):
        raise FormatError(f"{duration!r} is not a duration", hint=_HINT)
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif isinstance(duration, str):
        seconds = _parsed(duration)
    else:
        seconds = float(duration)
    if not (math.isfinite(seconds) and seconds > 0):
        raise FormatError(f"the duration {str(duration)!r} is not positive", hint=_HINT)
    return seconds


def _parsed(text: str) -> float:
    seconds, position = 0.0, 0
    while match := _PART.match(text, position):
        seconds += float(match[1]) * _UNITS[match[2].lower()]
        position = match.end()
    if position == 0 or text[position:].strip():
        raise FormatError(f"{text!r} is not a duration", hint=_HINT)
    return seconds


def format_seconds(seconds: float) -> str:
    """A duration for people: "0.85 s", "14 s", "3 min 20 s", "4 h 10 min", "2 d 3 h"."""
    if seconds == math.inf:
        return "for ever"
    if seconds < 10:
        return f"{seconds:.2g} s"
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    whole = round(seconds)
    for large, small, most, names in _SHOWN:
        if whole < most:
            whole = round(whole / small) * small
            rest = whole % large // small
            return f"{whole // large} {names[0]}" + (f" {rest} {names[1]}" if rest else "")
    return f"{whole / 86400:.0f} d"


def best_interval_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of work between two saves that make a run with failures end soonest (Daly's higher-order optimum).

    Args:
        cost_seconds: what a save takes from the work; C.
        mtbf_seconds: mean time between failures; M.

    Returns:
        sqrt(2CM)·(1 + sqrt(C/2M)/3 + C/18M) - C where C < 2M, else M.
    """
    if cost_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = cost_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * cost_seconds * mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_seconds


@dataclass(frozen=True, slots=True)
class IntervalCost:
    """What it costs to save at an interval.

    Attributes:
        interval_seconds: of work between two saves.
        interval_steps: the same in steps; None where the time of a step is not known.
        saving: seconds of saving per second of work.
        lost_seconds: expected work that a failure loses, with the time to begin again.
        overhead: expected seconds of saving, of work done twice and of beginning again, per second of work.
        is_best: whether it is the one to take.
    """

    interval_seconds: float
    interval_steps: int | None
    saving: float
    lost_seconds: float
    overhead: float
    is_best: bool = False


def interval_cost(
    interval_seconds: float,
    *,
    cost_seconds: float,
    mtbf_seconds: float,
    restart_seconds: float = 0.0,
    delay_seconds: float = 0.0,
    interval_steps: int | None = None,
    is_best: bool = False,
) -> IntervalCost:
    """What it costs to save at an interval (Daly's complete model, exact for failures at a constant rate).

    Args:
        interval_seconds: of work between two saves; T.
        cost_seconds: what a save takes from the work; C.
        mtbf_seconds: mean time between failures; M.
        restart_seconds: from a failure to the first new step; R.
        delay_seconds: from the moment that a save has captured until it is safe, while the work goes on: a failure
            loses that much more. It is counted as a part of R.
        interval_steps: told in the result.
        is_best: told in the result.

    Returns:
        With an overhead of M/T·e^(R/M)·(e^((T+C)/M) - 1) - 1, and an expected loss per failure of
        M - (T+C)/(e^((T+C)/M) - 1) + R, which is about (T+C)/2 + R. An overhead beyond measure is infinite.
    """
    segment, after = (interval_seconds + cost_seconds) / mtbf_seconds, (restart_seconds + delay_seconds) / mtbf_seconds
    hopeless = segment + after > _MOST_EXPONENT
    overhead = math.inf if hopeless else math.exp(after) * math.expm1(segment) * mtbf_seconds / interval_seconds - 1
    lost = mtbf_seconds * (1.0 if segment > _MOST_EXPONENT else 1 - segment / math.expm1(segment))
    return IntervalCost(
        interval_seconds=interval_seconds,
        interval_steps=interval_steps,
        saving=cost_seconds / interval_seconds,
        lost_seconds=lost + restart_seconds + delay_seconds,
        overhead=overhead,
        is_best=is_best,
    )


@dataclass(frozen=True, slots=True)
class Advice:
    """How often to save.

    Attributes:
        cost_seconds: what a save takes from the work.
        mtbf_seconds: mean time between failures.
        restart_seconds: from a failure to the first new step.
        delay_seconds: from the moment that a save has captured until it is safe.
        step_seconds: per step; None where not known.
        steps: of the run; None where not known.
        rows: by interval, ascending; one of them is the best.
    """

    cost_seconds: float
    mtbf_seconds: float
    restart_seconds: float
    delay_seconds: float
    step_seconds: float | None
    steps: int | None
    rows: Sequence[IntervalCost]

    @property
    def keeps_up(self) -> bool:
        """Whether more time goes into work than into saving it; otherwise the best is a save that follows the last."""
        return best_interval_seconds(self.cost_seconds, self.mtbf_seconds) >= self.cost_seconds

    @property
    def best(self) -> IntervalCost:
        """The row to take."""
        return next(row for row in self.rows if row.is_best)

    def at(self, interval_seconds: float) -> IntervalCost:
        """What another interval would cost."""
        return interval_cost(
            interval_seconds,
            cost_seconds=self.cost_seconds,
            mtbf_seconds=self.mtbf_seconds,
            restart_seconds=self.restart_seconds,
            delay_seconds=self.delay_seconds,
        )


def advise(
    *,
    cost_seconds: float,
    mtbf_seconds: float,
    restart_seconds: float = 0.0,
    delay_seconds: float = 0.0,
    step_seconds: float | None = None,
    steps: int | None = None,
) -> Advice:
    """The best interval, and what others around it would cost.

    Args:
        cost_seconds: what a save takes from the work.
        mtbf_seconds: mean time between failures, of the whole job: that of one machine over their number.
        restart_seconds: from a failure to the first new step.
        delay_seconds: from the moment that a save has captured until it is safe. A save must end before the next.
        step_seconds: per step; intervals are then whole steps.
        steps: of the run: no interval is longer.

    Raises:
        FormatError: a number that is negative, or not positive where it must be.
    """
    _check(cost_seconds, mtbf_seconds, restart_seconds, delay_seconds, step_seconds, steps)
    step = step_seconds or 0.0
    longest = math.inf if steps is None or step_seconds is None else steps * step_seconds

    wanted = best_interval_seconds(cost_seconds, mtbf_seconds)
    # of saves that follow each other: a shorter interval cannot be kept
    shortest = max(delay_seconds, cost_seconds if wanted < cost_seconds else 0.0)

    def allowed(seconds: float) -> float:
        if step:
            seconds = max(1, round(seconds / step)) * step
        return min(max(seconds, math.ceil(shortest / step) * step if step else shortest), longest)

    best = allowed(wanted)
    rows = [
        interval_cost(
            seconds,
            cost_seconds=cost_seconds,
            mtbf_seconds=mtbf_seconds,
            restart_seconds=restart_seconds,
            delay_seconds=delay_seconds,
            interval_steps=round(seconds / step) if step else None,
            is_best=seconds == best,
        )
        for seconds in sorted({allowed(best * share) for share in _SHARES})
    ]
    return Advice(cost_seconds, mtbf_seconds, restart_seconds, delay_seconds, step_seconds, steps, rows)


def _check(
    cost: float, mtbf: float, restart: float, delay: float, step_seconds: float | None, steps: int | None
) -> None:
    positive = {"the cost of a save": cost, "the mean time between failures": mtbf, "the time of a step": step_seconds}
    for name, value in (positive | {"the number of steps": steps}).items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise FormatError(f"{name} is {value}, and must be positive")
    for name, value in (("the time to begin again", restart), ("the delay of a save", delay)):
        if not (math.isfinite(value) and value >= 0):
            raise FormatError(f"{name} is {value}, and must not be negative")
