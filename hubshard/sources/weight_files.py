"""Which files of a folder are its checkpoint: the choice of transformers, with an error where there is none to make."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from hubshard.errors import FormatError, IncompleteError, NotFoundError, UnsafeFormatError
from hubshard.messages import listed
from hubshard.names import (
    ADAPTER_STEM,
    DIFFUSERS_STEM,
    MODEL_STEM,
    STEMS,
    check_variant,
    index_name,
    index_names,
    indexed_suffix,
    is_numbered,
    is_of_training,
    is_pickled,
    is_training_folder,
    parse_weight_name,
    shard_name,
    stem_of,
    variant_of,
)
from hubshard.paths import check_plain_path, path_in
from hubshard.protocols import Entry
from hubshard.sources.model_config import ADAPTER_CONFIG

__all__ = [
    "WeightFiles",
    "adapters_named_as_steps",
    "checkpoint_folders",
    "find_weight_files",
    "prefers_index",
    "stem_among",
    "training_folders",
]


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Where a checkpoint begins.

    Attributes:
        path: its index, or its one safetensors file; from the root of the store.
        is_index: which of the two.
        notes: what was chosen against something else, in sentences for people.
    """

    path: str
    is_index: bool
    notes: tuple[str, ...] = ()


def checkpoint_folders(paths: Iterable[str]) -> tuple[str, ...]:
    """The folders that hold a checkpoint of their own, sorted; "" is the root.

    A pipeline of diffusers has one per component (`unet`, `vae`), a model of sentence-transformers one per module.
    What counts is a safetensors file, or an index of some, with a usual name (`model`, `diffusion_pytorch_model`,
    `adapter_model`), of any variant; shards without their index do too, since something of them is missing. Hidden
    folders, caches and those of a training run (`checkpoint-500`) do not count, nor what lies in them.

    Args:
        paths: of files, from the root, with slashes.
    """
    paths = list(paths)
    of_training = training_folders(paths)
    found = set()
    for path in map(PurePosixPath, paths):
        name = parse_weight_name(path.name)
        is_aside = any(map(_is_aside, path.parts[:-1])) or not of_training.isdisjoint(map(str, path.parents))
        if name is not None and name.suffix == "safetensors" and not is_aside:
            found.add("/".join(path.parts[:-1]))
    return tuple(sorted(found))


def training_folders(paths: Iterable[str]) -> frozenset[str]:
    """The folders that hold a step of a training run, by their names, such as `checkpoint-500`.

    An adapter may be called so too: a folder with one is a component, unless a trainer keeps files of its own there.

    Args:
        paths: of files, from the root, with slashes.
    """
    return frozenset(folder for folder, here in _named_as_steps(paths).items() if not _is_adapter(here))


def adapters_named_as_steps(paths: Iterable[str]) -> frozenset[str]:
    """The folders called as a step of a training run is that hold an adapter, and nothing of a trainer.

    Args:
        paths: of files, from the root, with slashes.
    """
    return frozenset(folder for folder, here in _named_as_steps(paths).items() if _is_adapter(here))


def _named_as_steps(paths: Iterable[str]) -> Mapping[str, Collection[str]]:
    """The files of the folders that are called so."""
    names: dict[str, set[str]] = {}
    for path in map(PurePosixPath, paths):
        for folder in path.parents:
            if is_training_folder(folder.name):
                names.setdefault(str(folder), set())
        if str(path.parent) in names:
            names[str(path.parent)].add(path.name)
    return names


def _is_adapter(names: Collection[str]) -> bool:
    has_weights = any(stem_of(name) == ADAPTER_STEM for name in names)
    return has_weights and ADAPTER_CONFIG in names and not any(map(is_of_training, names))


def stem_among(names: Iterable[str], preferred: str | None) -> str:
    """The stem of the checkpoint among files of one folder: `preferred` if it is there, else the first of `STEMS`."""
    there = {stem_of(name) for name in names}
    return next((stem for stem in (preferred, *STEMS) if stem is not None and stem in there), MODEL_STEM)


def prefers_index(stem: str) -> bool:
    """Whether the loaders of `stem` take its index where a single file lies beside it; those of transformers do not."""
    return stem == DIFFUSERS_STEM


def _is_aside(folder: str) -> bool:
    return folder.startswith(".") or folder == "__pycache__"


def find_weight_files(
    entries: Mapping[str, Entry], *, folder: str, path: str | None, variant: str | None, stem: str | None = None
) -> WeightFiles:
    """The checkpoint in `folder`, chosen as its loaders do: a single file goes before an index, but in diffusers.

    Of several stems, `stem` counts if it is there, else the first of `names.STEMS`: a model goes before an adapter that
    lies beside it.

    Args:
        entries: the files of the revision, by path.
        folder: where to look, from the root; "" is the root.
        path: the file to take, relative to `folder`: an index or a safetensors file; None to look for the usual names.
        variant: as in `model.fp16.safetensors`.
        stem: the one that the folder's config is for; None where none tells.

    Raises:
        NotFoundError: nothing of the kind is there; says what is.
        IncompleteError: numbered shards without their index.
        UnsafeFormatError: only pickled weights.
        FormatError: several single files, none of which has the usual name.
    """
    check_variant(variant)
    prefix = path_in(folder.strip("/"), "")
    names = [name.removeprefix(prefix) for name in entries if name.startswith(prefix)]
    if prefix and not names:
        raise _no_folder(entries, prefix)
    if path is not None:
        return _given(prefix, names, path)
    here = {name for name in names if "/" not in name}
    stem = _stem(here, variant, stem)
    single = shard_name(1, 1, variant=variant, stem=stem)
    indexes = [name for name in index_names(variant, stem=stem) if name in here]
    if single in here and not (indexes and prefers_index(stem)):
        notes = tuple(f"{prefix}{single} was taken, as transformers does, and not {prefix}{name}" for name in indexes)
        return WeightFiles(prefix + single, is_index=False, notes=notes)
    if indexes:
        notes = (f"{prefix}{indexes[0]} was taken, as diffusers does, and not {prefix}{single}",)
        return WeightFiles(prefix + indexes[0], is_index=True, notes=notes if single in here else ())
    return _other_name(prefix, sorted(names), variant, stem)


def _stem(names: Iterable[str], variant: str | None, preferred: str | None) -> str:
    weights = [name for name in names if stem_of(name) is not None]
    of_variant = [name for name in weights if variant_of(name) == variant]
    return stem_among(of_variant or weights, preferred)


def _given(prefix: str, names: Sequence[str], path: str) -> WeightFiles:
    check_plain_path(path, path=prefix or "the checkpoint")
    if path not in set(names):
        raise NotFoundError(f"{prefix}{path} is not there; {_there(sorted(names), names)}")
    return WeightFiles(prefix + path, is_index=path.endswith(".json"))


def _other_name(prefix: str, names: Sequence[str], variant: str | None, stem: str) -> WeightFiles:
    # no usual name: one checkpoint of another name is taken, two are not chosen between
    here = [name for name in names if "/" not in name]
    weights = [name for name in here if name.endswith(".safetensors")]
    indexes = [name for name in here if _is_index(name)]
    numbered = [name for name in weights if is_numbered(name)]
    if numbered and not indexes:
        raise IncompleteError(
            f"{_place(prefix)} holds shards ({listed(numbered)}), but no {index_name(variant, stem=stem)} to say what "
            "is in them",
            hint="fetch or publish it whole again: the index is its last file",
        )
    found = [name for name in indexes + weights if not (name in numbered or name.startswith("model.") or stem_of(name))]
    if variant is not None or not found:
        raise _nothing(prefix, names, variant, stem)
    if len(found) > 1:
        raise FormatError(
            f"{_place(prefix)} holds several checkpoints, none with the usual name: {listed(found)}",
            hint=f"name one of them, such as {found[0]}, and not their folder",
        )
    note = f"{prefix}{found[0]} was taken: there is no {shard_name(1, 1)}"
    return WeightFiles(prefix + found[0], is_index=found[0].endswith(".json"), notes=(note,))


def _nothing(prefix: str, names: Sequence[str], variant: str | None, stem: str) -> FormatError | NotFoundError:
    here = [name for name in names if "/" not in name]
    looked_for = f"{shard_name(1, 1, variant=variant, stem=stem)} and {index_name(variant, stem=stem)}"
    pickled = [name for name in here if is_pickled(name)]
    if pickled and not any(name.endswith(".safetensors") for name in here):
        return UnsafeFormatError(
            f"{_place(prefix)} holds no {looked_for}, only pickled weights, which run code when read: "
            f"{listed(pickled)}",
            hint="convert them to safetensors first",
        )
    weights = [name for name in names if name.endswith(".safetensors") or _is_index(name)]
    others = [name for name in weights if "/" not in name]
    folders = [folder for folder in checkpoint_folders(names) if folder]
    hint = None
    if others:
        hint = f"there are the weights {listed(others)}: name their variant or path"
    elif folders:
        hint = f"there are checkpoints in folders of it, {listed(folders)}: name one of them as the subfolder"
    elif weights:
        hint = f"there are weights in folders of it: {listed(weights)}: name their folder"
    return NotFoundError(f"{_place(prefix)} holds no {looked_for}; {_there(here, names)}", hint=hint)


def _no_folder(paths: Iterable[str], prefix: str) -> NotFoundError:
    found = [folder or "the root" for folder in checkpoint_folders(paths)]
    hint = f"there are checkpoints in {listed(found)}" if found else "there is no checkpoint in any folder"
    return NotFoundError(f"{prefix.rstrip('/')}: there is no such folder", hint=hint)


def _is_index(name: str) -> bool:
    return indexed_suffix(name) == "safetensors"


def _place(prefix: str) -> str:
    return prefix.rstrip("/") or "the folder"


def _there(here: Sequence[str], names: Sequence[str]) -> str:
    if here:
        return f"there are: {listed(here)}"
    return "there are only folders" if names else "it is empty"
