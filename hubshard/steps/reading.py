"""Reading boxes of a step: whole blocks, checked before a byte of them is used. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hubshard.engine import run
from hubshard.errors import HubshardError, IntegrityError, NotFoundError, StoreError
from hubshard.manifest import FileDigest, Manifest, Piece
from hubshard.protocols import Reader, Revision
from hubshard.reads import Copy, Read, plan_reads
from hubshard.sizes import READ_BYTES
from hubshard.steps.step import Step, StepFile
from hubshard.tensors import Box, TensorSpec

__all__ = ["LOCAL", "REMOTE", "Pace", "StepFolder", "Take", "check_blocks", "copy_runs", "part_manifest", "read_boxes"]

_MIB = 2**20

Take = Callable[[int, Copy, memoryview], None]
"""Is given a part of the box `wanted[n]`: n, the copy to make, and the bytes that its `source` counts from."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How a place is best read.

    Attributes:
        max_gap_bytes: bytes nobody wants that are read through rather than skipped.
        max_read_bytes: bound per read, but for whole blocks (bytes).
        job_bytes: bytes that one thread reads in a row; at its ends a block may be read twice.
        workers: threads.
    """

    max_gap_bytes: int
    max_read_bytes: int
    job_bytes: int
    workers: int


LOCAL = Pace(max_gap_bytes=64 * 2**10, max_read_bytes=READ_BYTES, job_bytes=64 * _MIB, workers=4)
"""For disks."""
REMOTE = Pace(max_gap_bytes=256 * 2**10, max_read_bytes=16 * _MIB, job_bytes=64 * _MIB, workers=12)
"""For networks: a request costs tens of milliseconds, and one connection does not fill the line."""


@dataclass(frozen=True, slots=True)
class StepFolder:
    """Where the files of a step lie.

    Attributes:
        store: what they are read from.
        at: the revision.
        prefix: of their names in the store: "" or a folder with "/".
        where: the folder for people.
        pace: how the store is best read.
        fallback: is told why bytes from here are of no use, and gives where the same step lies too, or raises; None
            where it lies nowhere else. It is called from several threads.
    """

    store: Reader
    at: Revision
    prefix: str
    where: str
    pace: Pace
    fallback: Callable[[HubshardError], StepFolder] | None = None

    def read(self, name: str, start: int, stop: int, into: memoryview) -> None:
        """Fill `into` with bytes `start` to `stop` of a file."""
        self.store.read(self.at, self.prefix + name, start, stop, into)


def read_boxes(folder: StepFolder, step: Step, wanted: Sequence[tuple[str, Box]], take: Take) -> int:
    """Read boxes of tensors, from several threads, every byte of them checked.

    Args:
        folder: where the files are.
        step: what is in them.
        wanted: names and boxes; a name may be wanted more than once.
        take: is given their bytes part by part, from several threads.

    Returns:
        Bytes that were read: those of the boxes, and of the rest of the blocks that they touch.

    Raises:
        IntegrityError: a block is not as it was saved: names file and block.
    """
    manifest, boxes = part_manifest(step, wanted)
    pace = folder.pace
    plan = plan_reads(manifest, boxes, max_gap_bytes=pace.max_gap_bytes, max_read_bytes=pace.max_read_bytes)
    jobs = [partial(_do, folder, step.file_of[reads[0].path], reads, take) for reads in _jobs(plan.reads, pace)]
    done = run(
        jobs,
        cost=lambda job: sum(read.nbytes for read in job.args[2]),
        work=lambda job: job(),
        budget_bytes=pace.job_bytes * pace.workers,
        workers=max(1, min(pace.workers, len(jobs))),
    )
    return sum(done)


def part_manifest(step: Step, wanted: Sequence[tuple[str, Box]]) -> tuple[Manifest, Mapping[str, Box]]:
    """The pieces that some boxes need, and no others.

    Args:
        step: where they lie.
        wanted: names and boxes; those without elements are left out.

    Returns:
        A manifest in which the box of `wanted[n]` is to be read from a tensor that is called `f"{n} {name}"`, and those
        boxes.
    """
    tensors: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    boxes: dict[str, Box] = {}
    for number, (name, box) in enumerate(wanted):
        if box.numel:
            spec = step.tensors[name].spec
            key = f"{number} {name}"
            tensors[key] = TensorSpec(key, spec.dtype, spec.shape)
            pieces += [Piece(key, piece.box, piece.at) for piece in step.pieces(name, box)]
            boxes[key] = box
    files = {piece.at.path: FileDigest(step.file_of[piece.at.path].nbytes) for piece in pieces}
    return Manifest(tensors, pieces, files), boxes


def copy_runs(copy: Copy, raw: memoryview, into: memoryview) -> None:
    """Put the bytes of a copy in their places in the row-major bytes of its box."""
    for source, target, nbytes in copy.runs():
        into[target : target + nbytes] = raw[source : source + nbytes]


def check_blocks(folder: StepFolder, file: StepFile, first: int, raw: memoryview) -> None:
    """Compare whole blocks with their hashes.

    Args:
        folder: for the error.
        file: whose.
        first: number of the first block.
        raw: the blocks, one after the other.

    Raises:
        IntegrityError: one is not as it was saved: names file and block.
    """
    for number, start in enumerate(range(0, raw.nbytes, file.block_bytes), start=first):
        block = raw[start : start + file.block_bytes]
        if not file.is_block(number, block):
            begin = number * file.block_bytes
            raise IntegrityError(
                f"{folder.where}/{file.name}: block {number} (bytes {begin} to {begin + block.nbytes}) is not as it "
                "was saved",
                hint="restore an older step",
            )


def _jobs(reads: Sequence[Read], pace: Pace) -> Iterator[list[Read]]:
    job: list[Read] = []
    nbytes = 0
    for read in reads:
        if job and (read.path != job[0].path or nbytes + read.nbytes > pace.job_bytes):
            yield job
            job, nbytes = [], 0
        job.append(read)
        nbytes += read.nbytes
    if job:
        yield job


def _do(folder: StepFolder, file: StepFile, reads: Sequence[Read], take: Take) -> int:
    blocks = _Blocks(folder, file)
    for read in reads:
        raw = blocks.read(read.start, read.stop)
        for copy in read.copies:
            take(int(copy.tensor.partition(" ")[0]), copy, raw)
    return blocks.nbytes_read


class _Blocks:
    """Ranges of a file in ascending order, in whole checked blocks, none of which is read twice."""

    def __init__(self, folder: StepFolder, file: StepFile) -> None:
        self._folder = folder
        self._file = file
        self._last = (-1, b"")
        self._buffer = bytearray()
        self.nbytes_read = 0

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes `start` to `stop`, valid until the next call."""
        size = self._file.block_bytes
        first, after = start // size, -(-stop // size)
        begin, end = first * size, min(after * size, self._file.nbytes)
        if len(self._buffer) < end - begin:
            self._buffer = bytearray(end - begin)
        view = memoryview(self._buffer)[: end - begin]
        number, kept = self._last
        if number == first:
            view[: len(kept)] = kept
            first += 1
        new = view[first * size - begin :]
        if new.nbytes:
            self._fill(first, new)
            self.nbytes_read += new.nbytes
        self._last = (after - 1, bytes(view[(after - 1) * size - begin :]))
        return view[start - begin : stop - begin]

    def _fill(self, first: int, blocks: memoryview) -> None:
        try:
            _read_blocks(self._folder, self._file, first, blocks)
        except (IntegrityError, NotFoundError, StoreError) as error:
            if self._folder.fallback is None:
                raise
            _read_blocks(self._folder.fallback(error), self._file, first, blocks)


def _read_blocks(folder: StepFolder, file: StepFile, first: int, into: memoryview) -> None:
    start = first * file.block_bytes
    folder.read(file.name, start, start + into.nbytes, into)
    check_blocks(folder, file, first, into)
