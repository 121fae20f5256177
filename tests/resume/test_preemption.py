from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from hubshard.errors import FormatError
from hubshard.resume.preemption import DEFAULT_SIGNALS, NOTICE_EXIT_CODE, Preemption
from tests import warm

pytest.importorskip("fcntl", reason="Windows has no such signals")
assert sys.platform != "win32"  # nor are types checked for it from here on

SCRIPT = Path(__file__).with_name("preemption_script.py")


@contextmanager
def handled_by(number: int, handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def wait_for(condition: Callable[[], bool], *, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


# One process


def test_a_signal_stops_after_the_step_in_which_it_comes() -> None:
    with handled_by(signal.SIGTERM, signal.SIG_DFL), Preemption(grace_seconds=25) as preemption:
        assert not preemption.should_stop(1)
        assert preemption.seconds_left == float("inf")
        assert (preemption.stop_step, preemption.exit_code, preemption.is_heard) == (None, 0, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.is_heard
        assert preemption.should_stop(2)
        assert preemption.should_stop(2)
        assert preemption.should_stop(3)
        assert (preemption.stop_step, preemption.exit_code) == (2, 128 + signal.SIGTERM)
        assert 0 < preemption.seconds_left <= 25


def test_a_second_signal_changes_nothing_and_time_never_becomes_negative() -> None:
    with handled_by(signal.SIGTERM, signal.SIG_DFL), Preemption(grace_seconds=0.001) as preemption:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.should_stop(7)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (preemption.stop_step, preemption.exit_code) == (7, 128 + signal.SIGUSR1)
        assert preemption.seconds_left == 0


@pytest.mark.parametrize("number", DEFAULT_SIGNALS)
def test_a_handler_from_before_is_called_after_ours_and_put_back(number: int) -> None:
    calls: list[tuple[int, bool]] = []
    preemption = Preemption()

    def before(called: int, _: FrameType | None) -> None:
        calls.append((called, preemption.is_heard))

    with handled_by(number, before):
        with preemption:
            os.kill(os.getpid(), number)
            assert calls == [(number, True)]
            assert preemption.should_stop(1)
        assert signal.getsignal(number) is before


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_the_defaults_are_put_back_and_not_called(before: signal.Handlers) -> None:
    with handled_by(signal.SIGUSR1, before):
        with Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert preemption.should_stop(1)
        assert signal.getsignal(signal.SIGUSR1) is before


def test_pythons_own_handler_of_ctrl_c_is_not_called() -> None:
    with handled_by(signal.SIGINT, signal.default_int_handler), Preemption(signals=[signal.SIGINT]) as preemption:
        os.kill(os.getpid(), signal.SIGINT)
        assert preemption.should_stop(1)
        assert preemption.exit_code == 130


def test_a_handler_that_came_after_ours_stays() -> None:
    with handled_by(signal.SIGUSR1, signal.SIG_DFL):
        with Preemption():
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_two_at_once_hear_it_both() -> None:
    with handled_by(signal.SIGUSR1, signal.SIG_DFL):
        with Preemption() as outer, Preemption() as inner:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert inner.should_stop(1)
            assert outer.should_stop(1)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_outside_the_main_thread_signals_are_refused_and_notices_are_not() -> None:
    found: list[object] = []

    def go() -> None:
        try:
            with Preemption():
                pass
        except FormatError as error:
            found.append(error)
        with Preemption(signals=(), notice=lambda: True, poll_seconds=0.001) as preemption:
            wait_for(lambda: preemption.is_heard)
            found.append(preemption.should_stop(1))

    thread = threading.Thread(target=go, name="a-worker")
    thread.start()
    thread.join()
    assert "main thread alone, and this is 'a-worker'" in str(found[0])
    assert found[1] is True


def test_a_signal_that_cannot_be_handled_is_refused_and_the_others_are_put_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(FormatError, match="signal 9 cannot be handled"), Preemption(signals=[signal.SIGUSR1, 9]):
        pass
    assert signal.getsignal(signal.SIGUSR1) is before


def run_code(code: str) -> list[str]:
    """What a program prints, in a process group of its own."""
    run = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False, start_new_session=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(("number", "ending"), [("SIGTERM", "-15"), ("SIGUSR1", "7")])
def test_a_forked_process_ends_on_sigterm_as_if_we_were_not_there_and_outlives_the_rest(
    number: str, ending: str
) -> None:
    code = f"""
        import os, signal, time
        from hubshard.resume.preemption import Preemption
        with Preemption() as preemption:
            ready, said = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.write(said, b"x")
                time.sleep(1)
                os._exit(7)
            os.read(ready, 1)
            os.kill(pid, signal.{number})
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), preemption.should_stop(1))
    """
    assert run_code(code) == [ending, "False"]


def test_a_sigusr1_to_all_processes_of_a_job_leaves_the_workers_of_a_data_loader_at_work() -> None:
    pytest.importorskip("torch")
    code = """
        import os, signal
        from torch.utils.data import DataLoader
        from hubshard.resume.preemption import Preemption
        with Preemption() as preemption:
            batches = iter(DataLoader(range(4000), batch_size=4, num_workers=2))
            for step in range(1, 1000):
                next(batches)
                if step == 10:
                    os.killpg(0, signal.SIGUSR1)
                if preemption.should_stop(step):
                    break
            print(step, preemption.exit_code, sum(1 for _ in batches))
    """
    assert run_code(code) == ["10", str(128 + signal.SIGUSR1), "990"]


@pytest.mark.parametrize(("answer", "least", "most"), [(True, 0, 20), (1.5, 0, 1.5), (100, 20, 100)])
def test_a_notice_stops_and_may_say_how_much_time_is_left(answer: float | bool, least: float, most: float) -> None:
    told = threading.Event()
    with Preemption(
        signals=(), notice=lambda: answer if told.is_set() else False, grace_seconds=20, poll_seconds=0.001
    ) as preemption:
        assert not preemption.should_stop(1)
        told.set()
        wait_for(lambda: preemption.is_heard)
        assert preemption.should_stop(2)
        assert preemption.exit_code == NOTICE_EXIT_CODE == 75
        assert least < preemption.seconds_left <= most


def test_a_notice_that_fails_is_said_once_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    def notice() -> bool | None:
        nonlocal calls
        calls += 1
        if calls < 4:
            raise OSError("no route to 169.254.169.254")
        return None if calls < 6 else True

    with Preemption(signals=(), notice=notice, poll_seconds=0.001) as preemption:
        wait_for(lambda: preemption.is_heard)
    assert calls == 6
    assert [message for message in caplog.messages if "no route" in message] == [
        "the preemption notice cannot be had, and is asked for again: OSError('no route to 169.254.169.254')"
    ]


def test_the_thread_of_a_notice_ends_with_the_listening() -> None:
    with Preemption(signals=(), notice=lambda: None, poll_seconds=0.001):
        assert "hubshard-notice" in {thread.name for thread in threading.enumerate()}
    assert "hubshard-notice" not in {thread.name for thread in threading.enumerate()}


# Several ranks, started by torchrun


def found_by(out: Path, ranks: int) -> list[Any]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_whoever_is_told_and_whenever_all_ranks_stop_after_the_same_step(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("torch.distributed")
    done = warm.run([SCRIPT, tmp_path, "rounds"], imports="torch", ranks=ranks)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    *rounds, cadence = zip(*found_by(tmp_path, ranks), strict=True)
    assert len(rounds) == 24
    for found in rounds:
        assert len({of_rank["step"] for of_rank in found}) == 1, found
        assert all(of_rank["stop_step"] == of_rank["step"] for of_rank in found)
        assert {of_rank["exit_code"] for of_rank in found} == {found[0]["expected"]}
        assert all(0 < of_rank["seconds_left"] <= 50 for of_rank in found)
    assert any(not of_rank["told"] for found in rounds for of_rank in found)
    assert len(cadence[0]["cadence"]) > 1
    assert all(of_rank == cadence[0] for of_rank in cadence)


@pytest.mark.parametrize("target", ["one rank", "all ranks", "torchrun"])
def test_a_job_that_is_told_to_end_saves_on_all_ranks_through_further_signals(tmp_path: Path, target: str) -> None:
    pytest.importorskip("torch.distributed")
    log, argv = tmp_path / "log", [str(SCRIPT), str(tmp_path), "outside"]
    process: warm.Started | subprocess.Popen[bytes]
    if target == "torchrun":
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        with log.open("wb") as out:
            process = subprocess.Popen([*run, *argv], stdout=out, stderr=out)
    else:
        process = warm.start(argv, log, imports="torch", ranks=2)
    try:
        wait_for(lambda: all((tmp_path / f"pid{rank}").exists() for rank in range(2)))
        ranks = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
        pids = {"one rank": ranks[1:], "all ranks": ranks, "torchrun": [process.pid]}[target]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        wait_for(lambda: any((tmp_path / f"saved{rank}.part").exists() for rank in range(2)))
        for pid in ranks:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGUSR1)
        process.wait(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0, log.read_text()
    found = found_by(tmp_path, 2)
    assert found[0]["step"] == found[1]["step"]
    for rank, of_rank in enumerate(found):
        assert of_rank["exit_code"] == 128 + signal.SIGTERM
        assert of_rank["events"] == [signal.SIGUSR1]
        assert of_rank["left"] > 0
        assert (tmp_path / f"saved{rank}").read_bytes() == b"".join(bytes([part]) * 1000 for part in range(20))
