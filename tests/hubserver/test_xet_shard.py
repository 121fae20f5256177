"""Shards: what the client's says, and files registered only when everything about them is true."""

from __future__ import annotations

import hashlib
import random
import sqlite3
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from hubshard.errors import FormatError, IntegrityError, NotFoundError
from hubshard.hubserver.xet.dedup import find_chunk
from hubshard.hubserver.xet.hashing import chunk_hash, from_hex, to_hex
from hubshard.hubserver.xet.shard import ShardFile, parse_shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.hubserver.conftest import Golden, Storage


def test_the_clients_shard_names_its_files(golden: Golden) -> None:
    files = parse_shard(golden.shard)
    assert {to_hex(file.hash) for file in files} == set(golden.file_hashes.values())
    assert {file.sha256 for file in files} == {hashlib.sha256(data).hexdigest() for data in golden.files.values()}
    assert {to_hex(term.xorb) for file in files for term in file.terms} == {golden.xorb_hash}
    assert sorted(file.terms[0].nbytes for file in files) == sorted(map(len, golden.files.values()))


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda _: b"", "not a shard"),
        (lambda data: flip(data, 0), "not a shard"),
        (lambda data: flip(data, 32), "version 3"),
        (lambda data: data[:47], "not a shard"),
        (lambda data: data[: 48 + 47], "ends inside its records"),
        (lambda data: data[: 48 * 3], "ends before them|ends inside"),
        (lambda data: data[: 48 + 36] + struct.pack("<I", 1 << 31) + data[48 + 40 :], "announces 2147483648"),
        (lambda data: flip(data, 48 + 35)[: 48 + 35] + b"\x40" + data[48 + 36 :], "no verification entries"),
    ],
)
def test_a_damaged_shard_is_refused(golden: Golden, damage: Callable[[bytes], bytes], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_shard(damage(golden.shard))


def test_registered_files_are_found_by_their_sha256_and_read_back(golden: Golden, storage: Storage) -> None:
    storage.put_xorb(golden.xorb, from_hex(golden.xorb_hash))
    new = [storage.files.register(file, storage.repo_id) for file in parse_shard(golden.shard)]
    assert new == [True, True, True]
    for name, data in golden.files.items():
        found = storage.files.find(hashlib.sha256(data).hexdigest())
        assert found == (golden.file_hashes[name], len(data))
        assert b"".join(storage.files.read(found[0], 0, len(data))) == data
        assert storage.files.held_by(from_hex(found[0]), storage.repo_id)
        assert not storage.files.held_by(from_hex(found[0]), storage.repo_id + 1)
    again = [storage.files.register(file, storage.repo_id) for file in parse_shard(golden.shard)]
    assert again == [False, False, False]


def _broken(file: ShardFile, **changes: object) -> ShardFile:
    return replace(file, terms=(replace(file.terms[0], **changes), *file.terms[1:]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda file: _broken(file, xorb=bytes(32)), "was not uploaded"),
        (lambda file: _broken(file, stop=9), "the xorb has 4 chunks"),
        (lambda file: _broken(file, start=4, stop=4), "the xorb has 4 chunks"),
        (lambda file: _broken(file, nbytes=file.terms[0].nbytes + 1), "the shard says"),
        (lambda file: _broken(file, proof=bytes(32)), "verification hash is wrong"),
        (lambda file: replace(file, hash=bytes(32)), "have the file hash"),
        (lambda file: replace(file, terms=file.terms * 2), "have the file hash"),
        (lambda file: replace(file, terms=()), "have the file hash"),
    ],
)
def test_a_file_that_is_not_what_its_shard_says_is_refused(
    golden: Golden, storage: Storage, tamper: Callable[[ShardFile], ShardFile], message: str
) -> None:
    storage.put_xorb(golden.xorb, from_hex(golden.xorb_hash))
    for file in parse_shard(golden.shard):
        with pytest.raises(FormatError, match=message):
            storage.files.register(tamper(file), storage.repo_id)
    assert counts(storage.files.db.connection()) == [0, 0, 0, 0]


def counts(connection: sqlite3.Connection) -> list[int]:
    tables = ("xet_files", "xet_sha256", "xet_file_xorbs", "lfs_files")
    return [connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]  # noqa: S608


def test_the_server_computes_the_sha256_itself(golden: Golden, storage: Storage) -> None:
    storage.put_xorb(golden.xorb, from_hex(golden.xorb_hash))
    file = parse_shard(golden.shard)[0]
    with pytest.raises(IntegrityError, match=f"has sha256 {file.sha256}, the shard says 0000"):
        storage.files.register(replace(file, sha256="0" * 64), storage.repo_id)
    assert counts(storage.files.db.connection()) == [0, 0, 0, 0]
    # A file that was checked once is still checked under another name.
    storage.files.register(file, storage.repo_id)
    with pytest.raises(IntegrityError):
        storage.files.register(replace(file, sha256="0" * 64), storage.repo_id)


def test_a_deleted_repo_takes_no_files(golden: Golden, storage: Storage) -> None:
    storage.put_xorb(golden.xorb, from_hex(golden.xorb_hash))
    with pytest.raises(NotFoundError, match="was deleted"):
        storage.files.register(parse_shard(golden.shard)[0], storage.repo_id + 1)
    assert counts(storage.files.db.connection()) == [0, 0, 0, 0]


def test_every_range_of_a_file_of_many_terms_is_a_slice(storage: Storage) -> None:
    rng = random.Random(5)
    chunks = [[rng.randbytes(rng.randrange(1, 400)) for _ in range(12)] for _ in range(3)]
    xorbs = [storage.make_xorb(part) for part in chunks]
    runs = []
    for _ in range(9):
        which, start = rng.randrange(3), rng.randrange(11)
        runs.append((which, start, rng.randrange(start + 1, 13)))
    content = b"".join(b"".join(chunks[which][start:stop]) for which, start, stop in runs)
    file = storage.make_file([(xorbs[which], start, stop) for which, start, stop in runs], content)
    assert storage.files.register(file, storage.repo_id)
    name = to_hex(file.hash)
    ends = storage.files.file_map(file.hash).ends
    assert ends[-1] == len(content)
    borders = [(a + low, b + high) for a in (0, *ends) for b in ends for low in (-1, 0, 1) for high in (-1, 0, 1)]
    for start, stop in [*borders, *((rng.randrange(len(content)), rng.randrange(len(content))) for _ in range(300))]:
        if 0 <= start < stop <= len(content):
            assert b"".join(storage.files.read(name, start, stop)) == content[start:stop]


def test_only_uploads_to_the_same_repo_are_offered_for_deduplication(golden: Golden, storage: Storage) -> None:
    xorb = from_hex(golden.xorb_hash)
    storage.put_xorb(golden.xorb, xorb)
    first = chunk_hash(golden.files["text"])
    files, repo = storage.files, storage.repo_id
    shard = find_chunk(files.db, files.xorbs, repo, first)
    assert shard is not None
    assert shard.startswith(b"HFRepoMetaData")
    assert xorb in shard
    assert first in shard
    assert find_chunk(files.db, files.xorbs, repo + 1, first) is None
    assert find_chunk(files.db, files.xorbs, repo, bytes(32)) is None
    # The first chunk of a file is known once the file is.
    noise = chunk_hash(golden.files["noise"])
    assert find_chunk(files.db, files.xorbs, repo, noise) is None
    for file in parse_shard(golden.shard):
        files.register(file, repo)
    assert find_chunk(files.db, files.xorbs, repo, noise) is not None
