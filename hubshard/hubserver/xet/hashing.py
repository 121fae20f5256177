"""The hashes of Xet, after its public specification (https://huggingface.co/docs/xet/hashing).

Every hash is 32 bytes. In URLs it is written as four little-endian 64-bit numbers in hex, which is not the
hex form of the bytes: `to_hex` and `from_hex` convert.
"""

from __future__ import annotations

import re
import struct
from array import array
from typing import TYPE_CHECKING

from blake3 import blake3

from hubshard.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["HASH_BYTES", "chunk_hash", "file_hash", "from_hex", "merkle_root", "range_hash", "to_hex"]

HASH_BYTES = 32

_DATA_KEY = bytes.fromhex("6697f5775b9550de3135cbaca597181c9de421109beb2b58b4d0b04b93adf229")
_INTERNAL_NODE_KEY = bytes.fromhex("017ec5c7a5472996fd946666b48a02e65ddd536f37c76dd2f86352e64a53713f")
_VERIFICATION_KEY = bytes.fromhex("7f1857d6ce56ed66127ff913e7a5c3f3a4cd26d5b5db49e64124987f28fb94c3")
_FILE_KEY = bytes(HASH_BYTES)

_MEAN_BRANCHES = 4
_WORDS = struct.Struct("<4Q")
_HEX = re.compile(r"[0-9a-f]{64}")


def to_hex(value: bytes) -> str:
    """The form of a hash in URLs and JSON."""
    return _hex_of(value)


def _hex_of(hashes: bytes) -> str:
    """Of hashes one after the other: 64 digits each."""
    words = array("Q", hashes)
    words.byteswap()
    return words.tobytes().hex()


def from_hex(text: str) -> bytes:
    """The 32 bytes behind the form that URLs and JSON use.

    Raises:
        FormatError: not 64 lower-case hex digits.
    """
    if not _HEX.fullmatch(text):
        raise FormatError(f"{text[:80]!r} is not a Xet hash: 64 lower-case hex digits are expected")
    return _WORDS.pack(*(int(text[at : at + 16], 16) for at in range(0, 64, 16)))


def chunk_hash(data: bytes | memoryview) -> bytes:
    """The hash of one chunk's uncompressed bytes."""
    return blake3(data, key=_DATA_KEY).digest()


def range_hash(chunk_hashes: Iterable[bytes]) -> bytes:
    """What a shard must show for a range of chunks: proof that its author knows the hash of each."""
    return blake3(b"".join(chunk_hashes), key=_VERIFICATION_KEY).digest()


def file_hash(chunks: Sequence[tuple[bytes, int]]) -> bytes:
    """The hash of a file of these chunks (hash, uncompressed bytes), in file order."""
    return blake3(merkle_root(chunks), key=_FILE_KEY).digest() if chunks else bytes(HASH_BYTES)


def merkle_root(nodes: Sequence[tuple[bytes, int]]) -> bytes:
    """The root over (hash, bytes) nodes: of all chunks of a xorb it is the xorb's hash.

    Neighbours are merged, level by level, until one node is left; where one group ends and the next begins
    depends on the hashes alone, so that equal stretches of two sequences merge equally.
    """
    if not nodes:
        return bytes(HASH_BYTES)
    while len(nodes) > 1:
        nodes = list(_parents(nodes))
    return nodes[0][0]


def _parents(nodes: Sequence[tuple[bytes, int]]) -> Iterable[tuple[bytes, int]]:
    digits = _hex_of(b"".join(value for value, _ in nodes))
    lines = [f"{digits[64 * at : 64 * at + 64]} : {nbytes}\n" for at, (_, nbytes) in enumerate(nodes)]
    start = 0
    while start < len(nodes):
        stop = _group_end(nodes, start)
        text = "".join(lines[start:stop])
        yield blake3(text.encode(), key=_INTERNAL_NODE_KEY).digest(), sum(nbytes for _, nbytes in nodes[start:stop])
        start = stop


def _group_end(nodes: Sequence[tuple[bytes, int]], start: int) -> int:
    """One past the last node of the group that starts at `start`.

    A group has at least three nodes (where that many are left) and at most 2 * mean + 1, and ends early at a
    node whose hash, read as its last 64-bit word, is a multiple of the mean.
    """
    longest = min(start + 2 * _MEAN_BRANCHES + 1, len(nodes))
    for at in range(start + 2, longest):
        if nodes[at][0][24] % _MEAN_BRANCHES == 0:
            return at + 1
    return longest
