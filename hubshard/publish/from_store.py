"""What is to be published of a directory or of another repo: the checkpoints in it, and what goes along with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hubshard.errors import FormatError
from hubshard.messages import listed, named
from hubshard.names import (
    ADAPTER_STEM,
    MODEL_STEM,
    is_one_file,
    shard_name,
    shard_set,
    stem_of,
    variant_of,
)
from hubshard.paths import path_in
from hubshard.plan import Shard, ShardPlan, bound_of
from hubshard.publish.along import beside_weights, check_weights
from hubshard.publish.left_out import Choice
from hubshard.publish.outgoing import Component, Layout, OutFile, Outgoing, outgoing_of
from hubshard.publish.which_folders import folders_of, names_in, notes_on_components, refuse_missing
from hubshard.readers import ListedReader
from hubshard.sources.cast import CastSource
from hubshard.sources.dtypes import CASTABLE
from hubshard.sources.model_config import CONFIG, config_of, config_with_dtype, read_config, stem_told
from hubshard.sources.packed import logical_parameters
from hubshard.sources.safetensors import SafetensorsSource
from hubshard.sources.stems import stem_by_config
from hubshard.sources.weight_files import stem_among
from hubshard.store.local import LocalStore
from hubshard.store.opening import Opened

__all__ = ["from_store"]

_WORKERS = 8


@dataclass(frozen=True)
class _Checkpoint:
    # one that was found in a folder, the stem that its files are to have, and whether it is of the variant asked for
    folder: str
    source: SafetensorsSource
    stem: str
    is_variant: bool

    def path_of(self, name: str) -> str:
        return path_in(self.folder, name)

    @property
    def stems(self) -> frozenset[str]:
        """Of its files, as they are and as they are to be; and of what most loaders take for a model."""
        return frozenset({MODEL_STEM, self.stem, stem_of(self.source.path.rpartition("/")[2]) or MODEL_STEM})


def from_store(
    opened: Opened,
    layout: Layout,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Outgoing:
    """A revision of a store: a local directory or file, or a repo on a Hub. A weight file goes alone.

    Of a pipeline of diffusers, or what else has its checkpoints in several folders (adapters of peft, modules of
    sentence-transformers), each folder that holds one is published, planned on its own. Beside a checkpoint in the
    root, those in folders go along as they are, unless a `model_index.json` says that it is a pipeline.

    Weights of the layout's variant are read where there are some, else the plain ones; that is so in each folder, and
    all come to have the names of the variant. Shards that already carry the right names and fit the bound keep their
    tensors; otherwise all are planned anew. Files keep the stem of their names; those of a name that no loader looks
    for get that of the loader which the config is for.

    Args:
        opened: the revision.
        layout: of the shards.
        include: patterns of files that go along; all by default.
        exclude: patterns of files that do not, besides those that `Choice` leaves out; of the folders of checkpoints,
            those whose weights they match stay.

    Raises:
        FormatError: a checkpoint that does not hold together, or a file name that cannot be published.
        NotFoundError: nothing to publish, or a pipeline lacks a component that its `model_index.json` names.
    """
    place = opened.store.root if isinstance(opened.store, LocalStore) else None
    with opened.named():
        opened = replace(opened, store=ListedReader(opened.store))
        choice = Choice(include, exclude, [entry.path for entry in opened.store.list(opened.at)])
        return _from_store(opened, layout, choice, place)


def _from_store(opened: Opened, layout: Layout, choice: Choice, place: Path | None) -> Outgoing:
    entries = opened.store.list(opened.at)
    paths = [entry.path for entry in entries]
    folders: Sequence[str] = [""]
    said: list[str] = []
    if opened.path is None:
        folders = folders_of(paths, choice.exclude, place=place)
        refuse_missing(opened, entries, choice.exclude)
        said += notes_on_components(opened, entries, choice.exclude)
    checkpoints = [_checkpoint(opened, paths, folder, layout) for folder in folders]
    said += [note for checkpoint in checkpoints for note in _notes_on(checkpoint, layout)]
    if opened.path is not None and checkpoints[0].source.index_path is None:
        return outgoing_of([_component(checkpoints[0], layout, None)], [], layout, notes=said)
    if folders != [""]:
        said += _notes_on_folders(checkpoints, layout.variant)
    weights = {path for checkpoint in checkpoints for path in checkpoint.source.weight_files}
    along = [entry for entry in entries if entry.path not in weights]
    may_go = Choice((), choice.exclude, paths)
    for checkpoint in checkpoints:
        _refuse_unnamed(checkpoint, [entry.path for entry in along if may_go.takes(entry.path)])
    stems = {checkpoint.folder: checkpoint.stems for checkpoint in checkpoints}
    files, notes = beside_weights(opened, along, choice, stems=stems)
    check_weights(opened, files)
    totals = _with_configs(checkpoints, files, layout)
    components = [_component(checkpoint, layout, totals.get(checkpoint.folder)) for checkpoint in checkpoints]
    return outgoing_of(components, files, layout, notes=(*said, *notes))


def _refuse_unnamed(checkpoint: _Checkpoint, others: Iterable[str]) -> None:
    """Refuse shards that are of the checkpoint by their names, and that its index does not name: half a model."""
    sets = {shard_set(path) for path in checkpoint.source.weight_files} - {None}
    left = [path for path in others if shard_set(path) in sets]
    if left and checkpoint.source.index_path is not None:
        raise FormatError(
            f"{checkpoint.source.index_path}: does not name {listed(left)}, by its name a shard of the same checkpoint",
            hint="fetch or save it whole again; if it is none, leave it out with `exclude`",
        )


def _checkpoint(opened: Opened, paths: Sequence[str], folder: str, layout: Layout) -> _Checkpoint:
    here = names_in(folder, paths)
    with opened.named():
        by_path = {entry.path: entry for entry in opened.store.list(opened.at)}
        preferred = stem_by_config(opened.store, opened.at, by_path, folder) if opened.path is None else None
        has_variant = opened.path is None and _has_variant(here, layout.variant, preferred)
        source = SafetensorsSource(
            opened.store,
            opened.at,
            folder=folder,
            path=opened.path,
            variant=layout.variant if has_variant else None,
            workers=_WORKERS,
        )
    stem = stem_of(source.path.rpartition("/")[2])
    config = by_path.get(path_in(folder, CONFIG))
    if stem is None or (opened.path is None and stem != ADAPTER_STEM):
        told = None if config is None else stem_told(read_config(opened.store, opened.at, config))
        stem = told or stem or MODEL_STEM
    return _Checkpoint(folder, source, stem, has_variant)


def _has_variant(names: Collection[str], variant: str | None, preferred: str | None) -> bool:
    stem = stem_among(names, preferred)
    return any(stem_of(name) == stem and variant_of(name) == variant for name in names)


def _notes_on(checkpoint: _Checkpoint, layout: Layout) -> Iterable[str]:
    yield from checkpoint.source.notes
    path = checkpoint.source.path
    if stem_of(path.rpartition("/")[2]) != checkpoint.stem:
        name = checkpoint.path_of(shard_name(1, 1, variant=layout.variant, stem=checkpoint.stem))
        yield f"{path} is published under the name that loaders look for: {name}, or that of its shards"


def _notes_on_folders(checkpoints: Sequence[_Checkpoint], variant: str | None) -> Iterable[str]:
    plain = [checkpoint.folder for checkpoint in checkpoints if not checkpoint.is_variant]
    if variant is not None and 0 < len(plain) < len(checkpoints):
        yield f"no weights of the variant {variant} are in {listed(plain)}: the plain ones go under that name"


def _component(checkpoint: _Checkpoint, layout: Layout, total_parameters: int | None) -> Component:
    source = checkpoint.source
    with named(checkpoint.folder):
        kept = _kept_plan(checkpoint, layout)
        if kept is not None:
            return Component(kept, source, total_parameters)
        return Component.of(
            CastSource(source, layout.dtype) if layout.dtype else source,
            layout,
            stem=checkpoint.stem,
            folder=checkpoint.folder,
            metadata=source.header_metadata,
            total_parameters=total_parameters,
        )


def _kept_plan(checkpoint: _Checkpoint, layout: Layout) -> ShardPlan | None:
    source, stem = checkpoint.source, checkpoint.stem
    names, bound = list(source.weight_files), bound_of(stem, layout.max_shard_bytes)
    expected = [
        checkpoint.path_of(shard_name(n, len(names), variant=layout.variant, stem=stem))
        for n in range(1, len(names) + 1)
    ]
    if layout.dtype or sorted(names) != expected or not source.specs() or (is_one_file(stem) and len(names) > 1):
        return None
    in_file: dict[str, list[tuple[int, str]]] = {name: [] for name in expected}
    for piece in source.manifest.pieces:
        in_file[piece.at.path].append((piece.at.start, piece.tensor))
    shards = []
    for name in expected:
        specs = tuple(source.manifest.tensors[tensor] for _, tensor in sorted(in_file[name]))
        own = {alias: kept for alias, kept in source.aliases().items() if kept in {spec.name for spec in specs}}
        shards.append(Shard(name, specs, own | dict(source.header_metadata) | {"format": "pt"}))
    if any(shard.nbytes > bound and len(shard.specs) > 1 for shard in shards):
        return None
    oversized = tuple(shard.specs[0].name for shard in shards if shard.nbytes > bound)
    return ShardPlan(tuple(shards), layout.variant, oversized, stem, checkpoint.folder)


def _with_configs(checkpoints: Iterable[_Checkpoint], files: list[OutFile], layout: Layout) -> Mapping[str, int | None]:
    """Logical parameters by folder, as far as configs tell them; the configs among `files` tell of a new dtype."""
    totals = {}
    numbers = {file.path: number for number, file in enumerate(files)}
    for checkpoint in checkpoints:
        number = numbers.get(checkpoint.path_of(CONFIG))
        if number is None:
            continue
        path = files[number].path
        raw = files[number].content()
        totals[checkpoint.folder] = logical_parameters(checkpoint.source.specs(), config_of(raw, path=path))
        if layout.config_dtype:
            files[number] = OutFile.of(path, config_with_dtype(raw, CASTABLE[layout.config_dtype], path=path))
    return totals
