from __future__ import annotations

import math
import random
from datetime import timedelta

import pytest

from hubshard.errors import FormatError
from hubshard.steps.intervals import advise, best_interval_seconds, format_seconds, interval_cost, seconds_of


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        (90, 90.0),
        (1.5, 1.5),
        ("800ms", 0.8),
        ("90s", 90.0),
        ("30m", 1800.0),
        ("30 min", 1800.0),
        ("4h", 14400.0),
        ("1h30m", 5400.0),
        ("1.5 H", 5400.0),
        (" 2 d ", 172800.0),
        (timedelta(minutes=5), 300.0),
    ],
)
def test_durations_are_read_as_people_write_them(duration: float | str | timedelta, seconds: float) -> None:
    assert seconds_of(duration) == seconds


@pytest.mark.parametrize(
    "duration",
    ["", "4", "h", "4x", "-4h", "4h x", "1h,30m", "0s", 0, -1, math.inf, math.nan, timedelta(0), "9" * 20 + "h"],
)
def test_what_is_no_duration_is_refused(duration: float | str | timedelta) -> None:
    with pytest.raises(FormatError):
        seconds_of(duration)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "0.012 s"),
        (14.2, "14 s"),
        (59.9, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (5000, "1 h 23 min"),
        (90_000, "1 d 1 h"),
        (9e6, "104 d"),
        (math.inf, "for ever"),
    ],
)
def test_durations_are_written_in_two_units_at_most(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("cost", "mtbf"), [(1, 86400), (5, 14400), (60, 7200), (300, 3600), (1000, 3600)])
def test_the_best_interval_is_where_the_expected_run_time_is_least(cost: float, mtbf: float) -> None:
    def overhead(seconds: float) -> float:
        return interval_cost(seconds, cost_seconds=cost, mtbf_seconds=mtbf).overhead

    best = best_interval_seconds(cost, mtbf)
    least = min(overhead(best * (1 + share / 1000)) for share in range(-900, 3000))
    assert overhead(best) == pytest.approx(least, rel=2e-3)
    if cost < mtbf / 1000:
        assert best == pytest.approx(math.sqrt(2 * cost * mtbf), rel=0.02)


def test_a_save_that_costs_more_than_two_failures_are_apart_is_made_once_per_failure() -> None:
    assert best_interval_seconds(500, 200) == 200


@pytest.mark.parametrize(
    ("interval", "cost", "mtbf", "restart", "delay"),
    [(376, 5, 14400, 0, 0), (100, 20, 600, 30, 0), (300, 60, 900, 45, 80)],
)
def test_overhead_and_loss_are_those_of_runs_that_are_played_through(
    interval: float, cost: float, mtbf: float, restart: float, delay: float
) -> None:
    expected = interval_cost(
        interval, cost_seconds=cost, mtbf_seconds=mtbf, restart_seconds=restart, delay_seconds=delay
    )
    rng = random.Random(5)
    clock = work = 0.0
    losses: list[float] = []
    while len(losses) < 40_000:
        until_failure = rng.expovariate(1 / mtbf)
        whole = int(until_failure // (interval + cost))
        work += whole * interval
        lost = until_failure - whole * (interval + cost)
        clock += until_failure
        losses.append(lost + restart + delay)
        begin_again = restart + delay
        while (again := rng.expovariate(1 / mtbf)) < begin_again:  # it fails while it begins again
            clock += again
        clock += begin_again
    assert clock / work - 1 == pytest.approx(expected.overhead, rel=0.03)
    assert sum(losses) / len(losses) == pytest.approx(expected.lost_seconds, rel=0.03)
    assert expected.saving == cost / interval


def test_the_advice_has_its_best_row_marked_between_shorter_and_longer_intervals_of_whole_steps() -> None:
    advice = advise(cost_seconds=5, mtbf_seconds=14400, step_seconds=0.7, steps=100_000)
    assert [row.is_best for row in advice.rows].count(True) == 1
    assert advice.best.overhead == min(row.overhead for row in advice.rows)
    assert advice.best.interval_steps == 537  # 376.1 s
    assert [row.interval_seconds for row in advice.rows] == sorted(row.interval_seconds for row in advice.rows)
    assert all(
        row.interval_steps is not None and row.interval_seconds == pytest.approx(0.7 * row.interval_steps)
        for row in advice.rows
    )
    assert all(
        a.saving > b.saving and a.lost_seconds < b.lost_seconds
        for a, b in zip(advice.rows, advice.rows[1:], strict=False)
    )
    assert advice.at(advice.best.interval_seconds).overhead == advice.best.overhead


def test_no_interval_is_shorter_than_a_save_takes_or_a_step_nor_longer_than_the_run() -> None:
    slow = advise(cost_seconds=5, mtbf_seconds=14400, delay_seconds=900)
    assert slow.best.interval_seconds == slow.rows[0].interval_seconds == 900
    coarse = advise(cost_seconds=5, mtbf_seconds=14400, step_seconds=1000, delay_seconds=900)
    assert (coarse.best.interval_seconds, coarse.best.interval_steps) == (1000, 1)
    short = advise(cost_seconds=5, mtbf_seconds=14400, step_seconds=1, steps=100)
    assert short.best.interval_steps == short.rows[-1].interval_steps == 100


def test_a_hopeless_interval_has_an_infinite_overhead() -> None:
    row = interval_cost(1e9, cost_seconds=5, mtbf_seconds=60)
    assert row.overhead == math.inf
    assert row.lost_seconds == 60


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cost_seconds": 0}, "cost of a save is 0"),
        ({"mtbf_seconds": -1}, "between failures is -1"),
        ({"mtbf_seconds": math.nan}, "between failures is nan"),
        ({"step_seconds": 0}, "time of a step"),
        ({"steps": 0}, "number of steps"),
        ({"restart_seconds": -1}, "begin again"),
        ({"delay_seconds": math.inf}, "delay"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(changed: dict[str, float], said: str) -> None:
    arguments: dict[str, float] = {"cost_seconds": 5, "mtbf_seconds": 14400} | changed
    with pytest.raises(FormatError, match=said):
        advise(**arguments)  # type: ignore[arg-type]
