"""The recipes for training, run as they stand against an embedded Hub: killed, moved, told to go, and going on."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import warm
from tests.old_torch import fsdp2_on_cpu
from tests.systems import kill_group, posix_only

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("torch")
pytestmark = posix_only

RECIPES = Path(__file__).parent.parent / "recipes"
LOOP = [str(RECIPES / "train_loop.py"), "--workers", "0"]
STEPS = 60


class Process:
    """A recipe under way, whose output is read from a file."""

    def __init__(self, hub: Hub, argv: Sequence[str], log: Path, *, ranks: int = 0, is_new: bool = False) -> None:
        self.log = log
        env = hub.client_env() | {"OMP_NUM_THREADS": "1"}
        self._process: warm.Started | subprocess.Popen[bytes]
        if is_new:
            with log.open("wb") as out:
                self._process = subprocess.Popen(
                    [sys.executable, *argv], env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
        else:
            self._process = warm.start(argv, log, imports="torch", env=env, ranks=ranks)

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Until something is so, or the recipe has ended."""
        end = time.monotonic() + 240
        while not is_so() and self._process.poll() is None:
            assert time.monotonic() < end, self.text
            time.sleep(0.01)
        assert is_so(), self.text

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: f"step {step} loss" in self.text)

    def kill(self) -> None:
        kill_group(self._process.pid)
        self._process.wait()

    def tell(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        try:
            return self._process.wait(240)
        except BaseException:
            self.kill()
            raise


def losses(*texts: str) -> dict[int, str]:
    """The loss of each step; a step that was done again had the same."""
    found: dict[int, str] = {}
    for step, loss in (
        match.groups() for text in texts for match in re.finditer(r"^step (\d+) loss (.+)$", text, re.MULTILINE)
    ):
        assert found.setdefault(int(step), loss) == loss
    return found


def begun(text: str) -> list[int]:
    """The steps that lives began with, the first aside."""
    return [int(step) for step in re.findall(r"^going on from step (\d+)$", text, re.MULTILINE)]


def has_step(hub: Hub, repo: str, step: int) -> bool:
    return hub.api()("GET", f"/{repo}/resolve/resume/step-{step:08d}/manifest.json").status == 200


def ends_well(process: Process) -> str:
    assert process.wait() == 0, process.text
    return process.text


@pytest.fixture(scope="module")
def calm(module_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a plain loop that nobody disturbed."""
    folder = tmp_path_factory.mktemp("calm")
    found = losses(ends_well(Process(module_hub, loop("org/calm", folder), folder / "log")))
    assert found.keys() == set(range(1, STEPS + 1))
    return found


def loop(repo: str, folder: Path, *more: str) -> list[str]:
    return [*LOOP, "--repo", repo, "--steps", str(STEPS), "--local-dir", str(folder / "steps"), *more]


def test_the_plain_loop_is_killed_told_to_go_and_moved_to_an_empty_machine_and_trains_the_same(
    module_hub: Hub, tmp_path: Path, calm: dict[int, str]
) -> None:
    first = Process(module_hub, loop("org/loop", tmp_path), tmp_path / "first")
    first.wait_until((tmp_path / "steps" / "step-00000010" / "manifest.json").exists)
    first.wait_for_step(12)
    first.kill()
    second = Process(module_hub, loop("org/loop", tmp_path, "--workers", "1"), tmp_path / "second")
    second.wait_until(lambda: len(losses(second.text)) > 1)
    second.tell(signal.SIGTERM)
    assert second.wait() == 128 + signal.SIGTERM, second.text
    assert begun(second.text)[0] >= 10
    shutil.rmtree(tmp_path / "steps")
    third = ends_well(Process(module_hub, loop("org/loop", tmp_path), tmp_path / "third"))
    assert begun(third) == [max(losses(second.text))]
    assert losses(first.text, second.text, third) == calm


@fsdp2_on_cpu
def test_sharded_training_goes_on_on_as_many_ranks_and_on_one(module_hub: Hub, tmp_path: Path) -> None:
    def training(steps: int) -> list[str]:
        told = ["--repo", "org/sharded", "--steps", str(steps), "--local-dir", str(tmp_path / "steps")]
        return [str(RECIPES / "train_fsdp2.py"), *told, "--workers", "0"]

    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    first = Process(module_hub, [*torchrun, *training(40)], tmp_path / "log-first", is_new=True)
    first.wait_until(lambda: has_step(module_hub, "org/sharded", 10))
    first.wait_for_step(13)
    first.kill()
    shutil.rmtree(tmp_path / "steps")
    second = ends_well(Process(module_hub, training(40), tmp_path / "log-second", ranks=2))
    assert begun(second)[0] >= 10
    assert losses(first.text, second).keys() == set(range(1, 41))  # those that were done again were the same
    third = ends_well(Process(module_hub, training(42), tmp_path / "log-third", ranks=1))
    assert begun(third) == [40]
    assert losses(third).keys() == {41, 42}


CRASH_ONCE = """
import pathlib, runpy, sys, torch
crashed = pathlib.Path(sys.argv.pop(1))
step, count = torch.optim.AdamW.step, 0
def crashing(*args, **options):
    global count
    count += 1
    if count == 14 and not crashed.exists():
        crashed.touch()
        raise SystemExit("the driver is gone")
    return step(*args, **options)
torch.optim.AdamW.step = crashing
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A training that crashes at its 14th step, if it has not yet."""


def test_on_a_spot_machine_a_crash_is_started_again_and_a_notice_stops_the_training_well(
    module_hub: Hub, tmp_path: Path, calm: dict[int, str]
) -> None:
    notice = tmp_path / "notice"
    training = [sys.executable, "-c", CRASH_ONCE, str(tmp_path / "crashed"), *loop("org/spot", tmp_path)]
    command = [str(RECIPES / "train_on_spot.py"), "--notice-file", str(notice), "--", *training]
    first = Process(module_hub, command, tmp_path / "first")
    first.wait_until(lambda: len(begun(first.text)) == 1)
    assert "the training ended with 1; it is started again, restarts left: 4" in first.text
    notice.touch()
    code = first.wait()
    notice.unlink()
    assert code in {0, 128 + signal.SIGTERM}, first.text  # it may have ended faster than the notice is looked for
    second = ends_well(Process(module_hub, command, tmp_path / "second"))
    assert begun(second) == [max(losses(first.text))]
    assert losses(first.text, second) == calm
