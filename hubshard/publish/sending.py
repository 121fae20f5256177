"""Bringing one file into the store, and telling what came of each of its bytes: skipped, sent or deduplicated."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from hubshard.engine import Turn
from hubshard.events import Operation
from hubshard.protocols import Buffer, Content, Entry, Staged
from hubshard.publish.outgoing import OutFile
from hubshard.publish.scratch import Scratch

__all__ = ["LARGE_FILE_BYTES", "Sender"]

LARGE_FILE_BYTES = 10 * 10**6
"""Smaller files, shards excepted, travel inside the commit."""

_BLOCK_BYTES = 64 * 2**20  # of hf_xet, which fills it and then sends it
_EARLY_BYTES = 2 * _BLOCK_BYTES - 4 * 2**20  # one is sent, and the next all but full


class _Stage(Protocol):
    """`HubStore.stage`, with all that does not depend on the file given already."""

    def __call__(self, path: str, data: Content, **of_file: Any) -> Staged:
        """Make content durable without showing it."""


class Sender:
    """Brings files into the store; safe to use from several threads at once.

    Args:
        stage: of the store.
        op: is told.
        scratch: for large files; None where they are streamed.
        keep: takes note of each file that has become durable by itself.
    """

    def __init__(
        self, stage: _Stage, op: Operation, scratch: Scratch | None, keep: Callable[[OutFile, Staged], None]
    ) -> None:
        self._stage = stage
        self._keep = keep
        self._op = op
        self._scratch = scratch

    def send(self, file: OutFile, there: Entry | None, kept: Entry | None, turn: Turn) -> Staged:
        """Make a file durable in the store, unless it is.

        Args:
            file: to be sent.
            there: what the target shows under its path.
            kept: what an earlier run has left of it.
            turn: ends when it is in the store, or most of it is and the rest on its way; asked as its bytes move. Of a
                file that is early no more is sent than a block of 64 MiB, so that a kill costs no more of it.

        Raises:
            CancelledError: another file has failed, or the publish was interrupted.
        """
        # what may be there already is hashed first, so that it need not be sent
        held = {entry.sha256 for entry in (there, kept) if entry and entry.sha256 and entry.nbytes == file.nbytes}
        read = partial(_while_wanted, file.data, turn)
        sent = _Sum(partial(self._op.tell, "sent", file.path), turn.check)
        with self._content(file, read, turn, sent, must_hash=bool(held)) as (data, sha256):
            if sha256 and sha256 in held:
                self._op.tell("skipped", file.path, file.nbytes, "the Hub has it")
                return Staged(file.path, file.nbytes, sha256)
            staged = self._stage(
                file.path, data, nbytes=file.nbytes, sha256=sha256, on_sent=sent.add_while_wanted, on_ending=turn.ends
            )
        turn.ends()
        is_new = self._tell_of(staged, there, sent)
        self._keep(file, staged)
        if is_new:
            self._op.tell("staged", file.path, staged.nbytes)
        return staged

    @contextmanager
    def _content(
        self, file: OutFile, read: Callable[[], Iterable[Buffer]], turn: Turn, sent: _Sum, *, must_hash: bool
    ) -> Iterator[tuple[Content, str | None]]:
        if self._scratch is not None and file.nbytes >= LARGE_FILE_BYTES:
            with self._scratch.holding(read, file.path, partial(self._op.tell, "hashed", file.path)) as found:
                yield found
        else:
            reading = _Reading(partial(self._op.tell, "read", file.path), sent)
            yield partial(self._read, file, read, turn, reading), self._hashed(file.path, read) if must_hash else None

    def _hashed(self, path: str, read: Callable[[], Iterable[Buffer]]) -> str:
        digest = hashlib.sha256()
        for buffer in read():
            digest.update(buffer)
            self._op.tell("hashed", path, memoryview(buffer).nbytes)
        return digest.hexdigest()

    def _read(
        self, file: OutFile, read: Callable[[], Iterable[Buffer]], turn: Turn, reading: _Reading
    ) -> Iterable[Buffer]:
        # the last byte is held back, so that no file is complete before its turn
        early_bytes = min(_EARLY_BYTES, max(file.nbytes - 1, _BLOCK_BYTES))
        done = 0
        reading.begin()
        for buffer in read():
            done += memoryview(buffer).nbytes
            if done > early_bytes:
                turn.await_others()
            yield buffer
            reading.add(memoryview(buffer).nbytes)

    def _tell_of(self, staged: Staged, there: Entry | None, sent: _Sum) -> bool:
        """Tell of the bytes of a file; whether it was sent."""
        if not sent.nbytes and (staged.is_same(there) or not staged.nbytes_sent):
            self._op.tell("skipped", staged.path, staged.nbytes, "the Hub has it")
            return False
        if staged.nbytes_sent > sent.nbytes:  # what goes along with the commit, or was not told in between
            sent.add(staged.nbytes_sent - sent.nbytes)
        if staged.nbytes > sent.nbytes:
            self._op.tell("deduplicated", staged.path, staged.nbytes - sent.nbytes)
        return True


class _Sum:
    def __init__(self, then: partial[None], check: Callable[[], None]) -> None:
        self.nbytes = 0
        self._then = then
        self._check = check
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
        self._then(nbytes)

    def add_while_wanted(self, nbytes: int) -> None:
        self.add(nbytes)
        self._check()


class _Reading:
    """Tells of bytes that are read of a file: once, and anew only if some were sent since they were read before.

    A store that takes nothing has its file read again and again: nobody should take that for progress.
    """

    def __init__(self, then: Callable[[int], None], sent: _Sum) -> None:
        self._then = then
        self._sent = sent
        self._sent_bytes = 0
        self._most = 0
        self._done = 0

    def begin(self) -> None:
        """It is read from its start."""
        if self._sent.nbytes > self._sent_bytes:
            self._most = 0
        self._sent_bytes = self._sent.nbytes
        self._done = 0

    def add(self, nbytes: int) -> None:
        """So many more bytes were read."""
        self._done += nbytes
        fresh = min(self._done - self._most, nbytes)
        if fresh > 0:
            self._most = self._done
            self._then(fresh)


def _while_wanted(data: Callable[[], Iterable[Buffer]], turn: Turn) -> Iterator[Buffer]:
    for buffer in data():
        turn.check()
        yield buffer
