"""The checkpoints of a repo or directory that holds several, one to a folder, as those of diffusers' pipelines do.

As one, they have the names of their folders before those of their tensors: `conv_in.weight` of the folder `unet` is
`unet/conv_in.weight`. Those of the root are called as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hubshard.errors import FormatError
from hubshard.manifest import FileDigest, Manifest, Piece
from hubshard.names import stem_of, variant_of
from hubshard.paths import path_in
from hubshard.protocols import Buffer, Reader, Revision
from hubshard.readers import ListedReader
from hubshard.sources.safetensors import SafetensorsSource
from hubshard.sources.weight_files import checkpoint_folders
from hubshard.tensors import Box, TensorSpec

__all__ = ["SeveralCheckpoints", "open_each", "qualified", "variants_by_folder"]


def qualified(folder: str, name: str) -> str:
    """What a tensor of the checkpoint in `folder` is called among those of other folders."""
    return path_in(folder, name)


def variants_by_folder(
    paths: Iterable[str], *, variant: str | None, expected: Iterable[str] = ()
) -> Mapping[str, str | None]:
    """The folders to open as checkpoints, and which variant to take of each, as diffusers does.

    A folder without the variant gives its plain weights, if another folder has it.

    Args:
        paths: of all files, from the root.
        variant: the one that is asked for; None for the plain one.
        expected: folders that should hold a checkpoint, so that whoever opens them is told what is there instead.

    Returns:
        Variants by folder, "" of the root; where there is no folder, the root: it may hold a checkpoint of another
        name, and if not, the error of whoever opens it says what is there.
    """
    paths = list(paths)
    folders = checkpoint_folders(paths)
    split = (path.rpartition("/") for path in paths)
    having = {folder for folder, _, name in split if stem_of(name) and variant_of(name) == variant}
    if having.isdisjoint(folders):
        having = set(folders)
    found = {folder: variant if folder in having else None for folder in folders}
    return dict.fromkeys(expected) | found or {"": variant}


def open_each(
    store: Reader, at: Revision, *, path: str | None, variant: str | None, workers: int = 8
) -> Mapping[str, SafetensorsSource]:
    """Open the checkpoint of every folder, the root first.

    Args:
        store: where they lie.
        at: the revision to read.
        path: the one file or index to take, from the root; None for all checkpoints.
        variant: as in `model.fp16.safetensors`; see `variants_by_folder`.
        workers: threads that read headers.

    Raises:
        NotFoundError, IncompleteError, FormatError: as `SafetensorsSource` says, of any of them.
    """
    if path is not None:
        return {"": SafetensorsSource(store, at, path=path, variant=variant, workers=workers)}
    listed = ListedReader(store)
    chosen = variants_by_folder((entry.path for entry in listed.list(at)), variant=variant)
    return {
        folder: SafetensorsSource(listed, at, folder=folder, variant=of_folder, workers=workers)
        for folder, of_folder in chosen.items()
    }


class SeveralCheckpoints:
    """The tensors of several checkpoints as those of one source, by qualified names.

    Attributes:
        manifest: which bytes of which file are which tensor; paths from the root of the store.
    """

    def __init__(self, sources: Mapping[str, SafetensorsSource]) -> None:
        """Join them; nothing is read.

        Args:
            sources: by folder.

        Raises:
            FormatError: two tensors get one name.
        """
        self._owners: dict[str, tuple[SafetensorsSource, str]] = {}
        self._aliases: dict[str, str] = {}
        tensors: dict[str, TensorSpec] = {}
        pieces: list[Piece] = []
        files: dict[str, FileDigest] = {}
        for folder, source in sources.items():
            for spec in source.specs():
                name = self._own(qualified(folder, spec.name), source, spec.name)
                tensors[name] = replace(spec, name=name)
            for alias, stored in source.aliases().items():
                self._aliases[self._own(qualified(folder, alias), source, stored)] = qualified(folder, stored)
            pieces += [replace(piece, tensor=qualified(folder, piece.tensor)) for piece in source.manifest.pieces]
            files |= source.manifest.files
        self.manifest = Manifest(tensors, tuple(pieces), files, aliases=self._aliases)

    def specs(self) -> Sequence[TensorSpec]:
        """All stored tensors."""
        return tuple(self.manifest.tensors.values())

    def aliases(self) -> Mapping[str, str]:
        """Further names of tensors: alias to stored name, both qualified."""
        return self._aliases

    def read(self, name: str, box: Box) -> Buffer:
        """The row-major little-endian bytes of `box` of the tensor `name`, in a new buffer.

        Raises:
            FormatError: there is no such tensor or box.
        """
        if name not in self._owners:
            raise FormatError(f"there is no tensor {name!r} in these checkpoints")
        source, stored = self._owners[name]
        return source.read(stored, box)

    def _own(self, name: str, source: SafetensorsSource, stored: str) -> str:
        if name in self._owners:
            raise FormatError(f"two tensors are called {name!r}, one of a folder and one of another")
        self._owners[name] = source, stored
        return name
