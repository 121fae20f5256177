"""`diff`: which tensors two checkpoints do not share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hubshard.engine import run
from hubshard.manifest import Piece
from hubshard.sources.safetensors import SafetensorsSource
from hubshard.store.opening import open_target
from hubshard.tensors import TensorSpec

__all__ = ["Difference", "diff"]

_BLOCK_BYTES = 8 * 2**20
_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """How checkpoint `b` differs from checkpoint `a`, tensor by tensor, whatever files they lie in.

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
    token: str | bool | None = None,
    endpoint: str | None = None,
) -> Difference:
    """Compare two checkpoints: by headers, then by the hashes of their files, then, where those do not tell, by bytes.

    Args:
        a: a directory, a file, `org/name[@revision]` or `hf://org/name[@revision]`.
        b: likewise.
        variant: of both, as in `model.fp16.safetensors`.
        token: for the Hub; None for the one that is logged in.
        endpoint: of the Hub; None for the usual one.

    Raises:
        NotFoundError: no such path, repo, revision, or no weights there.
        FormatError: one of them does not hold together.
    """
    opened = [open_target(target, token=token, endpoint=endpoint) for target in (a, b)]
    old, new = (SafetensorsSource(o.store, o.at, path=o.path, variant=variant, workers=_WORKERS) for o in opened)
    before, after = _with_aliases(old), _with_aliases(new)
    common = sorted(before.keys() & after.keys())
    reshaped = {name: (before[name], after[name]) for name in common if _unlike(before[name], after[name])}
    alike = [name for name in common if name not in reshaped]
    undecided = [name for name in alike if not _known_equal(old, before[name].name, new, after[name].name)]
    results = run(
        undecided,
        cost=lambda name: 2 * min(before[name].nbytes, _BLOCK_BYTES) + 1,
        work=lambda name: _equal(old, before[name], new, after[name]),
        budget_bytes=2 * _WORKERS * _BLOCK_BYTES,
        workers=_WORKERS,
    )
    changed = tuple(name for name, equal in zip(undecided, results, strict=True) if not equal)
    return Difference(
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        reshaped=reshaped,
        changed=changed,
        same=len(alike) - len(changed),
        nbytes_read=sum(before[name].nbytes for name in undecided),
    )


def _with_aliases(source: SafetensorsSource) -> dict[str, TensorSpec]:
    # by every name; the spec keeps the name under which it is stored
    specs = {spec.name: spec for spec in source.specs()}
    return specs | {alias: specs[name] for alias, name in source.aliases().items()}


def _unlike(a: TensorSpec, b: TensorSpec) -> bool:
    return (a.dtype, a.shape) != (b.dtype, b.shape)


def _known_equal(old: SafetensorsSource, a: str, new: SafetensorsSource, b: str) -> bool:
    return all(
        _place(old, p) == _place(new, q) and _place(old, p)[0] != ""
        for p, q in zip(old.manifest.pieces_of[a], new.manifest.pieces_of[b], strict=True)
    )


def _place(source: SafetensorsSource, piece: Piece) -> tuple[str, int, int]:
    return source.manifest.files[piece.at.path].sha256, piece.at.start, piece.at.stop


def _equal(old: SafetensorsSource, a: TensorSpec, new: SafetensorsSource, b: TensorSpec) -> bool:
    blocks = a.box.blocks(bits=a.bits, max_bytes=_BLOCK_BYTES)
    return all(old.read(a.name, block) == new.read(b.name, block) for block in blocks)
