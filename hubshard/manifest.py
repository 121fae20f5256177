"""The one idea: these bytes of this file are this box of this tensor.

A `Piece` says so; a `Manifest` is a set of pieces that tile every tensor, with the size and hash of every file. A
sharded safetensors checkpoint, a rank's part of an optimizer moment and a DCP chunk are all manifests.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hubshard.errors import FormatError, IntegrityError
from hubshard.header import Header, aliases_in
from hubshard.paths import check_case, check_plain_path
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
            FormatError: naming the tensor and file at fault, or a file name that `check_plain_path` refuses.
        """
        for path in self.files:
            check_plain_path(path, path="the manifest")
        check_case(self.files, path="the manifest")
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

    Aliases are read from the headers' metadata (see `header.aliases_in`), where they are no tensors themselves.

    Args:
        headers: path and header of each file.
        digests: what is known of the files; sizes come from the headers otherwise.

    Raises:
        FormatError: a tensor stands in two files, or an alias means two tensors.
        IntegrityError: a file has another size than its digest says.
    """
    tensors: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    files: dict[str, FileDigest] = {}
    found: list[tuple[str, dict[str, str]]] = []
    for path, header in headers:
        for spec, start in zip(header.specs, header.starts, strict=True):
            if spec.name in tensors:
                other = next(piece.at.path for piece in pieces if piece.tensor == spec.name)
                raise FormatError(f"tensor {spec.name!r} stands in two files, {other} and {path}")
            tensors[spec.name] = spec
            pieces.append(Piece(spec.name, spec.box, Extent(path, start, start + spec.nbytes)))
        files[path] = _digest(path, header, digests or {})
        if header.metadata:
            found.append((path, aliases_in(header.metadata, {spec.name for spec in header.specs})))
    return Manifest(tensors, pieces, files, aliases=_merged_aliases(found, tensors))


def _digest(path: str, header: Header, digests: Mapping[str, FileDigest]) -> FileDigest:
    digest = digests.get(path) or FileDigest(header.file_nbytes)
    if digest.nbytes != header.file_nbytes:
        raise IntegrityError(
            f"{path}: has {header.file_nbytes} bytes, not the {digest.nbytes} that are promised",
            hint="fetch it again",
        )
    return digest


def _merged_aliases(found: Iterable[tuple[str, dict[str, str]]], tensors: Container[str]) -> dict[str, str]:
    merged: dict[str, str] = {}
    for path, aliases in found:
        for alias, name in aliases.items():
            if alias not in tensors and merged.setdefault(alias, name) != name:
                raise FormatError(
                    f"{path}: its metadata makes {alias!r} a name of {name!r}, another file one of {merged[alias]!r}",
                    hint="the files are not of one checkpoint: fetch or publish it again",
                )
    return merged


def _check_tiling(spec: TensorSpec, pieces: Sequence[Piece]) -> None:
    # within the tensor, disjoint, and as many elements as the tensor has: then nothing is missing
    filled = 0
    for piece in pieces:
        box = piece.box
        if not spec.holds(box):
            raise FormatError(f"{piece.at.path}: a piece of {spec.name!r} lies outside its shape {spec.shape}")
        filled += box.numel
    for a, b in _overlaps(pieces):
        raise FormatError(f"two pieces of {spec.name!r} overlap, in {a.at.path} and {b.at.path}")
    if filled != spec.numel:
        files = ", ".join(sorted({piece.at.path for piece in pieces})) or "no file"
        raise FormatError(f"the pieces of {spec.name!r} hold {filled} of its {spec.numel} elements ({files})")


def _overlaps(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Piece]]:
    # a sweep along the dimension that has been cut most: only pieces that are open there can meet
    pieces = [piece for piece in pieces if piece.box.numel]
    if len(pieces) < 2:
        return
    dims = range(len(pieces[0].box.shape))
    along = max(dims, key=lambda dim: len({piece.box.offset[dim] for piece in pieces}), default=None)
    if along is None:  # scalars
        yield pieces[0], pieces[1]
        return
    open_pieces: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.box.offset[along]):
        box = piece.box
        open_pieces = [other for other in open_pieces if other.box.stop[along] > box.offset[along]]
        yield from ((other, piece) for other in open_pieces if other.box & box)
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
