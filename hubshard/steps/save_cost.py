"""What a save cost, and whose it is. Pure.

It is told in the message of its commit rather than in the manifest, whose bytes depend on the state alone.

```
Step 1000

Hubshard-Stall-Seconds: 0.412
Hubshard-Write-Seconds: 3.080
Hubshard-Push-Seconds: 41.700
Hubshard-Bytes: 84000000000
Hubshard-Run: 5f0c2a9be417
```

The run is a random word, which tells the runs of a branch apart and nothing of whoever started them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median

__all__ = ["Measured", "PastSave", "SaveCost", "cost_in", "measured", "run_in", "step_in", "step_message", "step_title"]

_TITLE = re.compile(r"Step (\d{1,18})\Z", re.ASCII)
_LINE = re.compile(r"Hubshard-(Stall|Write|Push)-Seconds: (\d{1,12}\.\d{3})\Z", re.ASCII)
_RUN = re.compile(r"Hubshard-Run: ([0-9a-f]{1,64})\Z", re.ASCII)
_BYTES = re.compile(r"Hubshard-Bytes: (\d{1,18})\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class SaveCost:
    """What a save cost, as rank 0 measured it.

    Attributes:
        stall_seconds: that the training stood still.
        write_seconds: from then until the step was on the disks of all ranks.
        push_seconds: from then until its files were on the Hub, just before the commit that shows it; with what it
            waited for pushes before it.
        nbytes: of its files (bytes).
    """

    stall_seconds: float
    write_seconds: float
    push_seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class PastSave:
    """A save that the history of a branch tells of, whether its step is still there or not.

    Attributes:
        step: its number.
        saved_at: when its commit was made; None where the Hub does not say.
        cost: None where the commit does not say.
    """

    step: int
    saved_at: datetime | None
    cost: SaveCost | None


@dataclass(frozen=True, slots=True)
class Measured:
    """What the past saves of a run tell together: medians; None where they do not.

    Attributes:
        saves: how many told their cost.
        cost: of a save.
        step_seconds: per step of the training, from the dates of the commits, less what the saves took.
        dates: how many commits have one.
    """

    saves: int
    cost: SaveCost | None
    step_seconds: float | None
    dates: int


def measured(saves: Sequence[PastSave]) -> Measured:
    """What past saves tell, which come oldest first."""
    costs = [save.cost for save in saves if save.cost is not None]
    dated = [save for save in saves if save.saved_at is not None]
    paces = [pace for pace in map(_pace, dated, dated[1:]) if pace is not None]
    cost = (
        SaveCost(
            median(cost.stall_seconds for cost in costs),
            median(cost.write_seconds for cost in costs),
            median(cost.push_seconds for cost in costs),
            round(median(cost.nbytes for cost in costs)),
        )
        if costs
        else None
    )
    return Measured(len(costs), cost, median(paces) if paces else None, len(dated))


def _pace(before: PastSave, after: PastSave) -> float | None:
    if before.saved_at is None or after.saved_at is None or after.step <= before.step:
        return None
    stall_seconds = 0.0 if after.cost is None else after.cost.stall_seconds
    seconds = (after.saved_at - before.saved_at).total_seconds() - stall_seconds
    return seconds / (after.step - before.step) if seconds > 0 else None


def step_title(step: int) -> str:
    """The title of the commit that shows a step."""
    return f"Step {step}"


def step_in(title: str) -> int | None:
    """The step that a commit of this title shows, or None."""
    match = _TITLE.match(title)
    return None if match is None else int(match[1])


def step_message(step: int, cost: SaveCost | None = None, run: str | None = None) -> str:
    """The message of the commit that shows a step: what its save cost, and by which run, where that is known."""
    lines = []
    if cost is not None:
        seconds = {"Stall": cost.stall_seconds, "Write": cost.write_seconds, "Push": cost.push_seconds}
        lines += [f"Hubshard-{name}-Seconds: {max(0.0, value):.3f}" for name, value in seconds.items()]
        lines.append(f"Hubshard-Bytes: {cost.nbytes}")
    if run is not None:
        lines.append(f"Hubshard-Run: {run}")
    return "\n".join([step_title(step), "", *lines]) if lines else step_title(step)


def run_in(message: str) -> str | None:
    """The run that a commit message names, or None."""
    return next((match[1] for match in map(_RUN.match, message.splitlines()) if match), None)


def cost_in(message: str) -> SaveCost | None:
    """What a commit message tells of the cost of its save; None where it does not tell all of it."""
    lines = message.splitlines()
    seconds = {match[1]: float(match[2]) for match in map(_LINE.match, lines) if match}
    nbytes = [int(match[1]) for match in map(_BYTES.match, lines) if match]
    if len(seconds) < 3 or not nbytes:
        return None
    return SaveCost(seconds["Stall"], seconds["Write"], seconds["Push"], nbytes[0])
