"""Which steps of a disk a run goes on from, beside what its branch holds: clients in processes of their own."""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.resume.test_resume_branch_hub import SETUP

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("torch")

MORE = """
from hubshard.resume.saves.seen_rollbacks import NAME, SeenRollbacks
import traceback

def on_disk(folder="disk"):
    return sorted(int(path.parent.name[5:]) for path in (tmp / folder).glob("step-*/manifest.json"))

def foreign(folder, *words, step=None, **options):
    before, state_of = (store.head("resume"), on_disk(folder)), state(-1)
    with run(folder, **options) as branch:
        why = fails(lambda: branch.restore(state_of, step=step), ConflictError)
        for word in (str(tmp / folder), f"{repo}@resume", "by run ", "(commit ", *words):
            assert word in why, (word, why)
    assert same(state_of, -1)
    assert (store.head("resume"), on_disk(folder)) == before
"""


def _run(hub: Hub, code: str, repo: str, tmp_path: Path) -> str:
    return hub.client(SETUP + MORE + textwrap.dedent(code), repo, tmp_path)


def test_a_folder_of_another_run_takes_over_no_branch(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    saved(10, 20, repo=repo + "-other")
    saved(2, 8, folder="second")
    foreign("disk", "steps 10, 20", "steps 2, 8", keep=1)
    foreign("disk", "steps 10, 20", step=10)
    foreign("disk", "steps 10, 20", step=8)
    with run("disk") as branch:
        for step in (8, 20):
            assert "steps 10, 20" in fails(lambda: branch.rollback(step), ConflictError)
    assert on_branch() == [2, 8] and on_disk() == [10, 20]
    shutil.rmtree(tmp / "disk")
    saved(9)  # what the error tells to do
    saved(30, folder="second", repo=repo + "-older")
    saved(31)
    assert restored("second") == 31  # whose 30 went on from 8 of this branch, but is older
    assert "30" not in history()[0] and on_branch() == [2, 8, 9, 31]
    """
    _run(module_hub, code, "org/folder-of-another", tmp_path)


def test_older_steps_of_another_branch_are_neither_taken_nor_removed(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    saved(3, 5, repo=repo + "-other")
    saved(8, folder="second")
    foreign("disk", "steps 3, 5", "step 8", f"they are of {repo}-other@resume")
    assert on_disk() == [3, 5]
    """
    _run(module_hub, code, "org/older-of-another", tmp_path)


def test_steps_that_never_reached_a_branch_which_has_gone_on_neither_count_nor_stay(
    module_hub: Hub, tmp_path: Path
) -> None:
    code = """
    saved(3, 5, repo=repo + "-other")
    (tmp / "disk" / NAME).unlink()  # as if it had been killed before its first push
    saved(8, folder="second")
    assert restored() == 8
    assert on_disk() == [3, 5]
    saved(9)
    assert on_disk() == [9]
    """
    out = _run(module_hub, code, "org/never-reached", tmp_path)
    for step in (3, 5):
        assert f"step {step} is passed over: nothing says that {tmp_path / 'disk'} belongs to org/never-reached" in out


def test_what_a_stray_run_left_on_its_disk_is_not_put_above_the_branch(hub: Hub, tmp_path: Path) -> None:
    _run(hub, "saved(2, 8)", "org/stray", tmp_path)
    hub.stop()
    code = """
    for folder, restores in (("stray", False), ("alone", False)):
        with run(folder) as branch:
            branch._hub.max_retries = 0
            branch.save(state(12), 12)
            fails(branch.wait, StoreError)
    """
    _run(hub, code, "org/stray", tmp_path)
    hub.restart()
    code = """
    with run("stray") as branch:
        why = fails(lambda: branch.save(state(13), 13), ConflictError)
        assert "which this run has not restored" in why, why  # the hint tells to restore
    foreign("stray", "step 12", "steps 2, 8")
    saved(14)
    assert on_branch() == [2, 8, 14]
    saved(15, folder="new")

    repo += "-alone"  # a run that began while the Hub was down, and whose branch nobody else has taken meanwhile
    assert restored("alone") == 12
    assert HubStore(repo).head("resume") is not None
    """
    _run(hub, code, "org/stray", tmp_path)


def test_of_two_runs_that_begin_on_an_empty_branch_the_second_stays_refused(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    with run("first") as first, run("second") as second:
        assert first.restore(state(0)) is second.restore(state(0)) is None
        first.save(state(4), 4)
        first.wait()
        second.save(state(9), 9)
        try:
            second.wait()
        except ConflictError as error:  # which tells to start it again
            told = "".join(traceback.format_exception(error))
            assert "the branch 'resume' exists already" in told and "httpx" not in told, told
            assert told.count("Traceback") == 2, told  # where it was raised, and in the background
    foreign("second", "step 9", "step 4")
    assert restored("first") == 4
    """
    _run(module_hub, code, "org/two-begin", tmp_path)


def test_the_disks_of_the_run_itself_go_on(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    saved(1, 2)
    shutil.copytree(tmp / "disk", tmp / "copy")
    for step in (1, 2):
        shutil.copytree(tmp / "disk" / step_folder(step), tmp / "bare" / step_folder(step))  # without the record
    StepBranch(repo).pull(2, tmp / "pulled")
    assert restored("pulled") == restored("bare") == restored("copy") == 2
    saved(3, 4, folder="pulled", repo=None)
    assert restored("pulled") == 4 and on_branch() == [1, 2, 4]
    saved(5, folder="copy", repo=None)
    StepBranch(repo).squash()
    StepBranch(repo).prune(keep=1)
    assert on_branch() == [4]
    assert restored("bare") == 4  # whose 1 and 2 are older than what is left
    assert restored("copy") == 5 and on_branch() == [4, 5]
    """
    _run(module_hub, code, "org/itself", tmp_path)


PREPARED = """
    saved(*range(5, 9), 10, 11, 12, 13, 15)
    shutil.copytree(tmp / "disk", tmp / "old")
    StepBranch(repo).rollback(8)
    saved(9, folder="new")
"""


def test_steps_before_a_rollback_are_gone_before_they_could_count_again(module_hub: Hub, tmp_path: Path) -> None:
    code = f"""
    {PREPARED}
    with run("old") as branch:
        assert branch.restore(state(0)) == 9
        branch.save(state(14), 14)
        branch.wait()
    assert on_disk("old") == [5, 6, 7, 8, 14]
    (data,) = (tmp / "old" / step_folder(14)).glob("rank-*")
    flip(data)
    StepBranch(repo).rollback(9)
    assert restored("old") == 9
    with run("disk", every=None) as branch:  # one that saves without having restored
        why = fails(lambda: branch.save(state(16), 16), ConflictError)
    """
    _run(module_hub, code, "org/void", tmp_path)


def test_a_run_that_restores_nothing_removes_them_too(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    saved(4, 6, 8)
    StepBranch(repo).rollback(4)
    with run() as branch:  # whose disk holds the newest step of the branch
        branch.save(state(9), 9)
    assert on_disk() == on_branch() == [4, 9]
    """
    _run(module_hub, code, "org/void-unread", tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
@pytest.mark.parametrize("after", ["LocalSteps.drop", "SeenRollbacks.add", "saving.write_manifest"])
def test_killed_while_it_follows_a_rollback_a_disk_shows_nothing_from_before_it(
    module_hub: Hub, tmp_path: Path, after: str
) -> None:
    repo = f"org/void-killed-{after.rpartition('.')[2]}"
    code = f"""
    {PREPARED}
    from hubshard.resume.saves import saving
    from hubshard.resume.saves.local_steps import LocalSteps
    owner, name = {after.partition(".")[0]}, "{after.partition(".")[2]}"
    act = getattr(owner, name)
    def die(*arguments, **options):
        act(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)
    with run("old") as branch:
        assert branch.restore(state(0)) == 9
        setattr(owner, name, die)
        branch.save(state(14), 14)
        branch.wait()
    """
    done = module_hub.try_client(SETUP + MORE + textwrap.dedent(code), repo, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    code = f"""
    expected = 14 if "{after}" == "saving.write_manifest" else 9
    assert restored("old") == expected, on_disk("old")
    saved(16, folder="old")
    assert set(on_disk("old")) <= {{5, 6, 7, 8, 9, 14, 16}}
    """
    _run(module_hub, code, repo, tmp_path)


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe{", b"[" * 100_000, None], ids=["empty", "garbage", "deep", "folder"])
def test_a_damaged_record_undoes_no_rollback(module_hub: Hub, tmp_path: Path, raw: bytes | None) -> None:
    code = f"""
    def damage(folder):
        record = tmp / folder / NAME
        record.unlink()
        record.mkdir() if {raw is None} else record.write_bytes({(raw or b"")[:9]!r} * {max(1, len(raw or b"") // 9)})

    saved(2, 4, 6)
    damage("disk")
    assert restored() == 6  # the branch tells of no rollback
    saved(8)
    assert json.loads((tmp / "disk" / NAME).read_bytes()) == {{repo + "@resume": []}}
    shutil.copytree(tmp / "disk", tmp / "other")
    StepBranch(repo).rollback(4)
    damage("disk")
    head = store.head("resume")
    with run() as branch:
        why = fails(lambda: branch.restore(state(0)))
        for word in (str(tmp / "disk" / NAME), "steps 6, 8", "rollback of org/", "to step 4"):
            assert word in why, (word, why)
    assert store.head("resume") == head and on_branch() == [2, 4]
    for step in (6, 8):
        shutil.rmtree(tmp / "disk" / step_folder(step))  # as the error tells
    assert restored() == 4
    saved(5)
    assert list(json.loads((tmp / "disk" / NAME).read_bytes())) == [repo + "@resume"]
    damage("other")
    with run("other") as branch:
        assert branch.restore(state(0), step=8) == 8  # or so
    assert on_branch() == [2, 4, 5, 8]
    """
    _run(module_hub, code, f"org/damaged-{len(raw) if raw is not None else 'folder'}", tmp_path)


@pytest.mark.parametrize(
    "raw", [b"[" * 100_000, b'{"format": "hubshard-rollbacks", "rollbacks": [["a", -1]], "version": 1}']
)
def test_rollbacks_that_are_none_are_an_error_that_names_them(module_hub: Hub, tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "raw").write_bytes(raw)
    code = """
    from huggingface_hub import HfApi
    saved(2)
    where = {"path_in_repo": "rollbacks.json", "repo_id": repo, "revision": "resume"}
    HfApi().upload_file(path_or_fileobj=str(tmp / "raw"), **where)
    for call in (lambda: restored(), lambda: StepBranch(repo).rollback(2)):
        why = fails(call)
        assert f"{repo}@resume/rollbacks.json: this does not tell the rollbacks" in why, why
    """
    _run(module_hub, code, f"org/no-rollbacks-{len(raw)}", tmp_path)
