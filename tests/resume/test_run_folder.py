"""The folder of a run: which ranks share it, on disks that are full, can only be read, or have a clock of their own."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hubshard.errors import HubshardError, StoreError
from tests.thread_ranks import job_of_one, on_ranks

pytest.importorskip("torch")

from hubshard import ResumeBranch
from hubshard.resume.saves.run_folder import RunFolder
from hubshard.resume.team import Team, _Wire

_DAY_SECONDS = 24 * 3600.0


@pytest.fixture(autouse=True)
def _job() -> Iterator[None]:
    with job_of_one():
        yield


def on_folders(*roots: Path) -> list[Any]:
    """What ranks with these folders find out, each in a thread: who is the first of its disk, or the error."""

    def act(rank: int) -> bool:
        team = Team(_Wire("hubshard/test", rank, len(roots), says=False), "hubshard/test")
        try:
            return RunFolder(roots[rank], team).is_first_of_disk
        finally:
            team.close()

    return on_ranks(len(roots), act, caught=(HubshardError, OSError, ValueError))


def test_the_lowest_rank_of_each_folder_writes_there_and_no_mark_is_left(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert on_folders(one, other, one, other) == [True, True, False, False]
    assert [*one.iterdir(), *other.iterdir()] == []


@pytest.mark.parametrize("behind_days", [-9, 0, 9])
def test_marks_are_as_old_as_the_clock_of_the_disk_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind_days: int
) -> None:
    touch = Path.touch

    def by_the_server(path: Path, *, age_days: float = 0.0) -> None:
        touch(path)
        at = path.stat().st_mtime - (behind_days + age_days) * _DAY_SECONDS
        os.utime(path, (at, at))

    killed, starting = tmp_path / ".here-killed-00000", tmp_path / ".here-starting-00000"
    by_the_server(killed, age_days=1.1)
    by_the_server(starting, age_days=0.5)
    monkeypatch.setattr(Path, "touch", by_the_server)
    assert on_folders(tmp_path, tmp_path) == [True, False]
    assert list(tmp_path.iterdir()) == [starting]


def test_a_disk_that_takes_no_mark_is_told_by_its_path_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch = Path.touch

    def is_full(path: Path) -> None:
        if path.name.endswith("1"):
            raise OSError(errno.ENOSPC, "No space left on device")
        touch(path)

    monkeypatch.setattr(Path, "touch", is_full)
    for error in on_folders(tmp_path, tmp_path):
        assert isinstance(error, StoreError)
        assert ".here-" in error.message
        assert error.message.endswith("-00001: No space left on device")
        assert error.hint == "free some space, or choose another disk"
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_one_process_restores_from_a_disk_that_takes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ResumeBranch(None, local_dir=tmp_path, signals=()) as branch:
        branch.save({"n": 7}, 7)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("touch", "write_text", "write_bytes", "unlink", "rename", "replace"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(os, "open", refuse)
    state = {"n": 0}
    with ResumeBranch(None, local_dir=tmp_path, signals=()) as branch:
        assert branch.restore(state) == 7
        assert state == {"n": 7}
        with pytest.raises(StoreError, match=r"\.run\.lock cannot be opened: Read-only file system") as refused:
            branch.save(state, 8)
        assert "mount it to be written to" in str(refused.value.hint)
