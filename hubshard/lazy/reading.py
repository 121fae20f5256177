"""Bringing the bytes of wanted boxes to where they belong, in few, bounded reads from several threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Protocol

from hubshard.engine import run
from hubshard.errors import IntegrityError
from hubshard.lazy.staging import PlainStaging, Staging
from hubshard.manifest import Extent, Manifest
from hubshard.protocols import Reader, Revision, Source
from hubshard.reads import Copy, Read, check_whole_bytes, plan_reads, row_major_strides
from hubshard.sizes import READ_BYTES
from hubshard.tensors import Box, TensorSpec

__all__ = [
    "LOCAL",
    "REMOTE",
    "BytesTarget",
    "FileReader",
    "Job",
    "Policy",
    "SourceReader",
    "Target",
    "TensorReader",
    "ToldReader",
    "execute",
    "read_box",
    "single_run",
    "told",
]

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Policy:
    """How reads are cut and how many run at once.

    Attributes:
        max_gap_bytes: bytes nobody wants that are read through rather than skipped.
        max_read_bytes: bound per read (bytes).
        budget_bytes: of all reads in flight.
        workers: threads.
    """

    max_gap_bytes: int
    max_read_bytes: int
    budget_bytes: int
    workers: int


LOCAL = Policy(max_gap_bytes=64 * 2**10, max_read_bytes=READ_BYTES, budget_bytes=64 * _MIB, workers=4)
"""For disks: a gap of this size costs about as much as one more read."""
REMOTE = Policy(max_gap_bytes=128 * 2**10, max_read_bytes=READ_BYTES, budget_bytes=192 * _MIB, workers=24)
"""For networks: one connection does not fill the line. At 40 ms per request and 50 MB/s each, 24 that read 8 MiB
at a time make 960 MB/s at most; they hold those 192 MiB only where bytes cannot go straight to their place. A request
costs as much as a gap of a megabyte or two; but ranks that read their parts of neighbouring tensors would then all read
everything."""


class Target(Protocol):
    """Where the bytes of one wanted box go."""

    def place(self, copy: Copy, nbytes: int) -> memoryview | None:
        """The memory that a read of `nbytes` bytes, wanted for `copy` alone, may fill itself; None where it may not."""

    def take(self, copy: Copy, raw: memoryview) -> None:
        """Put the bytes of `copy` in their place; `raw` is what was read."""


@dataclass(frozen=True, slots=True)
class Job:
    """One bounded read and what becomes of it.

    Attributes:
        nbytes: that it reads.
        work: does it; returns the bytes it read.
        at: which bytes of which file it reads; None where it reads no file.
    """

    nbytes: int
    work: Callable[[], int]
    at: Extent | None = None


class TensorReader(Protocol):
    """Something that tensors are read from."""

    @property
    def policy(self) -> Policy:
        """How it is best read."""

    def jobs(self, wanted: Mapping[str, Box], targets: Mapping[str, Target]) -> Iterator[Job]:
        """The reads that fill `targets` with the boxes in `wanted`."""

    def through(self, store: Reader) -> TensorReader:
        """The same, from files that are read through another store; itself where it reads no files."""


def execute(jobs: Iterable[Job], policy: Policy) -> int:
    """Do all jobs, at most `policy.budget_bytes` in flight; the bytes that were read."""
    some = list(jobs)
    if len(some) == 1:  # no thread for a single read
        return some[0].work()
    return sum(
        run(
            some,
            cost=lambda job: job.nbytes,
            work=lambda job: job.work(),
            budget_bytes=policy.budget_bytes,
            workers=min(policy.workers, max(1, len(some))),
        )
    )


@dataclass(frozen=True)
class FileReader:
    """Reads exact ranges of files, in the order of their offsets, neighbours together.

    Attributes:
        store: where the files lie.
        at: the revision to read.
        manifest: which bytes are what.
        policy: how the store is best read.
        staging: memory for what cannot be read straight into its place; None for ordinary memory.
    """

    store: Reader
    at: Revision
    manifest: Manifest
    policy: Policy
    staging: Staging | None = None

    def jobs(self, wanted: Mapping[str, Box], targets: Mapping[str, Target]) -> Iterator[Job]:
        """The reads that fill `targets` with the boxes in `wanted`."""
        filled = {name: box for name, box in wanted.items() if box.numel}
        plan = plan_reads(
            self.manifest,
            filled,
            max_gap_bytes=self.policy.max_gap_bytes,
            max_read_bytes=self.policy.max_read_bytes,
        )
        for read in plan.reads:
            at = Extent(read.path, read.start, read.stop)
            yield Job(read.nbytes, partial(self._read, read, targets), at)

    def through(self, store: Reader) -> TensorReader:
        """The same, from files that are read through another store."""
        return replace(self, store=store)

    def _read(self, read: Read, targets: Mapping[str, Target]) -> int:
        if len(read.copies) == 1:
            (copy,) = read.copies
            place = targets[copy.tensor].place(copy, read.nbytes)
            if place is not None:
                self.store.read(self.at, read.path, read.start, read.stop, place)
                return read.nbytes
        staging = self._staging()
        raw = staging.buffer(read.nbytes)
        self.store.read(self.at, read.path, read.start, read.stop, raw)
        with staging.copying():
            for copy in read.copies:
                targets[copy.tensor].take(copy, raw)
        return read.nbytes

    def _staging(self) -> Staging:
        return self.staging or self._plain

    @cached_property
    def _plain(self) -> PlainStaging:
        return PlainStaging(self.policy.max_read_bytes)


@dataclass(frozen=True)
class SourceReader:
    """Reads from any Source, in bounded blocks.

    Attributes:
        source: what is read.
        specs: its tensors by name.
        policy: how it is best read.
    """

    source: Source
    specs: Mapping[str, TensorSpec]
    policy: Policy

    def jobs(self, wanted: Mapping[str, Box], targets: Mapping[str, Target]) -> Iterator[Job]:
        """The reads that fill `targets` with the boxes in `wanted`."""
        for name, box in wanted.items():
            bits = self.specs[name].bits
            if bits % 8:
                check_whole_bytes(self.specs[name], box)
            start = 0
            for block in box.blocks(bits=bits, max_bytes=self.policy.max_read_bytes):
                nbytes = block.numel * bits // 8
                if nbytes:
                    copy = _copy_of_block(name, block.shape, box.shape, bits, start)
                    yield Job(nbytes, partial(self._read, block, copy, targets[name], nbytes))
                start += nbytes

    def through(self, store: Reader) -> TensorReader:
        """Itself: it reads no files."""
        del store
        return self

    def _read(self, block: Box, copy: Copy, target: Target, nbytes: int) -> int:
        # a memoryview of a read-only buffer is only ever read from
        raw = memoryview(self.source.read(copy.tensor, block)).cast("B")
        if raw.nbytes != nbytes:
            raise IntegrityError(
                f"tensor {copy.tensor!r}: the source gave {raw.nbytes} bytes for {block.shape}, not {nbytes}"
            )
        target.take(copy, raw)
        return nbytes


@dataclass(frozen=True, slots=True)
class BytesTarget:
    """Plain memory that takes the row-major bytes of a box."""

    into: memoryview

    def place(self, copy: Copy, nbytes: int) -> memoryview | None:
        """The memory itself, where the read is one contiguous part of the box."""
        run_of = single_run(copy)
        if run_of is None or run_of[0] or run_of[2] != nbytes:
            return None
        return self.into[run_of[1] : run_of[1] + nbytes]

    def take(self, copy: Copy, raw: memoryview) -> None:
        """Copy run by run."""
        for source, target, nbytes in copy.runs():
            self.into[target : target + nbytes] = raw[source : source + nbytes]


def told(job: Job, on_bytes: Callable[[int], None]) -> Job:
    """The job, which tells `on_bytes` of the bytes it has read."""

    def work() -> int:
        nbytes = job.work()
        on_bytes(nbytes)
        return nbytes

    return Job(job.nbytes, work, job.at)


@dataclass(frozen=True)
class ToldReader:
    """Reads as another one does, and tells of it.

    Attributes:
        reader: the other one.
        on_bytes: is told of the bytes of each read.
    """

    reader: TensorReader
    on_bytes: Callable[[int], None]

    @property
    def policy(self) -> Policy:
        """As the other one's."""
        return self.reader.policy

    def through(self, store: Reader) -> TensorReader:
        """The same, from files that are read through another store."""
        return ToldReader(self.reader.through(store), self.on_bytes)

    def jobs(self, wanted: Mapping[str, Box], targets: Mapping[str, Target]) -> Iterator[Job]:
        """The other one's."""
        return (told(job, self.on_bytes) for job in self.reader.jobs(wanted, targets))


def read_box(reader: TensorReader, spec: TensorSpec, box: Box) -> bytearray:
    """The row-major little-endian bytes of `box`.

    Raises:
        FormatError: the box lies outside the tensor, or a packed dtype does not fall on whole bytes there.
    """
    spec.check_box(box)
    buffer = bytearray(math.ceil(box.numel * spec.bits / 8))
    execute(reader.jobs({spec.name: box}, {spec.name: BytesTarget(memoryview(buffer))}), reader.policy)
    return buffer


def single_run(copy: Copy) -> tuple[int, int, int] | None:
    """The copy as one run of bytes (from where, to where, how many), or None where it is several."""
    runs = list(islice(copy.runs(), 2))
    return runs[0] if len(runs) == 1 else None


def _copy_of_block(name: str, shape: tuple[int, ...], within: tuple[int, ...], bits: int, start: int) -> Copy:
    return Copy(
        tensor=name,
        shape=shape,
        bits=bits,
        source=0,
        source_strides=row_major_strides(shape, bits),
        target=start,
        target_strides=row_major_strides(within, bits),
    )
