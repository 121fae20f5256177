"""What every route of the server works on."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hubshard.hubserver.counters import Counters
from hubshard.hubserver.db import CORE, Database, Schema
from hubshard.hubserver.objects import ObjectStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["HubState", "open_state"]


@dataclass(frozen=True, slots=True)
class HubState:
    """One server's parts.

    Attributes:
        root: the directory that holds everything.
        db: metadata, ``root/hub.sqlite3``.
        objects: file contents by sha256.
        secret: signs URLs and short-lived tokens; kept in the database, so that they outlive a restart.
        counters: bytes and requests since the start or the last reset.
        public_url: how clients reach the server, without a slash at the end; None: as each request names it.
    """

    root: Path
    db: Database
    objects: ObjectStore
    secret: bytes
    counters: Counters
    public_url: str | None


def open_state(root: Path, *, public_url: str | None = None, schemas: Sequence[Schema] = (CORE,)) -> HubState:
    """Open, or make, the directory of a server.

    Args:
        root: the directory.
        public_url: see :class:`HubState`.
        schemas: the tables of every part of the program.
    """
    root.mkdir(parents=True, exist_ok=True)
    db = Database(root / "hub.sqlite3", schemas)
    return HubState(
        root=root,
        db=db,
        objects=ObjectStore(root),
        secret=_secret(db),
        counters=Counters(),
        public_url=public_url.rstrip("/") if public_url else None,
    )


def _secret(db: Database) -> bytes:
    with db.write() as connection:
        connection.execute("INSERT OR IGNORE INTO settings VALUES ('secret', ?)", (secrets.token_hex(32),))
        row = connection.execute("SELECT value FROM settings WHERE key = 'secret'").fetchone()
    return bytes.fromhex(row["value"])
