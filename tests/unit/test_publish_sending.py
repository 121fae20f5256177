"""What is told of the bytes of a file on its way into a store, and what a watch makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from hubshard.engine import Turn
from hubshard.events import Event, Operation
from hubshard.protocols import Content, Staged
from hubshard.publish.outgoing import OutFile
from hubshard.publish.sending import Sender
from hubshard.watch import LimitError, Limits, Watch

BLOCKS = [b"a" * 100, b"b" * 100, b"c" * 100]
TURN = Turn(ends=lambda: None, await_others=lambda: None, check=lambda: None)


def send(tries: Iterable[tuple[int, int]], on_event: Callable[[Event], None]) -> None:
    """A store that reads the file once for each of the tries: so many blocks, and takes so many bytes."""

    def stage(path: str, data: Content, **of_file: Any) -> Staged:
        assert callable(data)
        for blocks, taken in tries:
            content = iter(data())
            for _ in range(blocks):
                next(content)
            next(content, None)
            if taken:
                of_file["on_sent"](taken)
        return Staged(path, 300, "0" * 64, {"mode": "xet"}, nbytes_sent=300)

    op = Operation("publish", "org/model", on_event)
    op.start(300)
    Sender(stage, op, None, lambda *_: None).send(OutFile("model.safetensors", 300, lambda: BLOCKS), None, None, TURN)


@pytest.mark.parametrize(
    ("tries", "told"),
    [
        ([(3, 300)], 300),
        ([(2, 0), (3, 300)], 300),
        ([(3, 0), (3, 0), (3, 300)], 300),
        ([(3, 100), (3, 0), (3, 0), (3, 200)], 600),
        ([(1, 50), (2, 0), (3, 250)], 400),
    ],
    ids=["once", "further", "in vain", "after some were sent", "anew and further"],
)
def test_bytes_are_told_as_read_anew_only_where_some_were_sent_since(tries: list[tuple[int, int]], told: int) -> None:
    events: list[Event] = []
    send(tries, events.append)
    assert sum(event.nbytes for event in events if event.kind == "read") == told


def test_a_source_that_is_read_again_and_again_for_a_store_that_takes_nothing_stands_still() -> None:
    now = [0.0]
    watch = Watch(Limits(stall_seconds=10), clock=lambda: now[0])

    def on_event(event: Event) -> None:
        watch(event)
        now[0] += 1

    def in_vain() -> Iterable[tuple[int, int]]:
        for _ in range(20):
            yield 3, 0
            now[0] += 1
            watch.check()
            on_event(Event("publish", "retry", "model.safetensors"))

    with pytest.raises(LimitError, match="no byte has moved"):
        send(in_vain(), on_event)
    assert now[0] < 20
