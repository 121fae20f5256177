"""ResumeBranch on a Hub, as clients in processes of their own."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("torch")

SETUP = """
import json, logging, os, re, shutil, signal, sys, threading, urllib.request
from pathlib import Path
import torch
from hubshard import ResumeBranch
from hubshard.errors import ConflictError, HubshardError, IntegrityError, StoreError
from hubshard.steps.branch import StepBranch
from hubshard.steps.places import BranchPlace
from hubshard.steps.step import step_folder
from hubshard.store.hub import HubStore

logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stdout)
repo, tmp = sys.argv[1], Path(sys.argv[2])
store = HubStore(repo)
events = []

def state(seed, rows=600):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, 500, generator=generator)
    return {"model": {"w": w, "small": torch.full((7,), seed).bfloat16()}, "n": seed}

def same(one, seed):
    other = state(seed)
    return one["n"] == seed and all(torch.equal(one["model"][key], other["model"][key]) for key in other["model"])

def run(folder="disk", **options):
    options = {"keep": 9, "signals": (), "on_event": events.append, **options}
    return ResumeBranch(options.pop("repo", repo), local_dir=tmp / folder, **options)

def saved(*steps, folder="disk", **options):
    with run(folder, **options) as branch:
        branch.restore(state(0))
        for step in steps:
            branch.save(state(step), step)
            branch.wait()

def restored(folder="disk", seed=0, **options):
    found = state(seed)
    with run(folder, **options) as branch:
        step = branch.restore(found)
    assert step is None or same(found, step), step
    return step

def on_branch(name="resume"):
    head = store.head(name)
    return [] if head is None else sorted(BranchPlace(store, head, "").steps())

def history(name="resume"):
    api = f"{os.environ['HF_ENDPOINT']}/api/models/{repo}/commits/{name}"
    with urllib.request.urlopen(api) as answer:
        return [item["title"] for item in json.load(answer)]

def sent():
    with urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/-/counters") as answer:
        counted = json.load(answer)["total"]
    return counted["resolve_sent"] + counted["xet_sent"]

def flip(path):
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 1
    path.write_bytes(raw)

def fails(call, kind=HubshardError):
    try:
        call()
    except kind as error:
        return str(error)
    raise SystemExit("it did not fail")

def told(*kinds):
    return [(event.kind, event.path) for event in events if event.kind in kinds]
"""


def _run(hub: Hub, code: str, repo: str, tmp_path: Path, *, xet: bool = True) -> str:
    return hub.client(SETUP + textwrap.dedent(code), repo, tmp_path, xet=xet)


@pytest.mark.parametrize("xet", [True, False])
def test_a_wiped_machine_goes_on_from_the_branch(module_hub: Hub, tmp_path: Path, *, xet: bool) -> None:
    code = """
    saved(1, 2)
    assert on_branch() == [1, 2]
    shutil.rmtree(tmp / "disk")
    before = sent()
    assert restored() == 2
    assert sent() - before < 1.2 * 600 * 500 * 4
    assert told("commit")[-1] == ("commit", "resume")
    assert {kind for kind, _ in told("sent", "staged")} == {"sent", "staged"}
    """
    _run(module_hub, code, f"org/wiped-{xet}", tmp_path, xet=xet)


def test_each_step_is_one_commit_which_removes_those_past_the_retention(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    saved(1, 2, 3, 4, 5, keep=2, pinned=[1])
    assert on_branch() == [1, 4, 5]
    assert [title for title in history() if title.startswith("Step")] == [f"Step {n}" for n in (5, 4, 3, 2, 1)]
    assert len(history()) == 6  # the first is that of main
    head = store.head("resume")
    assert {entry.path.partition("/")[0] for entry in store.list(head)} == {
        ".gitattributes", *map(step_folder, (1, 4, 5))
    }
    """
    _run(module_hub, code, "org/retention", tmp_path)


def test_the_commit_of_a_step_tells_what_its_save_cost_and_its_bytes_do_not(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    from huggingface_hub import HfApi
    from hubshard.steps.save_cost import cost_in

    def costs(name):
        commits = HfApi().list_repo_commits(repo, revision=name)
        return {commit.title: cost_in(commit.message) for commit in commits if commit.title.startswith("Step ")}

    for number, name in enumerate(("first", "second")):
        with run(name, branch=name) as branch:
            for step in (1, 2):
                branch.save(state(step), step)
                branch.wait()
        found = costs(name)
        assert list(found) == ["Step 2", "Step 1"]
        for step in (1, 2):
            files = (tmp / name / step_folder(step)).glob("rank-*")
            assert found[f"Step {step}"].nbytes == sum(path.stat().st_size for path in files)
    for step in (1, 2):
        one, two = ({path.name: path.read_bytes() for path in (tmp / name / step_folder(step)).iterdir()}
                    for name in ("first", "second"))
        assert one == two
    saved(3, folder="first", repo=None)  # nobody knows any more what it cost when it is pushed
    assert restored("first", branch="first") == 3
    assert costs("first")["Step 3"] is None
    """
    _run(module_hub, code, "org/costs", tmp_path)


def test_a_repo_that_is_not_there_is_made_private_and_a_public_one_is_warned_of_once(
    module_hub: Hub, tmp_path: Path
) -> None:
    code = """
    saved(1)
    assert store.is_private()
    HubStore(repo + "-open").create_repo(private=False)
    with run("open", repo=repo + "-open") as branch:
        for step in (1, 2):
            branch.save(state(step), step)
            branch.wait()
    assert len(told("warning")) == 1
    with run("beside", repo=repo + "-open", resume_repo_id=repo + "-beside") as branch:
        branch.save(state(1), 1)
    assert HubStore(repo + "-beside").is_private()
    assert HubStore(repo + "-beside").head("resume") is not None
    assert len(told("warning")) == 1
    """
    out = _run(module_hub, code, "org/private", tmp_path)
    assert out.count("is public: everybody may read") == 1


def test_two_runs_on_one_branch_are_a_conflict_and_the_newer_step_stays(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    saved(1)
    with run("first") as first, run("second") as second:
        assert first.restore(state(0)) == second.restore(state(0)) == 1
        first.save(state(4), 4)
        first.wait()
        second.save(state(3), 3)
        why = fails(second.wait, ConflictError)
        assert "step 3 is on the disk, but did not reach the Hub" in why and "Step 4" in why, why
        assert f"by run {first._folder.run[:12]} (" in why and f"; this is run {second._folder.run[:12]}" in why, why
        second.save(state(5), 5)
        why = fails(second.wait, ConflictError)
        assert second.steps() == [1, 3, 4, 5]
        assert on_branch() == [1, 4]
        first.save(state(6), 6)
        first.wait()
    assert on_branch() == [1, 4, 6]
    why = fails(lambda: saved_blindly(5), ConflictError)
    assert "holds step 6 already, which this run has not restored" in why, why
    assert restored("third") == 6
    """
    blind = """
def saved_blindly(step):
    with run("blind") as branch:
        branch.save(state(step), step)
"""
    module_hub.client(SETUP + blind + textwrap.dedent(code), "org/conflict", tmp_path)


def test_a_run_that_has_restored_nothing_is_refused_a_branch_that_has_steps(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    with run("first", keep=3) as first:
        for step in (10, 20, 30):
            first.save(state(step), step)
            first.wait()
        head = store.head("resume")
        with run("second", keep=1) as second:
            for step in (30, 40, 5):
                why = fails(lambda: second.save(state(7), step), ConflictError)
                assert f"{repo}@resume holds step 30 already, which this run has not restored" in why, why
                assert f"step 30 was saved on 20" in why and f" UTC by run {first._folder.run[:12]}" in why, why
                assert head.commit[:12] in why, why
            fails(lambda: second.restore(state(0, rows=5)))  # which does not fit, so it goes on from nothing
            fails(lambda: second.save(state(40), 40), ConflictError)
            assert second.steps() == [10, 20, 30] and not list((tmp / "second").glob("step-*"))
        assert store.head("resume") == head
        first.save(state(40), 40)
        first.wait()
    assert on_branch() == [20, 30, 40]
    saved(50, folder="wiped")  # which restores
    assert on_branch() == [20, 30, 40, 50]
    with run("first") as again:  # which has what the branch has, but for the newest
        fails(lambda: again.save(state(60), 60), ConflictError)
    with run("wiped") as again:  # its own
        again.save(state(60), 60)
    with run("back") as other:
        other.rollback(50)
        other.save(state(51), 51)
    assert on_branch() == [20, 30, 40, 50, 51]
    """
    _run(module_hub, code, "org/foreign", tmp_path)


def test_a_run_that_begins_while_the_hub_is_down_is_refused_by_its_first_push(hub: Hub, tmp_path: Path) -> None:
    code = """
    def ask(word):
        print(word, flush=True)
        input()

    saved(1)
    ask("stop")
    with run("second") as second:
        second.save(state(7), 2)  # safe on the disk, whatever the Hub does
        second._saver.wait_for_disk()
        assert (tmp / "second" / step_folder(2) / "manifest.json").exists()
        ask("start")
        why = fails(second.wait, ConflictError)
        assert "step 2 is on the disk, but did not reach the Hub" in why and "has not restored" in why, why
        assert on_branch() == [1]
    print("done", flush=True)
    """
    assert _talk(hub, code, "org/late-look", tmp_path, {"stop": hub.stop, "start": hub.restart})[-1] == "done"


def test_a_run_whose_steps_are_all_broken_may_begin_anew(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    saved(5, 6)
    head = store.head("resume")
    data = [entry.path for entry in store.list(head) if "/rank-" in entry.path]
    store.commit("resume", parent=head, add=[], remove=data, message="Break them", publish_id="break")
    with run("empty") as branch:
        fails(lambda: branch.restore(state(0)))
        branch.save(state(1), 1)
        branch.wait()
    assert on_branch() == [1]
    assert restored("other") == 1
    """
    _run(module_hub, code, "org/all-broken", tmp_path)


def test_steps_that_somebody_prunes_meanwhile_are_no_conflict(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    with run() as branch:
        for step in (1, 2, 3):
            branch.save(state(step), step)
            branch.wait()
        head = store.head("resume")
        gone = [entry.path for entry in store.list(head) if entry.path.startswith(step_folder(2))]
        store.commit("resume", parent=head, add=[], remove=gone, message="Prune", publish_id="prune")
        branch.save(state(4), 4)
        branch.wait()
        assert on_branch() == [1, 3, 4]
        StepBranch(repo).rollback(3)  # which is not undone by a run that does not know of it
        branch.save(state(5), 5)
        why = fails(branch.wait, ConflictError)
        assert "Roll back to step 3" in why, why
    assert on_branch() == [1, 3]
    assert restored() == 3
    """
    _run(module_hub, code, "org/pruned", tmp_path)


def test_a_push_that_fails_leaves_the_local_step_and_the_next_save_pushes_on(hub: Hub, tmp_path: Path) -> None:
    code = """
    def ask(word):
        print(word, flush=True)
        input()

    with run(keep_every=2) as branch:
        branch._hub.max_retries = 0
        branch.save(state(1), 1)
        branch.wait()
        ask("stop")
        for step in (2, 3):
            branch.save(state(step), step)
            why = fails(branch.wait, StoreError)
            assert f"step {step} is on the disk, but did not reach the Hub" in why, why
        branch.save(state(4), 4)
        branch._saver.wait_for_disk() and branch._saver.wait_for_hub()
        assert "step 4" in fails(lambda: branch.should_save(5))
        ask("start")
        branch.rollback(3)  # and 4, which was still to be sent, is sent no more
        branch.save(state(5), 5)
        branch.wait()
    assert on_branch() == [1, 2, 5], on_branch()
    assert restored("other") == 5
    print("done", flush=True)
    """
    out = _talk(hub, code, "org/failing", tmp_path, {"stop": hub.stop, "start": hub.restart})
    assert out[-1] == "done"
    assert "step 3: " in "\n".join(out)


def _talk(hub: Hub, code: str, repo: str, tmp_path: Path, acts: Mapping[str, Callable[[], None]]) -> list[str]:
    """Run a client, and do what it asks for when it does."""
    command = [sys.executable, "-c", SETUP + textwrap.dedent(code), repo, str(tmp_path)]
    with subprocess.Popen(
        command,
        env=hub.client_env(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        lines = []
        for line in client.stdout:
            lines.append(line.strip())
            if lines[-1] in acts:
                acts[lines[-1]]()
                print(file=client.stdin, flush=True)
    assert client.returncode == 0, "\n".join(lines)
    return lines


def test_a_local_step_that_never_reached_the_hub_is_pushed_when_it_is_restored(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    saved(1)
    saved(2, 3, repo=None)
    assert on_branch() == [1]
    assert restored() == 3
    assert on_branch() == [1, 3]
    assert restored("other") == 3
    """
    _run(module_hub, code, "org/late", tmp_path)


def test_of_two_saves_of_one_number_that_of_the_branch_is_taken(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    saved(1, 2)
    with run("other", repo=None) as branch:
        branch.save(state(7), 2)
    found = state(0)
    with run("other") as branch:
        assert branch.restore(found) == 2
    assert same(found, 2)
    assert restored("other") == 2
    """
    _run(module_hub, code, "org/twice", tmp_path)


def test_what_is_broken_on_the_disk_is_read_from_the_branch(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    saved(1, 2)
    (data,) = (tmp / "disk" / step_folder(2)).glob("rank-*")
    flip(data)
    assert restored() == 2
    data.unlink()
    assert restored() == 2
    (tmp / "disk" / step_folder(2) / "manifest.json").unlink()
    assert restored() == 2
    saved(3)
    assert restored() == 3
    """
    out = _run(module_hub, code, "org/mended", tmp_path)
    assert "passed over" not in out


def test_a_step_that_is_broken_on_the_branch_is_passed_over_and_goes_with_the_next_save(
    module_hub: Hub, tmp_path: Path
) -> None:
    code = """
    saved(1, 2)
    shutil.rmtree(tmp / "disk")
    head = store.head("resume")
    (data,) = [entry.path for entry in store.list(head) if "step-00000002/rank-" in entry.path]
    store.commit("resume", parent=head, add=[], remove=[data], message="Break it", publish_id="break")
    with run() as branch:
        assert branch.restore(state(0)) == 1
        branch.save(state(1), 1)
        branch.wait()
        assert on_branch() == [1]
        branch.save(state(2), 2)
    assert restored("other") == 2
    """
    out = _run(module_hub, code, "org/broken", tmp_path)
    assert "step 2 is passed over: " in out


def test_a_step_that_is_broken_on_the_branch_counts_for_nothing_however_old_it_is(
    module_hub: Hub, tmp_path: Path
) -> None:
    code = """
    saved(4, 8)
    shutil.rmtree(tmp / "disk")
    head, path = store.head("resume"), "step-00000008/manifest.json"
    store.commit("resume", parent=head, add=[], remove=[path], message="Break it", publish_id="break")
    with run(keep=2) as branch:
        assert branch.restore(state(0)) == 4
        branch.save(state(9), 9)
    assert on_branch() == [4, 9]
    """
    _run(module_hub, code, "org/broken-old", tmp_path)


def test_what_a_rollback_has_voided_counts_for_nothing_and_is_gone_with_the_next_save(
    module_hub: Hub, tmp_path: Path
) -> None:
    code = """
    saved(4, 8)
    StepBranch(repo).rollback(4)
    with run(keep=2) as branch:
        assert branch.restore(state(0)) == 4
        branch.save(state(9), 9)
        branch.wait()
        assert branch.steps() == on_branch() == [4, 9]
    """
    _run(module_hub, code, "org/voided-old", tmp_path)


def test_what_cannot_be_removed_from_the_disk_keeps_no_step_from_the_hub(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    from hubshard.resume.saves.local_steps import LocalSteps
    def refuse(local, step):
        raise PermissionError(1, "Operation not permitted")
    LocalSteps.remove = refuse
    with run(keep=1) as branch:
        branch.restore(state(0))
        for step in range(1, 4):
            branch.save(state(step), step)
            branch.wait()
    assert on_branch() == [3]
    """
    out = _run(module_hub, code, "org/stuck", tmp_path)
    assert "step 1 is of no use any more, and cannot be removed: [Errno 1] Operation not permitted" in out
    assert "was not saved" not in out


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_too_many_open_files_are_told_as_that_where_a_connection_fails_for_them(
    module_hub: Hub, tmp_path: Path
) -> None:
    code = """
    import resource
    hub = run()._hub
    hub.get_ready()
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    try:
        hub.look()
    except StoreError as error:
        found = error
    for one in held:
        os.close(one)
    print(f"{found} | {found.hint}")
    """
    out = _run(module_hub, code, "org/few-files", tmp_path)
    assert out.rstrip().endswith("| too many files were open; raise the limit: `ulimit -n 1024`")


def test_a_rollback_removes_the_newer_steps_in_one_commit_and_from_the_disk(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    saved(1, 2, 3, 4)
    saved(5, repo=None)  # which never reached the Hub
    shutil.copytree(tmp / "disk", tmp / "copy")
    with run("empty") as branch:
        assert branch.rollback(2) == [3, 4]
    assert on_branch() == [1, 2]
    assert history()[0] == "Roll back to step 2"
    assert restored("copy") == 2  # though that disk has the newer ones, which it does not bring back
    assert on_branch() == [1, 2]
    with run() as branch:
        assert branch.rollback(2) == [3, 4, 5]
        assert branch.steps() == [1, 2]
        found = state(0)
        assert branch.restore(found) == 2
        branch.save(state(3), 3)
    assert restored("other") == 3
    saved(4, repo=None)
    assert restored() == 4
    StepBranch(repo).squash()  # which drops the commit that rolled back
    shutil.copytree(tmp / "copy", tmp / "later")
    assert restored("later") == 4
    saved(5, folder="later")
    assert restored("later") == 5 and on_branch() == [1, 2, 3, 4, 5]
    StepBranch(repo).rollback(3)
    saved(4, folder="later")  # of that number, but after the rollback, and so it counts
    saved(5, folder="later", repo=None)
    assert restored("later") == 5
    saved(6, folder="later", repo=None)
    assert StepBranch(repo).rollback(5) == ()  # the branch holds none that is newer, but the disk does
    assert restored("later") == 5 and on_branch() == [1, 2, 3, 4, 5]
    """
    out = _run(module_hub, code, "org/rollback", tmp_path)
    for step in (3, 4, 5):
        assert f"step {step} is passed over: the branch was rolled back to step 2" in out


def test_a_step_that_is_whole_on_the_disk_counts_though_the_branch_has_lost_it(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    saved(1, 2, 3)
    head = store.head("resume")
    (data,) = [entry.path for entry in store.list(head) if "step-00000003/rank-" in entry.path]
    store.commit("resume", parent=head, add=[], remove=[data], message="Break it", publish_id="break")
    assert StepBranch(repo).prune(keep=9, remove_broken=True).removed == (3,)
    assert restored() == 3
    assert on_branch() == [1, 2, 3]

    backup = store.head("resume")  # a Hub that is restored from an older backup, or a mirror that lags
    saved(4, 5)
    store.delete_branch("resume")
    store.create_branch("resume", backup)
    assert restored() == 5
    saved(6, keep=4)
    assert on_branch() == [2, 3, 5, 6]
    assert {path.name for path in (tmp / "disk").glob("step-*")} == {*map(step_folder, (3, 4, 5, 6))}
    """
    out = _run(module_hub, code, "org/lost", tmp_path)
    assert "rolled back" not in out


def test_of_the_steps_that_wait_for_a_slow_hub_the_newest_is_sent_and_those_that_stay(
    module_hub: Hub, tmp_path: Path
) -> None:
    code = """
    reached, gate = threading.Event(), threading.Event()
    def slow(event):
        events.append(event)
        if event.kind == "staged" and not gate.is_set():
            reached.set()
            gate.wait(60)
    with run(keep=2, keep_every=4, on_event=slow) as branch:
        branch.save(state(1), 1)
        assert reached.wait(60)
        for step in range(2, 8):
            branch.save(state(step), step)
        branch._saver.wait_for_disk()
        assert branch.steps() == [1, 4, 6, 7]
        gate.set()
        branch.wait()
        assert on_branch() == [4, 7], on_branch()
        assert {path.name for path in (tmp / "disk").glob("step-*")} == {*map(step_folder, (4, 6, 7))}
    skipped = [path for _, path in told("skipped") if "/" not in path]  # steps, not files that the Hub has already
    assert skipped == [step_folder(step) for step in (2, 3, 5, 6)], skipped

    # a step that is saved again, twice, while its first save is on its way
    events.clear()
    reached.clear()
    gate.clear()
    with run(keep=2, keep_every=4, on_event=slow) as branch:
        for seed in (8, 9, 10):
            branch.save(state(seed), 8)
            branch._saver.wait_for_disk()
            assert reached.wait(60)
        gate.set()
        branch.wait()
    assert [path for _, path in told("skipped") if "/" not in path] == [step_folder(8)]
    found = state(0)
    with run("elsewhere") as branch:
        assert branch.restore(found) == 8
    assert same(found, 10)
    """
    _run(module_hub, code, "org/slow", tmp_path)


def test_a_push_is_given_up_when_the_time_runs_out_and_the_step_is_on_the_disk(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    saved(1)
    def until_it_is_over(event):
        if event.kind == "staged":
            branch._saver._is_over.wait(60)
    with run(signals=[signal.SIGTERM], grace_seconds=2.1, on_event=until_it_is_over) as branch:
        signal.raise_signal(signal.SIGTERM)
        assert branch.should_save(2)
        branch.save(state(2), 2)
        assert branch.should_stop(2)
    assert branch.exit_code == 143
    assert on_branch() == [1]
    assert restored() == 2
    assert on_branch() == [1, 2]

    nobody = dict(endpoint="http://127.0.0.1:9")  # is tried again and again
    with run("third", signals=[signal.SIGTERM], grace_seconds=2.1, **nobody) as branch:
        signal.raise_signal(signal.SIGTERM)
        assert branch.should_save(3)
        branch.save(state(3), 3)
    with run("fourth", signals=[signal.SIGTERM], grace_seconds=100, **nobody) as branch:
        branch._hub.max_retries = 0
        signal.raise_signal(signal.SIGTERM)
        assert branch.should_save(4)
        branch.save(state(4), 4)
        branch.wait()  # and raises nothing: it would change what the process ends with
    assert branch.exit_code == 143
    with run("fourth", **nobody) as branch:
        branch._hub.max_retries = 0
        why = fails(lambda: branch.restore(state(0)), StoreError)
        assert "the newest step on the disk is 4" in why, why
    """
    out = _run(module_hub, code, "org/grace", tmp_path)
    assert "step 4: " in out
    for step in (2, 3):
        given_up = f"step {step} is on the disk, but (not on the Hub: there was no time|may not be on the Hub)"
        assert re.search(given_up, out), out
