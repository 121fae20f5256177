"""Files that are sent in turn, and begun before it."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import pytest

from hubshard.publish.ahead import Ahead, Turn
from hubshard.publish.outgoing import OutFile

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = bytes(8 << 20)
NBYTES = 10 * len(BLOCK)


def file(name: str) -> OutFile:
    return OutFile(name, NBYTES, lambda: [BLOCK] * 10)


def test_before_its_turn_a_file_is_read_to_less_than_what_is_sent_in_one_block() -> None:
    turn, passed, is_asked_for = Turn(has_come=False), [0], threading.Event()

    def blocks() -> Iterator[bytes]:
        for number in range(10):
            if number == 5:
                is_asked_for.set()
            yield BLOCK

    def read() -> None:
        for block in turn.pace(blocks(), NBYTES):
            passed[0] += len(block)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert is_asked_for.wait(60)
    reader.join(0.3)
    assert passed[0] == 5 * len(BLOCK)
    turn.come()
    reader.join()
    assert passed[0] == NBYTES


def test_the_last_block_of_a_small_file_waits_too() -> None:
    turn = Turn(has_come=False)
    turn.give_up()
    with pytest.raises(CancelledError):
        list(turn.pace([b"small"], 5))


def test_each_file_is_begun_when_the_one_before_has_been_read_and_ends_after_its_turn() -> None:
    said: list[str] = []
    begun = {name: threading.Event() for name in "abc"}

    def send(out: OutFile, turn: Turn) -> str:
        begun[out.path].set()
        for _ in turn.pace(out.data(), out.nbytes):
            pass
        said.append(out.path)
        return out.path

    files = [file(name) for name in "abc"]
    with Ahead(files, send, may_begin=lambda _: True, workers=1) as ahead:
        assert ahead.send(files[0]) == "a"
        assert begun["b"].wait(60)
        assert not begun["c"].is_set()
        assert ahead.send(files[1]) == "b"
        assert ahead.send(files[2]) == "c"
    assert said == ["a", "b", "c"]


def test_what_was_begun_and_is_not_wanted_any_more_is_given_up() -> None:
    ended: list[str] = []

    def send(out: OutFile, turn: Turn) -> None:
        try:
            for _ in turn.pace(out.data(), out.nbytes):
                pass
        except CancelledError:
            ended.append(out.path)
            raise

    files = [file("a"), file("b")]

    def fail_after_the_first() -> None:
        with Ahead(files, send, may_begin=lambda _: True, workers=1) as ahead:
            ahead.send(files[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_after_the_first()
    assert ended == ["b"]


def test_what_fails_early_fails_at_its_turn() -> None:
    def send(out: OutFile, turn: Turn) -> None:
        if out.path == "b":
            raise ValueError("b cannot be read")
        for _ in turn.pace(out.data(), out.nbytes):
            pass

    files = [file("a"), file("b")]
    with Ahead(files, send, may_begin=lambda _: True, workers=1) as ahead:
        ahead.send(files[0])
        with pytest.raises(ValueError, match="b cannot"):
            ahead.send(files[1])


def test_a_file_that_may_not_be_begun_early_waits_for_its_turn() -> None:
    begun: list[str] = []

    def send(out: OutFile, turn: Turn) -> None:
        begun.append(out.path)
        for _ in turn.pace(out.data(), out.nbytes):
            pass

    files = [file("a"), file("b")]
    with Ahead(files, send, may_begin=lambda out: out.path != "b", workers=1) as ahead:
        ahead.send(files[0])
        assert begun == ["a"]
        ahead.send(files[1])
    assert begun == ["a", "b"]
