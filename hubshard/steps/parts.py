"""From the pieces that each rank holds to the files that it writes, and from all ranks' files to one `Step`. Pure.

What a rank tells of a file is small: the layout (names, shapes, places) is the same for most ranks and travels
compressed, so that thousands of them are merged layout by layout instead of piece by piece.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from hubshard.errors import FormatError
from hubshard.header import MAX_WRITE_HEADER_BYTES, encode_header, entry_nbytes, header_nbytes
from hubshard.steps.columns import Column
from hubshard.steps.step import Placement, Step, StepFile, TreePath, piece_key
from hubshard.steps.tiling import Tiling
from hubshard.tensors import Box, TensorSpec

__all__ = ["FileReceipt", "Part", "PlannedFile", "block_bytes_for", "merge", "plan_files"]

_OFFSET_DIGITS = 13
_LEAST_PIECE_BYTES = 1024
_MIN_BLOCK_BYTES = 2**16
_MAX_BLOCK_BYTES = 64 * 2**20
_MANY_BLOCKS = 2**19


def block_bytes_for(total_bytes: int) -> int:
    """Bytes of a file that one hash covers, for a state of `total_bytes` in all ranks.

    A range is read with the whole blocks that it touches, so small blocks make checking cheap: a rank that takes a
    quarter of each tensor reads half a block too many at either end. From 64 KiB on, it doubles where there would be
    more than 2**19 hashes (16 MiB) in the manifest, up to 64 MiB.
    """
    block_bytes = _MIN_BLOCK_BYTES
    while block_bytes * _MANY_BLOCKS < total_bytes and block_bytes < _MAX_BLOCK_BYTES:
        block_bytes *= 2
    return block_bytes


@dataclass(frozen=True)
class Part:
    """A box of a tensor that a rank holds.

    Attributes:
        spec: the whole tensor.
        box: the part.
    """

    spec: TensorSpec
    box: Box

    @cached_property
    def stored(self) -> TensorSpec:
        """What the file holds of it."""
        return TensorSpec(piece_key(self.spec, self.box), self.spec.dtype, self.box.shape)

    @cached_property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.stored.nbytes

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.box.shape == self.spec.shape


@dataclass(frozen=True)
class PlannedFile:
    """A file that a rank is to write.

    Attributes:
        parts: in the order of their bytes.
    """

    parts: tuple[Part, ...]

    @cached_property
    def header(self) -> bytes:
        """Its first bytes."""
        return encode_header([part.stored for part in self.parts], {})

    @property
    def nbytes(self) -> int:
        """Its size (bytes)."""
        return len(self.header) + sum(part.nbytes for part in self.parts)


def plan_files(parts: Sequence[Part], *, max_file_bytes: int) -> list[PlannedFile]:
    """The files for the parts of one rank; deterministic.

    Parts of tensors come before whole ones and wide elements before narrow ones, so that ranks which differ only in the
    whole tensors that fell to them have the same layout. A part above the bound is cut.

    Args:
        parts: each box once. Those without elements are left out, unless their tensor has none.
        max_file_bytes: bound per file, header included; smaller than about a kilobyte it is not kept.
    """
    cut = [piece for part in parts if part.box.numel or not part.spec.numel for piece in _cut(part, max_file_bytes)]
    cut.sort(key=lambda part: (part.is_whole, -part.spec.bits, part.spec.name, part.box.offset))
    return [PlannedFile(tuple(group)) for group in _groups(cut, max_file_bytes)]


def _cut(part: Part, max_file_bytes: int) -> Iterator[Part]:
    if part.nbytes <= max_file_bytes // 2:
        yield part
        return
    header = header_nbytes(_entry_nbytes(part), {}) + 2 * _OFFSET_DIGITS * len(part.box.shape)
    room = max(_LEAST_PIECE_BYTES, max_file_bytes - header)
    for box in part.box.blocks(bits=part.spec.bits, max_bytes=room):
        yield Part(part.spec, box)


def _groups(parts: Sequence[Part], max_file_bytes: int) -> Iterator[list[Part]]:
    group: list[Part] = []
    entries = data = 0
    for part in parts:
        entry, nbytes = _entry_nbytes(part), part.nbytes
        header = header_nbytes(entries + entry, {})
        if group and (header + data + nbytes > max_file_bytes or header > MAX_WRITE_HEADER_BYTES):
            yield group
            group, entries, data = [], 0, 0
        group.append(part)
        entries += entry
        data += nbytes
    if group:
        yield group


def _entry_nbytes(part: Part) -> int:
    return entry_nbytes(part.stored, offset_digits=_OFFSET_DIGITS)


# What a rank tells of a file


@dataclass(frozen=True, slots=True)
class _Group:
    # parts of one file: what other ranks' files share with it, and the offsets of the boxes, which are its own
    layout: bytes
    offsets: array[int]


@dataclass(frozen=True, slots=True)
class FileReceipt:
    """A file that was written, for whoever gathers all of a step. Plain data.

    Attributes:
        file: name, size and hashes.
        groups: what it holds.
    """

    file: StepFile
    groups: tuple[_Group, ...]

    @classmethod
    def of(cls, planned: PlannedFile, file: StepFile) -> FileReceipt:
        """The receipt of a planned file."""
        rows: tuple[list[tuple[Part, int]], list[tuple[Part, int]]] = ([], [])
        start = 0
        for part in planned.parts:
            rows[part.is_whole].append((part, start))
            start += part.nbytes
        return cls(file, tuple(_group_of(group) for group in rows if group))


def _group_of(rows: Sequence[tuple[Part, int]]) -> _Group:
    columns = (
        [part.spec.name for part, _ in rows],
        [part.spec.dtype for part, _ in rows],
        [part.spec.shape for part, _ in rows],
        [part.box.shape for part, _ in rows],
        [start for _, start in rows],
    )
    layout = zlib.compress(json.dumps(columns).encode(), level=1)
    return _Group(layout, array("q", chain.from_iterable(part.box.offset for part, _ in rows)))


@dataclass(frozen=True)
class _Layout:
    # the shared columns of all files that are laid out alike, and those files
    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    sizes: Sequence[Sequence[int]]
    starts: Sequence[int]
    files: Sequence[int]
    offsets: Sequence[array[int]]

    @cached_property
    def positions(self) -> Sequence[int]:
        """Where the offsets of each part begin."""
        found = [0]
        for shape in self.shapes:
            found.append(found[-1] + len(shape))
        return found


def merge(
    receipts: Sequence[FileReceipt],
    *,
    step: int,
    world_size: int,
    scalars: Mapping[str, object],
    paths: Mapping[str, TreePath],
    metadata: Mapping[str, object],
) -> Step:
    """One step from the files of all ranks, validated.

    Args:
        receipts: of all files, in any order.
        step: its number.
        world_size: ranks that saved it.
        scalars: what is no tensor, by name.
        paths: of tensors and scalars in the nested state, where they are known.
        metadata: anything to be said of the step.

    Raises:
        FormatError: the pieces of some tensor are not one whole, or ranks differ in its dtype or shape.
    """
    ordered = sorted(receipts, key=lambda receipt: receipt.file.name)
    layouts = _layouts(ordered)
    where: defaultdict[str, list[tuple[_Layout, int]]] = defaultdict(list)
    for layout in layouts:
        for number, name in enumerate(layout.names):
            where[name].append((layout, number))
    tilings: dict[Tiling, Tiling] = {}
    return Step(
        step=step,
        world_size=world_size,
        files=[receipt.file for receipt in ordered],
        tensors={name: _placed(name, where[name], tilings, paths.get(name, (name,))) for name in sorted(where)},
        scalars=dict(scalars),
        scalar_paths={name: paths.get(name, (name,)) for name in scalars},
        metadata=dict(metadata),
    ).validate()


def _layouts(receipts: Sequence[FileReceipt]) -> list[_Layout]:
    alike: defaultdict[bytes, list[tuple[int, array[int]]]] = defaultdict(list)
    for number, receipt in enumerate(receipts):
        for group in receipt.groups:
            alike[group.layout].append((number, group.offsets))
    return [_layout_of(raw, files) for raw, files in alike.items()]


def _layout_of(raw: bytes, files: Sequence[tuple[int, array[int]]]) -> _Layout:
    names, dtypes, shapes, sizes, starts = json.loads(zlib.decompress(raw))
    numbers, offsets = [number for number, _ in files], [offsets for _, offsets in files]
    return _Layout(names, dtypes, shapes, sizes, starts, numbers, offsets)


def _placed(
    name: str, where: Sequence[tuple[_Layout, int]], tilings: dict[Tiling, Tiling], path: TreePath
) -> Placement:
    spec = _spec_of(name, where)
    offsets: list[list[int]] = [[] for _ in spec.shape]
    sizes: list[list[int]] = [[] for _ in spec.shape]
    files: list[int] = []
    starts: list[int] = []
    for layout, number in where:
        position, count = layout.positions[number], len(layout.files)
        for dim, size in enumerate(layout.sizes[number]):
            offsets[dim] += [held[position + dim] for held in layout.offsets]
            sizes[dim] += [size] * count
        files += layout.files
        starts += [layout.starts[number]] * count
    columns = _sorted_by_offset([*offsets, *sizes, files, starts], len(offsets))
    tiling = Tiling(spec.shape, tuple(columns[: len(offsets)]), tuple(columns[len(offsets) : -2]))
    return Placement(spec, tilings.setdefault(tiling, tiling), columns[-2], columns[-1], path)


def _spec_of(name: str, where: Sequence[tuple[_Layout, int]]) -> TensorSpec:
    layout, number = where[0]
    spec = TensorSpec(name, layout.dtypes[number], tuple(layout.shapes[number]))
    for layout, number in where:
        other = TensorSpec(name, layout.dtypes[number], tuple(layout.shapes[number]))
        if other != spec:
            raise FormatError(
                f"tensor {name!r} is {spec.dtype} of shape {spec.shape} on one rank and {other.dtype} of shape "
                f"{other.shape} on another",
                hint="what differs from rank to rank needs a name of its own on each",
            )
    return spec


def _sorted_by_offset(columns: list[list[int]], dims: int) -> list[Column]:
    keys = list(zip(*columns[:dims], strict=True))
    in_order = sorted(keys)
    if keys != in_order:
        order = sorted(range(len(keys)), key=keys.__getitem__)
        columns = [[column[at] for at in order] for column in columns]
    return [Column.of(column) for column in columns]
