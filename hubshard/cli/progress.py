"""Events on the screen and in a file: a bar on stderr where somebody looks, JSON lines where somebody records."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from hubshard.cli.common import Note, echo_json, give_up
from hubshard.cli.log_lines import LogLines, is_wanted
from hubshard.cli.tables import print_table
from hubshard.errors import StoreError
from hubshard.events import Event, OnEvent, Totals
from hubshard.messages import one_line
from hubshard.sizes import format_size
from hubshard.watch import Limits, Watch

__all__ = ["print_fetched", "print_totals", "reporting", "totals_of", "totals_record"]

_MOVED = {"sent", "received", "skipped", "deduplicated"}
_LONG_SECONDS = 60.0  # of a pause: whoever looks later wants to know when it ends
_UNSAID = {"read", "hashed", "committing", "end", "error"}
_SAID = frozenset({"warning", "retry", "note"})  # also where there is no bar


@contextmanager
def reporting(
    *, quiet: bool, events: Path | None, limits: Limits | None = None, note: str | Note = ""
) -> Iterator[OnEvent]:
    """An `OnEvent` that draws on stderr, when that is a terminal, and appends JSON lines to `events`.

    Warnings and retries are said in any case, one line each, notes unless it is quiet. In a job of GitHub Actions a
    line every half minute says how far it is.

    Args:
        quiet: draw nothing, and say no notes.
        events: opened before anything is done; each line is flushed.
        limits: the process ends with exit status 3 when one is broken.
        note: what is left then, and what to do.

    Raises:
        StoreError: `events` cannot be written.
    """
    with ExitStack() as stack:
        record = _appended(events) if events else None
        if record is not None:
            stack.callback(_close, record)
        bar = _Bar(stack.enter_context(_progress())) if _wants_bar(quiet=quiet) else None
        lines = None if bar is not None or quiet or not is_wanted() else stack.enter_context(LogLines(_say))
        on_event: OnEvent = _Reporter(bar, record, lines, _SAID - {"note"} if quiet else _SAID).on_event
        if limits is not None:
            on_event = stack.enter_context(Watch(limits, on_event, on_break=lambda error: give_up(error, note)))
        yield on_event


@contextmanager
def totals_of(then: OnEvent) -> Iterator[tuple[OnEvent, list[Totals]]]:
    """An `OnEvent` that passes everything on, and a list that has the sums once the operation has ended."""
    found: list[Totals] = []

    def on_event(event: Event) -> None:
        if event.totals is not None:
            found.append(event.totals)
        then(event)

    yield on_event, found


def print_totals(totals: Totals, *, fetched: bool = False) -> None:
    """A short table of the sums on stderr, of what was fetched or sent."""
    columns = {
        "sent": format_size(totals.sent_bytes),
        "received": format_size(totals.received_bytes),
        "skipped": format_size(totals.skipped_bytes),
        "saved by Xet": format_size(totals.deduplicated_bytes),
        "retries": f"{totals.retries:,}",
        "wall": f"{totals.seconds:.1f} s",
        "mean rate": f"{format_size(totals.bytes_per_second)}/s",
    }
    idle = {"sent", "saved by Xet"} if fetched else {"received"}
    shown = {name: value for name, value in columns.items() if name not in idle}
    print_table([f">{name}" for name in shown], [list(shown.values())], stderr=True)


def print_fetched(path: Path, totals: Totals, *, as_json: bool, quiet: bool) -> None:
    """Where what was fetched lies on stdout, with the sums: in one JSON object, or as a table on stderr."""
    if as_json:
        echo_json({"path": path, **totals_record(totals)})
        return
    typer.echo(path)
    if not quiet:
        print_totals(totals, fetched=True)


def totals_record(totals: Totals) -> dict[str, object]:
    """The sums as JSON values."""
    return {**dataclasses.asdict(totals), "bytes_per_second": totals.bytes_per_second}


def _appended(path: Path) -> TextIO:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"{path}: events cannot be recorded: {error.strerror or error}", hint="name another file for --events"
        ) from error


def _close(record: TextIO) -> None:
    with suppress(OSError):  # what could not be written was told
        record.close()


def _say(line: str) -> None:
    with suppress(OSError):  # nobody may be listening any more
        typer.echo(line, err=True)


def _wants_bar(*, quiet: bool) -> bool:
    off = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in {"1", "ON", "YES", "TRUE"}
    return sys.stderr.isatty() and not quiet and not off


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


class _Reporter:
    def __init__(self, bar: _Bar | None, record: TextIO | None, lines: LogLines | None, said: Collection[str]) -> None:
        self._said = said
        self._bar = bar
        self._lines = lines
        self._record = record
        self._lock = threading.Lock()

    def on_event(self, event: Event) -> None:
        with self._lock:
            if self._record is not None:
                self._write(self._record, event)
            if self._lines is not None:
                self._lines.take_in(event)
            if self._bar is not None:
                self._bar.show(event)
            elif event.kind in self._said:
                _say(_sentence(event))

    def _write(self, record: TextIO, event: Event) -> None:
        line = {name: value for name, value in dataclasses.asdict(event).items() if value is not None}
        try:
            record.write(json.dumps(line) + "\n")
            record.flush()
        except OSError as error:  # what is recorded is worth less than what is under way
            self._record = None
            _say(f"Warning: no more events are recorded: {error}")


class _Bar:
    """One bar for the bytes; above it a line for each shard that is stored, and for whatever is worth one."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def show(self, event: Event) -> None:
        if event.kind == "start":
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(event.operation, total=event.nbytes or None)
        elif event.kind in _MOVED:
            if self._task is not None:
                self._progress.update(self._task, advance=event.nbytes)
        elif event.kind not in _UNSAID and (event.kind != "staged" or event.path.endswith(".safetensors")):
            self._progress.console.print(_sentence(event), markup=False, highlight=False)


def _sentence(event: Event) -> str:
    word = {"warning": "Warning:", "retry": "Retry:", "note": "Note:"}.get(event.kind, event.kind)
    pause = ""
    if event.wait_seconds >= _LONG_SECONDS:
        until = time.strftime("%H:%M:%S", time.localtime(event.time + event.wait_seconds))
        pause = f"(in {event.wait_seconds:.0f} s, at {until})"
    elif event.wait_seconds:
        pause = f"(in {event.wait_seconds:.1f} s)"
    # the cause of a retry often says itself what was tried
    path = "" if event.kind == "retry" and event.path in event.detail else event.path
    return one_line(" ".join(part for part in (word, path, event.detail, pause) if part))
