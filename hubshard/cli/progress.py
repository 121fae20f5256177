"""Events on the screen and in a file: a bar on stderr where somebody looks, JSON lines where somebody records."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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

from hubshard.events import Event, OnEvent

__all__ = ["reporting"]

_MOVED = {"sent", "received", "skipped"}


@contextmanager
def reporting(*, quiet: bool, events: Path | None) -> Iterator[OnEvent]:
    """An `OnEvent` that draws on stderr, when that is a terminal, and appends JSON lines to `events`.

    Warnings and retries are said in any case, one line each.
    """
    with ExitStack() as stack:
        record = stack.enter_context(events.open("a", encoding="utf-8")) if events else None
        bar = _Bar(stack.enter_context(_progress())) if _wants_bar(quiet=quiet) else None
        yield _Reporter(bar, record).on_event


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
    def __init__(self, bar: _Bar | None, record: TextIO | None) -> None:
        self._bar = bar
        self._record = record
        self._lock = threading.Lock()

    def on_event(self, event: Event) -> None:
        with self._lock:
            if self._record is not None:
                self._record.write(json.dumps(dataclasses.asdict(event)) + "\n")
                self._record.flush()
            if self._bar is not None:
                self._bar.show(event)
            elif event.kind in {"warning", "retry"}:
                typer.echo(_sentence(event), err=True)


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
        elif event.kind != "end" and (event.kind != "staged" or event.path.endswith(".safetensors")):
            self._progress.console.print(_sentence(event), markup=False, highlight=False)


def _sentence(event: Event) -> str:
    word = {"warning": "Warning:", "retry": "Retry:"}.get(event.kind, event.kind)
    return " ".join(part for part in (word, event.path, event.detail) if part)
