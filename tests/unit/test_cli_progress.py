"""What the screen and the file of events show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import typer

from hubshard.cli.log_lines import LogLines
from hubshard.cli.progress import reporting
from hubshard.events import Event
from tests.systems import open_terminal

EVENTS = [
    Event("publish", "start", "org/name", 100),
    Event("publish", "sent", "model.safetensors", 60),
    Event("publish", "warning", "w", detail="is larger than the bound"),
    Event("publish", "skipped", "other.safetensors", 40),
    Event("publish", "end", "org/name", 60, "abc"),
]

PROGRAM = """
import sys
from pathlib import Path
from hubshard.cli.progress import reporting
from hubshard.events import Event
with reporting(quiet=sys.argv[1:] == ["quiet"], events=None) as on_event:
    on_event(Event("publish", "start", "org/name", 100))
    on_event(Event("publish", "sent", "model.safetensors", 60))
    on_event(Event("publish", "commit", "main", detail="abc"))
"""


def test_each_event_is_a_line_of_json_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        with reporting(quiet=False, events=path) as on_event:
            for event in EVENTS:
                on_event(event)
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [line["kind"] for line in lines] == [event.kind for event in EVENTS] * 2
    assert lines[1]["nbytes"] == 60
    assert lines[1]["path"] == "model.safetensors"
    assert capsys.readouterr().out == ""


def test_where_stderr_is_no_terminal_only_warnings_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    with reporting(quiet=False, events=None) as on_event:
        for event in EVENTS:
            on_event(event)
    captured = capsys.readouterr()
    assert captured.err == "Warning: w is larger than the bound\n"
    assert captured.out == ""


def test_of_a_long_pause_it_is_said_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with reporting(quiet=False, events=None) as on_event:
        for seconds in (59.0, 3600.0):
            on_event(Event("publish", "retry", "x", detail="busy", time=1_000_000.0, wait_seconds=seconds))
    until = time.strftime("%H:%M:%S", time.localtime(1_003_600.0))
    assert capsys.readouterr().err.splitlines() == [
        "Retry: x busy (in 59.0 s)",
        f"Retry: x busy (in 3600 s, at {until})",
    ]


def test_what_was_tried_again_is_named_once_and_notes_are_for_whoever_wants_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for quiet in (False, True):
        with reporting(quiet=quiet, events=None) as on_event:
            on_event(Event("pull", "retry", "look at it", detail="org/x: cannot look at it: no answer", wait_seconds=1))
            on_event(Event("pull", "note", detail="not fetched: a"))
    retry = "Retry: org/x: cannot look at it: no answer (in 1.0 s)"
    assert capsys.readouterr().err.splitlines() == [retry, "Note: not fetched: a", retry]


def test_a_log_line_says_how_far_it_is_and_how_fast_since_the_last_one() -> None:
    now = [0.0]
    lines = LogLines(lambda _: None, clock=lambda: now[0])
    assert lines.line() is None, "nothing is under way"
    lines.take_in(Event("publish", "start", "org/name", 4_000_000_000))
    lines.take_in(Event("publish", "hashed", "a", 600_000_000))
    now[0] = 30.0
    assert lines.line() == "publish: 0 B of 4.00 GB, 0 B/s, 20.00 MB/s read"
    lines.take_in(Event("publish", "skipped", "a", 1_000_000_000))
    lines.take_in(Event("publish", "sent", "b", 500_000_000))
    now[0] = 60.0
    assert lines.line() == "publish: 1.50 GB of 4.00 GB, 50.00 MB/s"
    lines.take_in(Event("publish", "sent", "c", 2_500_000_000))
    assert lines.line() == "publish: 4.00 GB of 4.00 GB, waiting for the Hub"
    lines.take_in(Event("publish", "end", "org/name"))
    assert lines.line() is None


@pytest.mark.parametrize(
    ("job", "quiet", "is_said"), [("true", False, True), ("true", True, False), ("", False, False)]
)
def test_a_job_of_github_says_how_far_it_is_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], job: str, quiet: bool, is_said: bool
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", job)
    said = threading.Event()
    monkeypatch.setattr("hubshard.cli.progress.LogLines", partial(LogLines, every_seconds=0.01))

    def say(line: str) -> None:
        typer.echo(line, err=True)
        said.set()

    monkeypatch.setattr("hubshard.cli.progress._say", say)
    with reporting(quiet=quiet, events=None) as on_event:
        on_event(Event("publish", "start", "org/name", 100))
        assert said.wait(10 if is_said else 0.1) is is_said
    assert capsys.readouterr().err.startswith("publish: 0 B of 100 B") is is_said


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("argument", "variables", "shown"),
    [([], {}, True), (["quiet"], {}, False), ([], {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}, False)],
)
def test_on_a_terminal_the_bar_shows_unless_it_is_switched_off(
    argument: list[str], variables: dict[str, str], shown: bool
) -> None:
    parent, child = open_terminal()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {"TERM": "xterm"} | variables
    with subprocess.Popen([sys.executable, "-c", PROGRAM, *argument], stderr=child, env=environment) as process:
        os.close(child)
        drawn = b""
        while True:
            try:
                part = os.read(parent, 65536)
            except OSError:  # Linux says so when the other end is closed
                break
            if not part:
                break
            drawn += part
    os.close(parent)
    assert process.returncode == 0
    assert (b"60/100 bytes" in drawn) is shown
    assert (b"commit main abc" in drawn) is shown
