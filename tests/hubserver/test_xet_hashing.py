"""The hashes of Xet, against what the real client computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hubshard.errors import FormatError
from hubshard.hubserver.xet.hashing import chunk_hash, file_hash, from_hex, merkle_root, to_hex

if TYPE_CHECKING:
    from tests.hubserver.conftest import Golden


def test_a_hash_is_written_as_four_little_endian_numbers() -> None:
    text = "07060504030201000f0e0d0c0b0a090817161514131211101f1e1d1c1b1a1918"
    assert to_hex(bytes(range(32))) == text
    assert from_hex(text) == bytes(range(32))


@pytest.mark.parametrize("text", ["", "0" * 63, "0" * 65, "g" * 64, "A" * 64, "../" + "0" * 61])
def test_anything_else_is_no_hash(text: str) -> None:
    with pytest.raises(FormatError, match="64 lower-case hex digits"):
        from_hex(text)


def test_the_hashes_of_many_chunks_are_those_of_the_client(golden: Golden) -> None:
    nodes = [(from_hex(value), nbytes) for value, nbytes in golden.vectors["chunks"]]
    assert len(nodes) > 9**2 / 2  # several levels
    assert to_hex(merkle_root(nodes)) == golden.vectors["xorb"]
    assert to_hex(file_hash(nodes)) == golden.vectors["file"]


def test_the_hash_of_a_file_of_one_chunk_is_that_of_the_client(golden: Golden) -> None:
    data = golden.files["text"]
    node = (chunk_hash(data), len(data))
    assert merkle_root([node]) == node[0]
    assert to_hex(file_hash([node])) == golden.file_hashes["text"]


def test_no_chunks_hash_to_zeros() -> None:
    assert file_hash([]) == bytes(32)
    assert merkle_root([]) == bytes(32)


def test_order_and_sizes_count() -> None:
    nodes = [(chunk_hash(bytes([number])), 1) for number in range(40)]
    assert merkle_root(nodes) != merkle_root(nodes[::-1])
    assert merkle_root(nodes) != merkle_root([*nodes[:-1], (nodes[-1][0], 2)])
