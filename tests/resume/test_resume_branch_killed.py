"""A save that is killed at any moment: the older steps stay, here and on the Hub, and the next save cleans up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import warm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.conftest import Hub

pytest.importorskip("torch")
pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="SIGKILL, and children that are forked")]

PROGRAM = Path(__file__).with_name("kill_branch.py")


def _seen(tmp_path: Path, *arguments: str, env: Mapping[str, str] | None = None) -> dict[str, int]:
    done = warm.run([PROGRAM, tmp_path, *arguments], imports="torch", env=env, timeout=590)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    seen: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert seen["old"] + seen["new"] == seen["steps"]
    return seen


@pytest.mark.timeout(600)
def test_killed_at_any_step_one_process_leaves_the_old_or_the_new_and_the_next_save_cleans_up(tmp_path: Path) -> None:
    seen = _seen(tmp_path, "disk")
    assert seen["left_behind"] == 0
    assert seen["old"] > 10
    assert seen["new"] > 5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_of_two_ranks_one_is_killed_and_both_find_the_old_or_the_new(tmp_path: Path) -> None:
    seen = _seen(tmp_path, "ranks")
    assert seen["left_behind"] == 0
    assert seen["old"] > 2
    assert seen["new"] > 1


@pytest.mark.timeout(600)
def test_killed_after_any_answer_of_the_hub_the_branch_holds_the_old_or_the_new(hub: Hub, tmp_path: Path) -> None:
    seen = _seen(tmp_path, "hub", "org/killed", env=hub.client_env())
    assert seen["old"] > 5
    assert seen["new"] > 1
