"""Shards: lists of files, as chunk ranges of xorbs, and of xorbs, as lists of chunks.

Format: https://huggingface.co/docs/xet/shard. Everything is a record of 48 bytes; a section ends with a record
whose hash is all ones. An uploaded shard names files; a dedup answer names xorbs only, and has a footer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hubshard.errors import FormatError
from hubshard.hubserver.xet.hashing import HASH_BYTES, to_hex

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hubshard.hubserver.xet.xorb import XorbIndex

__all__ = ["ShardFile", "ShardTerm", "build_dedup_shard", "parse_shard"]

_RECORD_BYTES = 48
_MAGIC = b"HFRepoMetaData\x00UigEj{\x81W\x83\xa5\xbd\xd9\\\xcd\xd1J\xa9"
_HEADER = struct.Struct("<32sQQ")
_HEADER_VERSION = 2
_FILE = struct.Struct("<32sII8x")
_TERM = struct.Struct("<32sIIII")
_XORB = struct.Struct("<32sIIII")
_CHUNK = struct.Struct("<32sII8x")
# Version, where the files and the xorbs start, (start, count) of three lookup tables, key, times, footer's start.
_FOOTER = struct.Struct("<3Q6Q32sQQ72xQ")
_FOOTER_VERSION = 1
_BOOKEND = b"\xff" * HASH_BYTES + bytes(_RECORD_BYTES - HASH_BYTES)
_WITH_VERIFICATION = 1 << 31
_WITH_SHA256 = 1 << 30


@dataclass(frozen=True, slots=True)
class ShardTerm:
    """A run of chunks of one xorb.

    Attributes:
        xorb: hash of the xorb.
        start: first chunk.
        stop: one past the last chunk.
        nbytes: uncompressed size.
        proof: the verification hash over the hashes of these chunks.
    """

    xorb: bytes
    start: int
    stop: int
    nbytes: int
    proof: bytes


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file of a shard.

    Attributes:
        hash: its Xet file hash.
        terms: what it is made of, in order.
        sha256: of its content, lower-case hex; None when the client did not say.
    """

    hash: bytes
    terms: tuple[ShardTerm, ...]
    sha256: str | None


class _Records:
    """Reads a shard record by record."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = _HEADER.size

    def take(self) -> bytes:
        record = self._data[self._at : self._at + _RECORD_BYTES]
        if len(record) < _RECORD_BYTES:
            raise FormatError("the shard ends inside its records; send it again")
        self._at += _RECORD_BYTES
        return record

    def take_many(self, count: int) -> list[bytes]:
        if count * _RECORD_BYTES > len(self._data) - self._at:
            raise FormatError(f"the shard announces {count} records and ends before them; send it again")
        return [self.take() for _ in range(count)]


def parse_shard(data: bytes) -> list[ShardFile]:
    """The files that an uploaded shard names. Its list of xorbs is not read: the server knows its xorbs.

    Raises:
        FormatError: not a shard of the known version, or damaged.
    """
    if len(data) < _HEADER.size or data[: len(_MAGIC)] != _MAGIC:
        raise FormatError("this is not a shard: its first 32 bytes are not those of the format")
    version = _HEADER.unpack_from(data)[1]
    if version != _HEADER_VERSION:
        raise FormatError(f"the shard has version {version}; version {_HEADER_VERSION} is understood")
    return list(_files(_Records(data)))


def _files(records: _Records) -> Iterator[ShardFile]:
    while (record := records.take())[:HASH_BYTES] != _BOOKEND[:HASH_BYTES]:
        file_hash, flags, count = _FILE.unpack(record)
        terms = records.take_many(count)
        if not flags & _WITH_VERIFICATION:
            raise FormatError(f"file {to_hex(file_hash)}: the shard has no verification entries for it")
        proofs = [proof[:HASH_BYTES] for proof in records.take_many(count)]
        sha256 = to_hex(records.take()[:HASH_BYTES]) if flags & _WITH_SHA256 else None
        yield ShardFile(file_hash, tuple(map(_term, terms, proofs)), sha256)


def _term(record: bytes, proof: bytes) -> ShardTerm:
    xorb, _flags, nbytes, start, stop = _TERM.unpack(record)
    return ShardTerm(xorb, start, stop, nbytes, proof)


def build_dedup_shard(xorbs: Sequence[tuple[bytes, XorbIndex]], *, created: int, expires: int) -> bytes:
    """A shard that tells a client which chunks the server has.

    Args:
        xorbs: (hash, index) of each xorb.
        created: when it is made, in seconds since the epoch.
        expires: until when the client may rely on it.
    """
    header = _HEADER.pack(_MAGIC, _HEADER_VERSION, _FOOTER.size)
    xorb_section = b"".join(_xorb_records(xorb, index) for xorb, index in xorbs) + _BOOKEND
    xorbs_at = len(header) + len(_BOOKEND)
    footer_at = xorbs_at + len(xorb_section)
    # The tables may be empty, yet their place must be right: the xorbs are what lies before them.
    tables = (footer_at, 0) * 3
    sections = (len(header), xorbs_at, *tables)
    footer = _FOOTER.pack(_FOOTER_VERSION, *sections, bytes(HASH_BYTES), created, expires, footer_at)
    return header + _BOOKEND + xorb_section + footer


def _xorb_records(xorb: bytes, index: XorbIndex) -> bytes:
    count = len(index)
    head = _XORB.pack(xorb, 0, count, index.unpacked_offset(count), index.packed_bytes)
    chunks = (
        _CHUNK.pack(value, index.unpacked_offset(chunk), nbytes)
        for chunk, (value, nbytes) in enumerate(index.nodes(0, count))
    )
    return head + b"".join(chunks)
