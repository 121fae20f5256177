"""Reading the contents of a commit's files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hubshard.errors import NotFoundError
from hubshard.hubserver import trees

if TYPE_CHECKING:
    import sqlite3

    from hubshard.hubserver.trees import Entry

__all__ = ["blob", "text_of"]

_MAX_TEXT_BYTES = 4 << 20


def blob(connection: sqlite3.Connection, entry: Entry) -> bytes:
    """The whole content of a regular file."""
    row = connection.execute("SELECT data FROM blobs WHERE oid = ?", (entry.oid,)).fetchone()
    if row is None:
        raise NotFoundError(f"{entry.path}: its content {entry.oid} is not in the store")
    return bytes(row["data"])


def text_of(connection: sqlite3.Connection, tree: bytes | None, path: str) -> str:
    """A small regular file as text; empty where there is none, or where it is large or no text."""
    entry = trees.find(connection, tree, path)
    if entry is None or entry.sha256 is not None or entry.nbytes > _MAX_TEXT_BYTES:
        return ""
    return blob(connection, entry).decode("utf-8", "replace")
