"""What the screen and the file of events show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hubshard.cli.progress import reporting
from hubshard.events import Event

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


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("argument", "variables", "shown"),
    [([], {}, True), (["quiet"], {}, False), ([], {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}, False)],
)
def test_on_a_terminal_the_bar_shows_unless_it_is_switched_off(
    argument: list[str], variables: dict[str, str], shown: bool
) -> None:
    import os
    import pty

    parent, child = pty.openpty()
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
