"""A checkpoint of safetensors files in any store: opened by its index and headers alone, read by exact byte ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hubshard.engine import run
from hubshard.errors import FormatError, NotFoundError
from hubshard.header import PREFIX_BYTES, Header, decode_header, header_extent
from hubshard.index import Index, decode_index
from hubshard.manifest import Extent, FileDigest, Manifest, Piece, manifest_of_headers
from hubshard.messages import listed
from hubshard.protocols import Buffer, Entry, Reader, Revision
from hubshard.readers import read_bytes
from hubshard.reads import plan_reads
from hubshard.sources.stems import stem_by_config
from hubshard.sources.weight_files import find_weight_files
from hubshard.tensors import Box, TensorSpec

__all__ = ["SafetensorsSource"]

_FIRST_READ_BYTES = 128 * 2**10
_ENTRY_BYTES = 140  # of a header entry besides the name, generously
_MAX_GAP_BYTES = 128 * 2**10
_MAX_READ_BYTES = 4 * 2**20
_HEADERS_BUDGET_BYTES = 256 * 2**20
_SHOWN = 20


class SafetensorsSource:
    """The tensors of a safetensors checkpoint, single or sharded, in a directory or on the Hub.

    Opening reads the index and, in parallel, the header of each shard, and checks that they agree completely; no tensor
    is read. Files that the index does not name are not looked at.

    Attributes:
        manifest: which bytes of which file are which tensor; paths from the root of the store.
        index_metadata: what the index says besides the weight map; {} where there is no index.
        header_metadata: what the headers say, merged, without `format` and without aliases.
        weight_files: the safetensors files, sorted.
        index_path: the index, or None.
        path: the index, or the only file.
        notes: what was chosen against something else, in sentences for people.
    """

    def __init__(
        self,
        store: Reader,
        at: Revision,
        *,
        folder: str = "",
        path: str | None = None,
        variant: str | None = None,
        workers: int = 8,
    ) -> None:
        """Open the checkpoint.

        Args:
            store: where it lies.
            at: the revision to read.
            folder: its folder, from the root; "" is the root.
            path: its index or single file, relative to `folder`; None to look for the usual names.
            variant: as in `model.fp16.safetensors`.
            workers: threads that read headers.

        Raises:
            NotFoundError: no weights, or shards that the index names are missing; names them all.
            IncompleteError: shards without an index.
            UnsafeFormatError: pickled files.
            FormatError: index and shards disagree, a config does not tell which weights count, or a file that is not
                what it should be.
        """
        self._store = store
        self._at = at
        entries = {entry.path: entry for entry in store.list(at)}
        folder = folder.strip("/")
        stem = stem_by_config(store, at, entries, folder) if path is None else None
        found = find_weight_files(entries, folder=folder, path=path, variant=variant, stem=stem)
        self.notes = found.notes
        self.path = found.path
        self.index_path = found.path if found.is_index else None
        index = self._index(entries[found.path]) if found.is_index else None
        self.index_metadata: Mapping[str, object] = index.metadata if index else {}
        shards = _shards(entries, found.path, index)
        headers = self._headers(shards, workers)
        if index:
            _check_index(found.path, index, headers)
        self.weight_files: Sequence[str] = tuple(shard.entry.path for shard in shards)
        digests = {shard.entry.path: FileDigest(shard.entry.nbytes, shard.entry.sha256 or "") for shard in shards}
        self.manifest: Manifest = manifest_of_headers(headers.items(), digests=digests)
        # the headers are checked, so whole tensors tile; what is looked up by threads is made before they come
        self._piece_of = {piece.tensor: piece for piece in self.manifest.pieces}
        self.header_metadata: Mapping[str, str] = self._merged_metadata(headers)

    def specs(self) -> Sequence[TensorSpec]:
        """All stored tensors, by file and by where their bytes lie."""
        return tuple(self.manifest.tensors.values())

    def aliases(self) -> Mapping[str, str]:
        """Names that the headers record for tensors stored under another name: alias to stored name."""
        return self.manifest.aliases

    def read(self, name: str, box: Box) -> Buffer:
        """The row-major little-endian bytes of `box` of the tensor `name`, in a new buffer.

        Raises:
            FormatError: there is no such tensor or box.
        """
        spec = self._spec(name, box)
        buffer = bytearray(box.numel * spec.bits // 8)
        self.read_into(name, box, memoryview(buffer))
        return buffer

    def read_into(self, name: str, box: Box, into: memoryview) -> None:
        """Fill `into`, which has exactly as many bytes, with what `read` returns.

        A box whose bytes lie together is one read straight into place; of others, gaps that are small are read through.
        """
        spec = self._spec(name, box)
        if into.nbytes * 8 != box.numel * spec.bits:
            raise FormatError(f"tensor {name!r}: {into.nbytes} bytes do not hold {box.shape} of {spec.dtype}")
        if not box.numel:
            return
        extent = _extent_within(self._piece_of[name], box, spec)
        if extent is not None:
            self._store.read(self._at, extent.path, extent.start, extent.stop, into)
            return
        plan = plan_reads(self.manifest, {name: box}, max_gap_bytes=_MAX_GAP_BYTES, max_read_bytes=_MAX_READ_BYTES)
        scratch = memoryview(bytearray(max(read.nbytes for read in plan.reads)))
        for read in plan.reads:
            self._store.read(self._at, read.path, read.start, read.stop, scratch[: read.nbytes])
            for copy in read.copies:
                for source, target, nbytes in copy.runs():
                    into[target : target + nbytes] = scratch[source : source + nbytes]

    def _spec(self, name: str, box: Box) -> TensorSpec:
        spec = self.manifest.tensors.get(name)
        if spec is None:
            raise FormatError(f"there is no tensor {name!r} in this checkpoint")
        spec.check_box(box)
        return spec

    def _index(self, entry: Entry) -> Index:
        return decode_index(self._bytes(entry, 0, entry.nbytes), path=entry.path)

    def _bytes(self, entry: Entry, start: int, stop: int) -> bytes:
        return read_bytes(self._store, self._at, entry.path, start, stop)

    def _headers(self, shards: Sequence[_Shard], workers: int) -> Mapping[str, Header]:
        results = run(
            shards,
            cost=lambda shard: shard.first_read_bytes,
            work=self._header,
            budget_bytes=_HEADERS_BUDGET_BYTES,
            workers=workers,
        )
        return {shard.entry.path: header for shard, header in zip(shards, results, strict=True)}

    def _header(self, shard: _Shard) -> Header:
        entry = shard.entry
        raw = self._bytes(entry, 0, shard.first_read_bytes)
        nbytes = header_extent(raw[: 2 * PREFIX_BYTES], file_nbytes=entry.nbytes, path=entry.path)
        if nbytes > len(raw):
            raw += self._bytes(entry, len(raw), nbytes)
        return decode_header(raw, file_nbytes=entry.nbytes, path=entry.path)

    def _merged_metadata(self, headers: Mapping[str, Header]) -> Mapping[str, str]:
        merged: dict[str, str] = {}
        for path, header in headers.items():
            for key, value in header.metadata.items():
                if key == "format" or key in self.manifest.aliases:
                    continue
                if merged.setdefault(key, value) != value:
                    self.notes += (
                        f"{path}: its metadata {key!r} differs from that of an earlier shard, which was kept",
                    )
        return merged


@dataclass(frozen=True, slots=True)
class _Shard:
    # a file to open, and how many bytes hold its header most likely
    entry: Entry
    first_read_bytes: int


def _shards(entries: Mapping[str, Entry], path: str, index: Index | None) -> Sequence[_Shard]:
    if index is None:
        entry = entries[path]
        return [_Shard(entry, min(entry.nbytes, _FIRST_READ_BYTES))]
    prefix = path[: path.rfind("/") + 1]
    header_bytes: dict[str, int] = {}
    for name, file in index.weight_map.items():
        header_bytes[file] = header_bytes.get(file, 0) + len(name) + _ENTRY_BYTES
    missing = sorted(file for file in header_bytes if prefix + file not in entries)
    if missing:
        raise NotFoundError(
            f"{path}: {len(missing)} of the {len(header_bytes)} shards that it names are not there: "
            f"{listed(missing, most=_SHOWN)}",
            hint="the checkpoint is incomplete: fetch or publish it again",
        )
    found = ((entries[prefix + file], nbytes + 4096) for file, nbytes in sorted(header_bytes.items()))
    return [_Shard(entry, min(entry.nbytes, nbytes)) for entry, nbytes in found]


def _check_index(path: str, index: Index, headers: Mapping[str, Header]) -> None:
    prefix = path[: path.rfind("/") + 1]
    where = _where(headers)
    for name, file in index.weight_map.items():
        holder = where.pop(name, None)
        if holder == prefix + file or (holder is None and _is_alias(name, headers[prefix + file])):
            continue
        elsewhere = f"it is in {holder}" if holder else "no shard has it"
        raise FormatError(
            f"{path}: says that tensor {name!r} is in {prefix}{file}, which lacks it ({elsewhere})",
            hint="index and shards are not of one checkpoint: fetch or publish it again",
        )
    if where:
        name, holder = min(where.items())
        raise FormatError(
            f"{path}: does not name tensor {name!r} of {holder} ({len(where)} such tensors in all)",
            hint="index and shards are not of one checkpoint: fetch or publish it again",
        )


def _where(headers: Mapping[str, Header]) -> dict[str, str]:
    where: dict[str, str] = {}
    for file, header in headers.items():
        for spec in header.specs:
            other = where.setdefault(spec.name, file)
            if other != file:
                raise FormatError(
                    f"tensor {spec.name!r} stands in two shards, {other} and {file}",
                    hint="they are not of one checkpoint: fetch or publish it again",
                )
    return where


def _is_alias(name: str, header: Header) -> bool:
    stored = header.metadata.get(name)
    return stored is not None and any(spec.name == stored for spec in header.specs)


def _extent_within(piece: Piece, box: Box, spec: TensorSpec) -> Extent | None:
    """Where the bytes of `box` lie together within a whole tensor, or None where they do not, or share a byte."""
    dims = len(spec.shape)
    # dimensions after the first one that is wider than one must be whole
    first = next((dim for dim in range(dims) if box.shape[dim] > 1), dims)
    if box.shape[first + 1 :] != spec.shape[first + 1 :]:
        return None
    start = 0
    for offset, size in zip(box.offset, spec.shape, strict=True):
        start = start * size + offset
    bits, at = box.numel * spec.bits, piece.at.start
    if start * spec.bits % 8 or bits % 8:
        return None
    return Extent(piece.at.path, at + start * spec.bits // 8, at + (start * spec.bits + bits) // 8)
