"""The one idea: these bytes of this file are this box of this tensor.

A `Piece` says so; a `Manifest` is a set of pieces that tile every tensor, with the size and hash of every file. A
sharded safetensors checkpoint, a rank's part of an optimizer moment and a DCP chunk are all manifests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hubshard.errors import FormatError
from hubshard.header import Header
from hubshard.tensors import Box, TensorSpec

__all__ = ["BLOCK_BYTES", "Extent", "FileDigest", "Manifest", "Piece", "manifest_of_headers"]

BLOCK_BYTES = 64 * 2**20
"""Bytes of a file that one block hash covers, so that a range can be checked without the whole file."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes `start` to `stop` of the file `path`, half-open."""

    path: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes at `at` are the elements of `box` of `tensor`, row-major and without gaps."""

    tensor: str
    box: Box
    at: Extent


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What a file must be.

    Attributes:
        nbytes: its size (bytes).
        sha256: of the whole, in hex; "" where it is not known.
        block_sha256: of each `BLOCK_BYTES` of it, in hex; () where not known.
    """

    nbytes: int
    sha256: str = ""
    block_sha256: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """Which bytes of which files are which part of which tensor.

    Attributes:
        tensors: by name.
        pieces: in any order; together they tile every tensor exactly.
        scalars: what is no tensor, as JSON values by name.
        files: by path, POSIX and relative.
        aliases: further names of tensors that share their bytes with a stored one: alias to stored name.
    """

    tensors: Mapping[str, TensorSpec]
    pieces: Sequence[Piece]
    files: Mapping[str, FileDigest]
    scalars: Mapping[str, object] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def pieces_of(self) -> Mapping[str, Sequence[Piece]]:
        """The pieces of each tensor, sorted by where their boxes begin."""
        table: dict[str, list[Piece]] = {name: [] for name in self.tensors}
        for piece in self.pieces:
            if piece.tensor not in table:
                raise FormatError(
                    f"{piece.at.path}: holds a piece of {piece.tensor!r}, which the manifest does not list"
                )
            table[piece.tensor].append(piece)
        for pieces in table.values():
            pieces.sort(key=lambda piece: piece.box.offset)
        return table

    def validate(self) -> Manifest:
        """Check that the pieces tile every tensor exactly and lie within their files; returns self.

        Raises:
            FormatError: naming the tensor and file at fault.
        """
        for name, pieces in self.pieces_of.items():
            _check_tiling(self.tensors[name], pieces)
        for piece in self.pieces:
            _check_extent(piece, self.tensors[piece.tensor], self.files)
        for alias, name in self.aliases.items():
            if name not in self.tensors or alias in self.tensors:
                raise FormatError(f"alias {alias!r} of {name!r} names no stored tensor, or is one itself")
        return self


def manifest_of_headers(
    headers: Iterable[tuple[str, Header]], *, digests: Mapping[str, FileDigest] | None = None
) -> Manifest:
    """The manifest of a checkpoint of whole tensors, from the headers of its files.

    Aliases are read from the headers' metadata: a key that is no tensor anywhere, with a value that is a tensor of that
    file (the convention of safetensors' and huggingface_hub's writers for shared tensors).

    Args:
        headers: path and header of each file.
        digests: what is known of the files; sizes come from the headers otherwise.

    Raises:
        FormatError: a tensor stands in two files.
    """
    tensors: dict[str, TensorSpec] = {}
    where: dict[str, str] = {}
    pieces: list[Piece] = []
    files: dict[str, FileDigest] = {}
    aliases: dict[str, str] = {}
    for path, header in headers:
        for spec, start in zip(header.specs, header.starts, strict=True):
            if spec.name in where:
                raise FormatError(f"tensor {spec.name!r} stands in two files, {where[spec.name]} and {path}")
            tensors[spec.name] = spec
            where[spec.name] = path
            pieces.append(Piece(spec.name, spec.box, Extent(path, start, start + spec.nbytes)))
        aliases |= {alias: name for alias, name in header.metadata.items() if where.get(name) == path}
        files[path] = (digests or {}).get(path) or FileDigest(header.file_nbytes)
    aliases = {alias: name for alias, name in aliases.items() if alias not in tensors}
    return Manifest(tensors, pieces, files, aliases=aliases)


def _check_tiling(spec: TensorSpec, pieces: Sequence[Piece]) -> None:
    # within the tensor, disjoint, and as many elements as the tensor has: then nothing is missing
    filled = 0
    for piece in pieces:
        if len(piece.box.shape) != len(spec.shape) or piece.box not in spec.box:
            raise FormatError(f"{piece.at.path}: a piece of {spec.name!r} lies outside its shape {spec.shape}")
        filled += piece.box.numel
    for a, b in _overlaps(pieces):
        raise FormatError(f"two pieces of {spec.name!r} overlap, in {a.at.path} and {b.at.path}")
    if filled != spec.numel:
        files = ", ".join(sorted({piece.at.path for piece in pieces})) or "no file"
        raise FormatError(f"the pieces of {spec.name!r} hold {filled} of its {spec.numel} elements ({files})")


def _overlaps(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Piece]]:
    # a sweep along the first dimension: only pieces that are open there can meet
    open_pieces: list[Piece] = []
    for piece in pieces:
        if piece.box.numel == 0:
            continue
        if piece.box.offset:
            open_pieces = [other for other in open_pieces if other.box.stop[0] > piece.box.offset[0]]
        yield from ((other, piece) for other in open_pieces if other.box & piece.box)
        open_pieces.append(piece)


def _check_extent(piece: Piece, spec: TensorSpec, files: Mapping[str, FileDigest]) -> None:
    at = piece.at
    if at.path not in files:
        raise FormatError(f"{at.path}: holds {piece.tensor!r}, but is not among the files of the manifest")
    if not 0 <= at.start <= at.stop <= files[at.path].nbytes:
        raise FormatError(f"{at.path}: bytes {at.start} to {at.stop} of {piece.tensor!r} lie outside the file")
    if at.nbytes * 8 != piece.box.numel * spec.bits:
        raise FormatError(
            f"{at.path}: {at.nbytes} bytes do not hold the {piece.box.numel} elements of {piece.tensor!r}"
        )
