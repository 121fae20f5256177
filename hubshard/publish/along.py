"""The files that go along with a model: which those are, and that the weights among them are whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from hubshard.errors import FormatError, HubshardError, IncompleteError
from hubshard.names import (
    MODEL_STEM,
    indexed_suffix,
    is_weight_file,
    parse_weight_name,
    variant_of,
)
from hubshard.protocols import Entry, Reader, Revision
from hubshard.publish.left_out import Choice
from hubshard.publish.outgoing import OutFile
from hubshard.readers import WrappedReader
from hubshard.sizes import READ_BYTES
from hubshard.sources.safetensors import SafetensorsSource
from hubshard.store.opening import Opened

__all__ = ["beside_weights", "check_weights"]

# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
_MAX_POINTER_BYTES = 1024


def beside_weights(
    opened: Opened, entries: Iterable[Entry], choice: Choice, *, stems: Mapping[str, Collection[str]] | None = None
) -> tuple[list[OutFile], list[str]]:
    """Of some files of a revision, those that go along with a model, and sentences on what does not.

    Args:
        opened: the revision.
        entries: the files, those of the published checkpoints left out.
        choice: what goes along at all.
        stems: of the checkpoints, by folder: other weights of such a folder that have one of them stay.
    """
    stems = {"": {MODEL_STEM}} | dict(stems or {})
    files, notes = [], []
    for entry in entries:
        path = entry.path
        if not choice.takes(path):
            continue
        folder, _, name = path.rpartition("/")
        if any(is_weight_file(name, variant=variant_of(name), stem=stem) for stem in stems.get(folder, ())):
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


def check_weights(opened: Opened, files: Iterable[OutFile]) -> None:
    """Refuse weights among the files that go along which no pull would take: their headers and indexes are read.

    Args:
        opened: the revision that they come from.
        files: all that go along.

    Raises:
        FormatError: a safetensors file, or an index, that is none, or does not agree with its shards.
        NotFoundError: a shard that an index names does not go along.
        IncompleteError: shards without an index.
    """
    paths = sorted(file.path for file in files)
    store = _Only(opened.store, frozenset(paths))
    try:
        whole: set[str] = set()
        for path in paths:
            if indexed_suffix(path.rpartition("/")[2]) == "safetensors":
                whole.update(SafetensorsSource(store, opened.at, path=path).weight_files)
        _refuse_numbered(paths)
        for path in paths:
            if path.endswith(".safetensors") and path not in whole:
                SafetensorsSource(store, opened.at, path=path)
    except HubshardError as error:
        error.add_hint("to publish without it, leave it out with `exclude`")
        raise


class _Only(WrappedReader):
    # a reader of some of the files
    def __init__(self, store: Reader, paths: Collection[str]) -> None:
        super().__init__(store)
        self._paths = paths

    def list(self, at: Revision) -> Sequence[Entry]:
        return [entry for entry in self._store.list(at) if entry.path in self._paths]


def _refuse_numbered(paths: Iterable[str]) -> None:
    begun: set[tuple[str, str, str | None]] = set()
    numbered: dict[tuple[str, str, str | None], str] = {}
    for path in paths:
        folder, _, file = path.rpartition("/")
        name = parse_weight_name(file)
        if name is None or name.suffix != "safetensors":
            continue
        which = folder, name.stem, name.variant
        if name.is_numbered and not name.is_index:
            numbered.setdefault(which, path)
        else:
            begun.add(which)
    for which, path in numbered.items():
        if which not in begun:
            raise IncompleteError(f"{path} is one of several shards, and no index says what is in them")
