"""Which bytes to read for which boxes: nothing but a plan. Pure: no I/O, the same answer for the same input."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from hubshard.errors import FormatError
from hubshard.manifest import Manifest, Piece
from hubshard.tensors import Box, TensorSpec

__all__ = ["Copy", "Read", "ReadPlan", "check_whole_bytes", "plan_reads", "row_major_strides"]


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements to move from bytes that were read into the bytes of a wanted box.

    Attributes:
        tensor: whose.
        shape: elements per dimension of what is moved.
        bits: bits per element.
        source: where its first element lies in the read (bytes).
        source_strides: bits from one element to the next, per dimension.
        target: where its first element goes in the row-major bytes of the wanted box (bytes).
        target_strides: as for the source.
    """

    tensor: str
    shape: tuple[int, ...]
    bits: int
    source: int
    source_strides: tuple[int, ...]
    target: int
    target_strides: tuple[int, ...]

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """The copy as runs of contiguous bytes: where from, where to, how many."""
        depth, run_bits = self._outer()
        if depth == 1:  # the usual case, and a long loop
            nbytes, source_step, target_step = run_bits // 8, self.source_strides[0], self.target_strides[0]
            for row in range(self.shape[0]):
                yield self.source + row * source_step // 8, self.target + row * target_step // 8, nbytes
            return
        for at in product(*(range(n) for n in self.shape[:depth])):
            source = sum(i * stride for i, stride in zip(at, self.source_strides, strict=False))
            target = sum(i * stride for i, stride in zip(at, self.target_strides, strict=False))
            yield self.source + source // 8, self.target + target // 8, run_bits // 8

    def is_whole_bytes(self) -> bool:
        """Whether every run starts and ends on whole bytes; only packed dtypes can fail."""
        depth, run_bits = self._outer()
        strides = self.source_strides[:depth] + self.target_strides[:depth]
        return run_bits % 8 == 0 and not any(
            stride % 8 for stride, n in zip(strides, self.shape[:depth] * 2, strict=True) if n > 1
        )

    def _outer(self) -> tuple[int, int]:
        # how many outer dimensions are walked, and the bits of each contiguous run within
        depth, run_bits = len(self.shape), self.bits
        while depth:
            contiguous = self.source_strides[depth - 1] == run_bits == self.target_strides[depth - 1]
            if not contiguous and self.shape[depth - 1] != 1:
                break
            depth -= 1
            run_bits *= self.shape[depth]
        return depth, run_bits


@dataclass(frozen=True, slots=True)
class Read:
    """One read of bytes `start` to `stop` of a file, and where their parts land."""

    path: str
    start: int
    stop: int
    copies: tuple[Copy, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the read."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """All reads for a set of wanted boxes, by file and offset.

    Attributes:
        reads: none overlaps another of the same file.
        nbytes_wanted: bytes that land somewhere.
    """

    reads: tuple[Read, ...]
    nbytes_wanted: int

    @property
    def nbytes_read(self) -> int:
        """Bytes that all reads move; the excess over `nbytes_wanted` is gaps read through."""
        return sum(read.nbytes for read in self.reads)


@dataclass(frozen=True, slots=True)
class _Span:
    # the bytes from the first to the last element of `region`, a box within `piece`
    piece: Piece
    region: Box
    start: int
    stop: int


def plan_reads(
    manifest: Manifest,
    wanted: Mapping[str, Box],
    *,
    max_gap_bytes: int,
    max_read_bytes: int,
) -> ReadPlan:
    """The reads that bring the wanted boxes, cut from the pieces that hold them.

    Args:
        manifest: what lies where.
        wanted: a box per tensor.
        max_gap_bytes: bytes nobody wants that are read through rather than skipped.
        max_read_bytes: bound per read (bytes), wherever a read can be cut between elements.

    Raises:
        FormatError: an unknown tensor, a box outside it, a box that no pieces hold wholly, or one of a packed dtype
            that does not fall on whole bytes.
    """
    spans = [
        span
        for name, box in wanted.items()
        for piece, region in _regions(manifest, name, box)
        for span in _spans(piece, region, manifest.tensors[name], max_gap_bytes, max_read_bytes)
    ]
    spans.sort(key=lambda span: (span.piece.at.path, span.start, span.stop))
    reads = tuple(
        Read(group[0].piece.at.path, start, stop, tuple(_copy(span, start, wanted, manifest) for span in group))
        for group, start, stop in _coalesce(spans, max_gap_bytes, max_read_bytes)
    )
    nbytes = sum(span.region.numel * manifest.tensors[span.piece.tensor].bits for span in spans) // 8
    return ReadPlan(reads, nbytes)


def _regions(manifest: Manifest, name: str, box: Box) -> Sequence[tuple[Piece, Box]]:
    spec = manifest.tensors.get(name)
    if spec is None:
        raise FormatError(f"there is no tensor {name!r} in this checkpoint")
    spec.check_box(box)
    if not box.numel:
        return ()
    pieces = ((piece, piece.box & box) for piece in manifest.pieces_of[name])
    regions = [(piece, region) for piece, region in pieces if region is not None]
    held = sum(region.numel for _, region in regions)
    if held != box.numel:
        raise FormatError(
            f"the pieces of {name!r} hold {held} of the {box.numel} elements of box {box.offset}+{box.shape}",
            hint="the checkpoint is damaged or incomplete",
        )
    return regions


def _spans(piece: Piece, region: Box, spec: TensorSpec, max_gap_bytes: int, max_read_bytes: int) -> Iterator[_Span]:
    # Dimensions from `depth` on are read through, gaps and all; those before are walked one index at a time.
    strides = row_major_strides(piece.box.shape, spec.bits)
    depth = len(region.shape)
    inner_bits = spec.bits
    while depth:
        gap_bits = strides[depth - 1] - inner_bits if region.shape[depth - 1] > 1 else 0
        if gap_bits > max_gap_bytes * 8:
            break
        depth -= 1
        inner_bits += (region.shape[depth] - 1) * strides[depth]
    for block in _cut(region, strides, spec.bits, depth, max_read_bytes):
        local = block.relative_to(piece.box)
        first = sum(o * stride for o, stride in zip(local.offset, strides, strict=True))
        last = first + sum((n - 1) * stride for n, stride in zip(local.shape, strides, strict=True)) + spec.bits
        if first % 8 or last % 8:
            raise _not_whole_bytes(spec, region)
        yield _Span(piece, block, piece.at.start + first // 8, piece.at.start + last // 8)


def check_whole_bytes(spec: TensorSpec, box: Box) -> None:
    """Refuse a box of a packed tensor whose rows begin or end within a byte.

    Raises:
        FormatError: there it does.
    """
    strides = row_major_strides(spec.shape, spec.bits)
    first = sum(o * stride for o, stride in zip(box.offset, strides, strict=True))
    copy = Copy(spec.name, box.shape, spec.bits, 0, strides, 0, row_major_strides(box.shape, spec.bits))
    if box.numel and (first % 8 or not copy.is_whole_bytes()):
        raise _not_whole_bytes(spec, box)


def _not_whole_bytes(spec: TensorSpec, box: Box) -> FormatError:
    return FormatError(
        f"tensor {spec.name!r}: {box.offset}+{box.shape} of packed {spec.dtype} does not fall on whole bytes",
        hint="ask for a box whose rows fill whole bytes",
    )


def _cut(region: Box, strides: Sequence[int], bits: int, depth: int, max_read_bytes: int) -> Iterator[Box]:
    # walk the dimensions before `depth` one index at a time, then cut along the first one whose inner part fits
    while depth < len(region.shape) and (
        sum((n - 1) * stride for n, stride in zip(region.shape[depth + 1 :], strides[depth + 1 :], strict=True)) + bits
        > max_read_bytes * 8
    ):
        if strides[depth] % 8:  # a packed row that does not fill whole bytes cannot be read alone
            break
        depth += 1
    outer, inner = region.shape[:depth], region.shape[depth:]
    for at in product(*(range(n) for n in outer)):
        corner = tuple(o + i for o, i in zip(region.offset, at, strict=False))
        if not inner:
            yield Box(corner, (1,) * depth)
            continue
        row_bits = sum((n - 1) * stride for n, stride in zip(inner[1:], strides[depth + 1 :], strict=True)) + bits
        unit = 8 // math.gcd(strides[depth], 8)
        rows = max(unit, (1 + max(0, max_read_bytes * 8 - row_bits) // strides[depth]) // unit * unit)
        for start in range(0, inner[0], rows):
            offset = (*corner, region.offset[depth] + start, *region.offset[depth + 1 :])
            yield Box(offset, (*(1,) * depth, min(rows, inner[0] - start), *inner[1:]))


def _coalesce(
    spans: Sequence[_Span], max_gap_bytes: int, max_read_bytes: int
) -> Iterator[tuple[list[_Span], int, int]]:
    group: list[_Span] = []
    start = stop = 0
    for span in spans:
        joins = bool(group) and span.piece.at.path == group[0].piece.at.path and span.start - stop <= max_gap_bytes
        if joins and (span.start < stop or max(stop, span.stop) - start <= max_read_bytes):
            group.append(span)
            stop = max(stop, span.stop)
            continue
        if group:
            yield group, start, stop
        group, start, stop = [span], span.start, span.stop
    if group:
        yield group, start, stop


def _copy(span: _Span, read_start: int, wanted: Mapping[str, Box], manifest: Manifest) -> Copy:
    spec = manifest.tensors[span.piece.tensor]
    box = wanted[spec.name]
    target_strides = row_major_strides(box.shape, spec.bits)
    corner = span.region.relative_to(box).offset
    target_bits = sum(o * stride for o, stride in zip(corner, target_strides, strict=True))
    copy = Copy(
        tensor=spec.name,
        shape=span.region.shape,
        bits=spec.bits,
        source=span.start - read_start,
        source_strides=row_major_strides(span.piece.box.shape, spec.bits),
        target=target_bits // 8,
        target_strides=target_strides,
    )
    if target_bits % 8 or not copy.is_whole_bytes():
        raise _not_whole_bytes(spec, box)
    return copy


def row_major_strides(shape: Sequence[int], bits: int) -> tuple[int, ...]:
    """Bits from one element to the next, per dimension, of a row-major array."""
    strides = [bits] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)
