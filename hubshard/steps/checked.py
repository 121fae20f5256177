"""The files of a step as a `Reader` of exact ranges: whole blocks are read and checked, none of them twice in a row.

What is read of a step in the order of a model crosses blocks anywhere: the end of one range and the beginning of the
next share a block, in each of the files of all ranks. So a block of which only a part was wanted is kept, until the
rest of it was, or until too many are kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from hubshard.protocols import Entry, Revision
from hubshard.steps.reading import StepFolder, check_blocks
from hubshard.steps.step import Step, StepFile

__all__ = ["KEPT_BYTES", "CheckedReader"]

KEPT_BYTES = 256 * 2**20
"""Of blocks that are kept: a block of 64 KiB in each of the files of a thousand ranks, for four that read at once."""


@dataclass
class _Kept:
    content: bytes
    left: int  # bytes of it that nobody has asked for


class CheckedReader:
    """Reads ranges of the files of a step; every byte was compared with its hash before it is given. Thread-safe.

    Args:
        folder: where the files are.
        step: what they should be.
        kept_bytes: bound of the blocks that are kept.
    """

    def __init__(self, folder: StepFolder, step: Step, *, kept_bytes: int = KEPT_BYTES) -> None:
        self._folder = folder
        self._step = step
        self._most_kept = kept_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], _Kept] = OrderedDict()
        self._kept_bytes = 0
        self._nbytes_read = 0

    @property
    def nbytes_read(self) -> int:
        """Bytes that were read from the store so far."""
        return self._nbytes_read

    def head(self, branch: str) -> Revision | None:
        """As the store says."""
        return self._folder.store.head(branch)

    def list(self, at: Revision) -> Sequence[Entry]:
        """The files of the step."""
        del at
        return [Entry(file.name, file.nbytes, file.sha256, "") for file in self._step.files]

    def read(self, at: Revision, path: str, start: int, stop: int, into: memoryview) -> None:
        """Fill `into` with bytes `start` to `stop` of a file.

        Raises:
            IntegrityError: a block is not as it was saved: names file and block.
        """
        del at
        wanted = _Range(self._step.file_of[path], start, stop, into.cast("B"))
        first, after = start // wanted.size, -(-stop // wanted.size)
        while first < after and self._take(wanted, first):
            first += 1
        while first < after and self._take(wanted, after - 1):
            after -= 1
        if first < after:
            self._fetch(wanted, first, after)

    def _take(self, wanted: _Range, number: int) -> bool:
        """Fill in what is wanted of a block, if it is kept."""
        key = wanted.file.name, number
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return False
            kept.left -= wanted.part_of(number)
            self._kept.move_to_end(key)
            if kept.left <= 0:
                del self._kept[key]
                self._kept_bytes -= len(kept.content)
        wanted.fill(number * wanted.size, memoryview(kept.content))
        return True

    def _fetch(self, wanted: _Range, first: int, after: int) -> None:
        """Read the blocks from `first` on, up to `after`; fill in what is wanted of them."""
        begin, end = first * wanted.size, min(after * wanted.size, wanted.file.nbytes)
        is_inside = wanted.start <= begin and end <= wanted.stop
        raw = wanted.place(begin, end) if is_inside else memoryview(bytearray(end - begin))
        self._folder.read(wanted.file.name, begin, end, raw)
        check_blocks(self._folder, wanted.file, first, raw)
        if not is_inside:
            wanted.fill(begin, raw)
        with self._lock:
            self._nbytes_read += raw.nbytes
            for number in {first, after - 1}:
                self._keep(wanted, number, raw[(number - first) * wanted.size :][: wanted.size])

    def _keep(self, wanted: _Range, number: int, content: memoryview) -> None:
        left = content.nbytes - wanted.part_of(number)
        if left and (wanted.file.name, number) not in self._kept:
            self._kept[wanted.file.name, number] = _Kept(bytes(content), left)
            self._kept_bytes += content.nbytes
        while self._kept_bytes > self._most_kept:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= len(dropped.content)


@dataclass(frozen=True, slots=True)
class _Range:
    # bytes `start` to `stop` of a file, on their way into memory
    file: StepFile
    start: int
    stop: int
    into: memoryview

    @property
    def size(self) -> int:
        return self.file.block_bytes

    def part_of(self, number: int) -> int:
        """How many bytes of a block it wants."""
        begin = number * self.size
        return max(0, min(self.stop, begin + self.size, self.file.nbytes) - max(self.start, begin))

    def place(self, begin: int, end: int) -> memoryview:
        """Where bytes `begin` to `end` of the file go."""
        return self.into[begin - self.start : end - self.start]

    def fill(self, begin: int, raw: memoryview) -> None:
        """Take what is wanted of the bytes from `begin` on."""
        first, after = max(self.start, begin), min(self.stop, begin + raw.nbytes)
        self.place(first, after)[:] = raw[first - begin : after - begin]
