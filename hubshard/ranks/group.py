"""Ranks that act together without marching in step: messages, and parts of tensors that one asks of another.

Over a gloo backend of its own. Each rank has a mailbox, which a thread empties: it answers requests for parts of what
the rank holds, keeps messages, and notes who is alive. A rank never waits for another one's progress, only for an
answer.

Imports torch: import this module only where a process group is at hand.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from hubshard.errors import FormatError, HubshardError, StoreError
from hubshard.ranks.gloo import gloo_backend, reason_of, shared_store
from hubshard.ranks.telling import error_of, plain_error, told_bytes, told_value
from hubshard.sources.distributed import Wanted
from hubshard.sources.thread_buffer import ThreadBuffer
from hubshard.tensors import MAX_DIMENSIONS, Box

__all__ = ["Job", "RankGroup", "job_of"]

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
        name: of this group alone, for what is kept in the store of the default process group.
    """

    rank: int
    members: tuple[int, ...]
    name: str

    @property
    def store(self) -> Any:
        """A `torch.distributed.Store` that all of them see, for this group alone."""
        return shared_store(self.name)


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
    return Job(rank, members, f"hubshard/publish/{hashlib.sha256(repr(members).encode()).hexdigest()[:16]}")


Serve = Callable[[int, Box, int], torch.Tensor]
"""Gives the box of a tensor of this rank, by its number, cast so: contiguous, on the CPU, of any dtype."""


class RankGroup:
    """This rank among those that act together. Made by all of them, at the same time.

    Ranks are counted within the job, from 0, which leads.

    Args:
        job: the processes.
        call: a name that they have agreed on, such as none was before.
        limit_seconds: of silence after which a rank counts as gone.

    Attributes:
        rank: this one.
        size: how many there are.
        serve: answers the others; to be set before any of them may ask.

    Raises:
        StoreError: some rank has not come, or is gone.
    """

    def __init__(self, job: Job, call: str, *, limit_seconds: float) -> None:
        self.rank = job.rank
        self.size = len(job.members)
        self.serve: Serve | None = None
        self._limit_seconds = limit_seconds
        self._backend = gloo_backend(
            f"{job.name}/{call}", self.rank, self.size, meet_seconds=limit_seconds, limit_seconds=limit_seconds
        )
        self._tags = count(_FIRST_ANSWER)
        self._sending = {rank: threading.Lock() for rank in range(self.size)}
        self._buffer = ThreadBuffer()
        self._changed = threading.Condition()
        self._inbox: Mapping[tuple[str, int], deque[Any]] = defaultdict(deque)
        self._heard = dict.fromkeys(range(self.size), time.monotonic())
        self._gone: dict[int, StoreError] = {}
        self._partners = set(range(1, self.size) if self.rank == 0 else range(1))  # whose life is watched
        self._done: set[int] = set()
        self._parted: set[int] = set()  # of whom nothing more will come
        self._failure: HubshardError | None = None
        self._told: Mapping[str, Any] | None = None  # by another rank, of its failure
        self._ended = threading.Event()
        self._mailbox = threading.Thread(target=self._receive, name="hubshard-mailbox", daemon=True)
        self._beat = threading.Thread(target=self._tell_alive, name="hubshard-alive", daemon=True)
        self._mailbox.start()
        self._beat.start()
        # torch does not bear it well that a message comes in while the interpreter ends
        atexit.register(self._await_mailbox, None)

    # Messages

    def tell(self, rank: int, kind: str, body: Any = None) -> None:
        """Send a message; returns when the other rank has it.

        Args:
            rank: to whom.
            kind: under which it is waited for.
            body: plain data; see `told_bytes`.

        Raises:
            StoreError: that rank is gone.
        """
        raw = torch.frombuffer(bytearray(told_bytes((kind, body))), dtype=torch.uint8)
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
        why = self._told or plain_error(error, self.rank)
        if self.rank == 0:
            self.tell_all(_STOP, why)
        else:
            with contextlib.suppress(StoreError):
                self.tell(0, _STOP, why)

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

        Those that are gone are not waited for. Where rank 0 is, the mailbox, and the connections with it, ends with the
        process, or within the limit of silence.
        """
        if self.rank != 0:
            self._hush()
            self._say_end(0)
        with self._changed:
            self._changed.wait_for(lambda: self._partners <= self._done | self._gone.keys(), self._limit_seconds)
        if self.rank == 0:
            self._hush()
            for rank in self._partners:
                self._say_end(rank)
        self._await_mailbox(self._limit_seconds)
        if not self._mailbox.is_alive():
            self._backend = None  # which closes the connections
            atexit.unregister(self._await_mailbox)

    # How

    def _expect(self, wanted: Sequence[Wanted], tag: int) -> list[tuple[torch.Tensor, Any]]:
        # answers of one rank under one tag come in the order of the questions
        room = self._buffer.of(sum(_answer_bytes(part.nbytes) for part in wanted))
        answers, at = [], 0
        for part in wanted:
            answers.append(room[at : at + part.nbytes + _STATUS_BYTES])
            at += _answer_bytes(part.nbytes)
        return [
            (answer, self._tried(part.rank, partial(self._backend.recv, [answer], part.rank, tag)))
            for part, answer in zip(wanted, answers, strict=True)
        ]

    def _send(self, rank: int, tensor: torch.Tensor, tag: int) -> None:
        self._tried(rank, lambda: self._backend.send([tensor], rank, tag).wait())

    def _tried(self, rank: int, act: Callable[[], Any]) -> Any:
        if rank in self._gone:
            raise self._gone[rank]
        try:
            return act()
        except RuntimeError as error:  # what torch.distributed raises
            raise self._lose(rank, reason_of(error)) from error

    def _lose(self, rank: int, why: str) -> StoreError:
        gone = StoreError(
            f"rank {rank} is gone, or cannot be reached: {why}",
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
        while not self._ended.wait(pause):
            for rank in self._partners:
                with contextlib.suppress(StoreError), self._sending[rank]:
                    self._send(rank, _header(_ALIVE), _MAILBOX)

    def _hush(self) -> None:
        self._ended.set()
        self._beat.join()

    def _await_mailbox(self, seconds: float | None) -> None:
        # gloo tells nobody who waits for any rank that one has closed its connection: nothing wakes the mailbox then
        is_forsaken = self._partners <= self._parted | self._gone.keys()
        self._mailbox.join(_LOOK_SECONDS if is_forsaken else seconds)

    def _say_end(self, rank: int) -> None:
        with contextlib.suppress(StoreError), self._sending[rank]:
            self._send(rank, _header(_END), _MAILBOX)

    def _receive(self) -> None:
        # Nothing but a message wakes it. So each of the others tells rank 0 twice: that it is done, and then, as its
        # last word, that it has heard the same from rank 0, which by then knows who is gone.
        try:
            while not self._partners <= self._parted | self._gone.keys():
                header = torch.empty(_HEADER_WORDS, dtype=torch.int64)
                work = self._backend.recv_anysource([header], _MAILBOX)
                work.wait()
                source = int(work._source_rank())  # noqa: SLF001  # there is no other way to learn it
                self._take(source, header.tolist())
        except RuntimeError as error:
            self.stop(StoreError(f"no rank can be heard any more: {reason_of(error)}"))
            return
        if self.rank != 0:
            self._say_end(0)

    def _take(self, source: int, words: list[int]) -> None:
        kind, nbytes = words[:2]
        message = None
        if kind == _MESSAGE:
            raw = torch.empty(nbytes, dtype=torch.uint8)
            self._backend.recv([raw], source, _PAYLOAD).wait()
            message = told_value(raw.numpy().tobytes())
        with self._changed:
            self._heard[source] = time.monotonic()
            if message is not None and message[0] == _STOP:
                self._told = self._told or message[1]
                self.stop(error_of(message[1]))
            elif message is not None:
                self._inbox[message[0], source].append(message[1])
            if kind == _END and (self.rank != 0 or source in self._done):
                self._parted.add(source)
            if kind == _END:
                self._done.add(source)
            self._changed.notify_all()
        if kind == _READ:
            self._answer(source, words)

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


def _answer_bytes(nbytes: int) -> int:
    return (nbytes + _STATUS_BYTES + 7) // 8 * 8  # so that the next one is aligned for any dtype


def _header(*words: int) -> torch.Tensor:
    header = torch.zeros(_HEADER_WORDS, dtype=torch.int64)
    header[: len(words)] = torch.tensor(words)
    return header
