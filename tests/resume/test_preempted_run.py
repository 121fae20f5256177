"""A run of two ranks that is told to go: what it saves reaches the Hub, and the next start finds it on empty disks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hubshard.steps.branch import StepBranch
from tests import warm

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("torch.distributed")
pytest.importorskip("fcntl", reason="Windows has no such signals")
assert sys.platform != "win32"  # nor are types checked for it from here on

SCRIPT = Path(__file__).with_name("preempted_script.py")


@contextmanager
def started(hub: Hub, out: Path, last: int) -> Iterator[subprocess.Popen[str]]:
    """The run; it is ended with what is left of it where the test fails."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = [str(SCRIPT), str(out), hub.url, str(last)]
    env = hub.client_env() | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*run, *script],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGABRT)  # faulthandler says where they stood
        print(process.communicate()[0])
        raise


def pids_of(out: Path) -> list[int]:
    """The ranks, once both are training."""
    end = time.monotonic() + 280
    while not all((out / f"pid{rank}").exists() for rank in range(2)):
        assert time.monotonic() < end, "it never began"
        time.sleep(0.02)
    return [int((out / f"pid{rank}").read_text()) for rank in range(2)]


def found_by(out: Path) -> list[Any]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("told", ["one rank by SIGUSR1", pytest.param("torchrun by SIGTERM", marks=pytest.mark.slow)])
def test_a_run_that_is_told_to_go_is_on_the_hub_and_goes_on_from_empty_disks(
    hub: Hub, tmp_path: Path, told: str
) -> None:
    with started(hub, tmp_path / "first", 10**6) as process:
        pids = pids_of(tmp_path / "first")
        time.sleep(0.5)
        if "SIGUSR1" in told:
            os.kill(pids[1], signal.SIGUSR1)
        else:
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=280)
    first = found_by(tmp_path / "first")
    assert process.returncode != 0, output
    step = first[0]["step"]
    assert step > 1
    for rank, of_rank in enumerate(first):
        code = 128 + (signal.SIGUSR1 if "SIGUSR1" in told else signal.SIGTERM)
        expected = {"restored": None, "step": step, "exit_code": code, "steps": [step], "mine": step * (rank + 1)}
        assert of_rank == expected
    assert StepBranch("org/run", token="hf_test", endpoint=hub.url).verify(step).problems == ()

    argv = [SCRIPT, tmp_path / "second", hub.url, str(step + 3)]
    done = warm.run(argv, imports="torch", ranks=2, env=hub.client_env() | {"OMP_NUM_THREADS": "1"}, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank, of_rank in enumerate(found_by(tmp_path / "second")):
        assert (of_rank["restored"], of_rank["step"], of_rank["exit_code"]) == (step, step + 3, 0)
        assert of_rank["mine"] == (step + 3) * (rank + 1)
