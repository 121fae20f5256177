"""How a run ends, as processes of their own: by itself, by a signal, by Ctrl-C, and on a Hub that answers no more.

The limits of time are not what is promised, but what a run that hangs does not keep.
"""

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
from typing import TYPE_CHECKING

import pytest

from tests.faults.proxy import Proxy, delay, proxied

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("torch.distributed")
pytest.importorskip("fcntl", reason="Windows has no such signals")
assert sys.platform != "win32"  # nor are types checked for it from here on

from hubshard.resume.saves.local_steps import LocalSteps  # noqa: E402

SCRIPT = Path(__file__).with_name("ending_script.py")
FOR_EVER = 10_000.0

Popen = subprocess.Popen[str]


@contextmanager
def started(hub: Hub, url: str, folder: Path, how: str, *, grace: int = 20, ranks: int = 1) -> Iterator[Popen]:
    run = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    argv = [sys.executable, *run, str(SCRIPT), str(folder), how, str(grace)]
    env = hub.client_env() | {"HF_ENDPOINT": url, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        argv,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=_hear_ctrl_c,  # noqa: PLW1509  # it takes no lock
    )
    try:
        yield process
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGABRT)  # faulthandler says where they stood
        print(process.communicate()[0])
        raise


def _hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored


def hang_after_step_one(process: Popen, proxy: Proxy, folder: Path, ranks: int = 1) -> None:
    """Let the program save its second step to a Hub that takes requests, and never answers."""
    _read_until(process, "READY", ranks)
    proxy.always(".*", delay(proxy, FOR_EVER))
    (folder / "go").touch()
    _read_until(process, "SAVED", ranks)


def _read_until(process: Popen, word: str, times: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        times -= line.strip() == word
        if not times:
            return
    raise AssertionError(f"it ended without {word}")


def steps_on_disk(folder: Path, rank: int = 0) -> set[int]:
    return LocalSteps(folder / f"disk{rank}").numbers()


def steps_on_hub(hub: Hub) -> list[str]:
    listed = hub.client(
        "import json\nfrom huggingface_hub import HfApi\n"
        "print(json.dumps(HfApi().list_repo_files('org/run', revision='resume')))"
    )
    return sorted({name.split("/")[0] for name in json.loads(listed) if "/" in name})


# Without `with` or close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("how", "status"), [("by itself", 0), ("exit 3", 3), ("raises", 1), ("forgotten", 0)])
def test_what_was_saved_is_on_the_disk_and_the_hub_when_the_program_ends(
    hub: Hub, tmp_path: Path, how: str, status: int
) -> None:
    with started(hub, hub.url, tmp_path, how) as process:
        output, _ = process.communicate(timeout=280)
    assert process.returncode == status, output
    assert steps_on_disk(tmp_path) == {1}
    assert steps_on_hub(hub) == ["step-00000001"]
    assert "was not closed" in output


@pytest.mark.timeout(600)
def test_a_save_that_fails_while_the_program_ends_is_said_by_its_status(hub: Hub, tmp_path: Path) -> None:
    with started(hub, hub.url, tmp_path, "full disk") as process:
        output, _ = process.communicate(timeout=280)
    assert process.returncode == 1, output
    assert "step 1 was not saved: no room for step-00000001" in output
    assert steps_on_disk(tmp_path) == set()


# On a Hub that answers no more


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["trains", pytest.param("over", marks=pytest.mark.slow)])
def test_sigterm_ends_a_run_within_its_grace_with_the_step_on_the_disk(hub: Hub, tmp_path: Path, how: str) -> None:
    with proxied(hub.port) as proxy, started(hub, proxy.url, tmp_path, how) as process:
        hang_after_step_one(process, proxy, tmp_path)
        time.sleep(1)  # "over": it is within close()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "may not be on the Hub" in output
    newest = max(steps_on_disk(tmp_path))
    assert newest > 2 if how == "trains" else newest == 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_with_the_step_on_the_disk_and_says_what_it_waits_for(
    hub: Hub, tmp_path: Path, times: int
) -> None:
    with proxied(hub.port) as proxy, started(hub, proxy.url, tmp_path, "trains") as process:
        hang_after_step_one(process, proxy, tmp_path)
        process.send_signal(signal.SIGINT)
        if times == 2:
            assert process.stdout is not None
            said = next(line for line in process.stdout if "waiting" in line)
            assert "step 2 is on the disk" in said
            assert "Ctrl-C leaves at once" in said
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=90)
    assert process.returncode == -signal.SIGINT, output
    assert "KeyboardInterrupt" in output
    assert ("may not be on the Hub" in output) == (times == 1)
    assert steps_on_disk(tmp_path) == {1, 2}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_end_within_the_grace_on_a_hub_that_answers_no_more(hub: Hub, tmp_path: Path) -> None:
    with proxied(hub.port) as proxy, started(hub, proxy.url, tmp_path, "trains", grace=15, ranks=2) as process:
        hang_after_step_one(process, proxy, tmp_path, ranks=2)
        pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
        os.kill(pids[0], signal.SIGUSR1)
        output, _ = process.communicate(timeout=60)
    assert output.count("SIGUSR1 arrived") == 2, output
    assert f"exitcode  : {128 + signal.SIGUSR1}" in output, output
    assert max(steps_on_disk(tmp_path, 0)) == max(steps_on_disk(tmp_path, 1)) > 2
