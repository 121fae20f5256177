"""Steps on a disk whose files somebody reads while they are to go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hubshard.resume.saves.local_steps import LocalSteps
from hubshard.steps.step import MANIFEST_NAME

if TYPE_CHECKING:
    from pathlib import Path


def test_a_step_that_somebody_reads_is_in_nobodys_way_and_is_gone_after_the_next_save(tmp_path: Path) -> None:
    local = LocalSteps(tmp_path)
    for step in (1, 2):
        local.folder(step).mkdir()
        for name in (MANIFEST_NAME, "rank-00000-0.safetensors"):
            (local.folder(step) / name).write_bytes(b"{}")
    with (local.folder(1) / "rank-00000-0.safetensors").open("rb"):
        local.keep_only({2}, newest=2)  # Windows removes no file that is open
        assert local.numbers() == {2}
    local.keep_only({2}, newest=2)
    assert not local.folder(1).exists()
