"""`hubshard resume advise`: how often to save."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from hubshard.cli.common import Json, Token, a_path, can_show, echo_json, interruptible
from hubshard.errors import FormatError, StoreError
from hubshard.steps.intervals import Advice, IntervalCost, format_seconds, seconds_of
from hubshard.steps.intervals import advise as find

if TYPE_CHECKING:
    from hubshard.steps.branch_look import StepSummary

__all__ = ["advise"]

_BAR_CHARACTERS = 30
_MARKS, _PLAIN_MARKS = "█░…", "#.+"
_MOST_TIMES_BEST = 4.0


@interruptible("nothing was written.")
def advise(
    cost: Annotated[str, typer.Argument(help="Time that a save takes from the training: 1.5, 800ms, 2m.")],
    *,
    mtbf: Annotated[str, typer.Option(help="Mean time between failures of the whole job: 4h, 30m, 2d.")],
    step_seconds: Annotated[
        float | None, typer.Option(help="Time of a training step (s): intervals are then whole steps.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the run: what it costs in all.")] = None,
    restart: Annotated[str, typer.Option(help="Time from a failure to the first new step: 5m.")] = "0",
    delay: Annotated[
        str, typer.Option(help="Time until a save is safe, while the training goes on: on the disk, or on the Hub.")
    ] = "0",
    repo: Annotated[
        str | None, typer.Option(help="org/name[@branch]: take the time of a step from when its steps were saved.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(parser=a_path, metavar="FILE", help="Write a page with a chart as well.")
    ] = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Weigh what saving costs against what failures lose. A table and a chart, best marked (Young 1974, Daly 2006)."""
    if repo is not None and step_seconds is None:
        step_seconds = _seconds_per_step(repo, token)
    advice = find(
        cost_seconds=_seconds(cost),
        mtbf_seconds=_seconds(mtbf),
        restart_seconds=_seconds(restart),
        delay_seconds=_seconds(delay),
        step_seconds=step_seconds,
        steps=steps,
    )
    columns, rows = _table(advice)
    if html is not None:
        _write_page(html, advice, columns, rows)
    if as_json:
        echo_json(_record(advice))
    else:
        _print(advice, columns, rows)
        if html is not None:
            typer.echo(html)


def _seconds(text: str) -> float:
    """Seconds of "1.5", "800ms" or "2m"; 0 is one too."""
    try:
        return float(text)
    except ValueError:
        return seconds_of(text)


def _seconds_per_step(repo: str, token: str | None) -> float:
    from hubshard.cli.resume import branch_of

    summaries = branch_of(repo, None, token).steps()
    dated = [found for found in summaries if found.saved_at is not None]
    found = [_pace(before, after) for before, after in pairwise(dated)]
    paces = [pace for pace in found if pace is not None]
    if not paces:
        raise FormatError(
            f"{repo}: its steps do not tell how long one takes: {len(dated)} of {len(summaries)} have a date",
            hint="give --step-seconds",
        )
    return median(paces)


def _pace(before: StepSummary, after: StepSummary) -> float | None:
    if before.saved_at is None or after.saved_at is None or after.saved_at <= before.saved_at:
        return None
    return (after.saved_at - before.saved_at).total_seconds() / (after.step - before.step)


def _table(advice: Advice) -> tuple[list[str], list[list[str]]]:
    steps = [">steps"] if advice.step_seconds is not None else []
    totals = [">saves", ">cost of the run"] if _run_seconds(advice) is not None else []
    columns = [">save every", *steps, ">saving", ">lost per failure", ">overhead", *totals]
    return columns, [_cells(advice, row) for row in advice.rows]


def _cells(advice: Advice, row: IntervalCost) -> list[str]:
    cells = [format_seconds(row.interval_seconds)]
    if row.interval_steps is not None:
        cells.append(f"{row.interval_steps:,}")
    cells += [f"{row.saving:.2%}", format_seconds(row.lost_seconds), _percent(row.overhead)]
    run_seconds = _run_seconds(advice)
    if run_seconds is not None:
        saves = max(1, math.floor(run_seconds / row.interval_seconds))
        cells += [f"{saves:,}", format_seconds(run_seconds * row.overhead) if row.overhead < math.inf else "never ends"]
    return cells


def _run_seconds(advice: Advice) -> float | None:
    return None if advice.steps is None or advice.step_seconds is None else advice.steps * advice.step_seconds


def _percent(share: float) -> str:
    return f"{share:.2%}" if share < 100 else "> 10,000%"


def _bar(advice: Advice, row: IntervalCost, marks: str) -> str:
    """Saving, then what is lost, drawn to a scale on which the best is a quarter."""
    scale = _BAR_CHARACTERS / (_MOST_TIMES_BEST * advice.best.overhead)
    saving = min(_BAR_CHARACTERS, round(row.saving * scale))
    whole = min(_BAR_CHARACTERS, max(1, round(min(row.overhead, 1e9) * scale)))
    beyond = marks[2] if row.overhead * scale > _BAR_CHARACTERS else ""
    return marks[0] * min(saving, whole) + marks[1] * (whole - saving) + beyond + (" <- best" if row.is_best else "")


def _said(advice: Advice) -> str:
    best = advice.best
    steps = "" if best.interval_steps is None else f" ({best.interval_steps:,} steps)"
    return f"Save every {format_seconds(best.interval_seconds)}{steps}: an overhead of {_percent(best.overhead)}"


def _notes(advice: Advice) -> str:
    told = [
        f"a save takes {format_seconds(advice.cost_seconds)}",
        f"a failure is expected every {format_seconds(advice.mtbf_seconds)}",
    ]
    if advice.delay_seconds:
        told.append(f"a save is safe after {format_seconds(advice.delay_seconds)}")
    if advice.restart_seconds:
        told.append(f"beginning again takes {format_seconds(advice.restart_seconds)}")
    if advice.step_seconds is not None:
        told.append(f"a step takes {format_seconds(advice.step_seconds)}")
    return f"Where {', '.join(told)}."


def _print(advice: Advice, columns: list[str], rows: list[list[str]]) -> None:
    from hubshard.cli.tables import print_table

    marks = _MARKS if can_show(_MARKS) else _PLAIN_MARKS
    bars = [_bar(advice, row, marks) for row in advice.rows]
    heading = f"{marks[0]} saving {marks[1]} work lost"
    print_table([*columns, heading], [[*cells, bar] for cells, bar in zip(rows, bars, strict=True)])
    typer.echo(_said(advice))
    typer.echo(_notes(advice))


def _record(advice: Advice) -> dict[str, object]:
    def finite(row: IntervalCost) -> dict[str, object]:
        return asdict(row) | {"overhead": row.overhead if row.overhead < math.inf else None}

    return {**asdict(advice), "rows": [finite(row) for row in advice.rows], "best": finite(advice.best)}


def _write_page(path: Path, advice: Advice, columns: list[str], rows: list[list[str]]) -> None:
    from hubshard.cli.advise_page import page

    try:
        path.write_text(
            page(advice, columns=columns, rows=rows, said=_said(advice), notes=_notes(advice)), encoding="utf-8"
        )
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}", hint="name another file for --html") from error
