"""The name of a server's Xet storage in its URLs.

Clients remember, per storage URL and for weeks, which chunks they have uploaded, and do not send those again. So
the URL must change when the storage forgets chunks: with another root behind the same address, and when garbage
collection has removed xorbs.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hubshard.hubserver.db import Database

__all__ = ["current_realm", "renew_realm"]

_KEY = "xet_realm"


def current_realm(db: Database) -> str:
    """The name now: hex digits."""
    row = db.connection().execute("SELECT value FROM settings WHERE key = ?", (_KEY,)).fetchone()
    if row is not None:
        return str(row["value"])
    with db.write() as connection:
        connection.execute("INSERT OR IGNORE INTO settings VALUES (?, ?)", (_KEY, secrets.token_hex(8)))
    return current_realm(db)


def renew_realm(db: Database) -> None:
    """Gives the storage a new name; URLs with the old one go on working."""
    with db.write() as connection:
        connection.execute("REPLACE INTO settings VALUES (?, ?)", (_KEY, secrets.token_hex(8)))
