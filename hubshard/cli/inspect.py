"""`hubshard inspect`: what a checkpoint holds, from its index and headers alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from hubshard.cli.common import Json, Revision, Token, Variant, echo_json, interruptible
from hubshard.messages import counted
from hubshard.sizes import format_size

if TYPE_CHECKING:
    from hubshard.lazy import Checkpoint

__all__ = ["inspect"]


@interruptible("nothing was written.")
def inspect(
    target: Annotated[str, typer.Argument(help="A directory, a .safetensors file, or org/name[@revision].")],
    *,
    revision: Revision = None,
    variant: Variant = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Show shards, dtypes and tensors. Reads the index and the header of each shard, no tensor."""
    from hubshard.cli.progress import reporting
    from hubshard.lazy import open_checkpoint

    with (
        reporting(quiet=True, events=None) as on_event,
        open_checkpoint(target, revision=revision, variant=variant, token=token, on_event=on_event) as checkpoint,
    ):
        overview = _overview(checkpoint)
    if as_json:
        echo_json(overview)
    else:
        _print(overview, tensors=tensors)


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor: where it is and what it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


@dataclass(frozen=True, slots=True)
class Overview:
    """A checkpoint in figures.

    Attributes:
        files: bytes per safetensors file.
        dtypes: bytes of tensors per dtype.
        parameters: elements in all, packed ones counted as stored.
        nbytes: bytes of tensors in all.
        aliases: names that share a stored tensor.
        notes: what was chosen against something else.
        tensors: all of them.
    """

    files: dict[str, int]
    dtypes: dict[str, int]
    parameters: int
    nbytes: int
    aliases: dict[str, str]
    notes: tuple[str, ...]
    tensors: tuple[TensorRow, ...]


def _overview(checkpoint: Checkpoint) -> Overview:
    manifest = checkpoint.manifest
    files = {piece.tensor: piece.at.path for piece in manifest.pieces} if manifest else {}
    specs = tuple(checkpoint.specs.values())
    dtypes: Counter[str] = Counter()
    for spec in specs:
        dtypes[spec.dtype] += spec.nbytes
    return Overview(
        files={path: manifest.files[path].nbytes for path in sorted(manifest.files)} if manifest else {},
        dtypes=dict(dtypes.most_common()),
        parameters=sum(spec.numel for spec in specs),
        nbytes=checkpoint.nbytes,
        aliases=dict(checkpoint.aliases),
        notes=tuple(getattr(checkpoint.source, "notes", ())),
        tensors=tuple(TensorRow(s.name, s.dtype, s.shape, s.nbytes, files.get(s.name, "")) for s in specs),
    )


def _print(overview: Overview, *, tensors: bool) -> None:
    from hubshard.cli.tables import print_table

    counts = Counter(row.file for row in overview.tensors)
    print_table(
        ("file", ">tensors", ">size"),
        [(path, f"{counts[path]:,}", format_size(nbytes)) for path, nbytes in overview.files.items()],
    )
    of_dtype = Counter(row.dtype for row in overview.tensors)
    print_table(
        ("dtype", ">tensors", ">size"),
        [(dtype, f"{of_dtype[dtype]:,}", format_size(nbytes)) for dtype, nbytes in overview.dtypes.items()],
    )
    if tensors:
        print_table(
            ("tensor", "dtype", "shape", ">size", "file"),
            [(row.name, row.dtype, _shape(row.shape), format_size(row.nbytes), row.file) for row in overview.tensors],
        )
    typer.echo(
        f"{counted(len(overview.tensors), 'tensor')}, {counted(overview.parameters, 'parameter')}, "
        f"{format_size(overview.nbytes)} in {counted(len(overview.files), 'file')}"
    )
    for alias, name in overview.aliases.items():
        typer.echo(f"{alias} is {name}")
    for note in overview.notes:
        typer.echo(note, err=True)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
