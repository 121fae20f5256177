"""Items that are ending make room for the next ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import pytest

from hubshard.engine import Turn, run_overlapping

PATIENCE_SECONDS = 30  # before a test that hangs fails


class Line:
    """Work that says when it begins, may be told to be ending, and goes on until it is let go."""

    def __init__(self, count: int) -> None:
        self.begun = [threading.Event() for _ in range(count)]
        self.go = [threading.Event() for _ in range(count)]
        self._turns: dict[int, Turn] = {}

    def work(self, item: int, turn: Turn) -> int:
        self._turns[item] = turn
        self.begun[item].set()
        assert self.go[item].wait(PATIENCE_SECONDS)
        return item

    def ends(self, item: int) -> None:
        self._turns[item].ends()

    def has_begun(self, item: int) -> bool:
        return self.begun[item].wait(PATIENCE_SECONDS)

    def is_waiting(self, item: int) -> bool:
        return not self.begun[item].wait(0.1)


@pytest.fixture
def taken() -> Iterator[Callable[[Iterator[int]], list[int]]]:
    """Takes results in a thread of its own; gives the list that fills."""
    threads: list[threading.Thread] = []

    def start(results: Iterator[int]) -> list[int]:
        found: list[int] = []
        threads.append(threading.Thread(target=lambda: found.extend(results)))
        threads[-1].start()
        return found

    yield start
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def one_at_a_time(line: Line, count: int, endings: int = 1) -> Iterator[int]:
    return run_overlapping(range(count), cost=lambda _: 10, work=line.work, budget_bytes=10, workers=1, endings=endings)


def test_the_next_begins_when_one_is_ending_and_not_before(taken: Callable[[Iterator[int]], list[int]]) -> None:
    line = Line(2)
    taken(one_at_a_time(line, 2))
    assert line.has_begun(0)
    assert line.is_waiting(1)
    line.ends(0)
    assert line.has_begun(1)
    for go in line.go:
        go.set()


def test_no_more_are_ending_at_once_than_may_be(taken: Callable[[Iterator[int]], list[int]]) -> None:
    line = Line(3)
    taken(one_at_a_time(line, 3))
    assert line.has_begun(0)
    line.ends(0)
    assert line.has_begun(1)
    line.ends(1)
    assert line.is_waiting(2), "item 0 is ending still"
    line.go[0].set()
    assert line.has_begun(2)
    line.ends(2)
    line.ends(2)
    for go in line.go:
        go.set()


def test_results_come_in_order_also_where_the_next_ended_first(taken: Callable[[Iterator[int]], list[int]]) -> None:
    line = Line(3)
    found = taken(one_at_a_time(line, 3))
    assert line.has_begun(0)
    line.ends(0)
    line.go[1].set()
    assert line.has_begun(1)
    line.go[0].set()
    line.go[2].set()
    assert line.has_begun(2)
    while len(found) < 3:
        threading.Event().wait(0.01)
    assert found == [0, 1, 2]


def test_after_the_failure_of_one_that_is_ending_nothing_more_is_started() -> None:
    line = Line(4)

    def work(item: int, turn: Turn) -> int:
        if item == 0:
            turn.ends()
            assert line.has_begun(1)
            raise OSError("zero")
        line.begun[item].set()
        return item

    with pytest.raises(OSError, match="zero"):
        list(run_overlapping(range(4), cost=lambda _: 10, work=work, budget_bytes=10, workers=1, endings=1))
    assert not line.begun[3].is_set()


def test_closing_waits_for_those_that_are_ending_and_starts_nothing() -> None:
    line = Line(4)
    line.go[0].set()
    results = one_at_a_time(line, 4)
    assert next(results) == 0
    opener = threading.Timer(0.05, line.go[1].set)
    opener.start()
    results.close()  # type: ignore[attr-defined]
    assert not line.begun[2].is_set()
    opener.join()


def work_until_unwanted(turn: Turn, stopped: list[int], item: int) -> int:
    for _ in range(1000):
        try:
            turn.check()
        except CancelledError:
            stopped.append(item)
            raise
        threading.Event().wait(0.01)
    return item


def test_work_that_asks_learns_of_the_failure_of_an_item_before_it() -> None:
    line, stopped = Line(3), list[int]()

    def work(item: int, turn: Turn) -> int:
        line.begun[item].set()
        if item == 1:
            turn.ends()
            assert line.has_begun(2)
            raise OSError("one")
        if item == 2:
            return work_until_unwanted(turn, stopped, item)
        turn.check()
        return item

    with pytest.raises(OSError, match="one"):
        list(run_overlapping(range(3), cost=lambda _: 10, work=work, budget_bytes=10, workers=1, endings=1))
    assert stopped == [2]


def test_work_that_asks_learns_that_nobody_takes_results_any_more() -> None:
    stopped = list[int]()

    def work(item: int, turn: Turn) -> int:
        return item if item == 0 else work_until_unwanted(turn, stopped, item)

    results = run_overlapping(range(2), cost=lambda _: 10, work=work, budget_bytes=20, workers=2, endings=0)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert stopped in ([], [1]), "item 1 was stopped, or never begun"


def test_an_item_that_came_early_waits_until_the_one_in_whose_place_it_came_has_ended() -> None:
    line, seen = Line(3), list[bool]()

    def work(item: int, turn: Turn) -> int:
        line.begun[item].set()
        if item == 0:
            turn.await_others()
            turn.ends()
            assert line.has_begun(1)
            assert line.go[0].wait(PATIENCE_SECONDS)
        if item == 1:
            opener = threading.Timer(0.1, line.go[0].set)
            opener.start()
            turn.await_others()
            seen.append(line.go[0].is_set())
            turn.await_others()
        return item

    results = run_overlapping(range(3), cost=lambda _: 10, work=work, budget_bytes=10, workers=1, endings=1)
    assert list(results) == [0, 1, 2]
    assert seen == [True]


def test_items_that_were_admitted_before_one_was_ending_are_not_early() -> None:
    line = Line(2)

    def work(item: int, turn: Turn) -> int:
        line.begun[item].set()
        if item == 0:
            assert line.has_begun(1)
            turn.ends()
            assert line.go[0].wait(PATIENCE_SECONDS)
        else:
            assert line.has_begun(0)
            turn.await_others()
            line.go[0].set()
        return item

    results = run_overlapping(range(2), cost=lambda _: 10, work=work, budget_bytes=20, workers=2, endings=1)
    assert list(results) == [0, 1]


def test_an_item_that_waits_for_one_before_it_learns_of_its_failure() -> None:
    line, stopped = Line(3), list[int]()

    def work(item: int, turn: Turn) -> int:
        line.begun[item].set()
        if item == 1:
            turn.ends()
            assert line.go[1].wait(PATIENCE_SECONDS)
            raise OSError("one")
        if item == 2:
            threading.Timer(0.1, line.go[1].set).start()
            try:
                turn.await_others()
            except CancelledError:
                stopped.append(item)
                raise
        return item

    with pytest.raises(OSError, match="one"):
        list(run_overlapping(range(3), cost=lambda _: 10, work=work, budget_bytes=10, workers=1, endings=1))
    assert stopped == [2]
