"""Garbage collection of Xet storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hubshard.hubserver.xet.realm import renew_realm

if TYPE_CHECKING:
    from hubshard.hubserver.xet.files import XetFiles
    from hubshard.hubserver.xet.storage import StoredXorb

__all__ = ["XetFreed", "collect_xet"]

_FORGET_FILES = """
    DELETE FROM xet_files WHERE touched_at < ? AND file_hash NOT IN
        (SELECT file_hash FROM xet_sha256 JOIN lfs_files USING (sha256))
"""


@dataclass(frozen=True, slots=True)
class XetFreed:
    """What a collection removed: files forgotten, xorbs removed, bytes on disk freed."""

    files: int
    xorbs: int
    nbytes: int


def collect_xet(files: XetFiles, *, older_than: float) -> XetFreed:
    """Forgets files that no repo holds, then removes xorbs that no file needs.

    Run it after the rows of `lfs_files` that nothing refers to were removed. It is safe beside a running server:
    what an upload needs is checked and made young in a write transaction, and removed in one.

    Args:
        files: the Xet storage.
        older_than: seconds since the epoch; what was uploaded, or offered to a client, at or after it stays.
    """
    with files.db.write() as connection:
        forgotten = connection.execute(_FORGET_FILES, (older_than,)).rowcount
    unneeded = [
        stored
        for stored in files.xorbs.listing()
        if stored.modified < older_than and not _is_needed(files, stored.xorb)
    ]
    if unneeded:  # before the first goes: a client that looks in between must not rely on it
        renew_realm(files.db)
    freed = [_collect_xorb(files, stored, older_than) for stored in unneeded]
    return XetFreed(forgotten, sum(nbytes > 0 for nbytes in freed), sum(freed))


def _is_needed(files: XetFiles, xorb: bytes) -> bool:
    found = files.db.connection().execute("SELECT 1 FROM xet_file_xorbs WHERE xorb = ? LIMIT 1", (xorb,))
    return found.fetchone() is not None


def _collect_xorb(files: XetFiles, stored: StoredXorb, older_than: float) -> int:
    with files.db.write() as connection:
        if _is_needed(files, stored.xorb):
            return 0
        nbytes = files.xorbs.delete(stored.xorb, older_than=older_than)
        if nbytes:
            connection.execute("DELETE FROM xet_uploads WHERE xorb = ?", (stored.xorb,))
            connection.execute("DELETE FROM xet_chunks WHERE xorb = ?", (stored.xorb,))
        return nbytes
