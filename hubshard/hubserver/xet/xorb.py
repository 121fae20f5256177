"""Xorbs: up to 64 MiB of chunks, back to back, each with a header of 8 bytes and packed on its own.

Format: https://huggingface.co/docs/xet/xorb. A serialized xorb may carry a footer, which repeats what the
headers say; it is not needed and not kept.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lz4.frame

from hubshard.errors import FormatError, IntegrityError
from hubshard.hubserver.xet.hashing import HASH_BYTES, chunk_hash, merkle_root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "CHUNK_HEADER_BYTES",
    "MAX_CHUNK_BYTES",
    "MAX_XORB_BYTES",
    "ChunkParser",
    "XorbIndex",
    "decode_chunks",
    "unpack_chunk",
]

CHUNK_HEADER_BYTES = 8
"""What stands before the packed data of each chunk."""

MAX_CHUNK_BYTES = 128 << 10
"""The largest chunk, uncompressed."""

MAX_XORB_BYTES = 64 << 20
"""The most uncompressed bytes that the chunks of a xorb may hold."""

_FOOTER_IDENT = b"XETBLOB"
_CHUNK_HEADER = struct.Struct("<II")
_RECORD = struct.Struct("<32sII")
_TAIL = struct.Struct("<8sQ32s")
_MAGIC = b"xorbidx1"


@dataclass(frozen=True, slots=True)
class XorbIndex:
    """Where the chunks of one xorb are.

    Attributes:
        hashes: the hash of each chunk, `HASH_BYTES` bytes each, joined.
        packed_ends: for each chunk, one past its last byte in the serialized xorb, header included.
        unpacked_ends: for each chunk, one past its last byte in the concatenation of all uncompressed chunks.
    """

    hashes: bytes
    packed_ends: array[int]
    unpacked_ends: array[int]

    def __len__(self) -> int:
        return len(self.packed_ends)

    @property
    def packed_bytes(self) -> int:
        """Size of the serialized chunks."""
        return self.packed_ends[-1] if self.packed_ends else 0

    def hash_of(self, chunk: int) -> bytes:
        """The hash of one chunk."""
        return self.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]

    def packed_offset(self, chunk: int) -> int:
        """Where chunk number `chunk` (the count of chunks is allowed) starts in the serialized xorb."""
        return self.packed_ends[chunk - 1] if chunk else 0

    def unpacked_offset(self, chunk: int) -> int:
        """Where chunk number `chunk` (the count of chunks is allowed) starts in the uncompressed bytes."""
        return self.unpacked_ends[chunk - 1] if chunk else 0

    def chunk_at(self, offset: int) -> int:
        """The chunk that holds the uncompressed byte at `offset`."""
        return bisect_right(self.unpacked_ends, offset)

    def nodes(self, start: int, stop: int) -> list[tuple[bytes, int]]:
        """(hash, uncompressed bytes) of the chunks [start, stop)."""
        return [
            (self.hash_of(chunk), self.unpacked_ends[chunk] - self.unpacked_offset(chunk))
            for chunk in range(start, stop)
        ]

    def merkle_hash(self) -> bytes:
        """The hash of the xorb."""
        return merkle_root(self.nodes(0, len(self)))

    def to_bytes(self) -> bytes:
        """The form in which the index is kept behind the chunks of a stored xorb: records, then a tail."""
        records = b"".join(
            _RECORD.pack(self.hash_of(chunk), self.packed_ends[chunk], self.unpacked_ends[chunk])
            for chunk in range(len(self))
        )
        return records + _TAIL.pack(_MAGIC, len(self), hashlib.sha256(records).digest())

    @staticmethod
    def tail_bytes() -> int:
        """Size of the tail that ends `to_bytes`."""
        return _TAIL.size

    @staticmethod
    def bytes_for_tail(tail: bytes, *, name: str) -> int:
        """Size of the whole index, given the tail.

        Raises:
            IntegrityError: that is no tail; the message names the file `name`.
        """
        magic, count, _ = _TAIL.unpack(tail) if len(tail) == _TAIL.size else (b"", 0, b"")
        if magic != _MAGIC:
            raise IntegrityError(f"{name}: a stored xorb that has lost its index; upload its files again")
        return int(count) * _RECORD.size + _TAIL.size

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str) -> XorbIndex:
        """The inverse of `to_bytes`.

        Raises:
            IntegrityError: the index is damaged; the message names the file `name`.
        """
        records, (_, _, digest) = data[: -_TAIL.size], _TAIL.unpack(data[-_TAIL.size :])
        if hashlib.sha256(records).digest() != digest:
            raise IntegrityError(f"{name}: the index of a stored xorb is damaged; upload its files again")
        hashes, packed, unpacked = zip(*_RECORD.iter_unpack(records), strict=True)
        return cls(b"".join(hashes), array("I", packed), array("I", unpacked))


class ChunkParser:
    """Takes a serialized xorb in pieces of any size, checks every chunk, and keeps the index.

    Holds at most one incomplete chunk.

    Args:
        name: what messages call the xorb.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._partial = bytearray()
        self._in_footer = False
        self._hashes = bytearray()
        self._packed_ends = array("I")
        self._unpacked_ends = array("I")
        self._packed_bytes = 0
        self._unpacked_bytes = 0

    def feed(self, data: bytes | memoryview) -> list[bytes | memoryview]:
        """Takes the next bytes.

        Returns:
            The complete chunks among what has come and was not returned before: what to store, in order.

        Raises:
            FormatError: not a xorb, or one beyond the limits.
        """
        ready: list[bytes | memoryview] = []
        view = memoryview(data)
        while self._partial and view and not self._in_footer:
            view = self._complete(view, ready)
        used = 0 if self._partial else self._take_chunks(view)
        ready.append(view[:used])
        if not self._in_footer:
            self._partial += view[used:]
        return ready

    def finish(self) -> XorbIndex:
        """The index, once all bytes were fed.

        Raises:
            FormatError: the xorb is empty or ends inside a chunk.
        """
        if self._partial and not self._in_footer:
            raise FormatError(f"xorb {self._name} ends inside chunk {len(self._packed_ends)}; send it again")
        if not self._packed_ends:
            raise FormatError(f"xorb {self._name} has no chunks")
        return XorbIndex(bytes(self._hashes), self._packed_ends, self._unpacked_ends)

    def _complete(self, view: memoryview, ready: list[bytes | memoryview]) -> memoryview:
        """Adds to the incomplete chunk what it lacks of its header, or else of its data; what is left of `view`."""
        wanted = CHUNK_HEADER_BYTES
        if len(self._partial) >= CHUNK_HEADER_BYTES and not _starts_footer(self._partial):
            wanted += _header(self._partial, 0, self._name)[0]
        missing = wanted - len(self._partial)
        self._partial += view[:missing]
        chunk = bytes(self._partial)
        if self._take_chunks(memoryview(chunk)):
            ready.append(chunk)
            self._partial.clear()
        return view[missing:]

    def _take_chunks(self, data: memoryview) -> int:
        """Checks the complete chunks at the start of `data`; their size in bytes."""
        at = 0
        while not self._in_footer and len(data) - at >= CHUNK_HEADER_BYTES:
            if data[at] and _starts_footer(data[at:]):
                self._in_footer = True
                break
            packed, scheme, unpacked = _header(data, at, self._name)
            stop = at + CHUNK_HEADER_BYTES + packed
            if stop > len(data):
                break
            self._add(unpack_chunk(data[at + CHUNK_HEADER_BYTES : stop], scheme, unpacked), stop - at)
            at = stop
        return at

    def _add(self, chunk: bytes | memoryview, packed: int) -> None:
        self._packed_bytes += packed
        self._unpacked_bytes += len(chunk)
        if self._unpacked_bytes > MAX_XORB_BYTES:
            raise FormatError(f"xorb {self._name} holds more than {MAX_XORB_BYTES} bytes of data")
        self._hashes += chunk_hash(chunk)
        self._packed_ends.append(self._packed_bytes)
        self._unpacked_ends.append(self._unpacked_bytes)


def _starts_footer(data: memoryview | bytearray) -> bool:
    return bytes(data[: len(_FOOTER_IDENT)]) == _FOOTER_IDENT


def decode_chunks(packed: bytes | memoryview, *, name: str) -> Iterator[bytes | memoryview]:
    """The uncompressed chunks of whole serialized chunks, in order.

    Raises:
        FormatError: the bytes are not chunks.
    """
    data, at = memoryview(packed), 0
    while at < len(data):
        nbytes, scheme, unpacked = _header(data, at, name)
        at += CHUNK_HEADER_BYTES
        yield unpack_chunk(data[at : at + nbytes], scheme, unpacked)
        at += nbytes


def unpack_chunk(data: memoryview, scheme: int, nbytes: int) -> bytes | memoryview:
    """One chunk's uncompressed bytes.

    Args:
        data: what follows the chunk's header.
        scheme: 0 stored, 1 LZ4 frame, 2 bytes grouped by their position in groups of four, then LZ4 frame.
        nbytes: how many bytes must come out.

    Raises:
        FormatError: an unknown scheme, damaged data, or another number of bytes.
    """
    unpack = _SCHEMES.get(scheme)
    if unpack is None:
        raise FormatError(f"compression scheme {scheme} of a chunk is unknown; known are {sorted(_SCHEMES)}")
    chunk = unpack(data, nbytes)
    if len(chunk) != nbytes:
        raise FormatError(f"a chunk unpacks to {len(chunk)} bytes or more, its header says {nbytes}")
    return chunk


def _header(data: memoryview | bytearray, at: int, name: str) -> tuple[int, int, int]:
    """(packed bytes, scheme, unpacked bytes) of the chunk at `at`: u8 version, u24, u8, u24, little-endian."""
    first, second = _CHUNK_HEADER.unpack_from(data, at) if len(data) - at >= CHUNK_HEADER_BYTES else (1, 0)
    packed, unpacked = first >> 8, second >> 8
    if first & 0xFF:
        raise FormatError(f"xorb {name}: a chunk header is damaged or of an unknown version")
    if not 0 < unpacked <= MAX_CHUNK_BYTES or packed > MAX_CHUNK_BYTES:
        raise FormatError(f"xorb {name}: a chunk of {unpacked} bytes ({packed} packed) is not in 1..131072")
    return packed, second & 0xFF, unpacked


def _stored(data: memoryview, nbytes: int) -> memoryview:  # noqa: ARG001  (the signature of an unpacker)
    return data


def _unpack_lz4(data: memoryview, nbytes: int) -> bytes:
    try:
        # One byte more than expected: enough to see that a chunk is too long, without unpacking a bomb.
        return bytes(lz4.frame.LZ4FrameDecompressor().decompress(data, max_length=nbytes + 1))
    except RuntimeError as error:
        raise FormatError(f"a chunk is not an LZ4 frame: {error}") from error


def _unpack_grouped_lz4(data: memoryview, nbytes: int) -> bytes:
    grouped = _unpack_lz4(data, nbytes)
    chunk, start = bytearray(len(grouped)), 0
    for position in range(4):
        stop = start + (len(grouped) + 3 - position) // 4
        chunk[position::4] = grouped[start:stop]
        start = stop
    return bytes(chunk)


_SCHEMES: dict[int, Callable[[memoryview, int], bytes | memoryview]] = {
    0: _stored,
    1: _unpack_lz4,
    2: _unpack_grouped_lz4,
}
