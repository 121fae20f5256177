"""Global deduplication: which chunks a repo's uploads already hold, so that they are not sent again.

Clients ask about the first chunk of each file and about chunks whose hash ends in ten zero bits
(https://huggingface.co/docs/xet/deduplication). The answer lists the xorb that holds the chunk and its
neighbours in upload order, which most likely hold the rest of the file. Only what was uploaded to the same repo
counts, finished or not: so an upload that was killed goes on where it stopped, and nobody learns of others' data.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hubshard.errors import NotFoundError
from hubshard.hubserver.xet.shard import build_dedup_shard

if TYPE_CHECKING:
    import sqlite3

    from hubshard.hubserver.db import Database
    from hubshard.hubserver.xet.storage import XorbStore
    from hubshard.hubserver.xet.xorb import XorbIndex

__all__ = ["find_chunk", "is_asked", "note_chunk", "note_upload"]

_EVERY = 1024
_XORBS_BEFORE = 4
_XORBS_AFTER = 32
_VALID_SECONDS = 3600


def is_asked(chunk: bytes) -> bool:
    """Whether clients ask about a chunk with this hash wherever in a file it is, not only at its beginning."""
    return int.from_bytes(chunk[24:], "little") % _EVERY == 0


def note_upload(db: Database, repo_id: int, xorb: bytes, index: XorbIndex) -> None:
    """Records that a xorb was uploaded to a repo, and which of its chunks clients will ask about."""
    asked = [chunk for chunk in range(len(index)) if chunk == 0 or is_asked(index.hash_of(chunk))]
    with db.write() as connection:
        connection.execute(  # nothing where the repo was deleted meanwhile
            "INSERT OR IGNORE INTO xet_uploads (repo_id, xorb) SELECT id, ? FROM repos WHERE id = ?", (xorb, repo_id)
        )
        for chunk in asked:
            note_chunk(connection, index.hash_of(chunk), xorb)


def note_chunk(connection: sqlite3.Connection, chunk: bytes, xorb: bytes) -> None:
    """Records, inside a write transaction, where a chunk is that clients will ask about."""
    connection.execute("INSERT OR IGNORE INTO xet_chunks VALUES (?, ?)", (chunk, xorb))


def find_chunk(db: Database, xorbs: XorbStore, repo_id: int, chunk: bytes) -> bytes | None:
    """The shard that answers a client's question for a chunk, or None when the repo's uploads lack it.

    The xorbs in it become young again: whoever was told of them may count on them for a while.
    """
    row = (
        db.connection()
        .execute(
            "SELECT number FROM xet_chunks JOIN xet_uploads USING (xorb) WHERE chunk = ? AND repo_id = ?"
            " ORDER BY number DESC LIMIT 1",
            (chunk, repo_id),
        )
        .fetchone()
    )
    if row is None:
        return None
    around = (
        db.connection()
        .execute(
            "SELECT xorb FROM xet_uploads WHERE repo_id = ? AND number BETWEEN ? AND ? ORDER BY number",
            (repo_id, row["number"] - _XORBS_BEFORE, row["number"] + _XORBS_AFTER),
        )
        .fetchall()
    )
    found = [(item["xorb"], index) for item in around if (index := _offer(xorbs, item["xorb"])) is not None]
    now = int(time.time())
    return build_dedup_shard(found, created=now, expires=now + _VALID_SECONDS) if found else None


def _offer(xorbs: XorbStore, xorb: bytes) -> XorbIndex | None:
    try:
        return xorbs.index(xorb) if xorbs.touch(xorb) else None
    except NotFoundError:  # removed between the two calls
        return None
