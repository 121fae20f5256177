"""`hubshard resume` against an embedded Hub: what it prints, what it returns, what it changes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

from hubshard.steps.intervals import best_interval_seconds
from hubshard.steps.parts import Part, merge, plan_files
from hubshard.steps.places import LocalPlace
from hubshard.steps.save_cost import SaveCost
from hubshard.steps.step import step_folder
from hubshard.steps.step_json import encode_step
from hubshard.steps.writing import PieceStream, commit_step, stage_stream
from hubshard.store.hub import HubStore
from hubshard.tensors import Box, TensorSpec
from tests import warm
from tests.systems import make_pipe

if TYPE_CHECKING:
    from tests.conftest import Hub

TOKEN = "hf_test"
SIZE = 40_000
WEIGHT = TensorSpec("model.layer.weight", "F32", (2, SIZE // 8))
MOMENT = TensorSpec("optimizer.exp_avg", "F32", (2, SIZE // 8))


@pytest.fixture
def hub(module_hub: Hub) -> Hub:
    return module_hub


@pytest.fixture
def repo(request: pytest.FixtureRequest) -> str:
    """A repo of the test's own, on a Hub that all tests of this file share."""
    return "org/" + re.sub(r"[^a-z0-9]+", "-", request.node.name)[:80].strip("-")


@pytest.fixture
def store(hub: Hub, repo: str) -> HubStore:
    made = HubStore(repo, token=TOKEN, endpoint=hub.url, xet=False)
    made.create_repo()
    return made


def save(store: HubStore, number: int, *, branch: str = "resume", cost: SaveCost | None = None) -> None:
    """Save a step of two ranks."""
    receipts, staged = [], []
    for rank in range(2):
        parts = [Part(spec, Box((rank, 0), (1, spec.shape[1]))) for spec in (WEIGHT, MOMENT)]
        stream = PieceStream(
            plan_files(parts, max_file_bytes=10**9)[0],
            stem=f"rank-{rank:05d}-00001",
            read=lambda part, box: f"{number:05d}{part.spec.name[:1]}{box.offset[0]:02d}".encode() * (box.numel // 2),
            block_bytes=16 * 2**10,
        )
        staged.append(stage_stream(store, branch, stream, step=number))
        receipts.append(stream.receipt)
    step = merge(receipts, step=number, world_size=2, scalars={"epoch": 3}, paths={}, metadata={})
    commit_step(store, branch, parent=store.head(branch), step=step, raw=encode_step(step), staged=staged, cost=cost)


def run(hub: Hub, *arguments: str | Path | int) -> subprocess.CompletedProcess[str]:
    argv = ["-m", "hubshard", "resume", *map(str, arguments)]
    return warm.run(argv, imports="client", env=hub.client_env() | {"TZ": "UTC"})


def printed(hub: Hub, *arguments: str | Path | int) -> str:
    done = run(hub, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def as_json(hub: Hub, *arguments: str | Path | int) -> Any:
    return json.loads(printed(hub, *arguments, "--json"))


def remove(store: HubStore, *paths: str) -> None:
    head = store.head("resume")
    store.commit("resume", parent=head, add=[], remove=paths, message="remove", publish_id="p")


def file_of(store: HubStore, step: int) -> str:
    head = store.head("resume")
    assert head is not None
    return next(e.path for e in store.list(head) if e.path.startswith(f"{step_folder(step)}/rank-"))


def test_list_shows_each_step_and_which_cannot_be_restored(hub: Hub, repo: str, store: HubStore) -> None:
    for number in (100, 200, 300):
        save(store, number)
    remove(store, file_of(store, 200))
    lines = printed(hub, "list", repo).splitlines()
    rows = [line.split() for line in lines if re.match(r"\s*[123]00\b", line)]
    assert [row[0] for row in rows] == ["100", "200", "300"]
    assert rows[0][-1] == rows[2][-1] == "whole"
    assert rows[0][3:5] == ["2", "2"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", rows[0][5])
    assert "missing: rank-00000-00001" in lines[[line.split()[:1] for line in lines].index(["200"])]
    assert lines[-1].startswith("3 steps")
    assert lines[-1].endswith("1 cannot be restored")
    found = as_json(hub, "list", f"{repo}@resume")
    assert [(one["step"], one["world_size"], one["files"]) for one in found] == [
        (100, 2, 2),
        (200, None, 1),
        (300, 2, 2),
    ]


def test_show_says_what_a_step_holds(hub: Hub, repo: str, store: HubStore) -> None:
    save(store, 7)
    text = printed(hub, "show", repo)
    assert f"step 7 of {repo}@resume/step-00000007, saved by 2 ranks" in text
    assert re.search(r"1\s+10,000\s+40.00 kB\s+model", text)
    assert re.search(r"epoch\s+3", text)
    assert "2 tensors" in text
    assert re.search(r"model.layer.weight\s+F32\s+2x5000\s+2\s+40.00 kB", printed(hub, "show", repo, "--tensors"))
    found = as_json(hub, "show", repo, "--step", 7)
    assert found["tensors"][0] == {"name": "model.layer.weight", "dtype": "F32", "shape": [2, 5000], "pieces": 2}
    assert found["scalars"] == {"epoch": 3}
    assert len(found["files"]) == 2


def test_verify_lists_what_is_wrong_and_fails(hub: Hub, repo: str, store: HubStore) -> None:
    for number in (1, 2):
        save(store, number)
    assert re.match(r"step 2: 2 files, .* read, 0 problems", printed(hub, "verify", repo))
    remove(store, file_of(store, 1))
    done = run(hub, "verify", repo, "--all")
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].startswith("step-00000001: ")
    assert "missing: rank-00000-00001" in done.stdout
    assert "step 2: 2 files" in done.stdout
    assert done.stderr == ""
    done = run(hub, "verify", repo, "--step", 1, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False
    assert run(hub, "verify", repo, "--step", 1, "--all").returncode == 1


def test_pull_brings_a_step_to_where_it_can_be_restored(hub: Hub, repo: str, store: HubStore, tmp_path: Path) -> None:
    save(store, 5)
    save(store, 6)
    done = run(hub, "pull", repo, "--local-dir", tmp_path / "steps", "--events", tmp_path / "events.jsonl")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "steps" / step_folder(6))
    assert "received" in done.stderr
    assert LocalPlace(tmp_path / "steps").open(6).step.nbytes > 2 * SIZE
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (kinds[0], kinds[-1]) == ("start", "end")
    again = as_json(hub, "pull", repo, "--step", 6, "--local-dir", tmp_path / "steps")
    assert again["received_bytes"] == 0
    assert again["skipped_bytes"] > 2 * SIZE


def test_prune_says_what_it_would_do_then_does_it_and_frees_with_squash(hub: Hub, repo: str, store: HubStore) -> None:
    for number in range(10, 70, 10):
        save(store, number)
    text = printed(hub, "prune", repo, "--keep", 2, "--keep-every", 30, "--pin", 10, "--dry-run")
    assert re.search(r"20\s+would be removed", text)
    assert "2 steps" in text
    assert "4 kept" in text
    assert len(as_json(hub, "list", repo)) == 6
    text = printed(hub, "prune", repo, "--keep", 2, "--keep-every", 30, "--pin", 10)
    assert "--squash gives their storage back" in text
    assert [one["step"] for one in as_json(hub, "list", repo)] == [10, 30, 50, 60]
    planned = as_json(hub, "squash", repo, "--dry-run")
    assert (planned["files"], planned["dry_run"]) == (4, True)
    done = as_json(hub, "prune", repo, "--keep", 2, "--squash")
    assert (done["removed"], done["kept"], done["freed"]["files"]) == ([10, 30], [50, 60], 8)
    assert as_json(hub, "squash", repo)["files"] == 0
    assert "No date (-): the branch's history was squashed since" in printed(hub, "list", repo)
    assert as_json(hub, "verify", repo, "--all")["ok"] is True


def test_rollback_makes_an_older_step_the_newest(hub: Hub, repo: str, store: HubStore) -> None:
    for number in (1, 2, 3):
        save(store, number)
    assert printed(hub, "rollback", repo, "--to", 1, "--dry-run") == "2 steps would be removed: 2, 3\n"
    assert printed(hub, "rollback", repo, "--to", 1) == "2 steps removed: 2, 3\n"
    none = "No step removed: step 1 is the newest on the branch; the disks of the run {} over what they hold after it\n"
    assert printed(hub, "rollback", repo, "--to", 1, "--dry-run") == none.format("would pass")
    assert printed(hub, "rollback", repo, "--to", 1) == none.format("pass")
    assert as_json(hub, "rollback", repo, "--to", 1)["removed"] == []


def test_another_branch_is_named_once(hub: Hub, repo: str, store: HubStore) -> None:
    save(store, 4, branch="state/run-2")
    assert "1 step" in printed(hub, "list", f"{repo}@state/run-2")
    assert "1 step" in printed(hub, "list", f"hf://{repo}", "--branch", "state/run-2")
    done = run(hub, "list", f"{repo}@state/run-2", "--branch", "resume")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: two branches are named")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list", "{repo}@nowhere"], "has no branch 'nowhere'"),
        (["list", "org/there-is-no-such-repo"], "does not exist"),
        (["show", "{repo}", "--step", "99"], "there is no step-00000099"),
        (["squash", "{repo}@main"], "holds no step: its history is not dropped"),
        (["rollback", "{repo}", "--to", "99"], "there is no step-00000099"),
        (["squash", "{repo}@mixed"], "holds more than steps (notes.txt)"),
        (["prune", "{repo}@mixed", "--squash"], "holds more than steps (notes.txt)"),
        (["list", "not a repo"], "not a repo"),
    ],
)
def test_what_cannot_be_done_is_one_line_with_a_hint(hub: Hub, arguments: list[str], said: str) -> None:
    store = HubStore("org/errors", token=TOKEN, endpoint=hub.url, xet=False)
    store.create_repo()
    if store.head("resume") is None:
        save(store, 1)
        save(store, 1, branch="mixed")
        staged = store.stage("mixed", "notes.txt", lambda: [b"a note\n"], nbytes=7)
        store.commit("mixed", parent=store.head("mixed"), add=[staged], remove=[], message="a note", publish_id="p")
    before = store.branches()
    done = run(hub, *[argument.format(repo="org/errors") for argument in arguments])
    assert done.returncode == 1, done.stdout
    error, hint = done.stderr.splitlines()
    assert error.startswith("Error: ")
    assert said in error
    assert hint.startswith("Hint: ")
    assert store.branches() == before


@pytest.mark.skipif(sys.platform == "win32", reason="it has no SIGINT for one process")
def test_ctrl_c_during_a_pull_is_one_line_and_the_next_goes_on(hub: Hub, repo: str, tmp_path: Path) -> None:
    store = HubStore(repo, token=TOKEN, endpoint=hub.url, xet=False)
    store.create_repo()
    save(store, 8)
    folder = tmp_path / "steps" / step_folder(8)
    folder.mkdir(parents=True)
    held = folder / ".rank-00000-pull.part"
    command = [sys.executable, "-m", "hubshard", "resume", "pull", repo, "--local-dir", str(tmp_path / "steps")]
    fifo = tmp_path / "events"
    make_pipe(fifo)  # nobody reads on: the pull stands still after a few events, wherever it is
    process = subprocess.Popen(
        [*command, "--events", str(fifo)], env=hub.client_env(), stderr=subprocess.PIPE, text=True
    )
    with fifo.open() as events:
        assert '"start"' in events.readline()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode in {0, 130}
    assert "Traceback" not in stderr
    assert process.returncode == 0 or "it goes on from there" in stderr
    assert run(hub, "pull", repo, "--local-dir", tmp_path / "steps").returncode == 0
    assert not held.exists()
    assert LocalPlace(tmp_path / "steps").open(8).ignored == ()


# advise


def test_advise_marks_the_best_interval_in_a_table_with_bars(hub: Hub) -> None:
    text = printed(hub, "advise", "5", "--mtbf", "4h", "--step-seconds", "0.7", "--steps", "100000")
    (best,) = [line for line in text.splitlines() if "<- best" in line]
    assert "537" in best
    assert "█" in best
    assert "░" in best
    assert "Save every 6 min 16 s (537 steps): an overhead of 2.68%" in text
    assert "a save takes 5 s, a failure is expected every 4 h, a step takes 0.7 s" in text
    assert "Assumed: a save is safe at once (--delay), beginning again takes no time (--restart)." in text


def test_advise_as_json_is_what_the_formula_says(hub: Hub) -> None:
    found = as_json(hub, "advise", "800ms", "--mtbf", "30m", "--restart", "2m")
    assert found["best"]["interval_seconds"] == pytest.approx(best_interval_seconds(0.8, 1800))
    assert found["rows"][[row["is_best"] for row in found["rows"]].index(True)] == found["best"]
    assert found["best"]["overhead"] == min(row["overhead"] for row in found["rows"])
    assert found["restart_seconds"] == 120


def test_advise_writes_a_page_that_stands_alone(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "advice.html"
    assert str(path) in printed(hub, "advise", "5", "--mtbf", "4h", "--delay", "1m", "--html", path)
    text = path.read_text(encoding="utf-8")
    assert "http" not in text.replace("http-equiv", "")
    svg = ET.fromstring(re.search(r"<svg.*</svg>", text, re.DOTALL)[0])  # type: ignore[index]  # noqa: S314
    assert len(svg.findall(".//circle")) == text.count("<tr") - 1
    assert len(svg.findall(".//path")) == 3
    assert text.count("class=is-best") == 1


def test_advise_takes_the_time_of_a_step_from_when_steps_were_saved(hub: Hub, repo: str, store: HubStore) -> None:
    save(store, 10)
    done = run(hub, "advise", "5", "--mtbf", "4h", "--repo", repo)
    assert done.returncode == 1
    assert "do not tell how long a step takes: 1 of 1" in done.stderr
    assert "Hint: give --step-seconds" in done.stderr
    time.sleep(1.1)
    save(store, 12)
    found = as_json(hub, "list", repo)
    apart = [float(one["saved_at"][17:].split("+")[0]) for one in found]
    taken = as_json(hub, "advise", "5", "--mtbf", "4h", "--repo", repo)["step_seconds"]
    assert taken == pytest.approx((apart[1] - apart[0]) % 60 / 2, abs=1e-3)
    done = run(hub, "advise", "--mtbf", "4h", "--repo", repo)
    assert (done.returncode, done.stdout) == (1, "")
    assert "none of its commits tells what a save takes" in done.stderr


def test_advise_takes_what_is_not_given_from_the_commits_of_the_steps(
    hub: Hub, repo: str, store: HubStore, tmp_path: Path
) -> None:
    save(store, 10)  # by a version that did not tell
    for number, stall in ((20, 1.5), (30, 2.5), (40, 2.0)):
        save(store, number, cost=SaveCost(stall, 30.0, 90.0, 4 * 10**9))
    remove(store, *(f"{step_folder(20)}/{name}" for name in ("manifest.json",)), file_of(store, 20))
    text = printed(hub, "advise", "--mtbf", "4h", "--repo", repo, "--step-seconds", "0.5")
    assert "Where a save takes 2 s (measured), a failure is expected every 4 h, " in text
    assert "a save is safe after 30 s (measured), a step takes 0.5 s." in text
    assert "Measured: medians of 3 saves, of 4.00 GB. A save was on the disk after 30 s, on the Hub after 2 min" in text
    assert text.splitlines()[-1] == "Assumed: beginning again takes no time (--restart)."
    page = tmp_path / "advice.html"
    found = as_json(hub, "advise", "--mtbf", "4h", "--repo", repo, "--step-seconds", "0.5", "--html", page)
    assert (found["cost_seconds"], found["delay_seconds"], found["measured"]["cost"]["push_seconds"]) == (
        2.0,
        30.0,
        90.0,
    )
    assert found["sources"] == {
        "cost_seconds": "measured",
        "delay_seconds": "measured",
        "restart_seconds": "assumed",
        "step_seconds": "given",
    }
    assert "Measured: medians of 3 saves" in page.read_text(encoding="utf-8")
    found = as_json(hub, "advise", "7", "--mtbf", "4h", "--repo", repo, "--delay", "2m", "--restart", "0")
    assert (found["cost_seconds"], found["delay_seconds"]) == (7.0, 120.0)
    assert {found["sources"][f"{name}_seconds"] for name in ("cost", "delay", "restart")} == {"given"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x", "--mtbf", "4h"], "'x' is not a duration"),
        (["5", "--mtbf", "0"], "between failures is 0.0, and must be positive"),
        (["0", "--mtbf", "4h"], "the cost of a save is 0.0"),
        (["--mtbf", "4h"], "COST is not given"),
        (["5", "--mtbf", "4h", "--html", "/there/is/no/such/place.html"], "cannot be written"),
    ],
)
def test_advise_refuses_nonsense_in_one_line(hub: Hub, arguments: list[str], said: str) -> None:
    done = run(hub, "advise", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr


def test_advise_says_where_saves_cannot_keep_up_with_the_failures(hub: Hub) -> None:
    done = run(hub, "advise", "10m", "--mtbf", "5m")
    assert done.returncode == 0, done.stderr
    assert "Save every 10 min" in done.stdout
    assert "Saving cannot keep up with the failures" in done.stdout


def test_it_works_without_torch(hub: Hub, repo: str, store: HubStore, tmp_path: Path) -> None:
    save(store, 3)
    code = """
        import sys
        sys.modules["torch"] = sys.modules["numpy"] = None
        from hubshard.cli import main
        sys.argv[0] = "hubshard"
        main()
    """
    for arguments in (["list", repo], ["show", repo], ["verify", repo], ["pull", repo, "--local-dir", str(tmp_path)]):
        hub.client(code, "resume", *arguments)
    hub.client(code, "resume", "prune", repo, "--keep", "1", "--squash")
    assert LocalPlace(tmp_path).open(3).step.step == 3
