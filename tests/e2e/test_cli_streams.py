"""The command line where nobody listens: closed streams, full disks behind them, limits of the system."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from huggingface_hub import HfApi
from safetensors.numpy import save_file

from hubshard.cli.app import main
from hubshard.messages import one_line

if TYPE_CHECKING:
    from tests.conftest import Hub

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="streams are closed before a start by fork only")
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")

REPO = "org/model"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({f"w.{i}": np.full(1000, i, np.float32) for i in range(4)}, folder / "model.safetensors")
    return folder


def _run(hub: Hub, *arguments: str | Path, before: Callable[[], object]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hubshard", *map(str, arguments)],
        env=hub.client_env(),
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        preexec_fn=before,
    )


def _close(*numbers: int) -> Callable[[], None]:
    def close() -> None:
        for number in numbers:
            os.close(number)

    return close


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=["stdin", "stdout", "stderr", "all"])
def test_a_closed_stream_changes_nothing_of_what_is_done(
    hub: Hub, model: Path, tmp_path: Path, closed: tuple[int, ...]
) -> None:
    published = _run(hub, "publish", model, REPO, "--max-shard-size", "10kB", before=_close(*closed))
    assert published.returncode == 0, published.stderr
    pulled = _run(hub, "pull", REPO, "--local-dir", tmp_path / "copy", before=_close(*closed))
    assert pulled.returncode == 0, pulled.stderr
    missing = _run(hub, "inspect", "org/none", before=_close(*closed))
    assert missing.returncode == 1
    done = _run(hub, "verify", tmp_path / "copy", "--against", REPO, before=_close())
    assert done.returncode == 0, done.stdout


@needs_full
def test_a_full_disk_behind_the_events_is_told_and_the_publish_lands(hub: Hub, model: Path) -> None:
    done = _run(hub, "publish", model, REPO, "-q", "--events", "/dev/full", before=_close())
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["Warning: no more events are recorded: [Errno 28] No space left on device"]
    assert "model.safetensors" in HfApi(endpoint=hub.url).list_repo_files(REPO)


@needs_full
def test_a_result_that_cannot_be_written_is_told_as_done(hub: Hub, model: Path, tmp_path: Path) -> None:
    def to_full() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)

    url = f"{hub.url}/{REPO}/tree/"
    verbs: list[tuple[list[str | Path], str]] = [
        (["publish", model, REPO, "--json"], url),
        (["pull", REPO, "--local-dir", tmp_path / "copy", "--json"], f"{REPO} is in {tmp_path / 'copy'}"),
        (["rollback", REPO, "--to", "main", "--json"], url),
    ]
    for verb, told in verbs:
        done = _run(hub, *verb, before=to_full)
        assert done.returncode == 1
        said = [line for line in done.stderr.splitlines() if not line.startswith("Warning: ")]
        assert said[0].startswith(f"Error: {told}")
        assert said[0].endswith("only its result cannot be written to stdout: No space left on device")
        assert said[1:] == ["Hint: there is no need to run it again"]
    assert "model.safetensors" in HfApi(endpoint=hub.url).list_repo_files(REPO)
    assert (tmp_path / "copy/model.safetensors").exists()


@needs_full
def test_warnings_that_cannot_be_said_do_not_end_a_publish(hub: Hub, model: Path) -> None:
    def to_full() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)

    done = _run(hub, "publish", model, REPO, "-q", "--max-shard-size", "1kB", before=to_full)
    assert done.returncode == 0
    assert "model-00004-of-00004.safetensors" in HfApi(endpoint=hub.url).list_repo_files(REPO)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")], ids=["memory", "threads"])
def test_a_machine_at_its_limits_is_told_in_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def starved() -> None:
        raise error

    monkeypatch.setattr("hubshard.cli.app.app", starved)
    with pytest.raises(SystemExit, match="1"):
        main()
    said, hint = capsys.readouterr().err.splitlines()
    assert said.startswith("Error: ")
    assert "ulimit" in hint


def test_a_line_stays_one_and_obeys_nobody() -> None:
    assert one_line("no\r\n  such\tthing \x1b[31mü\u200b\ud800") == "no such thing \\x1b[31mü\\u200b\\ud800"
