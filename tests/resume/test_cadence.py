from __future__ import annotations

import logging
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from hubshard.errors import FormatError, StoreError
from hubshard.resume.agreement import StepAgreement
from hubshard.resume.cadence import Cadence, Every
from hubshard.steps.intervals import best_interval_seconds


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def due_steps(cadence: Cadence, steps: range, clock: Clock | None = None, step_seconds: float = 1.0) -> list[int]:
    """The steps that are to be saved, each of which takes some seconds and is saved at once."""
    found = []
    for step in steps:
        if clock is not None:
            clock.seconds += step_seconds
        if cadence.due(step):
            found.append(step)
            cadence.saved(step, 0.5, 0.5)
    return found


@pytest.mark.parametrize("every", [10, "10"])
def test_every_so_many_steps_means_their_multiples(every: Every) -> None:
    assert due_steps(Cadence(every), range(1, 35)) == [10, 20, 30]
    assert due_steps(Cadence(every), range(35)) == [10, 20, 30]
    assert due_steps(Cadence(every), range(1010, 1035)) == [1010, 1020, 1030]  # as after a restore of 1009


def test_a_multiple_that_is_never_asked_for_is_saved_at_the_next_chance() -> None:
    assert due_steps(Cadence(10), range(4, 60, 4)) == [12, 20, 32, 40, 52]


def test_none_is_never() -> None:
    assert due_steps(Cadence(None), range(1, 100)) == []


def test_to_ask_again_gets_the_same_answer_until_the_step_is_saved() -> None:
    cadence = Cadence(5)
    assert [cadence.due(step) for step in (4, 5, 5, 5)] == [False, True, True, True]
    cadence.saved(5, 0.1, 0.2)
    assert not cadence.due(5)
    assert not cadence.due(6)


def test_a_run_that_goes_back_is_saved_again_on_its_way() -> None:
    cadence, clock = Cadence(10), Clock()
    assert due_steps(cadence, range(1, 42)) == [10, 20, 30, 40]
    assert due_steps(cadence, range(21, 42)) == [30, 40]
    timed = Cadence("30s", clock=clock)
    assert due_steps(timed, range(1, 70), clock) == [30, 60]
    assert due_steps(timed, range(31, 70), clock) == [51]  # nine seconds had passed


@pytest.mark.parametrize("every", ["30s", timedelta(seconds=30), "0.5m"])
def test_time_is_counted_from_the_beginning_and_from_save_to_save(every: Every) -> None:
    clock = Clock()
    assert due_steps(Cadence(every, clock=clock), range(1, 15), clock, step_seconds=7) == [5, 10]


def test_a_save_outside_the_cadence_begins_the_time_anew() -> None:
    clock = Clock()
    cadence = Cadence("30s", clock=clock)
    assert due_steps(cadence, range(1, 29), clock) == []
    cadence.saved(28, 0.1, 0.1)
    assert due_steps(cadence, range(29, 65), clock) == [58]


def test_auto_saves_at_once_to_learn_the_cost_and_then_at_the_best_interval(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    cadence = Cadence("auto", mtbf_seconds=3600, clock=clock)
    best = best_interval_seconds(0.5, 3600)
    with caplog.at_level(logging.INFO, logger="hubshard"):
        assert due_steps(cadence, range(1, 200), clock) == [1, 61, 121, 181]  # 59.5 s of work
    assert 59 < best < 60
    assert cadence.interval_seconds == best
    assert len(caplog.messages) == 1
    assert "every 1 min" in caplog.text
    assert "0.5 s (mean of the last 1)" in caplog.text


def test_auto_follows_the_mean_cost_of_the_last_saves_and_never_saves_before_one_can_have_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cadence = Cadence("auto", mtbf_seconds=3600)
    with caplog.at_level(logging.INFO, logger="hubshard"):
        for step in range(1, 8):
            cadence.saved(step, 8.0 if step > 2 else 0.5, 10)
    assert cadence.interval_seconds == best_interval_seconds(8.0, 3600)
    assert len(caplog.messages) >= 2
    cadence.saved(8, 8.0, 1e4)
    assert cadence.interval_seconds == 1e4


@pytest.mark.parametrize("every", [0, -3, True, 2.5, "0", "nonsense", "", "-5s", timedelta(0)])
def test_nonsense_is_refused(every: Every) -> None:
    with pytest.raises(FormatError):
        Cadence(every)


def test_auto_needs_to_know_how_often_the_job_fails() -> None:
    with pytest.raises(FormatError, match="how often the job fails"):
        Cadence("auto")


# Several ranks: threads that wait for each other in each step, as in a collective, over one of torch's stores


def test_ranks_whose_clocks_differ_save_the_same_steps_those_of_rank_0() -> None:
    dist = pytest.importorskip("torch.distributed")
    store, world, steps = dist.HashStore(), 4, 400
    meet = threading.Barrier(world, timeout=60)

    def rank_of(rank: int) -> list[int]:
        clock, rng = Clock(), random.Random(rank)
        agreement = StepAgreement(store, name="save", world_size=world)
        cadence = Cadence("10s", rank=rank, agreement=agreement, clock=clock)
        found = []
        for step in [*range(1, steps), *range(50, 150)]:
            meet.wait()
            if rng.random() < 0.1:
                time.sleep(0.001)
            clock.seconds += 1 if rank == 0 else rng.random() * 10
            if cadence.due(step):
                found.append(step)
        return found

    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(rank_of, range(world)))
    wanted = list(range(11, steps, 11))  # ten seconds, and one step until all know
    assert found[0] == [*wanted, *range(57, 150, 11)]
    assert found == [found[0]] * world


class RunningAhead:
    """Stands in for a device: a rank ends a step once all others have ended the one before the last."""

    def __init__(self, ended: list[int], rank: int, changed: threading.Condition) -> None:
        self._ended = ended
        self._rank = rank
        self._changed = changed

    def pass_by(self) -> int:
        with self._changed:
            self._ended[self._rank] += 1
            step = self._ended[self._rank]
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: min(self._ended) >= step - 1, timeout=60)
        return 1


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_run_a_step_apart_still_do_it_after_the_same_step(seed: int) -> None:
    dist = pytest.importorskip("torch.distributed")
    store, world = dist.HashStore(), 3
    ended, changed = [0] * world, threading.Condition()

    def rank_of(rank: int) -> list[int]:
        agreement = StepAgreement(store, name="stop", world_size=world)
        agreement._fence = RunningAhead(ended, rank, changed)  # type: ignore[assignment]
        rng = random.Random(100 * seed + rank)
        found = []
        for step in range(1, 200):
            if rng.random() < 0.1:
                time.sleep(0.001)
            if agreement.at_end_of(step, {"rank": rank} if rng.random() < 0.05 else None) is not None:
                found.append(step)
        return found

    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(rank_of, range(world)))
    assert len(found[0]) > 3
    assert found == [found[0]] * world


def test_several_ranks_without_a_store_are_refused() -> None:
    with pytest.raises(FormatError, match="2 ranks cannot agree"):
        StepAgreement(None, name="save", world_size=2)


def test_a_store_that_is_gone_is_an_error_that_says_so() -> None:
    dist = pytest.importorskip("torch.distributed")
    server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    client = dist.TCPStore("127.0.0.1", server.port, 1, is_master=False, timeout=timedelta(seconds=2))
    agreement = StepAgreement(client, name="stop", world_size=2)
    assert agreement.at_end_of(1, None) is None
    del server
    with pytest.raises(StoreError, match="the store that the ranks share cannot be reached"):
        agreement.at_end_of(2, None)
