"""`hubshard resume advise`: how often to save."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from hubshard.cli.common import Json, Token, a_path, can_show, echo_json, interruptible
from hubshard.errors import FormatError, StoreError
from hubshard.messages import counted
from hubshard.sizes import format_size
from hubshard.steps.intervals import Advice, IntervalCost, format_seconds, seconds_of
from hubshard.steps.intervals import advise as find
from hubshard.steps.save_cost import Measured, measured

__all__ = ["advise"]

_BAR_CHARACTERS = 30
_MARKS, _PLAIN_MARKS = "█░…", "#.+"
_MOST_TIMES_BEST = 4.0
_LEAST_SECONDS = 0.001  # commits tell no less


@interruptible("nothing was written.")
def advise(
    cost: Annotated[
        str | None,
        typer.Argument(help="Time that a save takes from the training: 1.5, 800ms, 2m; --repo may tell it."),
    ] = None,
    *,
    mtbf: Annotated[
        str, typer.Option(metavar="DURATION", help="Mean time between failures of the whole job: 4h, 30m, 2d.")
    ],
    step_seconds: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time of a training step (s): intervals are then whole steps."),
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Steps of the run: what it costs in all.")] = None,
    restart: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Time from a failure to the first new step: 5m; 0 by default."),
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Time until a save is safe, while the training goes on: on the disk, or on the Hub. "
            "0 by default; with --repo what was measured until it was on the disk.",
        ),
    ] = None,
    repo: Annotated[
        str | None,
        typer.Option(metavar="REPO", help="org/name[@branch]: take what is not given from the commits of its steps."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(parser=a_path, metavar="FILE", help="Write a page with a chart as well.")
    ] = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Weigh what saving costs against what failures lose. A table and a chart, best marked (Young 1974, Daly 2006).

    A run tells in the commit of each step how long its save held the training up, and how long it took to the disk and
    to the Hub.
    """
    found = None if repo is None else _measured(repo, token, needs_step=step_seconds is None)
    figures = _figures(cost, delay, restart, step_seconds, found)
    advice = find(
        cost_seconds=figures["cost"].seconds,
        mtbf_seconds=_seconds(mtbf),
        restart_seconds=figures["restart"].seconds,
        delay_seconds=figures["delay"].seconds,
        step_seconds=figures["step"].seconds if "step" in figures else None,
        steps=steps,
    )
    columns, rows = _table(advice)
    notes = _notes(advice, figures, found)
    if html is not None:
        _write_page(html, advice, columns, rows, " ".join(notes))
    if as_json:
        sources = {f"{name}_seconds": figure.source for name, figure in figures.items()}
        echo_json({**_record(advice), "sources": sources, "measured": found and asdict(found)})
    else:
        _print(advice, columns, rows, notes)
        if html is not None:
            typer.echo(html)


@dataclass(frozen=True, slots=True)
class _Figure:
    # a number of the advice, and where it is from
    seconds: float
    source: Literal["given", "measured", "dates", "assumed"]

    @property
    def note(self) -> str:
        return {"measured": " (measured)", "dates": " (from the dates of the commits)"}.get(self.source, "")


def _seconds(text: str) -> float:
    """Seconds of "1.5", "800ms" or "2m"; 0 is one too."""
    try:
        return float(text)
    except ValueError:
        return seconds_of(text)


def _measured(repo: str, token: str | None, *, needs_step: bool) -> Measured:
    from hubshard.cli.resume import branch_of

    saves = branch_of(repo, None, token).past_saves()
    found = measured(saves)
    if needs_step and found.step_seconds is None and found.cost is None:
        raise FormatError(
            f"{repo}: its commits do not tell how long a step takes: {found.dates} of {len(saves)} have a date",
            hint="give --step-seconds",
        )
    return found


def _figures(
    cost: str | None, delay: str | None, restart: str | None, step_seconds: float | None, found: Measured | None
) -> dict[str, _Figure]:
    """What is given, else what was measured, else what is assumed."""
    costs = None if found is None else found.cost
    if cost is None and costs is None:
        message = "COST is not given" if found is None else "none of its commits tells what a save takes"
        raise FormatError(message, hint="give it as the first argument, such as 1.5 or 800ms, or --repo")
    known = {
        "cost": None if costs is None else _Figure(max(_LEAST_SECONDS, costs.stall_seconds), "measured"),
        "delay": _Figure(0.0, "assumed") if costs is None else _Figure(costs.write_seconds, "measured"),
        "restart": _Figure(0.0, "assumed"),
        "step": None if found is None or found.step_seconds is None else _Figure(found.step_seconds, "dates"),
    }
    given = {
        "cost": None if cost is None else _seconds(cost),
        "delay": None if delay is None else _seconds(delay),
        "restart": None if restart is None else _seconds(restart),
        "step": step_seconds,
    }
    chosen = {name: known[name] if value is None else _Figure(value, "given") for name, value in given.items()}
    return {name: figure for name, figure in chosen.items() if figure is not None}


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
    steps = "" if best.interval_steps is None else f" ({counted(best.interval_steps, 'step')})"
    return f"Save every {format_seconds(best.interval_seconds)}{steps}: an overhead of {_percent(best.overhead)}"


def _notes(advice: Advice, figures: Mapping[str, _Figure], found: Measured | None) -> list[str]:
    """What the advice stands on, in sentences."""
    told = [
        f"a save takes {format_seconds(advice.cost_seconds)}{figures['cost'].note}",
        f"a failure is expected every {format_seconds(advice.mtbf_seconds)}",
    ]
    if advice.delay_seconds:
        told.append(f"a save is safe after {format_seconds(advice.delay_seconds)}{figures['delay'].note}")
    if advice.restart_seconds:
        told.append(f"beginning again takes {format_seconds(advice.restart_seconds)}")
    if advice.step_seconds is not None:
        told.append(f"a step takes {format_seconds(advice.step_seconds)}{figures['step'].note}")
    notes = [f"Where {', '.join(told)}."]
    if not advice.keeps_up:
        notes.append(
            "Saving cannot keep up with the failures: no less time goes into it than into the work. Make saves cheap, "
            "or the job fail less often."
        )
    if found is not None and found.cost is not None:
        hub_seconds = found.cost.write_seconds + found.cost.push_seconds
        notes.append(
            f"Measured: medians of {counted(found.saves, 'save')}, of {format_size(found.cost.nbytes)}. A save was on "
            f"the disk after {format_seconds(found.cost.write_seconds)}, on the Hub after {format_seconds(hub_seconds)}"
            ": give that as --delay where a failure takes the disk along."
        )
    assumed = {"delay": "a save is safe at once (--delay)", "restart": "beginning again takes no time (--restart)"}
    names = [what for name, what in assumed.items() if figures[name].source == "assumed"]
    return [*notes, f"Assumed: {', '.join(names)}."] if names else notes


def _print(advice: Advice, columns: list[str], rows: list[list[str]], notes: list[str]) -> None:
    from hubshard.cli.tables import print_table

    marks = _MARKS if can_show(_MARKS) else _PLAIN_MARKS
    bars = [_bar(advice, row, marks) for row in advice.rows]
    heading = f"{marks[0]} saving {marks[1]} work lost"
    print_table([*columns, heading], [[*cells, bar] for cells, bar in zip(rows, bars, strict=True)])
    typer.echo(_said(advice))
    for note in notes:
        typer.echo(note)


def _record(advice: Advice) -> dict[str, object]:
    def finite(row: IntervalCost) -> dict[str, object]:
        return asdict(row) | {"overhead": row.overhead if row.overhead < math.inf else None}

    return {**asdict(advice), "rows": [finite(row) for row in advice.rows], "best": finite(advice.best)}


def _write_page(path: Path, advice: Advice, columns: list[str], rows: list[list[str]], notes: str) -> None:
    from hubshard.cli.advise_page import page

    try:
        path.write_text(page(advice, columns=columns, rows=rows, said=_said(advice), notes=notes), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}", hint="name another file for --html") from error
