"""Steps on a disk whose files somebody reads while they are to go."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hubshard.resume.saves.local_steps import LocalSteps
from hubshard.steps.step import MANIFEST_NAME

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def _made(root: Path, *steps: int) -> LocalSteps:
    local = LocalSteps(root)
    for step in steps:
        local.folder(step).mkdir()
        for name in (MANIFEST_NAME, "rank-00000-0.safetensors"):
            (local.folder(step) / name).write_bytes(b"{}")
    return local


def test_a_step_that_somebody_reads_is_in_nobodys_way_and_is_gone_after_the_next_save(tmp_path: Path) -> None:
    local = _made(tmp_path, 1, 2)
    with (local.folder(1) / "rank-00000-0.safetensors").open("rb"):
        local.keep_only({2}, newest=2)  # Windows removes no file that is open
        assert local.numbers() == {2}
    local.keep_only({2}, newest=2)
    assert not local.folder(1).exists()


def test_two_threads_may_remove_the_same_step(tmp_path: Path) -> None:
    steps = range(300)
    local, failed, both = _made(tmp_path, *steps), list[OSError](), threading.Barrier(2)

    def remove() -> None:
        for step in steps:
            both.wait(60)
            try:
                local.remove(step)
            except OSError as error:
                failed.append(error)

    threads = [threading.Thread(target=remove) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_removed_is_said_and_keeps_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    local, remove = _made(tmp_path, 1, 2, 3), LocalSteps.remove

    def sticks(local: LocalSteps, step: int) -> None:
        if step == 1:
            raise OSError("the disk has lost it")
        remove(local, step)

    monkeypatch.setattr(LocalSteps, "remove", sticks)
    assert local.keep_only({3}, newest=3) == [2]
    assert "step 1 is of no use any more, and cannot be removed: the disk has lost it" in caplog.text
