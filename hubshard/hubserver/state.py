"""What every route of the server works on."""

from __future__ import annotations

import asyncio
import functools
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from hubshard.hubserver.auth import Accounts
from hubshard.hubserver.counters import Counters
from hubshard.hubserver.db import CORE, Database, Schema
from hubshard.hubserver.objects import ObjectStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import ParamSpec

    P = ParamSpec("P")

T = TypeVar("T")

__all__ = ["DATABASE_NAME", "HubState", "Settings", "open_state"]

DATABASE_NAME = "hub.sqlite3"
"""The file whose presence makes a directory that of a server."""

_WORKERS = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator may choose.

    Attributes:
        tokens: token → user and role, see `auth.Accounts`; None: everybody may do all.
        organizations: organisation → its members, separated by commas.
        public_url: how clients reach the server, without a slash at the end; None: as each request names it.
        lfs_part_bytes: an LFS upload of more bytes goes in parts of this size.
        page_size: entries per page of a tree, commits and LFS files.
        oidc_secret: checks the identity tokens (HS256) that are exchanged for access tokens; None: no exchange.
    """

    tokens: Mapping[str, str] | None = None
    organizations: Mapping[str, str] | None = None
    public_url: str | None = None
    lfs_part_bytes: int = 512 << 20
    page_size: int = 1000
    oidc_secret: str | None = None


@dataclass(frozen=True, slots=True)
class HubState:
    """One server's parts.

    Attributes:
        root: the directory that holds everything.
        db: metadata, `root/hub.sqlite3`.
        objects: file contents by sha256.
        secret: signs URLs and short-lived tokens; kept in the database, so that they outlive a restart.
        counters: bytes and requests since the start or the last reset.
        accounts: users and tokens.
        settings: the operator's choices.
        pool: the threads in which everything that blocks runs.
    """

    root: Path
    db: Database
    objects: ObjectStore
    secret: bytes
    counters: Counters
    accounts: Accounts
    settings: Settings
    pool: ThreadPoolExecutor

    async def run(self, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function in the pool."""
        call = functools.partial(func, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self.pool, call)

    def close(self) -> None:
        """Wait for the threads, then close the database."""
        self.pool.shutdown(wait=True)
        self.db.close()


def open_state(root: Path, settings: Settings | None = None, *, schemas: Sequence[Schema] = (CORE,)) -> HubState:
    """Open, or make, the directory of a server.

    Args:
        root: the directory.
        settings: the operator's choices.
        schemas: the tables of every part of the program.
    """
    chosen = settings or Settings()
    root.mkdir(parents=True, exist_ok=True)
    db = Database(root / DATABASE_NAME, schemas)
    secret = _secret(db)
    return HubState(
        root=root,
        db=db,
        objects=ObjectStore(root),
        secret=secret,
        counters=Counters(),
        accounts=Accounts(chosen.tokens, chosen.organizations, secret),
        settings=chosen,
        pool=ThreadPoolExecutor(_WORKERS, thread_name_prefix="hub"),
    )


def _secret(db: Database) -> bytes:
    with db.write() as connection:
        connection.execute("INSERT OR IGNORE INTO settings VALUES ('secret', ?)", (secrets.token_hex(32),))
        row = connection.execute("SELECT value FROM settings WHERE key = 'secret'").fetchone()
    return bytes.fromhex(row["value"])
