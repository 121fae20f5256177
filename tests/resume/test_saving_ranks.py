"""A step that ranks write on disks of their own, on threads: what is left where one of the disks fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hubshard.errors import StoreError
from hubshard.events import Operation, ignore
from hubshard.resume.saves import saving
from hubshard.resume.saves.disk_line import DiskLine
from hubshard.resume.saves.local_steps import LocalSteps
from hubshard.resume.saves.push_queue import PushQueue
from hubshard.steps.retention import Retention
from hubshard.steps.step import step_folder
from hubshard.steps.writing import write_manifest
from tests.thread_ranks import job_of_one, on_ranks

torch = pytest.importorskip("torch")

from hubshard.resume.saves.taking import SnapshotTaker  # noqa: E402  # imports torch
from hubshard.resume.team import Team, _Wire  # noqa: E402


@pytest.fixture(autouse=True)
def _job() -> Iterator[None]:
    with job_of_one():
        yield


def _saved(step: int, *roots: Path) -> list[Any]:
    """What each rank comes to, whose folder is its own: the number of the step that it saved, or the error."""

    def act(rank: int) -> int:
        name = f"hubshard/test-{step}"
        team = Team(_Wire(name, rank, len(roots), says=False), name)
        local, retention = LocalSteps(roots[rank]), Retention(1)
        try:
            state = {f"t{rank}": torch.full((9,), float(step))}
            snapshot = SnapshotTaker(team).take(state, check=lambda: None, is_busy=lambda: False)
            assert snapshot is not None
            return saving.write_step(
                snapshot,
                step,
                local=local,
                line=DiskLine(local),
                hub=None,
                team=team,
                retention=retention,
                queue=PushQueue(retention),
                broken=(),
                max_file_bytes=2**20,
                is_first_of_disk=True,
                on_merged=lambda _: None,
                op=Operation("save", "run", ignore),
            ).number
        finally:
            team.close()

    return on_ranks(len(roots), act)


def _whole(step: int, *roots: Path) -> bool:
    local = [LocalSteps(root) for root in roots]
    shown = [one.manifest(step)[0] for one in local if step in one.numbers()]
    names = {name for one in local for name in one.present(shown[0])} if shown else set()
    return bool(shown) and names == {*shown[0].file_of}


@pytest.mark.parametrize("failing", [{"a"}, {"b"}, {"a", "b"}])
def test_a_step_that_some_disks_cannot_show_costs_none_that_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: set[str]
) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    assert _saved(10, *roots) == [10, 10]

    def refused(folder: Path, raw: bytes, names: Any) -> None:
        if folder.parent.name in failing:
            raise StoreError(f"{folder} is gone")
        write_manifest(folder, raw, names)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_manifest", refused)
        assert all("is gone" in str(error) for error in _saved(20, *roots))
    assert _whole(10, *roots)
    assert _whole(20, *roots) == (len(failing) == 1)
    assert [*tmp_path.rglob(step_folder(20))] == [] or len(failing) == 1
    assert _saved(30, *roots) == [30, 30]
    assert [*map(LocalSteps.numbers, map(LocalSteps, roots))] == [{30}, {30}]
    assert _whole(30, *roots)
