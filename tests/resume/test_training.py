"""A real training, killed at random moments and restarted, goes on as if nothing had happened."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Hub

from hubshard.resume.data.data_order import DataOrder
from tests.old_torch import fsdp2_on_cpu
from tests.systems import KILLED, kill_group, posix_only

pytest.importorskip("torch")
pytestmark = posix_only

SCRIPT = Path(__file__).with_name("train_gpt.py")


class Trainer:
    """Starts ranks as forks of a process that has imported everything already."""

    def __init__(self, env: dict[str, str]) -> None:
        self._server = subprocess.Popen(
            [sys.executable, SCRIPT], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._running: set[int] = set()

    def ask(self, line: str) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(line + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def start(self, out: Path, *, ranks: int = 1, **told: Any) -> list[int]:
        """Start the ranks of a run; their process numbers."""
        store = out / f"store-{time.monotonic_ns()}"
        common = {"out": str(out), "ranks": ranks, "store": str(store), **told}
        pids = [self.ask(json.dumps({**common, "rank": rank})) for rank in range(ranks)]
        self._running.update(pids)
        return pids

    def wait(self, pids: list[int]) -> list[int]:
        """Until the ranks end; their statuses."""
        statuses = [self.ask(f"wait {pid}") for pid in pids]
        self._running.difference_update(pids)
        return statuses

    def finish(self, out: Path, **told: Any) -> None:
        """Start the ranks of a run, which end well."""
        statuses = self.wait(self.start(out, **told))
        assert not any(statuses), errors(out)

    def kill(self, pids: list[int]) -> list[int]:
        """SIGKILL to the ranks and their workers; their statuses."""
        for pid in pids:
            kill_group(pid)
        return self.wait(pids)

    def stop(self) -> None:
        self.kill(list(self._running))  # of a test that failed
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(30)
        assert self._server.stdout is not None
        self._server.stdout.close()


@pytest.fixture(scope="module")
def trainer(module_hub: Hub) -> Iterator[Trainer]:
    made = Trainer(module_hub.client_env() | {"OMP_NUM_THREADS": "1"})
    yield made
    made.stop()


def errors(out: Path) -> str:
    return "\n".join(path.read_text()[-4000:] for path in sorted(out.glob("errors-*.txt")))


def lines(out: Path, rank: int = 0) -> list[dict[str, Any]]:
    log = out / f"log-{rank}.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def count_of_lines(out: Path) -> int:
    return len(lines(out))


def steps(out: Path, rank: int = 0) -> dict[int, dict[str, Any]]:
    """What was logged of each step; what was logged twice is the same, since a step that is done again is the same."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines(out, rank):
        if "step" in line:
            assert found.setdefault(line["step"], line) == line
    return found


def lives(out: Path) -> list[int | None]:
    """The step that each life began with."""
    return [line["restored"] for line in lines(out) if "restored" in line]


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def newest(local_dir: Path) -> int:
    """The newest step that is whole in a folder; 0 for none."""
    return max((int(path.parent.name[5:]) for path in local_dir.glob("step-*/manifest.json")), default=0)


def wait_beyond(measure: Callable[[], int], value: int, out: Path) -> None:
    """Until what is measured has grown beyond a value."""
    end = time.monotonic() + 120
    while measure() <= value:
        assert time.monotonic() < end, errors(out)
        assert "Traceback" not in errors(out), errors(out)
        time.sleep(0.001)


def newest_on(hub: Hub, repo: str) -> int:
    """The newest step on the branch of a repo; 0 for none."""
    answer = hub.api()("GET", f"/api/models/{repo}/tree/resume")
    entries = answer.json if answer.status == 200 else []  # the first life makes the repo
    return max((int(entry["path"][5:]) for entry in entries if entry["type"] == "directory"), default=0)


def train_with_kills(
    trainer: Trainer, hub: Hub, out: Path, repo: str, *, kills: int, moments: random.Random, **told: Any
) -> None:
    """Train to the end, with so many kills on the way.

    Some lives are ended as soon as they have begun, within the start or the restore; some within a step or a save. Of
    four, one gets so far that it saves, and one so far that the Hub has it; then the disk is lost.
    """
    local_dir = out / "steps"
    on_disk, on_hub, logged = partial(newest, local_dir), partial(newest_on, hub, repo), partial(count_of_lines, out)
    for number in range(kills):
        before = on_disk(), on_hub(), logged()
        pids = trainer.start(out, every=2, repo=repo, local_dir=str(local_dir), **told)
        if number % 4 == 1:
            wait_beyond(on_disk, before[0], out)
        elif number % 4 == 3:
            wait_beyond(on_hub, before[1], out)
        elif moments.random() < 0.7:
            wait_beyond(logged, before[2] + moments.randint(0, 4), out)
        time.sleep(moments.uniform(0, 0.03))
        assert set(trainer.kill(pids)) == {KILLED}, errors(out)
        if number % 4 == 3:
            shutil.rmtree(local_dir)
    trainer.finish(out, every=20, repo=repo, local_dir=str(local_dir), **told)


@pytest.mark.timeout(1800)  # on a machine that has much else to do
@pytest.mark.parametrize(
    ("ranks", "workers", "kills", "count"),
    [
        pytest.param(1, 0, 8, 60, id="1 rank"),
        pytest.param(2, 2, 4, 40, id="2 ranks", marks=fsdp2_on_cpu),
        pytest.param(1, 0, 20, 120, id="1 rank, often", marks=pytest.mark.slow),
        pytest.param(2, 2, 20, 200, id="2 ranks, often", marks=[pytest.mark.slow, fsdp2_on_cpu]),
        pytest.param(1, 2, 20, 200, id="1 rank, workers", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_again_and_again_has_the_losses_and_weights_of_one_that_never_was(
    trainer: Trainer, module_hub: Hub, tmp_path: Path, ranks: int, workers: int, kills: int, count: int
) -> None:
    told: dict[str, Any] = {"ranks": ranks, "workers": workers, "steps": count, "dump": ["saved"]}
    calm, killed = folder(tmp_path / "calm"), folder(tmp_path / "killed")
    trainer.finish(calm, local_dir=str(calm / "steps"), every=count, **told)
    moments = random.Random(ranks * 100 + kills)
    repo = f"org/killed-{ranks}-{workers}-{kills}"
    train_with_kills(trainer, module_hub, killed, repo, kills=kills, moments=moments, **told)
    assert lives(calm) == [None]
    assert len({step for step in lives(killed) if step}) >= kills // 5  # it went on from many steps
    for rank in range(ranks):
        assert steps(killed, rank).keys() == set(range(1, count + 1))
        assert steps(killed, rank) == steps(calm, rank)
    assert json.loads((killed / "saved.json").read_text()) == json.loads((calm / "saved.json").read_text())


@fsdp2_on_cpu
def test_from_2_to_4_to_1_ranks_the_state_is_bit_equal_and_the_samples_come_in_the_same_order(
    trainer: Trainer, tmp_path: Path
) -> None:
    steps_dir, order = tmp_path / "steps", DataOrder(101, 8, seed=5, drop_last=False)
    saved: dict[str, Any] = {}
    taken: list[list[int]] = []
    for number, (ranks, stop_at) in enumerate([(2, 9), (4, 18), (1, 28)]):
        out = folder(tmp_path / f"out-{number}")
        told: dict[str, Any] = {"steps": 40, "every": 40, "stop_at": stop_at, "dump": ["restored", "saved"]}
        trainer.finish(out, ranks=ranks, local_dir=str(steps_dir), workers=number % 2, **told)
        restored, left = (json.loads((out / f"{when}.json").read_text()) for when in ("restored", "saved"))
        assert not saved or without_world(restored) == without_world(saved)
        assert lives(out) == [[None], [9], [18]][number]
        saved = left
        by_rank = [steps(out, rank) for rank in range(ranks)]
        taken += [[index for rank in by_rank for index in rank[step]["indices"]] for step in sorted(by_rank[0])]
        if number:
            assert errors(out).count("the random generators of rank") == ranks
    starts = range(0, 101, 8)
    expected = [order.indices(epoch, at, min(at + 8, 101)) for epoch in range(3) for at in starts]
    assert taken == expected[:28]
    assert sorted(index for indices in taken[:13] for index in indices) == list(range(101))


def without_world(found: dict[str, Any]) -> dict[str, Any]:
    """Without what says on how many ranks it was."""
    return found | {"values": re.sub(r'"world_size":\d+', "", found["values"])}
