"""`diff`: which tensors two checkpoints do not share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from hubshard.engine import run
from hubshard.manifest import Piece
from hubshard.reads import plan_reads
from hubshard.sizes import READ_BYTES
from hubshard.sources.several import SeveralCheckpoints, open_each
from hubshard.store.opening import Opened, open_target
from hubshard.tensors import TensorSpec

if TYPE_CHECKING:
    from hubshard.store.hub_client import Token

__all__ = ["Difference", "diff"]

_GROUP_BYTES = 4 * 2**20
_GAP_BYTES = 64 * 2**10  # less than a request costs
_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """How checkpoint `b` differs from checkpoint `a`, tensor by tensor, whatever files they lie in.

    The tensors of a checkpoint in a folder have its name before theirs, as in `unet/conv_in.weight`.

    Attributes:
        added: only in `b`.
        removed: only in `a`.
        reshaped: in both, with another dtype or shape: what it was, and is.
        changed: in both, alike, with other values.
        same: how many are equal, byte for byte.
        nbytes_read: bytes of tensors that had to be compared, of each side (bytes).
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    reshaped: Mapping[str, tuple[TensorSpec, TensorSpec]]
    changed: tuple[str, ...]
    same: int
    nbytes_read: int

    @property
    def is_empty(self) -> bool:
        """Whether the two hold the same tensors."""
        return not (self.added or self.removed or self.reshaped or self.changed)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    variant: str | None = None,
    token: Token = None,
    endpoint: str | None = None,
) -> Difference:
    """Compare two checkpoints: by headers, then by the hashes of their files, then, where those do not tell, by bytes.

    Of a directory or repo, the checkpoints of all folders are compared, such as those of a pipeline of diffusers.

    Args:
        a: a directory, a file, `org/name[@revision]` or `hf://org/name[@revision]`.
        b: likewise.
        variant: of both, as in `model.fp16.safetensors`; a folder without it has its plain weights compared, if
            another folder has it.
        token: for the Hub; None for the one that is logged in.
        endpoint: of the Hub; None for the usual one.

    Raises:
        NotFoundError: no such path, repo, revision, or no weights there.
        FormatError: one of them does not hold together.
    """
    opened = [open_target(target, token=token, endpoint=endpoint) for target in (a, b)]
    old, new = (_source(each, variant) for each in opened)
    before, after = _with_aliases(old), _with_aliases(new)
    common = sorted(before.keys() & after.keys())
    reshaped = {name: (before[name], after[name]) for name in common if _unlike(before[name], after[name])}
    alike = [name for name in common if name not in reshaped]
    undecided = [name for name in alike if not _known_equal(old, before[name].name, new, after[name].name)]
    sides = (_Side(opened[0], old, before), _Side(opened[1], new, after))
    results = run(
        _groups(undecided, sides[0]),
        cost=lambda names: min(4 * sum(before[name].nbytes for name in names), 2 * READ_BYTES) + 1,
        work=lambda names: _changed(names, *sides),
        budget_bytes=2 * _WORKERS * READ_BYTES,
        workers=_WORKERS,
    )
    changed = tuple(sorted(chain.from_iterable(results)))
    return Difference(
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        reshaped=reshaped,
        changed=changed,
        same=len(alike) - len(changed),
        nbytes_read=sum(before[name].nbytes for name in undecided),
    )


def _source(opened: Opened, variant: str | None) -> SeveralCheckpoints:
    with opened.named():
        return SeveralCheckpoints(
            open_each(opened.store, opened.at, path=opened.path, variant=variant, workers=_WORKERS)
        )


def _with_aliases(source: SeveralCheckpoints) -> dict[str, TensorSpec]:
    # by every name; the spec keeps the name under which it is stored
    specs = {spec.name: spec for spec in source.specs()}
    return specs | {alias: specs[name] for alias, name in source.aliases().items()}


def _unlike(a: TensorSpec, b: TensorSpec) -> bool:
    return (a.dtype, a.shape) != (b.dtype, b.shape)


def _known_equal(old: SeveralCheckpoints, a: str, new: SeveralCheckpoints, b: str) -> bool:
    return all(
        _place(old, p) == _place(new, q) and _place(old, p)[0] != ""
        for p, q in zip(old.manifest.pieces_of[a], new.manifest.pieces_of[b], strict=True)
    )


def _place(source: SeveralCheckpoints, piece: Piece) -> tuple[str, int, int]:
    return source.manifest.files[piece.at.path].sha256, piece.at.start, piece.at.stop


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two checkpoints."""

    opened: Opened
    source: SeveralCheckpoints
    specs: Mapping[str, TensorSpec]

    def start_of(self, name: str) -> tuple[str, int]:
        """The file of a tensor, and where it begins there (bytes)."""
        return min((piece.at.path, piece.at.start) for piece in self.source.manifest.pieces_of[self.specs[name].name])

    def read_whole(self, names: Sequence[str]) -> Mapping[str, bytearray]:
        """The bytes of tensors that are small, by the names they are stored under; neighbours by one read."""
        specs = {self.specs[name].name: self.specs[name] for name in names}
        boxes = {name: spec.box for name, spec in specs.items()}
        found = {name: bytearray(spec.nbytes) for name, spec in specs.items()}
        plan = plan_reads(self.source.manifest, boxes, max_gap_bytes=_GAP_BYTES, max_read_bytes=READ_BYTES)
        for read in plan.reads:
            data = memoryview(bytearray(read.nbytes))
            self.opened.store.read(self.opened.at, read.path, read.start, read.stop, data)
            for copy in read.copies:
                for start, to, nbytes in copy.runs():
                    found[copy.tensor][to : to + nbytes] = data[start : start + nbytes]
        return found


def _groups(names: Iterable[str], side: _Side) -> Iterator[Sequence[str]]:
    """Large tensors one by one, small ones with their neighbours."""
    group: list[str] = []
    nbytes = 0
    for name in sorted(names, key=side.start_of):
        size = side.specs[name].nbytes
        if group and nbytes + size > _GROUP_BYTES:
            yield group
            group, nbytes = [], 0
        group.append(name)
        nbytes += size
    if group:
        yield group


def _changed(names: Sequence[str], old: _Side, new: _Side) -> Sequence[str]:
    """Those of a group whose values differ."""
    if len(names) == 1:
        a, b = old.specs[names[0]], new.specs[names[0]]
        blocks = a.box.blocks(bits=a.bits, max_bytes=READ_BYTES)
        return [] if all(old.source.read(a.name, x) == new.source.read(b.name, x) for x in blocks) else names
    before, after = old.read_whole(names), new.read_whole(names)
    return [name for name in names if before[old.specs[name].name] != after[new.specs[name].name]]
