"""Files from a store into their parts, in parallel, each hashed in the order of its bytes while it arrives."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from hubshard.digests import content_id, new_hash
from hubshard.engine import run
from hubshard.errors import HubshardError, IntegrityError
from hubshard.events import Event, Gathered, OnEvent
from hubshard.fetch.parts import PIECE_BYTES, Part, name_of
from hubshard.protocols import Entry, Revision, Store
from hubshard.readers import read_bytes
from hubshard.store.hub import HubStore
from hubshard.store.patience import Patience, Waits, may_pass

__all__ = ["Transfer"]

_WHOLE_TRIES = 3
_FILES_AT_ONCE = 4  # of several pieces: so many hashes may run in parallel
_WAITS = Waits(first_seconds=0.25)
_SMALL_COST_BYTES = 1 << 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Transfer:
    """How files are fetched.

    Attributes:
        store: where from.
        at: the revision.
        parts: the folder of the parts.
        workers: threads; each holds two pieces at most, one that arrives and one that waits for its turn.
        max_retries: of each piece, after its first try.
        on_event: told what happens.
    """

    store: Store
    at: Revision
    parts: Path
    workers: int
    max_retries: int
    on_event: OnEvent

    def fetch(self, entries: Sequence[Entry], keep: Callable[[Entry, Part], None]) -> None:
        """Fetch files, of which no two have the same content. On an error what has arrived stays, unless it is wrong.

        Args:
            entries: in the order in which to begin.
            keep: takes over each file once it is checked and durable; its part is closed.

        Raises:
            IntegrityError: the content of a file is not what the store promised, also when fetched again.
            StoreError: the store failed more often than `max_retries`, or the disk did.
        """
        wrong: Sequence[tuple[Entry, str]] = [(entry, "") for entry in entries]
        for attempt in range(_WHOLE_TRIES):
            for entry, found in wrong if attempt else ():
                self._tell("retry", entry, 0, f"its hash is {found}, not {content_id(entry)}")
            wrong = self._round([entry for entry, _ in wrong], keep)
            if not wrong:
                return
        entry, found = wrong[0]
        raise IntegrityError(
            f"{entry.path}: what arrived has the hash {found}, not {content_id(entry)}; fetched {_WHOLE_TRIES} times",
            hint="something on the way changes bytes; nothing was shown, and what was there before is as it was",
        )

    def read(self, entry: Entry) -> bytes:
        """A small file, checked.

        Raises:
            IntegrityError, StoreError: as for `fetch`.
        """

        def read_checked() -> bytes:
            data = read_bytes(self.store, self.at, entry.path, 0, entry.nbytes)
            digest = new_hash(entry)
            digest.update(data)
            if digest.hexdigest() != content_id(entry):
                raise IntegrityError(f"{entry.path}: what arrived has the hash {digest.hexdigest()}")
            return data

        return self._patiently(entry, read_checked)

    def _round(self, entries: Sequence[Entry], keep: Callable[[Entry, Part], None]) -> list[tuple[Entry, str]]:
        """Fetch each file once; those that came out wrong, with the hash that was found."""
        memory = _Memory(min(max((entry.nbytes for entry in entries), default=0), PIECE_BYTES))
        arrivals = [_Arrival(entry, self.parts, memory) for entry in entries]
        jobs = run(
            _interleaved(arrivals),
            cost=lambda job: max(job[0].nbytes_of(job[1]), _SMALL_COST_BYTES),
            work=lambda job: self._one(*job, keep),
            budget_bytes=2 * self.workers * PIECE_BYTES,
            workers=self.workers,
        )
        try:
            return [wrong for wrong in jobs if wrong is not None]
        finally:
            for arrival in arrivals:
                arrival.close()

    def _one(self, arrival: _Arrival, piece: int, keep: Callable[[Entry, Part], None]) -> tuple[Entry, str] | None:
        """Get one piece; whoever hashes the last of its file finishes the file."""
        part, data = self._open(arrival), arrival.memory.take(arrival.nbytes_of(piece))
        if not part.read(piece, data):
            self._patiently(arrival.entry, lambda: self._range(arrival.entry, part.span(piece)[0], data))
            part.write(piece, data)
            self._tell("received", arrival.entry, len(data))
        return self._finish(arrival, keep) if arrival.take_in(piece, data) else None

    def _range(self, entry: Entry, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `start` on."""
        if not isinstance(self.store, HubStore):
            self.store.read(self.at, entry.path, start, start + len(into), into)
            return
        read = Gathered(partial(self._tell, "read", entry))
        self.store.read(self.at, entry.path, start, start + len(into), into, on_read=read.add)
        read.flush()

    def _open(self, arrival: _Arrival) -> Part:
        part, arrived_bytes = arrival.open()
        if arrived_bytes:
            self._tell("skipped", arrival.entry, arrived_bytes, "arrived in an earlier run")
        return part

    def _finish(self, arrival: _Arrival, keep: Callable[[Entry, Part], None]) -> tuple[Entry, str] | None:
        entry, part = arrival.entry, arrival.open()[0]
        found = arrival.hexdigest()
        if found != content_id(entry):
            arrival.close()
            part.delete()
            return entry, found
        part.sync()
        arrival.close()
        keep(entry, part)
        self._tell("verify", entry, entry.nbytes)
        return None

    def _patiently(self, entry: Entry, call: Callable[[], T]) -> T:
        """Call, and call again where the store failed for a while, or gave other bytes than it should."""
        patience = Patience(self.max_retries, on_retry=self._retried)
        return patience.insist(call, entry.path, waits=_WAITS, again=_is_worth_another_try)

    def _retried(self, path: str, cause: str, wait_seconds: float) -> None:
        self.on_event(Event("pull", "retry", path, detail=cause, wait_seconds=wait_seconds))

    def _tell(self, kind: str, entry: Entry, nbytes: int, detail: str = "") -> None:
        self.on_event(Event("pull", kind, entry.path, nbytes, detail))


def _is_worth_another_try(error: HubshardError) -> bool:
    return isinstance(error, IntegrityError) or may_pass(error)


class _Memory:
    """Memory of pieces, used again and again: fresh memory costs more than the network. Thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: deque[memoryview] = deque()

    def take(self, nbytes: int) -> memoryview:
        """So many bytes of it, with anything in them."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = memoryview(bytearray(self._nbytes))
        return memory[:nbytes]

    def give_back(self, data: memoryview) -> None:
        """What was taken is not used any more."""
        self._free.append(memoryview(data.obj))


class _Arrival:
    """A file on its way: its part, which is open from its first piece to its last, and the hash of what came so far."""

    def __init__(self, entry: Entry, folder: Path, memory: _Memory) -> None:
        self.entry = entry
        self.memory = memory
        self.last = max(-(-entry.nbytes // PIECE_BYTES), 1) - 1  # an empty file is one empty piece
        self._folder = folder
        self._part: Part | None = None
        self._digest = new_hash(entry)
        self._lock = threading.Lock()
        self._waiting: dict[int, memoryview] = {}
        self._next = 0
        self._is_hashing = False

    def nbytes_of(self, piece: int) -> int:
        """Bytes of a piece."""
        return min(self.entry.nbytes - piece * PIECE_BYTES, PIECE_BYTES)

    def open(self) -> tuple[Part, int]:
        """The part, and, to the first who asks, the bytes that had arrived in an earlier run."""
        with self._lock:
            if self._part is not None:
                return self._part, 0
            self._part = Part(self._folder, name_of(content_id(self.entry)), self.entry.nbytes)
            return self._part, self._part.arrived_bytes

    def take_in(self, piece: int, data: memoryview) -> bool:
        """Hash a piece when all before it have been, and give its memory back; one that is early waits.

        Returns:
            True to the one caller whose call has hashed the last piece.
        """
        with self._lock:
            self._waiting[piece] = data
            if self._is_hashing:
                return False
            self._is_hashing = True
        while True:
            with self._lock:
                due = self._waiting.pop(self._next, None)
                if due is None:
                    self._is_hashing = False
                    return self._next > self.last
                self._next += 1
            self._digest.update(due)
            self.memory.give_back(due)

    def hexdigest(self) -> str:
        """Of all pieces so far."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close the part, if it is open."""
        with self._lock:
            if self._part is not None:
                self._part.close()


def _interleaved(arrivals: Sequence[_Arrival]) -> Iterator[tuple[_Arrival, int]]:
    """All pieces, those of a file in order; of large files a few go side by side."""
    yield from ((arrival, 0) for arrival in arrivals if arrival.last == 0)
    large = [arrival for arrival in arrivals if arrival.last > 0]
    for first in range(0, len(large), _FILES_AT_ONCE):
        abreast = large[first : first + _FILES_AT_ONCE]
        pieces = [[(arrival, piece) for piece in range(arrival.last + 1)] for arrival in abreast]
        for row in zip_longest(*pieces):
            yield from (job for job in row if job is not None)
