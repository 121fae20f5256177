"""What is to be published of a directory or of another repo: the checkpoints in it, and what goes along with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from hubshard.errors import FormatError, NotFoundError, UnsafeFormatError
from hubshard.messages import listed, named
from hubshard.names import (
    ADAPTER_STEM,
    MODEL_STEM,
    STEMS,
    is_of_training,
    is_one_file,
    is_pickled,
    is_weight_file,
    parse_weight_name,
    shard_name,
    stem_of,
    variant_of,
)
from hubshard.paths import path_in
from hubshard.plan import Shard, ShardPlan, bound_of
from hubshard.protocols import Entry
from hubshard.publish.left_out import Choice
from hubshard.publish.outgoing import Component, Layout, OutFile, Outgoing, outgoing_of
from hubshard.readers import ListedReader
from hubshard.sizes import READ_BYTES
from hubshard.sources.cast import CastSource
from hubshard.sources.dtypes import CASTABLE
from hubshard.sources.model_config import CONFIG, config_of, config_with_dtype, read_config, stem_for
from hubshard.sources.model_index import MODEL_INDEX, component_names, models_among, without_folder
from hubshard.sources.packed import logical_parameters
from hubshard.sources.safetensors import SafetensorsSource
from hubshard.sources.stems import stem_by_config
from hubshard.sources.weight_files import checkpoint_folders, stem_among
from hubshard.store.local import LocalStore
from hubshard.store.opening import Opened

__all__ = ["beside_weights", "from_store"]

_WORKERS = 8
# in the root of what lies in several folders: pipelines of diffusers, models of sentence-transformers
_OF_FOLDERS = frozenset({MODEL_INDEX, "modular_model_index.json", "modules.json"})
# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
_MAX_POINTER_BYTES = 1024


@dataclass(frozen=True)
class _Checkpoint:
    # one that was found in a folder, the stem that its files are to have, and whether it is of the variant asked for
    folder: str
    source: SafetensorsSource
    stem: str
    is_variant: bool

    def path_of(self, name: str) -> str:
        return path_in(self.folder, name)


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
    opened = replace(opened, store=ListedReader(opened.store))
    entries = opened.store.list(opened.at)
    paths = [entry.path for entry in entries]
    folders = [""]
    if opened.path is None:
        folders = list(_folders(paths, exclude))
        with opened.named():
            _refuse_folders_alone(folders, paths, place)
            _refuse_missing(opened, entries, exclude)
    checkpoints = [_checkpoint(opened, paths, folder, layout) for folder in folders]
    said = [note for checkpoint in checkpoints for note in _notes_on(checkpoint, layout)]
    if opened.path is not None and checkpoints[0].source.index_path is None:
        return outgoing_of([_component(checkpoints[0], layout, None)], [], layout, notes=said)
    if folders != [""]:
        said += _notes_on_folders(checkpoints, layout.variant)
    weights = {path for checkpoint in checkpoints for path in checkpoint.source.weight_files}
    stems = {checkpoint.folder: checkpoint.stem for checkpoint in checkpoints}
    along = [entry for entry in entries if entry.path not in weights]
    files, notes = beside_weights(opened, along, Choice(include, exclude), stems=stems)
    totals = _with_configs(checkpoints, files, layout)
    components = [_component(checkpoint, layout, totals.get(checkpoint.folder)) for checkpoint in checkpoints]
    return outgoing_of(components, files, layout, notes=(*said, *notes))


def _folders(paths: Sequence[str], exclude: Sequence[str]) -> Sequence[str]:
    """The folders whose checkpoints are published, "" of the root.

    Raises:
        UnsafeFormatError: one of several holds nothing but pickled weights; names it.
    """
    choice = Choice((), exclude)
    paths = [path for path in paths if choice.takes(path)]
    in_root = [path for path in paths if "/" not in path]
    found = checkpoint_folders(paths)
    if MODEL_INDEX not in in_root and any(map(_holds_weights, in_root)):
        return [""]
    stems = {stem_of(name) for folder in found for name in _names_in(folder, paths)} - {None}
    if _OF_FOLDERS.isdisjoint(in_root) and stems != {ADAPTER_STEM}:
        return [""]
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder not in found and is_pickled(name) and parse_weight_name(name) is not None:
            raise UnsafeFormatError(
                f"{folder or 'the root'} holds only pickled weights, which run code when read: {path}",
                hint="convert them to safetensors first, or leave the folder out with `exclude`",
            )
    return found or [""]


def _refuse_folders_alone(folders: Sequence[str], paths: Sequence[str], place: Path | None) -> None:
    found = [folder for folder in checkpoint_folders(paths) if folder]
    in_root = [path for path in paths if "/" not in path]
    if folders != [""] or not found or any(map(_holds_weights, in_root)):
        return
    there = f"there are: {listed(in_root)}" if in_root else "there are only folders"
    one = f"publish one of them, such as {place / found[0]}" if place else "pull it, and publish one of them from there"
    raise NotFoundError(
        f"the root holds no weights; {there}", hint=f"there are checkpoints in folders of it, {listed(found)}: {one}"
    )


def _refuse_missing(opened: Opened, entries: Sequence[Entry], exclude: Sequence[str]) -> None:
    choice = Choice((), exclude)
    taken = [entry for entry in entries if choice.takes(entry.path)]
    paths = {entry.path for entry in taken}
    named = component_names(opened.store, opened.at, taken)
    names = [name for name in named if not _is_excluded(name, entries, exclude)]
    hint = "add it; if it is meant to be missing, or is in the repo already, leave it out with `exclude`, as {}/*"
    for name in without_folder(names, paths):
        raise NotFoundError(
            f"{MODEL_INDEX} names the component {name}, but there is no such folder", hint=hint.format(name)
        )
    found = checkpoint_folders(paths)
    for name in models_among(names, paths):
        if name not in found:
            raise NotFoundError(
                f"{MODEL_INDEX} names the component {name}, but {name} holds no weights that loaders look for",
                hint=hint.format(name),
            )


def _is_excluded(component: str, entries: Iterable[Entry], exclude: Sequence[str]) -> bool:
    """Whether somebody has asked to leave the component out, or its weights, be they there or not."""
    prefix = path_in(component, "")
    weights = {component, prefix, *(prefix + shard_name(1, 1, stem=stem) for stem in STEMS)}
    weights |= {e.path for e in entries if e.path.startswith(prefix) and stem_of(e.path.rpartition("/")[2])}
    return any(fnmatch(path, pattern) for path in weights for pattern in exclude)


def _holds_weights(name: str) -> bool:
    suffix = name.rpartition(".")[2]
    return suffix == "safetensors" or stem_of(name) is not None or (is_pickled(name) and not is_of_training(name))


def _checkpoint(opened: Opened, paths: Sequence[str], folder: str, layout: Layout) -> _Checkpoint:
    here = _names_in(folder, paths)
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
    if stem is None:
        config = by_path.get(path_in(folder, CONFIG))
        stem = MODEL_STEM if config is None else stem_for(read_config(opened.store, opened.at, config))
    return _Checkpoint(folder, source, stem, has_variant)


def _names_in(folder: str, paths: Iterable[str]) -> Sequence[str]:
    return [name for where, _, name in (path.rpartition("/") for path in paths) if where == folder]


def _has_variant(names: Collection[str], variant: str | None, preferred: str | None) -> bool:
    stem = stem_among(names, preferred)
    return any(stem_of(name) == stem and variant_of(name) == variant for name in names)


def _notes_on(checkpoint: _Checkpoint, layout: Layout) -> Iterable[str]:
    yield from checkpoint.source.notes
    path = checkpoint.source.path
    if stem_of(path.rpartition("/")[2]) is None:
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


def beside_weights(
    opened: Opened, entries: Iterable[Entry], choice: Choice, *, stems: Mapping[str, str] | None = None
) -> tuple[list[OutFile], list[str]]:
    """Of some files of a revision, those that go along with a model, and sentences on what does not.

    Args:
        opened: the revision.
        entries: the files, those of the published checkpoints left out.
        choice: what goes along at all.
        stems: of the checkpoints, by folder: other weights of such a folder that have that stem, or `model`, stay.
    """
    stems = {"": MODEL_STEM} | dict(stems or {})
    files, notes = [], []
    for entry in entries:
        path = entry.path
        if not choice.takes(path):
            continue
        folder, _, name = path.rpartition("/")
        own = {MODEL_STEM, stems[folder]} if folder in stems else set()
        if any(is_weight_file(name, variant=variant_of(name), stem=stem) for stem in own):
            if not path.endswith(".json"):
                notes.append(f"{path} is left out: it is no part of the checkpoint that is published")
            continue
        data = partial(opened.blocks, path, entry.nbytes, block_bytes=READ_BYTES)
        files.append(OutFile(path, entry.nbytes, data))
    for file in files:
        _refuse_pointer(file)
    return files, [*notes, *choice.notes()]


def _refuse_pointer(file: OutFile) -> None:
    # what a clone without git-lfs leaves in the place of a large file
    if file.nbytes < _MAX_POINTER_BYTES and file.content().startswith(_POINTER):
        raise FormatError(
            f"{file.path}: this is a Git LFS pointer, not the file itself",
            hint="fetch the content with `git lfs pull`, or leave the file out with `exclude`",
        )
