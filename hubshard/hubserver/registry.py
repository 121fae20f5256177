"""Which large files a repo holds: what was uploaded to it, or copied to it, and not deleted since."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

__all__ = ["held_bytes", "hold", "touch"]


def hold(connection: sqlite3.Connection, repo_id: int, sha256: str, nbytes: int) -> None:
    """Note, inside a write transaction, that a repo holds a large file; garbage collection spares it for a while.

    Call it only in a transaction that saw the content in the store: garbage collection removes contents in
    write transactions too, so what is there then stays.
    """
    connection.execute(
        "INSERT INTO lfs_files VALUES (?, ?, ?, ?)"
        " ON CONFLICT (repo_id, sha256) DO UPDATE SET touched_at = excluded.touched_at",
        (repo_id, sha256, nbytes, time.time()),
    )


def held_bytes(connection: sqlite3.Connection, repo_id: int, sha256: str) -> int | None:
    """The size in bytes of a large file that the repo holds, or None."""
    row = connection.execute(
        "SELECT nbytes FROM lfs_files WHERE repo_id = ? AND sha256 = ?", (repo_id, sha256)
    ).fetchone()
    return None if row is None else int(row["nbytes"])


def touch(connection: sqlite3.Connection, repo_id: int, sha256: str) -> None:
    """Make a large file young again, because somebody was told that it is there."""
    connection.execute(
        "UPDATE lfs_files SET touched_at = ? WHERE repo_id = ? AND sha256 = ?", (time.time(), repo_id, sha256)
    )
