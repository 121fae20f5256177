"""Limits of an operation, on a clock that the tests turn."""

from __future__ import annotations

import pytest

from hubshard.errors import FormatError
from hubshard.events import Event, operation
from hubshard.watch import LimitError, Limits, Watch


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Setting:
    """A watch that is not entered, so that the test alone looks at the clock."""

    def __init__(self, limits: Limits) -> None:
        self.clock = Clock()
        self.events: list[Event] = []
        self.broken: list[LimitError] = []
        self.watch = Watch(limits, self.events.append, on_break=self.broken.append, clock=self.clock)

    def tell(self, kind: str, nbytes: int = 0, operation: str = "publish", after: float = 0.0) -> None:
        self.clock.now += after
        self.watch(Event(operation, kind, "a file", nbytes))

    def look(self, after: float = 0.0) -> None:
        self.clock.now += after
        self.watch.check()


def test_one_retry_too_many_raises_in_whoever_tells_of_it() -> None:
    setting = Setting(Limits(max_retries=2))
    setting.tell("start", 100)
    setting.tell("retry")
    setting.tell("retry")
    with pytest.raises(LimitError, match="3 retries, and 2 are allowed") as caught:
        setting.tell("retry")
    assert not caught.value.retryable
    assert setting.broken == [caught.value]
    assert [event.kind for event in setting.events] == ["start", "retry", "retry", "retry", "error"]


def test_no_retry_at_all_may_be_allowed() -> None:
    setting = Setting(Limits(max_retries=0))
    with pytest.raises(LimitError):
        setting.tell("retry")


@pytest.mark.parametrize(("limit", "said"), [(0.25, "0.25 s"), (1.5, "1.5 s"), (90.0, "90 s")])
def test_a_short_silence_is_not_rounded_to_none(limit: float, said: str) -> None:
    setting = Setting(Limits(stall_seconds=limit - 0.001))
    setting.tell("start", 100)
    setting.look(after=limit)
    assert [str(error) for error in setting.broken] == [f"no byte has moved for {said}"]


@pytest.mark.parametrize("kind", ["sent", "received", "read", "hashed", "skipped"])
def test_silence_counts_from_the_last_byte(kind: str) -> None:
    setting = Setting(Limits(stall_seconds=10))
    setting.tell("start", 100)
    setting.tell(kind, 1, after=9)
    setting.look(after=9)
    assert setting.broken == []
    setting.look(after=2)
    assert [str(error) for error in setting.broken] == ["no byte has moved for 11 s"]
    setting.look(after=100)
    assert len(setting.broken) == 1


@pytest.mark.parametrize("kind", ["warning", "staging", "retry"])
def test_what_moves_no_byte_does_not_end_the_silence(kind: str) -> None:
    setting = Setting(Limits(stall_seconds=10))
    setting.tell("start", 100)
    setting.tell(kind, after=9)
    setting.look(after=2)
    assert len(setting.broken) == 1


def test_a_broken_limit_raises_at_the_next_progress_and_lets_last_words_pass() -> None:
    setting = Setting(Limits(stall_seconds=10))
    setting.tell("start", 100)
    setting.look(after=11)
    setting.tell("warning")
    setting.tell("error")
    with pytest.raises(LimitError):
        setting.tell("read", 5)


@pytest.mark.parametrize(
    ("operation", "kinds"),
    [("publish", ["staged", "skipped"]), ("pull", ["received", "skipped"]), ("load", ["received"])],
)
def test_there_is_no_silence_once_all_bytes_are_where_they_should_be(operation: str, kinds: list[str]) -> None:
    setting = Setting(Limits(stall_seconds=10, min_rate=1e9))
    setting.tell("start", 50 * len(kinds), operation)
    for kind in kinds:
        setting.tell(kind, 50, operation)
    setting.look(after=1000)
    assert setting.broken == []


@pytest.mark.parametrize("kind", ["commit", "end", "error"])
def test_there_is_no_silence_after_the_transfer(kind: str) -> None:
    setting = Setting(Limits(stall_seconds=10))
    setting.tell("start", 100)
    setting.tell(kind)
    setting.look(after=1000)
    assert setting.broken == []


def test_bytes_that_were_sent_of_a_file_that_is_not_stored_are_still_watched() -> None:
    setting = Setting(Limits(stall_seconds=10))
    setting.tell("start", 100)
    setting.tell("sent", 100)
    setting.look(after=11)
    assert len(setting.broken) == 1


def test_the_mean_rate_counts_once_the_window_has_passed() -> None:
    setting = Setting(Limits(min_rate=100, window_seconds=10))
    setting.tell("start", 10**9)
    setting.look(after=9)
    assert setting.broken == []
    for after in (0, 3, 4, 4, 4):
        setting.tell("sent", 500, after=after)
    assert setting.broken == []
    setting.tell("sent", 100, after=4)
    with pytest.raises(LimitError, match=r"60 B/s over the last 10 s, and 100 B/s is the least"):
        setting.tell("sent", 0, after=5)


def test_what_is_hashed_or_read_fast_is_not_slow() -> None:
    setting = Setting(Limits(min_rate=100, window_seconds=10))
    setting.tell("start", 10**9)
    for _ in range(50):
        setting.tell("hashed", 150, after=1)
    assert setting.broken == []


def test_the_thread_sees_a_stall_and_ends_with_the_block() -> None:
    clock = Clock()
    broken: list[LimitError] = []
    with Watch(Limits(stall_seconds=5), on_break=broken.append, clock=clock) as watch:
        watch(Event("pull", "start", nbytes=10))
        clock.now += 6
        watch._ended.wait(1.5)
    assert len(broken) == 1
    assert not watch._thread.is_alive()


def test_an_operation_ends_with_the_error_of_its_watch() -> None:
    setting = Setting(Limits(max_retries=0))

    def run() -> None:
        with operation("publish", "org/name", setting.watch) as op:
            op.start(100)
            op.retry("a file", "a cause", 1.5)

    with pytest.raises(LimitError):
        run()
    assert [event.kind for event in setting.events] == ["start", "retry", "error"]
    assert setting.events[1].wait_seconds == 1.5


@pytest.mark.parametrize("wrong", [{"max_retries": -1}, {"stall_seconds": 0.0}, {"min_rate": -1.0}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(FormatError, match=next(iter(wrong))):
        Limits(**wrong)  # type: ignore[arg-type]
