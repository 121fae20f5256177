"""What an operation tells of itself, and its sums."""

from __future__ import annotations

import pytest

from hubshard.events import Event, Gathered, Totals, operation


def test_the_end_has_the_sums_of_all_events() -> None:
    events: list[Event] = []
    with operation("publish", "org/name", events.append) as op:
        op.start(100)
        op.tell("sent", "a", 30)
        op.tell("sent", "a", 20)
        op.tell("deduplicated", "a", 10)
        op.tell("skipped", "b", 40)
        op.tell("read", "a", 999)
        op.retry("a", "a cause", 0.5)
        totals = op.end("a commit")
    assert events[-1].totals == totals
    assert (events[-1].kind, events[-1].path, events[-1].nbytes) == ("end", "org/name", 50)
    counted = (totals.sent_bytes, totals.skipped_bytes, totals.deduplicated_bytes, totals.received_bytes)
    assert counted == (50, 40, 10, 0)
    assert totals.retries == 1
    assert all(event.totals is None for event in events[:-1])


def test_a_failure_is_told_and_raised() -> None:
    events: list[Event] = []
    with pytest.raises(KeyError), operation("pull", "org/name", events.append):
        raise KeyError("lost")
    assert [(event.kind, event.detail) for event in events] == [("error", "KeyError: 'lost'")]


def test_the_mean_rate_is_of_what_moved() -> None:
    assert Totals(sent_bytes=30, received_bytes=10, skipped_bytes=1000, seconds=4).bytes_per_second == 10
    assert Totals().bytes_per_second == 0


def test_bytes_are_gathered_until_they_are_worth_an_event() -> None:
    told: list[int] = []
    gathered = Gathered(told.append, least_bytes=10)
    for nbytes in (4, 5, 3, 20, 1):
        gathered.add(nbytes)
    gathered.flush()
    gathered.flush()
    assert told == [12, 20, 1]
