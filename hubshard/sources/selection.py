"""Which files of a revision a pull takes, and in which order they are shown. Pure but for reading the indexes.

Of each folder: the checkpoint of the variant (its single file, or what its index names; the plain one, as diffusers
takes it, where another folder has the variant), and every file that holds no weights. Left out, unless `include` names
them: pickles, other formats, other variants, `consolidated*`, safetensors files that no index names, the folders of
training checkpoints, and git's own files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePosixPath

from hubshard.errors import FormatError, IncompleteError, NotFoundError, UnsafeFormatError
from hubshard.index import decode_index
from hubshard.messages import listed
from hubshard.names import (
    ADAPTER_STEM,
    index_names,
    indexed_suffix,
    is_consolidated,
    is_numbered,
    is_of_training,
    is_pickled,
    parse_weight_name,
)
from hubshard.paths import check_case, check_plain_path
from hubshard.protocols import Entry
from hubshard.sources.model_config import CONFIG
from hubshard.sources.model_index import MODEL_INDEX
from hubshard.sources.weight_files import prefers_index, training_folders

__all__ = ["ReadIndex", "Selection", "holds_weights", "is_entry_point", "only_pickled", "select"]

ReadIndex = Callable[[Entry], bytes]

_OTHER_WEIGHTS = {
    *("h5", "msgpack", "onnx", "onnx_data", "gguf", "ggml", "npz", "tflite", "pb", "keras", "params", "pdparams"),
    *("engine", "plan", "nemo", "mlmodel", "llamafile"),
}
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Selection:
    """What a pull takes.

    Attributes:
        files: in the order in which they are to be shown: small files, weights, what makes a loader take the weights of
            a folder for whole (an index, a single file), and last what makes it take all folders for a pipeline.
        left_out: weight files of the revision that are not taken.
        is_whole: whether it is the usual choice, and not what patterns select.
    """

    files: tuple[Entry, ...]
    left_out: tuple[Entry, ...]
    is_whole: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.nbytes for entry in self.files)


@dataclass(frozen=True, slots=True)
class _Group:
    """The weights of one name and one variant in a folder, `model` of variant `fp16`, say; the usual index first."""

    single: Entry | None
    indexes: tuple[Entry, ...]
    numbered: tuple[Entry, ...]


def select(
    listing: Sequence[Entry],
    *,
    variant: str | None,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    read_index: ReadIndex,
    where: str,
) -> Selection:
    """Choose the files of a revision.

    Args:
        listing: all files of the revision.
        variant: as in `model.fp16.safetensors`; a folder without it gives its plain weights, if another folder has it.
        include: patterns as `fnmatch` knows them, of paths; given, they replace the choice: what matches is taken.
        exclude: patterns of what is not taken, whatever else is said.
        read_index: gives the bytes of an index.
        where: names the revision in errors.

    Raises:
        NotFoundError: no file matches, or there are no weights of that variant.
        IncompleteError: shards without an index, or an index that names files which the revision lacks.
        UnsafeFormatError: the only weights are pickles.
        FormatError: the only weights are of another format, or a path that a disk cannot hold safely.
    """
    if include is not None:
        chosen = [entry for entry in listing if _match(entry.path, include)]
    else:
        chosen = _usual_choice(listing, variant, read_index, where)
    chosen = [entry for entry in chosen if not _match(entry.path, exclude or ())]
    if not chosen:
        raise _nothing(listing, where, has_patterns=bool(include or exclude))
    for entry in chosen:
        check_plain_path(entry.path, path=where)
    hint = "leave one of them out (--exclude), or have it renamed in the repo"
    check_case((entry.path for entry in chosen), path=where, hint=hint)
    taken = {entry.path for entry in chosen}
    left_out = tuple(entry for entry in listing if holds_weights(entry.path) and entry.path not in taken)
    return Selection(tuple(sorted(chosen, key=_order)), left_out, not (include or exclude))


def _nothing(listing: Sequence[Entry], where: str, *, has_patterns: bool) -> NotFoundError:
    """Why there is nothing to take."""
    if all(_is_of_git(entry.path) for entry in listing):
        return NotFoundError(
            f"{where}: there are no files yet", hint="is it the right repo and revision? if so, publish to it first"
        )
    if has_patterns:
        return NotFoundError(f"{where}: no file is left to fetch", hint="correct the patterns to include and exclude")
    return NotFoundError(
        f"{where}: there are no files of a model, only {_some(listing)}", hint="to fetch them, name them in include"
    )


def is_entry_point(path: str) -> bool:
    """Whether a loader that finds this file takes what it leads to for whole.

    That is an index, or a single file; and the list of components of a pipeline.
    """
    name = PurePosixPath(path).name
    return (
        name == MODEL_INDEX
        or indexed_suffix(name) is not None
        or (_suffix(name) in {"safetensors", "bin"} and not is_numbered(name))
    )


def holds_weights(path: str) -> bool:
    """Whether it is a weight file, of any format."""
    return is_pickled(path) or _suffix(path) in {"safetensors", *_OTHER_WEIGHTS}


def only_pickled(listing: Sequence[Entry], files: Sequence[Entry]) -> Sequence[str]:
    """Pickled weights with usual names, of folders that hold a model, where no weights of that folder are taken.

    Args:
        listing: all files of the revision.
        files: those that are taken.
    """
    models = {PurePosixPath(entry.path).parent for entry in files if _name(entry) == CONFIG}
    models -= {PurePosixPath(entry.path).parent for entry in files if holds_weights(entry.path)}
    return [
        entry.path
        for entry in listing
        if PurePosixPath(entry.path).parent in models
        and is_pickled(entry.path)
        and parse_weight_name(_name(entry)) is not None
    ]


def _match(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(path, f"{pattern}*" if pattern.endswith("/") else pattern) for pattern in patterns)


def _order(entry: Entry) -> tuple[int, str]:
    if is_entry_point(entry.path):
        return 3 if _name(entry) == MODEL_INDEX else 2, entry.path
    return int(holds_weights(entry.path)), entry.path


def _suffix(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _usual_choice(listing: Sequence[Entry], variant: str | None, read_index: ReadIndex, where: str) -> list[Entry]:
    aside = training_folders(entry.path for entry in listing)
    usable = [entry for entry in listing if not (_is_of_git(entry.path) or _is_below(entry.path, aside))]
    small = [entry for entry in usable if not holds_weights(entry.path) and indexed_suffix(_name(entry)) is None]
    weights = _weights(usable, variant, read_index, where)
    if not weights:
        _refuse_other_formats(usable, where)
    return small + weights


def _is_below(path: str, folders: Collection[str]) -> bool:
    return any(str(folder) in folders for folder in PurePosixPath(path).parents)


def _is_of_git(path: str) -> bool:
    return PurePosixPath(path).name.startswith(".git")


def _name(entry: Entry) -> str:
    return PurePosixPath(entry.path).name


def _weights(usable: Sequence[Entry], variant: str | None, read_index: ReadIndex, where: str) -> list[Entry]:
    groups = _groups(usable)
    if not groups:
        return _unusual(usable)
    if variant is not None and not any(variant in variants for variants in groups.values()):
        known = sorted({name for variants in groups.values() for name in variants if name})
        raise NotFoundError(
            f"{where}: there are no weights of the variant {variant!r}",
            hint=f"there are the variants {', '.join(known)}" if known else "leave the variant out",
        )
    by_path = {entry.path: entry for entry in usable}
    chosen: dict[str, Entry] = {}
    for (folder, stem), variants in groups.items():
        group = variants.get(variant) or variants.get(None)
        if group is not None:
            chosen |= {entry.path: entry for entry in _whole(group, by_path, folder / stem, read_index, where)}
        elif stem != ADAPTER_STEM:  # an adapter is no part of the model
            there = ", ".join(sorted(name for name in variants if name))
            raise NotFoundError(
                f"{where}: {folder / stem}: there are only weights of the variants {there}",
                hint="name one of them as the variant",
            )
    return list(chosen.values())


def _groups(usable: Sequence[Entry]) -> Mapping[tuple[PurePosixPath, str], Mapping[str | None, _Group]]:
    """The weights with usual names: by folder and name, then by variant."""
    found: dict[tuple[PurePosixPath, str], dict[str | None, _Group]] = {}
    for entry in usable:
        name = parse_weight_name(_name(entry))
        if name is None or name.suffix != "safetensors":
            continue
        variants = found.setdefault((PurePosixPath(entry.path).parent, name.stem), {})
        old = variants.get(name.variant, _Group(None, (), ()))
        if name.is_index:
            is_usual = _name(entry) == index_names(name.variant, stem=name.stem)[0]
            indexes = (entry, *old.indexes) if is_usual else (*old.indexes, entry)
            variants[name.variant] = _Group(old.single, indexes, old.numbered)
        elif name.is_numbered:
            variants[name.variant] = _Group(old.single, old.indexes, (*old.numbered, entry))
        else:
            variants[name.variant] = _Group(entry, old.indexes, old.numbered)
    return found


def _whole(
    group: _Group, by_path: Mapping[str, Entry], stem: PurePosixPath, read_index: ReadIndex, where: str
) -> list[Entry]:
    if group.single is not None and not (group.indexes and prefers_index(stem.name)):
        return [group.single]
    if not group.indexes:
        raise IncompleteError(
            f"{where}: {stem}: there are shards ({_some(group.numbered)}), but no index",
            hint="publish the model whole again: the index is what makes it one",
        )
    index = group.indexes[0]
    folder = PurePosixPath(index.path).parent
    names = sorted(set(decode_index(read_index(index), path=f"{where}: {index.path}").weight_map.values()))
    paths = [(folder / name).as_posix() for name in names]
    missing = [path for path in paths if path not in by_path]
    if missing:
        raise IncompleteError(
            f"{where}: {index.path} names files that are not there: {listed(missing, most=_SHOWN)}",
            hint="publish the model whole again",
        )
    return [*(by_path[path] for path in paths), index]


def _unusual(usable: Sequence[Entry]) -> list[Entry]:
    """Where no file has a usual name (a LoRA, say), every safetensors file is one of its own."""
    return [e for e in usable if _suffix(e.path) == "safetensors" and not is_consolidated(_name(e))]


def _refuse_other_formats(usable: Sequence[Entry], where: str) -> None:
    others = [entry for entry in usable if holds_weights(entry.path) and not is_of_training(_name(entry))]
    pickles = [entry for entry in others if is_pickled(entry.path)]
    if pickles:
        raise UnsafeFormatError(
            f"{where}: the only weights are pickles, which may run code when they are loaded: {_some(pickles)}",
            hint="to fetch them all the same, name them in include",
        )
    if others:
        raise FormatError(
            f"{where}: there are no safetensors weights with a usual name, only {_some(others)}",
            hint="to fetch them, name them in include",
        )


def _some(entries: Sequence[Entry]) -> str:
    return listed([entry.path for entry in entries], most=_SHOWN)
