"""Steps that stay for good and did not reach the Hub: the next start sends them, and none of another line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.resume.test_resume_branch_hub import _talk

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Hub

pytest.importorskip("torch")

OWE = """
def ask(word):
    print(word, flush=True)
    input()

options = {"keep": 1, "keep_every": 4}

def owe(*steps):
    \"\"\"Save step 2, then some that do not reach the Hub.\"\"\"
    with run(**options) as branch:
        branch._hub.max_retries = 0
        branch.restore(state(0))
        branch.save(state(2), 2)
        branch.wait()
        ask("stop")
        for step in steps:
            branch.save(state(step), step)
            assert f"step {step} is on the disk, but did not reach the Hub" in fails(branch.wait, StoreError)
    ask("start")

def start(folder="disk", **more):
    with run(folder, **options, **more) as branch:
        step = branch.restore(state(0))
        branch.wait()
    return step
"""


def _check(hub: Hub, code: str, tmp_path: Path) -> list[str]:
    out = _talk(hub, OWE + code + "\nprint('done')", "org/owed", tmp_path, {"stop": hub.stop, "start": hub.restart})
    assert out[-1] == "done"
    return out


def test_the_next_start_sends_the_newest_then_those_that_stay(hub: Hub, tmp_path: Path) -> None:
    code = """
owe(4, 6, 8, 9)
shutil.copytree(tmp / "disk", tmp / "again")
assert start() == 9
assert on_branch() == [4, 8, 9]
assert history()[:3] == ["Step 4", "Step 8", "Step 9"]
for step in (4, 8):
    found = state(0)
    with run("empty") as branch:
        assert branch.restore(found, step=step) == step
    assert same(found, step)
assert not (tmp / "disk" / ".unsent.json").exists()
StepBranch(repo).prune(keep=1)
assert start() == 9
assert on_branch() == [9]  # they were there, and somebody has removed them
"""
    _check(hub, code, tmp_path)


def test_what_failed_in_this_run_goes_after_the_newest_and_what_is_gone_is_said(hub: Hub, tmp_path: Path) -> None:
    code = """
with run(**options) as branch:
    branch._hub.max_retries = 0
    branch.restore(state(0))
    ask("stop")
    for step in (4, 8, 9):
        branch.save(state(step), step)
        fails(branch.wait, StoreError)
    shutil.rmtree(tmp / "disk" / step_folder(4))
    ask("start")
    branch.save(state(10), 10)
    branch.wait()
    assert on_branch() == [8, 10], on_branch()
    assert history()[:2] == ["Step 8", "Step 10"]
"""
    out = _check(hub, code, tmp_path)
    assert "step 4 is not on the disk any more, and was never sent to the Hub" in out


def test_steps_of_another_line_are_never_sent(hub: Hub, tmp_path: Path) -> None:
    code = """
owe(4, 8)
saved(12, folder="other")  # another machine goes on from step 2
assert start() == 12
assert on_branch() == [2, 12]
ask("stop")
with run(**options) as branch:
    branch._hub.max_retries = 0
    fails(lambda: branch.restore(state(0)))
ask("start")
with run(**options) as branch:
    branch._hub.max_retries = 0
    assert branch.restore(state(0)) == 12
    ask("stop")
    branch.save(state(13), 13)
    fails(branch.wait, StoreError)
ask("start")
assert start() == 13
assert on_branch() == [12, 13], on_branch()
"""
    _check(hub, code, tmp_path)


def test_steps_that_were_rolled_back_are_never_sent(hub: Hub, tmp_path: Path) -> None:
    code = """
owe(4, 8)
StepBranch(repo).rollback(2)
assert start() == 2
assert on_branch() == [2]
saved(3, **options)
assert start() == 3
assert on_branch() == [3]
"""
    _check(hub, code, tmp_path)


def test_killed_just_after_a_step_is_shown_the_next_start_sends_those_before_it(hub: Hub, tmp_path: Path) -> None:
    code = """
from hubshard.resume.saves import saving
write_manifest = saving.write_manifest

def shown(*arguments):
    write_manifest(*arguments)
    shutil.copytree(tmp / "disk", tmp / "killed", ignore=shutil.ignore_patterns("*lock*"))  # as a kill leaves it

with run(**options) as branch:
    branch._hub.max_retries = 0
    branch.restore(state(0))
    branch.save(state(2), 2)
    branch.wait()
    ask("stop")
    branch.save(state(4), 4)
    fails(branch.wait, StoreError)
    saving.write_manifest = shown
    branch.save(state(5), 5)
    fails(branch.wait, StoreError)
ask("start")
saving.write_manifest = write_manifest
assert start("killed") == 5
assert on_branch() == [4, 5]
"""
    _check(hub, code, tmp_path)


def test_a_branch_that_answers_late_judges_the_disk_all_the_same(hub: Hub, tmp_path: Path) -> None:
    code = """
from hubshard.resume.saves.seen_rollbacks import SeenRollbacks
saved(2)
StepBranch(repo).rollback(2)
(tmp / "disk" / ".rollbacks.json").unlink()
with run(keep=9) as branch:  # which restores nothing
    branch._hub.max_retries = 0
    ask("stop")
    branch.save(state(4), 4)
    fails(branch.wait, StoreError)
    ask("start")
    branch.save(state(5), 5)
    branch.wait()
assert SeenRollbacks(tmp / "disk").of(f"{repo}@resume")
StepBranch(repo).rollback(2)
assert start() == 2
"""
    _check(hub, code, tmp_path)
