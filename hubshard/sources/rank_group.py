"""Ranks that act together without marching in step: messages, and parts of tensors that one asks of another.

Over a gloo group of its own. Each rank has a mailbox, which a thread empties: it answers requests for parts of what the
rank holds, keeps messages, and notes who is alive. A rank never waits for another one's progress, only for an answer.

Imports torch: import this module only where a process group is at hand.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hubshard.errors import FormatError, HubshardError, StoreError
from hubshard.messages import one_line
from hubshard.sources.plain_errors import error_of, plain_error
from hubshard.sources.thread_buffer import ThreadBuffer
from hubshard.tensors import MAX_DIMENSIONS, Box

__all__ = ["Job", "RankGroup", "Wanted", "job_of"]

_STOP = "stop"
_READ, _MESSAGE, _ALIVE, _END = range(1, 5)
_HEADER_WORDS = 8 + 2 * MAX_DIMENSIONS
_MAILBOX, _PAYLOAD, _FIRST_ANSWER = 1, 2, 16  # tags
_STATUS_BYTES = 8
_BEATS = 12  # signs of life within the limit of silence
_LONGEST_BEAT_SECONDS = 5.0
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """The processes of a process group.

    Attributes:
        rank: of this process, within the group.
        members: their ranks in the default process group, in order.
        store: that all of them see, for this group alone.
    """

    rank: int
    members: tuple[int, ...]
    store: Any


def job_of(process_group: Any) -> Job | None:
    """The processes of a group, or of the default one; None where there is none.

    Raises:
        FormatError: this process is not of the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise FormatError(
            "this process is not of the process group that is to publish", hint="call it on those that are"
        )
    members = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    name = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
    whole = distributed_c10d._get_default_store()  # noqa: SLF001  # there is no public one
    return Job(rank, members, distributed_c10d.PrefixStore(f"hubshard/publish/{name}", whole))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A part of a tensor that another rank holds.

    Attributes:
        rank: which.
        number: of the tensor.
        box: within what that rank holds.
        cast: how its elements are to be cast, as the ranks have agreed; 0 for not at all.
        nbytes: of the answer.
    """

    rank: int
    number: int
    box: Box
    cast: int
    nbytes: int


Serve = Callable[[int, Box, int], torch.Tensor]
"""Gives the box of a tensor of this rank, by its number, cast so: contiguous, on the CPU, of any dtype."""


class RankGroup:
    """This rank among those that act together. Made by all of them, in the thread that makes process groups.

    Ranks are counted within the group, from 0, which leads.

    Args:
        ranks: those of the default process group that take part, in order.
        limit_seconds: of silence after which a rank counts as gone.

    Attributes:
        rank: this one.
        size: how many there are.
        serve: answers the others; to be set before any of them may ask.
    """

    def __init__(self, ranks: Sequence[int], *, limit_seconds: float) -> None:
        self.rank = list(ranks).index(dist.get_rank())
        self.size = len(ranks)
        self.serve: Serve | None = None
        self._limit_seconds = limit_seconds
        is_part = self.size < dist.get_world_size()
        self._group: Any = dist.new_group(
            list(ranks), backend="gloo", timeout=timedelta(seconds=limit_seconds), use_local_synchronization=is_part
        )
        self._tags = count(_FIRST_ANSWER)
        self._sending: Mapping[int, threading.Lock] = defaultdict(threading.Lock)
        self._buffer = ThreadBuffer()
        self._changed = threading.Condition()
        self._inbox: Mapping[tuple[str, int], deque[Any]] = defaultdict(deque)
        self._heard = dict.fromkeys(range(self.size), time.monotonic())
        self._gone: dict[int, StoreError] = {}
        self._done: set[int] = set()
        self._is_closed = False
        self._failure: HubshardError | None = None
        self._told: Mapping[str, Any] | None = None  # by another rank, of its failure
        self._ended = threading.Event()
        # no daemon: torch cannot bear that a thread waits within it while the interpreter ends
        self._mailbox = threading.Thread(target=self._receive, name="hubshard-mailbox")
        self._beat = threading.Thread(target=self._tell_alive, name="hubshard-alive", daemon=True)
        self._mailbox.start()
        self._beat.start()

    # Messages

    def tell(self, rank: int, kind: str, body: Any = None) -> None:
        """Send a message; returns when the other rank has it.

        Args:
            rank: to whom.
            kind: under which it is waited for.
            body: JSON values.

        Raises:
            StoreError: that rank is gone.
        """
        raw = torch.frombuffer(bytearray(json.dumps([kind, body]).encode()), dtype=torch.uint8)
        with self._sending[rank]:
            self._send(rank, _header(_MESSAGE, raw.numel()), _MAILBOX)
            self._send(rank, raw, _PAYLOAD)

    def tell_all(self, kind: str, body: Any = None) -> None:
        """Send a message to all others, those that are gone left out."""
        for rank in range(self.size):
            if rank != self.rank:
                with contextlib.suppress(StoreError):
                    self.tell(rank, kind, body)

    def hear(self, rank: int, kind: str) -> Any:
        """Wait for a message; its body. As long as it takes, while the other rank is alive.

        Args:
            rank: from whom.
            kind: of the message.

        Raises:
            HubshardError: the work has failed, here or elsewhere.
            StoreError: that rank is gone.
        """
        with self._changed:
            while not self._inbox[kind, rank]:
                if self._failure is not None:
                    raise self._failure
                self._check_alive(rank)
                self._changed.wait(_LOOK_SECONDS)
            return self._inbox[kind, rank].popleft()

    def heard(self, kind: str) -> Iterator[tuple[int, Any]]:
        """Messages of one kind that have come, with who sent each; does not wait."""
        for rank in range(self.size):
            with self._changed:
                bodies = list(self._inbox[kind, rank])
                self._inbox[kind, rank].clear()
            for body in bodies:
                yield rank, body

    def stop(self, error: HubshardError) -> None:
        """The work has failed: whoever waits or asks on this rank gets this error, if it is the first."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def give_up(self, error: BaseException) -> None:
        """Tell the others that the work has failed: rank 0 tells all, the others tell rank 0, and it them."""
        told = self._told or plain_error(error, self.rank)
        if self.rank == 0:
            self.tell_all(_STOP, told)
        else:
            with contextlib.suppress(StoreError):
                self.tell(0, _STOP, told)

    # Parts of tensors

    def fetch(self, wanted: Sequence[Wanted]) -> Iterator[torch.Tensor]:
        """The bytes of parts that other ranks hold, in order: each a uint8 tensor.

        From several threads at once. What a thread gets is valid until it asks again.

        Raises:
            HubshardError: what `stop` was given.
            StoreError: a rank is gone, or could not read its part.
        """
        if self._failure is not None:
            raise self._failure
        tag = next(self._tags)
        pending = self._expect(wanted, tag)
        for part in wanted:
            box = [len(part.box.shape), *part.box.offset, *part.box.shape]
            header = _header(_READ, part.nbytes, tag, part.number, part.cast, *box)
            with self._sending[part.rank]:
                self._send(part.rank, header, _MAILBOX)
        for part, (answer, work) in zip(wanted, pending, strict=True):
            self._tried(part.rank, work.wait)
            if not int(answer[-1]):
                raise self._failure or StoreError(f"rank {part.rank} could not read its part of a tensor")
            yield answer[: part.nbytes]

    def close(self) -> None:
        """End it: this rank asks and tells no more. Others are answered until they are done too.

        Where some rank is gone the group is left as it is, since nobody can be waited for; the mailbox ends within the
        limit of silence.
        """
        self._is_closed = True
        if self.rank != 0:
            self._hush()
            self._say_end(0)
        with self._changed:
            others = range(1, self.size) if self.rank == 0 else range(1)
            self._changed.wait_for(
                lambda: all(rank in self._done or rank in self._gone for rank in others), self._limit_seconds
            )
        if self.rank == 0:
            self._hush()
            for rank in others:
                self._say_end(rank)
        if not self._gone and dist.is_initialized():
            self._mailbox.join(self._limit_seconds)
            dist.destroy_process_group(self._group)

    # How

    def _expect(self, wanted: Sequence[Wanted], tag: int) -> list[tuple[torch.Tensor, Any]]:
        # answers of one rank under one tag come in the order of the questions
        room = self._buffer.of(sum(_answer_bytes(part.nbytes) for part in wanted))
        answers, at = [], 0
        for part in wanted:
            answers.append(room[at : at + part.nbytes + _STATUS_BYTES])
            at += _answer_bytes(part.nbytes)
        return [
            (answer, self._tried(part.rank, partial(self._group.recv, [answer], part.rank, tag)))
            for part, answer in zip(wanted, answers, strict=True)
        ]

    def _send(self, rank: int, tensor: torch.Tensor, tag: int) -> None:
        self._tried(rank, lambda: self._group.send([tensor], rank, tag).wait())

    def _tried(self, rank: int, act: Callable[[], Any]) -> Any:
        if rank in self._gone:
            raise self._gone[rank]
        try:
            return act()
        except RuntimeError as error:  # what torch.distributed raises
            raise self._lose(rank, str(error)) from error

    def _lose(self, rank: int, why: str) -> StoreError:
        gone = StoreError(
            f"rank {rank} is gone, or cannot be reached: {_sentence(why)}",
            hint="see what became of it; then publish again: what was finished is not sent again",
        )
        with self._changed:
            gone = self._gone.setdefault(rank, gone)
            self._failure = self._failure or gone
            self._changed.notify_all()
        return gone

    def _check_alive(self, rank: int) -> None:
        if rank in self._gone:
            raise self._gone[rank]
        silent_seconds = time.monotonic() - self._heard[rank]
        if rank != self.rank and silent_seconds > self._limit_seconds:
            raise self._lose(rank, f"it has been silent for {silent_seconds:.0f} s")

    def _tell_alive(self) -> None:
        pause = min(self._limit_seconds / _BEATS, _LONGEST_BEAT_SECONDS)
        others = range(1, self.size) if self.rank == 0 else range(1)
        while not self._ended.wait(pause):
            for rank in others:
                with contextlib.suppress(StoreError), self._sending[rank]:
                    self._send(rank, _header(_ALIVE), _MAILBOX)

    def _hush(self) -> None:
        self._ended.set()
        self._beat.join()

    def _say_end(self, rank: int) -> None:
        with contextlib.suppress(StoreError), self._sending[rank]:
            self._send(rank, _header(_END), _MAILBOX)

    def _receive(self) -> None:
        # rank 0 ends when all others have said so, they when rank 0 has
        waiting = self.size - 1 if self.rank == 0 else 1
        try:
            while waiting and not (self._is_closed and self._gone):
                header = torch.empty(_HEADER_WORDS, dtype=torch.int64)
                work = self._group.recv_anysource([header], _MAILBOX)
                work.wait()
                source = int(work._source_rank())  # noqa: SLF001  # there is no other way to learn it
                waiting -= self._take(source, header.tolist())
        except RuntimeError as error:
            self.stop(StoreError(f"no rank can be heard any more: {_sentence(str(error))}"))

    def _take(self, source: int, words: list[int]) -> bool:
        """Take in what came; whether it was the last of its sender."""
        kind, nbytes = words[:2]
        message = None
        if kind == _MESSAGE:
            raw = torch.empty(nbytes, dtype=torch.uint8)
            self._group.recv([raw], source, _PAYLOAD).wait()
            message = json.loads(bytes(raw.numpy()))
        with self._changed:
            self._heard[source] = time.monotonic()
            if message is not None and message[0] == _STOP:
                self._told = self._told or message[1]
                self.stop(error_of(message[1]))
            elif message is not None:
                self._inbox[message[0], source].append(message[1])
            if kind == _END:
                self._done.add(source)
            self._changed.notify_all()
        if kind == _READ:
            self._answer(source, words)
        return kind == _END

    def _answer(self, source: int, words: list[int]) -> None:
        nbytes, tag, number, cast, ndim = words[1:6]
        box = Box(tuple(words[6 : 6 + ndim]), tuple(words[6 + ndim : 6 + 2 * ndim]))
        answer = self._buffer.of(nbytes + _STATUS_BYTES)
        answer[nbytes:] = 0
        try:
            if self.serve is None:
                raise StoreError(f"rank {self.rank} was asked for a tensor before it has any")  # noqa: TRY301
            answer[:nbytes] = self.serve(number, box, cast).view(-1).view(torch.uint8)
            answer[-1] = 1
        except Exception as error:  # noqa: BLE001  # whoever asked is told that it failed, and this rank why
            text = f"rank {self.rank} cannot read its part of a tensor: {type(error).__name__}: {error}"
            self.stop(error if isinstance(error, HubshardError) else StoreError(text))
        with contextlib.suppress(StoreError):  # who asked is gone
            self._send(source, answer, tag)


def _sentence(text: str) -> str:
    """The first sentence of what gloo says, without the place in its source."""
    return one_line(re.sub(r"^\[[^\]]*\] ", "", text)).partition(". ")[0][:200]


def _answer_bytes(nbytes: int) -> int:
    return (nbytes + _STATUS_BYTES + 7) // 8 * 8  # so that the next one is aligned for any dtype


def _header(*words: int) -> torch.Tensor:
    header = torch.zeros(_HEADER_WORDS, dtype=torch.int64)
    header[: len(words)] = torch.tensor(words)
    return header
