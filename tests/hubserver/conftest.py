"""What the real hf_xet client sent for three small files, see tests/golden/xet/make_golden.py."""

from __future__ import annotations

import json
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hubshard.hubserver.app import SCHEMAS
from hubshard.hubserver.db import Database
from hubshard.hubserver.repos import insert
from hubshard.hubserver.xet.files import XetFiles

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


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    db = Database(tmp_path / "hub.sqlite3", SCHEMAS)
    with db.write() as connection:
        repo = insert(connection, "model", "org/model", private=False)
    yield Storage(XetFiles(tmp_path, db), repo.id)
    db.close()
