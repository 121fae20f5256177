from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from hubshard.steps.save_cost import Measured, PastSave, SaveCost, cost_in, measured, run_in, step_in, step_message
from hubshard.store.commit import publish_id_in, with_publish_id

COST = SaveCost(stall_seconds=0.41, write_seconds=3.08, push_seconds=41.7, nbytes=84 * 10**9)
BEGAN = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)


def past(step: int, seconds: float | None, cost: SaveCost | None = None) -> PastSave:
    return PastSave(step, None if seconds is None else BEGAN + timedelta(seconds=seconds), cost)


def test_a_message_tells_what_the_save_cost_below_its_title() -> None:
    title, _, rest = step_message(1000, COST).partition("\n")
    assert title == "Step 1000"
    assert rest.split() == [
        *("Hubshard-Stall-Seconds:", "0.410", "Hubshard-Write-Seconds:", "3.080"),
        *("Hubshard-Push-Seconds:", "41.700", "Hubshard-Bytes:", "84000000000"),
    ]


def test_the_cost_is_read_back_with_and_without_the_title_and_beside_a_publish_id() -> None:
    title, _, rest = step_message(7, COST).partition("\n")
    whole = with_publish_id(rest, "step-7-ab")
    assert cost_in(whole) == cost_in(f"{title}\n\n{whole}") == cost_in(whole.replace("\n", "\r\n")) == COST
    assert publish_id_in(whole) == "step-7-ab"


def test_a_message_without_a_cost_is_the_title_alone() -> None:
    assert step_message(7) == "Step 7"
    assert cost_in("Step 7") is None
    assert run_in("Step 7") is None


def test_a_message_tells_the_run_with_and_without_a_cost() -> None:
    for cost in (None, COST):
        message = step_message(7, cost, "5f0c2a9be417")
        assert step_in(message.partition("\n")[0]) == 7
        assert run_in(with_publish_id(message, "step-7-ab")) == "5f0c2a9be417"
        assert cost_in(message) == cost


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Hubshard-Bytes: 84000000000", ""),
        ("Hubshard-Write-Seconds: 3.080", ""),
        ("Stall-Seconds: 0.410", "Stall-Seconds: nan"),
        ("Stall-Seconds: 0.410", "Stall-Seconds: -0.410"),
        ("Stall-Seconds: 0.410", "Stall-Seconds: ٣.410"),
        ("Hubshard-Push", "> Hubshard-Push"),
        ("84000000000", "8" * 19),
    ],
)
def test_what_does_not_tell_all_of_the_cost_tells_none(before: str, after: str) -> None:
    message = step_message(7, COST)
    assert cost_in(message.replace(before, after)) is None
    assert cost_in(message) == COST


def test_a_clock_that_went_back_makes_no_negative_seconds() -> None:
    cost = cost_in(step_message(7, SaveCost(-0.1, -0.0001, 0.0, 1)))
    assert cost == SaveCost(0.0, 0.0, 0.0, 1)


@pytest.mark.parametrize(
    ("title", "step"),
    [("Step 7", 7), ("Step 1000", 1000), ("Step 7 of 9", None), ("Remove step 7", None), ("Step -1", None), ("", None)],
)
def test_only_the_commit_that_shows_a_step_has_its_title(title: str, step: int | None) -> None:
    assert step_in(title) == step


def test_past_saves_are_told_by_their_medians() -> None:
    costs = [SaveCost(1.0, 10.0, 100.0, 1000), SaveCost(2.0, 30.0, 200.0, 3000), SaveCost(9.0, 20.0, 900.0, 2000)]
    found = measured([past(0, 0.0), *(past(10 * n, 22.0 * n, cost) for n, cost in enumerate(costs, 1))])
    assert found == Measured(3, SaveCost(2.0, 20.0, 200.0, 2000), 2.0, 4)


def test_a_step_takes_what_lies_between_two_commits_less_the_save() -> None:
    assert measured([past(0, 0.0), past(10, 25.0, SaveCost(5.0, 0.0, 0.0, 1))]).step_seconds == 2.0
    assert measured([past(0, 0.0), past(10, 25.0)]).step_seconds == 2.5


def test_nothing_is_told_where_the_run_went_back_or_no_date_is_known() -> None:
    assert measured([]) == Measured(0, None, None, 0)
    assert measured([past(10, 0.0), past(4, 10.0)]).step_seconds is None
    assert measured([past(1, None), past(2, 10.0), past(3, None)]).step_seconds is None
    assert measured([past(1, 10.0), past(2, 10.0)]).step_seconds is None
    assert measured([past(1, 0.0), past(2, None), past(3, 10.0)]).step_seconds == 5.0
