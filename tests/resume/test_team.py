"""Ranks that act together, on threads with a store in memory: what they tell each other, and what fails on some."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from hubshard.errors import ConflictError, FormatError, HubshardError, StoreError
from hubshard.protocols import Revision
from tests.old_torch import gloo_limits
from tests.thread_ranks import job_of_one, on_ranks

dist = pytest.importorskip("torch.distributed")

from hubshard.resume.ranks import LostRankError  # noqa: E402
from hubshard.resume.team import Team, _Wire  # noqa: E402  # imports torch


@pytest.fixture(autouse=True)
def _job() -> Iterator[None]:
    with job_of_one():
        yield


def on_teams(size: int, act: Callable[[Team], Any]) -> list[Any]:
    """What each rank comes to, in a thread of its own: what it returned, or the error."""

    def run(rank: int) -> Any:
        team = Team(_Wire("hubshard/test", rank, size, says=False), "hubshard/test")
        try:
            return act(team)
        finally:
            team.close()

    return on_ranks(size, run, caught=(HubshardError, ArithmeticError))


def as_text(errors: Sequence[Any]) -> list[str]:
    return [f"{type(error).__name__}: {error}" for error in errors]


def test_ranks_learn_what_the_others_found_and_get_their_shares() -> None:
    def act(team: Team) -> Any:
        return [
            team.each(lambda: (team.rank, None)),
            team.first(lambda: Revision("main", str(team.rank))),
            team.join(lambda: {team.rank: b"\0"}, lambda found: frozenset(key for each in found for key in each)),
            team.share_out(lambda: team.rank, lambda ranks: [2**70 * rank for rank in ranks]),
            team.any_of([team.rank == 2, False]),
        ]

    every = [[(0, None), (1, None), (2, None)], Revision("main", "0"), frozenset({0, 1, 2})]
    assert on_teams(3, act) == [[*every, 2**70 * rank, [True, False]] for rank in range(3)]


def fail(team: Team, rank: int, error: Exception) -> None:
    if team.rank == rank:
        raise error


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_ours_is_the_same_on_all_ranks(rank: int) -> None:
    def act(team: Team) -> Any:
        error = ConflictError("it moved", hint="look")
        return team.each(lambda: fail(team, rank, error))

    found = on_teams(2, act)
    assert as_text(found) == [f"ConflictError: {'rank 1: ' if rank else ''}it moved"] * 2
    assert [error.hint for error in found] == ["look", "look"]


@pytest.mark.parametrize("share", [False, True])
def test_any_other_error_is_raised_as_it_is_where_it_came_up_and_told_to_the_others(share: bool) -> None:
    def act(team: Team) -> Any:
        error = ZeroDivisionError("a bad day")
        if share:
            return team.share_out(lambda: fail(team, 1, error), list)
        return team.join(lambda: fail(team, 1, error), len)

    other, own = on_teams(2, act)
    assert as_text([other, own]) == ["StoreError: rank 1: ZeroDivisionError: a bad day", "ZeroDivisionError: a bad day"]
    assert own.__traceback__ is not None


def test_what_cannot_be_told_is_an_error_and_nobody_waits() -> None:
    found = on_teams(2, lambda team: team.each(lambda: object() if team.rank else None))
    assert [type(error) for error in found] == [FormatError, FormatError]
    assert str(found[0]).startswith("rank 1: what is told to other ranks")


@pytest.mark.parametrize("lost", [0, 2])
def test_where_a_rank_is_gone_every_other_learns_it_also_one_that_waits_for_a_third(lost: int) -> None:
    all_know = threading.Barrier(2, timeout=30)  # nobody closes anything before

    def go_on(team: Team) -> None:
        while True:
            team.each(lambda: None)

    def act(team: Team) -> Any:
        team.each(lambda: None)
        if team.rank == lost:
            return None
        with pytest.raises(LostRankError, match=f"rank {team.rank} cannot reach the others"):
            go_on(team)
        all_know.wait()
        with pytest.raises(LostRankError):  # and does not wait again
            team.first(lambda: None)
        return "told"

    assert on_teams(3, act) == [None if rank == lost else "told" for rank in range(3)]


@gloo_limits
def test_ranks_that_part_do_not_wait_for_ever_for_one_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubshard.resume.team._PART_SECONDS", 0.2)
    has_left = threading.Event()

    def act(team: Team) -> Any:
        if team.rank == 1:
            return has_left.wait(60)
        team.part()
        has_left.set()
        return "left"

    assert on_teams(2, act) == ["left", True]


def test_a_rank_that_leaves_in_the_middle_keeps_nobody_waiting() -> None:
    def act(team: Team) -> Any:
        def leave(found: list[None]) -> None:
            assert len(found) == 2
            raise KeyboardInterrupt

        try:
            return team.join(lambda: None, leave)
        except KeyboardInterrupt:
            return "interrupted"

    interrupted, told = on_teams(2, act)
    assert interrupted == "interrupted"
    assert type(told) is StoreError
    assert str(told) == "KeyboardInterrupt: "
