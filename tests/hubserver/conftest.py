"""What the real hf_xet client sent for three small files, see tests/golden/xet/make_golden.py."""

from __future__ import annotations

import hashlib
import json
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hubshard.hubserver.app import SCHEMAS
from hubshard.hubserver.db import Database
from hubshard.hubserver.repos import insert
from hubshard.hubserver.xet.dedup import note_upload
from hubshard.hubserver.xet.files import XetFiles
from hubshard.hubserver.xet.hashing import chunk_hash, file_hash, merkle_root, range_hash
from hubshard.hubserver.xet.shard import ShardFile, ShardTerm

if TYPE_CHECKING:
    from collections.abc import Iterator

GOLDEN = Path(__file__).parents[1] / "golden" / "xet"


@dataclass(frozen=True)
class Golden:
    """The recorded bytes, and what they stand for."""

    xorb: bytes
    xorb_hash: str
    shard: bytes
    files: dict[str, bytes]
    file_hashes: dict[str, str]
    vectors: dict[str, Any]


@pytest.fixture(scope="session")
def golden() -> Golden:
    facts = json.loads((GOLDEN / "golden.json").read_text())
    return Golden(
        xorb=(GOLDEN / "golden.xorb").read_bytes(),
        xorb_hash=facts["xorb"],
        shard=(GOLDEN / "golden.shard").read_bytes(),
        files=runpy.run_path(str(GOLDEN / "make_golden.py"))["golden_files"](),
        file_hashes=facts["files"],
        vectors=facts["vectors"],
    )


@dataclass(frozen=True)
class Storage:
    """Xet storage without a server, and the number of a repo to upload to."""

    files: XetFiles
    repo_id: int

    def put_xorb(self, body: bytes, xorb: bytes) -> None:
        """Stores a serialized xorb."""
        with self.files.xorbs.writer(xorb) as writer:
            writer.write(body)
            _, index = writer.commit()
        note_upload(self.files.db, self.repo_id, xorb, index)

    def make_xorb(self, chunks: list[bytes]) -> bytes:
        """Stores a xorb of these chunks, not packed; its hash."""
        sizes = [len(data).to_bytes(3, "little") for data in chunks]
        body = b"".join(b"\0" + size + b"\0" + size + data for size, data in zip(sizes, chunks, strict=True))
        xorb = merkle_root([(chunk_hash(data), len(data)) for data in chunks])
        self.put_xorb(body, xorb)
        return xorb

    def make_file(self, runs: list[tuple[bytes, int, int]], content: bytes) -> ShardFile:
        """A file of (xorb, first chunk, one past the last), described truly."""
        terms, nodes = [], []
        for xorb, start, stop in runs:
            part = self.files.xorbs.index(xorb).nodes(start, stop)
            nodes += part
            proof = range_hash(value for value, _ in part)
            terms.append(ShardTerm(xorb, start, stop, sum(nbytes for _, nbytes in part), proof))
        return ShardFile(file_hash(nodes), tuple(terms), hashlib.sha256(content).hexdigest())


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    db = Database(tmp_path / "hub.sqlite3", SCHEMAS)
    with db.write() as connection:
        repo = insert(connection, "model", "org/model", private=False)
    yield Storage(XetFiles(tmp_path, db), repo.id)
    db.close()
