"""`hubshard inspect`: what a checkpoint holds, from its index and headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hubshard.cli.common import Json, Revision, Subfolder, Token, Variant, echo_json, interruptible
from hubshard.messages import counted
from hubshard.sizes import format_size
from hubshard.sources.several import qualified

if TYPE_CHECKING:
    from hubshard.lazy import Checkpoint

__all__ = ["inspect"]


@interruptible("nothing was written.")
def inspect(
    target: Annotated[str, typer.Argument(help="A directory, a .safetensors file, or org/name[@revision].")],
    *,
    revision: Revision = None,
    subfolder: Subfolder = None,
    variant: Variant = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Show shards, dtypes and tensors. Reads indexes and headers, no tensor; of a pipeline, those of every folder."""
    from hubshard.cli.progress import reporting
    from hubshard.lazy import open_checkpoint
    from hubshard.lazy.opening import open_checkpoints

    with reporting(quiet=True, events=None) as on_event, ExitStack() as stack:
        where: dict[str, Any] = {"revision": revision, "variant": variant, "token": token, "on_event": on_event}
        if subfolder:
            checkpoints = {"": open_checkpoint(target, subfolder="" if subfolder == "." else subfolder, **where)}
        else:
            checkpoints = dict(open_checkpoints(target, **where))
        for checkpoint in checkpoints.values():
            stack.enter_context(checkpoint)
        overview = _joined([_overview(checkpoint, prefix) for prefix, checkpoint in checkpoints.items()])
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
class Part:
    """The checkpoint of one folder.

    Attributes:
        folder: from the root, "" for the root itself.
        files: how many hold its tensors.
        tensors: how many.
        parameters: elements in all.
        nbytes: bytes of its tensors.
    """

    folder: str
    files: int
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Overview:
    """What a repo or directory holds, in figures. A tensor of a folder is called `unet/conv_in.weight`.

    Attributes:
        checkpoints: one of each folder.
        files: bytes per safetensors file.
        dtypes: bytes of tensors per dtype.
        parameters: elements in all, packed ones counted as stored.
        nbytes: bytes of tensors in all.
        aliases: names that share a stored tensor.
        notes: what was chosen against something else.
        tensors: all of them.
    """

    checkpoints: tuple[Part, ...]
    files: dict[str, int]
    dtypes: dict[str, int]
    parameters: int
    nbytes: int
    aliases: dict[str, str]
    notes: tuple[str, ...]
    tensors: tuple[TensorRow, ...]


def _overview(checkpoint: Checkpoint, prefix: str) -> Overview:
    manifest = checkpoint.manifest
    of_tensor = {piece.tensor: piece.at.path for piece in manifest.pieces} if manifest else {}
    files = {path: manifest.files[path].nbytes for path in sorted(manifest.files)} if manifest else {}
    specs = tuple(checkpoint.specs.values())
    dtypes: Counter[str] = Counter()
    for spec in specs:
        dtypes[spec.dtype] += spec.nbytes
    parameters = sum(spec.numel for spec in specs)
    return Overview(
        checkpoints=(Part(checkpoint.folder, len(files), len(specs), parameters, checkpoint.nbytes),),
        files=files,
        dtypes=dict(dtypes),
        parameters=parameters,
        nbytes=checkpoint.nbytes,
        aliases={qualified(prefix, alias): qualified(prefix, name) for alias, name in checkpoint.aliases.items()},
        notes=tuple(getattr(checkpoint.source, "notes", ())),
        tensors=tuple(
            TensorRow(qualified(prefix, s.name), s.dtype, s.shape, s.nbytes, of_tensor.get(s.name, "")) for s in specs
        ),
    )


def _joined(each: Sequence[Overview]) -> Overview:
    dtypes: Counter[str] = Counter()
    for overview in each:
        dtypes.update(overview.dtypes)
    return Overview(
        checkpoints=tuple(part for overview in each for part in overview.checkpoints),
        files={path: nbytes for overview in each for path, nbytes in overview.files.items()},
        dtypes=dict(dtypes.most_common()),
        parameters=sum(overview.parameters for overview in each),
        nbytes=sum(overview.nbytes for overview in each),
        aliases={alias: name for overview in each for alias, name in overview.aliases.items()},
        notes=tuple(note for overview in each for note in overview.notes),
        tensors=tuple(row for overview in each for row in overview.tensors),
    )


def _print(overview: Overview, *, tensors: bool) -> None:
    from hubshard.cli.tables import print_table

    if any(part.folder for part in overview.checkpoints):
        print_table(
            ("checkpoint", ">files", ">tensors", ">parameters", ">size"),
            [
                (p.folder or ".", f"{p.files:,}", f"{p.tensors:,}", f"{p.parameters:,}", format_size(p.nbytes))
                for p in overview.checkpoints
            ],
        )
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
