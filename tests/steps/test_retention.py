from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hubshard.errors import FormatError
from hubshard.steps.retention import Retention

STEPS = [100, 200, 300, 400, 500, 600]


def test_the_newest_are_kept_and_the_rest_expires_oldest_first() -> None:
    assert Retention(3).expired(STEPS, 700) == [100, 200, 300, 400]
    assert Retention(3).expired(STEPS, 600) == [100, 200, 300]
    assert Retention(1).expired(STEPS, 700) == STEPS
    assert Retention(7).expired(STEPS, 700) == []


def test_every_nth_and_the_pinned_are_kept_beside_the_newest() -> None:
    retention = Retention(2, keep_every=300, pinned=frozenset({100, 9999}))
    assert retention.expired(STEPS, 700) == [200, 400, 500]


def test_a_step_that_is_saved_again_counts_once() -> None:
    assert Retention(2).expired([100, 200, 200], 200) == []


def test_what_is_newer_than_the_saved_step_is_left_alone_and_does_not_count() -> None:
    assert Retention(2).expired([100, 200, 300, 900], 400) == [100, 200]


def test_nothing_expires_where_nothing_is() -> None:
    assert Retention(3).expired([], 1) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"keep": 0}, "at least one"),
        ({"keep": -1}, "at least one"),
        ({"keep": True}, "at least one"),
        ({"keep": 1.5}, "at least one"),
        ({"keep": 1, "keep_every": 0}, "keep_every=0"),
        ({"keep": 1, "pinned": frozenset({-1})}, "pinned: -1"),
        ({"keep": 1, "pinned": frozenset({"5"})}, "pinned: '5'"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(FormatError, match=said):
        Retention(**arguments)  # type: ignore[arg-type]


@given(
    st.sets(st.integers(0, 200)),
    st.integers(0, 250),
    st.integers(1, 6),
    st.none() | st.integers(1, 40),
    st.frozensets(st.integers(0, 200), max_size=3),
)
def test_what_expires_is_never_the_newest_the_pinned_the_nth_or_among_the_last(
    steps: set[int], newest: int, keep: int, keep_every: int | None, pinned: frozenset[int]
) -> None:
    expired = Retention(keep, keep_every, pinned).expired(steps, newest)
    assert expired == sorted(set(expired))
    assert set(expired) <= steps - pinned - {newest}
    assert all(step < newest for step in expired)
    assert keep_every is None or all(step % keep_every for step in expired)
    older = sorted(step for step in steps | {newest} if step <= newest)
    assert not set(expired) & set(older[-keep:])
    kept = set(older) - set(expired)
    assert all(
        step in older[-keep:] or step in pinned or (keep_every is not None and step % keep_every == 0) for step in kept
    )
    assert Retention(keep, keep_every, pinned).expired(kept, newest) == []
