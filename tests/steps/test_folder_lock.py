"""The lock of a folder of steps: it dies with its holder, and is one for all ranks of a run. Needs no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hubshard.errors import ConflictError
from hubshard.steps import folder_lock
from hubshard.steps.folder_lock import FolderLock
from tests.systems import kill_group

HOLDER = """
import os, sys, time
from pathlib import Path
from hubshard.steps.folder_lock import FolderLock

lock = FolderLock(Path(sys.argv[1]), "first")
lock.acquire()
if hasattr(os, "fork") and not os.fork():
    sys.stdout.close()
    time.sleep(60)  # as a worker of a data loader, which outlives the run for a while
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.0)


def test_a_run_that_is_killed_lets_go_though_what_it_forked_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    second = FolderLock(tmp_path, "second")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with monkeypatch.context() as patch:
            patch.setattr(folder_lock, "WAIT_SECONDS", 0.0)
            held = rf"is in use: another run \(process {process.pid} on .*, since 20.*\) saves there"
            with pytest.raises(ConflictError, match=held):
                second.acquire()
        assert f"process {process.pid}" in (second.holder() or "")
        process.kill()
        second.acquire()  # which waits, if it must
        assert second.holder() is None
        second.release()
    finally:
        kill_group(process.pid)
        process.kill()
        process.communicate()
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_one_run_hold_it_together_and_others_do_not(tmp_path: Path, no_wait: None) -> None:
    first, rank_of_it, other = (FolderLock(tmp_path / "steps", run) for run in ("one", "one", "two"))
    assert first.holder() is None
    first.acquire()
    rank_of_it.acquire()
    assert rank_of_it.holder() is None
    refused = "another ResumeBranch of this process, which was not closed, saves there"
    with pytest.raises(ConflictError, match=refused):
        other.acquire()
    first.release()
    first.release()
    other.acquire()
    other.release()


@pytest.mark.parametrize(
    "spoil", [Path.unlink, lambda path: path.write_bytes(b"\xff{"), lambda path: path.write_text("")]
)
def test_what_became_of_the_file_does_not_matter(
    tmp_path: Path, no_wait: None, spoil: Callable[[Path], object]
) -> None:
    first, other = FolderLock(tmp_path, "one"), FolderLock(tmp_path, "two")
    first.acquire()
    path = tmp_path / folder_lock.NAME
    spoil(path)
    if path.exists():
        with pytest.raises(ConflictError, match="in use: another run saves there"):
            other.acquire()
    first.release()
    other.acquire()
    other.release()
    first.acquire()
    first.release()


@pytest.mark.parametrize("told", [b"", b"[" * 60_000, b'{"run": ' + b"1" * 2**17 + b"}"], ids=["empty", "deep", "long"])
@pytest.mark.usefixtures("no_wait")
def test_who_holds_it_is_another_run_where_the_file_tells_nothing(tmp_path: Path, told: bytes) -> None:
    first, second = FolderLock(tmp_path, "first"), FolderLock(tmp_path, "second")
    first.acquire()
    (tmp_path / folder_lock.NAME).write_bytes(told)
    assert second.holder() == "another run"
    with pytest.raises(ConflictError, match="is in use: another run saves there"):
        second.acquire()
    first.release()
