"""Xorbs: decoding, checking on upload, reading ranges."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import lz4.frame
import pytest

from hubshard.errors import FormatError, HubshardError, IntegrityError, NotFoundError
from hubshard.hubserver.xet.hashing import chunk_hash, from_hex, merkle_root
from hubshard.hubserver.xet.storage import XorbStore
from hubshard.hubserver.xet.xorb import ChunkParser, XorbIndex, decode_chunks, unpack_chunk

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hubserver.conftest import Golden


def chunk(data: bytes, *, scheme: int = 0, nbytes: int | None = None, version: int = 0) -> bytes:
    """A serialized chunk."""
    unpacked = len(data) if nbytes is None else nbytes
    sizes = len(data).to_bytes(3, "little") + bytes([scheme]) + unpacked.to_bytes(3, "little")
    return bytes([version]) + sizes + data


def parse(data: bytes) -> XorbIndex:
    parser = ChunkParser("test")
    parser.feed(data)
    return parser.finish()


def store_golden(root: Path, golden: Golden) -> tuple[XorbStore, bytes, bytes]:
    """(store, hash of the xorb, its uncompressed bytes)."""
    store, xorb = XorbStore(root), from_hex(golden.xorb_hash)
    upload(store, xorb, golden.xorb)
    return store, xorb, b"".join(golden.files.values())


def test_the_clients_xorb_decodes_to_what_was_uploaded(golden: Golden) -> None:
    index = parse(golden.xorb)
    assert b"".join(decode_chunks(golden.xorb, name="golden")) == b"".join(golden.files.values())
    assert index.merkle_hash() == from_hex(golden.xorb_hash)
    assert {golden.xorb[index.packed_offset(number) + 4] for number in range(len(index))} == {0, 1, 2}


@pytest.mark.parametrize("step", [1, 7, 4096, 10_000_000])
def test_the_size_of_the_pieces_does_not_matter(golden: Golden, step: int) -> None:
    parser = ChunkParser("golden")
    kept = b"".join(
        part for at in range(0, len(golden.xorb), step) for part in parser.feed(golden.xorb[at : at + step])
    )
    assert kept == golden.xorb
    assert parser.finish() == parse(golden.xorb)


def test_a_footer_is_taken_and_not_kept(golden: Golden) -> None:
    with_footer = golden.xorb + b"XETBLOB" + bytes(500)
    for step in (1, 3, 4096, len(with_footer)):
        parser = ChunkParser("golden")
        kept = b"".join(
            part for at in range(0, len(with_footer), step) for part in parser.feed(with_footer[at : at + step])
        )
        assert kept == golden.xorb
        assert parser.finish() == parse(golden.xorb)


def test_grouped_bytes_of_any_length_come_back() -> None:
    for nbytes in range(1, 40):
        data = random.Random(nbytes).randbytes(nbytes)
        grouped = b"".join(data[position::4] for position in range(4))
        packed = lz4.frame.compress(grouped)
        assert unpack_chunk(memoryview(packed), 2, nbytes) == data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has no chunks"),
        (chunk(b"abc")[:-1], "ends inside chunk 0"),
        (chunk(b"abc") + b"\0", "ends inside chunk 1"),
        (chunk(b"abc", version=1), "unknown version"),
        (chunk(b"abc", scheme=3), "scheme 3"),
        (chunk(b"abc", nbytes=4), "unpacks to 3 bytes"),
        (chunk(b"no frame at all, yet long enough", scheme=1), "not an LZ4 frame"),
        (chunk(b"", nbytes=0), "not in 1..131072"),
        (chunk(bytes(131_073)), "not in 1..131072"),
        (chunk(lz4.frame.compress(b"abc"), scheme=1, nbytes=2), "header says 2"),
        (chunk(lz4.frame.compress(b"abc"), scheme=2, nbytes=4), "header says 4"),
        (chunk(lz4.frame.compress(b"abc")[:-6], scheme=1, nbytes=3), "unpacks to 1"),
    ],
)
def test_what_is_no_xorb_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse(data)


def test_a_chunk_that_would_unpack_to_far_more_is_stopped() -> None:
    bomb = lz4.frame.compress(bytes(30 << 20))
    assert len(bomb) < 131_072 * 2
    with pytest.raises(FormatError, match="unpacks to 9 bytes or more"):
        unpack_chunk(memoryview(bomb), 1, 8)


def test_a_xorb_of_more_than_64_mib_of_data_is_refused() -> None:
    parser, full = ChunkParser("large"), chunk(lz4.frame.compress(bytes(131_072)), scheme=1, nbytes=131_072)
    parser.feed(full * 512)
    with pytest.raises(FormatError, match="more than 67108864 bytes"):
        parser.feed(chunk(b"a"))


def test_an_index_survives_its_form_on_disk_and_damage_is_seen(golden: Golden) -> None:
    index = parse(golden.xorb)
    data = index.to_bytes()
    assert XorbIndex.from_bytes(data, name="x") == index
    with pytest.raises(IntegrityError, match="damaged"):
        XorbIndex.from_bytes(bytes([data[0] ^ 1]) + data[1:], name="x")
    with pytest.raises(IntegrityError, match="lost its index"):
        XorbIndex.bytes_for_tail(bytes(XorbIndex.tail_bytes()), name="x")


def upload(store: XorbStore, xorb: bytes, body: bytes) -> bool:
    with store.writer(xorb) as writer:
        writer.write(body)
        return writer.commit()[0]


def test_a_tampered_xorb_leaves_nothing(golden: Golden, tmp_path: Path) -> None:
    store, xorb = XorbStore(tmp_path), from_hex(golden.xorb_hash)
    for at in range(0, len(golden.xorb), 997):
        tampered = bytearray(golden.xorb)
        tampered[at] ^= 1
        with pytest.raises(HubshardError):
            upload(store, xorb, bytes(tampered))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_xorb_under_another_name_is_refused(golden: Golden, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=f"have the hash {golden.xorb_hash}"):
        upload(XorbStore(tmp_path), bytes(32), golden.xorb)


def test_every_range_is_a_slice(golden: Golden, tmp_path: Path) -> None:
    store, xorb, data = store_golden(tmp_path, golden)
    ends = [0, *store.index(xorb).unpacked_ends]
    borders = [
        (start + low, stop + high) for start in ends for stop in ends for low in (-1, 0, 1) for high in (-1, 0, 1)
    ]
    rng = random.Random(3)
    ranges = [*borders, *(sorted((rng.randrange(len(data)), rng.randrange(len(data)))) for _ in range(200))]
    checked = 0
    for start, stop in ranges:
        if 0 <= start < stop <= len(data):
            assert b"".join(map(bytes, store.read(xorb, start, stop))) == data[start:stop]
            checked += 1
    assert checked > 200


def test_ranges_longer_than_one_read_are_slices(tmp_path: Path) -> None:
    rng = random.Random(4)
    chunks = [rng.randbytes(rng.randrange(1, 131_073)) for _ in range(60)]
    data = b"".join(chunks)
    xorb = merkle_root([(chunk_hash(part), len(part)) for part in chunks])
    store = XorbStore(tmp_path)
    upload(store, xorb, b"".join(map(chunk, chunks)))
    for _ in range(60):
        start, stop = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
        assert b"".join(map(bytes, store.read(xorb, start, stop + 1))) == data[start : stop + 1]


def test_a_stored_xorb_that_lost_bytes_is_named(golden: Golden, tmp_path: Path) -> None:
    store, xorb, data = store_golden(tmp_path, golden)
    assert len(store.index(xorb)) == 4
    with store.path(xorb).open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(IntegrityError, match=golden.xorb_hash):
        list(store.read(xorb, 0, len(data)))


def test_of_many_uploads_at_once_exactly_one_is_new(golden: Golden, tmp_path: Path) -> None:
    xorb = from_hex(golden.xorb_hash)
    with ThreadPoolExecutor(8) as pool:
        new = list(pool.map(lambda _: upload(XorbStore(tmp_path), xorb, golden.xorb), range(24)))
    assert sum(new) == 1
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_a_stored_xorb_is_not_replaced_by_another_packing(golden: Golden, tmp_path: Path) -> None:
    store, xorb, data = store_golden(tmp_path, golden)
    before = store.path(xorb).read_bytes()
    stored_plain = b"".join(chunk(bytes(part)) for part in decode_chunks(golden.xorb, name="golden"))
    assert not upload(store, xorb, stored_plain)
    assert store.path(xorb).read_bytes() == before
    # Removed and uploaded anew it may be packed otherwise; what was remembered of the old file must not count.
    assert store.delete(xorb) > 0
    assert upload(store, xorb, stored_plain)
    assert b"".join(map(bytes, store.read(xorb, 0, len(data)))) == data


def test_removal_spares_what_is_young_and_missing_xorbs_are_named(golden: Golden, tmp_path: Path) -> None:
    store, xorb, _ = store_golden(tmp_path, golden)
    (listed,) = store.listing()
    assert (listed.xorb, listed.nbytes) == (xorb, store.path(xorb).stat().st_size)
    os.utime(store.path(xorb), (1000, 1000))
    assert store.touch(xorb)
    assert store.delete(xorb, older_than=2000) == 0
    os.utime(store.path(xorb), (1000, 1000))
    assert store.delete(xorb, older_than=2000) == listed.nbytes
    assert not store.touch(xorb)
    with pytest.raises(NotFoundError, match=golden.xorb_hash):
        store.index(xorb)
