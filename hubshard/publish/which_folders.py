"""In which folders of a directory or repo the checkpoints lie that are published; what is missing there, is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from hubshard.errors import NotFoundError, UnsafeFormatError
from hubshard.messages import listed
from hubshard.names import (
    ADAPTER_STEM,
    STEMS,
    is_of_training,
    is_pickled,
    parse_weight_name,
    shard_name,
    stem_of,
)
from hubshard.paths import path_in
from hubshard.protocols import Entry
from hubshard.publish.left_out import Choice
from hubshard.sources.model_config import ADAPTER_CONFIG, CONFIG
from hubshard.sources.model_index import MODEL_INDEX, component_names, models_among, without_folder
from hubshard.sources.weight_files import checkpoint_folders
from hubshard.store.opening import Opened

__all__ = ["folders_of", "names_in", "notes_on_components", "refuse_missing"]

# in the root of what lies in several folders: pipelines of diffusers, models of sentence-transformers
_OF_FOLDERS = frozenset({MODEL_INDEX, "modular_model_index.json", "modules.json"})


def folders_of(paths: Sequence[str], exclude: Sequence[str], *, place: Path | None) -> Sequence[str]:
    """The folders whose checkpoints are published, "" of the root.

    Args:
        paths: of all files, from the root.
        exclude: patterns of files that stay.
        place: the directory, where it is one.

    Raises:
        NotFoundError: the root holds none, and of its folders it cannot be said that they belong together.
        UnsafeFormatError: one of several holds nothing but pickled weights; names it.
    """
    folders = _folders(paths, exclude)
    if folders == [""]:
        _refuse_folders_alone(paths, exclude, place)
    return folders


def _folders(paths: Sequence[str], exclude: Sequence[str]) -> Sequence[str]:
    choice = Choice((), exclude, paths)
    paths = [path for path in paths if choice.takes(path)]
    in_root = [path for path in paths if "/" not in path]
    found = checkpoint_folders(paths)
    if MODEL_INDEX not in in_root and any(map(_holds_weights, in_root)):
        return [""]
    stems = {stem_of(name) for folder in found for name in names_in(folder, paths)} - {None}
    if _OF_FOLDERS.isdisjoint(in_root) and stems != {ADAPTER_STEM}:
        return [""]
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder not in found and is_pickled(name) and parse_weight_name(name) is not None:
            raise UnsafeFormatError(
                f"{folder or 'the root'} holds only pickled weights, which run code when read: {path}",
                hint="convert them to safetensors first, or leave the folder out with `exclude`",
            )
    return list(found) or [""]


def names_in(folder: str, paths: Iterable[str]) -> Sequence[str]:
    """The names of the files that lie in a folder itself."""
    return [name for where, _, name in (path.rpartition("/") for path in paths) if where == folder]


def _refuse_folders_alone(paths: Sequence[str], exclude: Sequence[str], place: Path | None) -> None:
    found = [folder for folder in checkpoint_folders(paths) if folder]
    in_root = [path for path in paths if "/" not in path]
    if not found or any(map(_holds_weights, in_root)):
        return
    choice = Choice((), exclude, paths)
    if not checkpoint_folders(path for path in paths if choice.takes(path)):
        raise NotFoundError(
            f"`exclude` leaves no weights: those of {listed(found)} are left out by {listed(exclude)}",
            hint="leave the weights of one folder in, at least",
        )
    there = f"there are: {listed(in_root)}" if in_root else "there are only folders"
    one = f"publish one of them, such as {place / found[0]}" if place else "pull it, and publish one of them from there"
    raise NotFoundError(
        f"the root holds no weights; {there}", hint=f"there are checkpoints in folders of it, {listed(found)}: {one}"
    )


def refuse_missing(opened: Opened, entries: Sequence[Entry], exclude: Sequence[str]) -> None:
    """Refuse a pipeline without a folder, or without weights, of a component that its `model_index.json` names.

    Args:
        opened: the directory or repo.
        entries: all its files.
        exclude: patterns of files that stay.

    Raises:
        NotFoundError: there is none, and nobody has asked to leave the component out.
    """
    paths, names = _components(opened, entries, exclude)
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


def notes_on_components(opened: Opened, entries: Sequence[Entry], exclude: Sequence[str]) -> Iterator[str]:
    """Sentences on components that a pipeline names, and that diffusers could not load.

    Args:
        opened: the directory or repo.
        entries: all its files.
        exclude: patterns of files that stay.
    """
    paths, names = _components(opened, entries, exclude)
    found = checkpoint_folders(paths)
    for name in names:
        here = names_in(name, paths)
        if name in found and not {CONFIG, ADAPTER_CONFIG} & set(here):
            yield f"{name} holds weights, but no {CONFIG}, by which loaders know what to make of them"
        elif name not in found and not any(map(_is_of_component, here)):
            yield f"{name}: {MODEL_INDEX} names this component, but it holds neither a config nor weights"


def _is_of_component(name: str) -> bool:
    # of a scheduler, a processor, a tokenizer; the oldest of these have no config
    return name.endswith((".json", ".model")) or name.startswith(("vocab", "merges", "tokenizer"))


def _components(
    opened: Opened, entries: Sequence[Entry], exclude: Sequence[str]
) -> tuple[Collection[str], Sequence[str]]:
    """The paths of files that are taken, and the components that should be among them."""
    choice = Choice((), exclude, [entry.path for entry in entries])
    taken = [entry for entry in entries if choice.takes(entry.path)]
    named = component_names(opened.store, opened.at, taken)
    return {entry.path for entry in taken}, [name for name in named if not _is_excluded(name, entries, exclude)]


def _is_excluded(component: str, entries: Iterable[Entry], exclude: Sequence[str]) -> bool:
    """Whether somebody has asked to leave the component out, or its weights, be they there or not."""
    prefix = path_in(component, "")
    weights = {component, prefix, *(prefix + shard_name(1, 1, stem=stem) for stem in STEMS)}
    weights |= {e.path for e in entries if e.path.startswith(prefix) and stem_of(e.path.rpartition("/")[2])}
    return any(fnmatch(path, pattern) for path in weights for pattern in exclude)


def _holds_weights(name: str) -> bool:
    suffix = name.rpartition(".")[2]
    return suffix == "safetensors" or stem_of(name) is not None or (is_pickled(name) and not is_of_training(name))
