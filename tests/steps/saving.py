"""Steps saved without torch: arrays as the ranks of a world would hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hubshard.steps.parts import FileReceipt, Part, merge, plan_files
from hubshard.steps.step import Step, step_folder
from hubshard.steps.step_json import encode_step
from hubshard.steps.writing import PieceStream, write_local, write_manifest
from hubshard.tensors import Box, TensorSpec

__all__ = ["random_tensors", "save_step"]

Tensors = Mapping[str, tuple[str, NDArray[Any]]]
"""By name in the step: code of the dtype, and the values (of any dtype of that width)."""


def save_step(
    root: Path,
    tensors: Tensors,
    *,
    step: int = 1,
    world: int = 1,
    dims: tuple[int | None, ...] = (0, -1, None),
    same: Mapping[str, str] | None = None,
    scalars: Mapping[str, object] | None = None,
    metadata: Mapping[str, object] | None = None,
    flat: bool = False,
    max_file_bytes: int = 10**9,
    block_bytes: int = 64,
) -> Step:
    """Save a step into a local folder.

    Args:
        root: gets the folder of the step.
        tensors: what is saved; "a.b.c" lies below the key "a".
        step: its number.
        world: ranks that share the tensors.
        dims: along which they are cut, one after the other; None is not at all, and falls to one rank.
        same: further names of tensors, which lie at the same bytes.
        scalars: what is no tensor.
        metadata: of the step.
        flat: the names are keys themselves.
        max_file_bytes: bound per file.
        block_bytes: that one hash covers.
    """
    folder = root / step_folder(step)
    folder.mkdir(parents=True, exist_ok=True)
    parts = list(_parts(tensors, world, dims))

    def read(part: Part, box: Box) -> bytes:
        index = tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True))
        return tensors[part.spec.name][1][index].tobytes()

    receipts: list[FileReceipt] = []
    for rank in range(world):
        mine = [part for owner, part in parts if owner == rank]
        for number, planned in enumerate(plan_files(mine, max_file_bytes=max_file_bytes), start=1):
            stem = f"rank-{rank:05d}-{number:05d}"
            stream = PieceStream(planned, stem=stem, read=read, block_bytes=block_bytes)
            write_local(folder, stream)
            receipts.append(stream.receipt)
    names = [*tensors, *(scalars or {})]
    paths = {} if flat else {name: (name.partition(".")[0], name.partition(".")[2]) for name in names if "." in name}
    made = merge(
        receipts, step=step, world_size=world, scalars=scalars or {}, paths=paths, metadata=dict(metadata or {})
    )
    if same:
        made = replace(made, tensors=dict(sorted({**made.tensors, **_further(made, same)}.items())))
    write_manifest(folder, encode_step(made), made.file_of)
    return made


def _further(step: Step, same: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for name, other in same.items():
        placed = step.tensors[other]
        head, _, tail = name.partition(".")
        spec = TensorSpec(name, placed.spec.dtype, placed.spec.shape)
        found[name] = replace(placed, spec=spec, path=(head, tail))
    return found


def _parts(tensors: Tensors, world: int, dims: tuple[int | None, ...]) -> Iterator[tuple[int, Part]]:
    for number, (name, (dtype, array)) in enumerate(tensors.items()):
        spec, dim = TensorSpec(name, dtype, array.shape), dims[number % len(dims)]
        if dim is None or not array.ndim:
            yield number % world, Part(spec, spec.box)
            continue
        dim %= array.ndim
        bounds = [min(array.shape[dim], rank * -(-array.shape[dim] // world)) for rank in range(world + 1)]
        for rank, (start, stop) in enumerate(pairwise(bounds)):
            offset, shape = [0] * array.ndim, list(array.shape)
            offset[dim], shape[dim] = start, stop - start
            yield rank, Part(spec, Box(tuple(offset), tuple(shape)))


def random_tensors(count: int, shape: tuple[int, ...], *, seed: int = 0, prefix: str = "model.") -> dict[str, Any]:
    """F32 tensors `layers.N.weight` with random values."""
    rng = np.random.default_rng(seed)
    return {f"{prefix}layers.{n}.weight": ("F32", rng.standard_normal(shape, dtype="f4")) for n in range(count)}
