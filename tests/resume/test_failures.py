"""Several things that failed in the background, told as one."""

from __future__ import annotations

from hubshard.errors import StoreError
from hubshard.resume.saves.failures import merged


def test_of_several_failures_the_last_is_raised_and_tells_of_the_others() -> None:
    first, second = StoreError("step 1: no", retryable=True), StoreError("step 2: nor this")
    told = merged([first, second])
    assert isinstance(told, StoreError)
    assert str(told).startswith("step 2: nor this. Also failed: step 1: no")
    assert second.message == "step 2: nor this"


def test_one_failure_is_raised_as_it_is_and_many_are_counted() -> None:
    assert merged([]) is None
    error = ValueError("one")
    assert merged([error]) is error
    many = merged([ValueError(str(number)) for number in range(6)])
    assert str(many).startswith("5. Also failed: 4; 3; 2; and 2 more")
