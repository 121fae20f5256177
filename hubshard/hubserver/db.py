"""The Hub's metadata: one SQLite file in WAL mode, a connection per thread.

Every change runs in `Database.write` (`BEGIN IMMEDIATE`), so writers queue up and a change is all or
nothing; with `synchronous=FULL` it is on disk before the context manager returns. Reads that need one view
of several tables run in `Database.read`. Several processes may have the file open (a server and a garbage
collection).

Parts of the program bring their own tables as a `Schema` and name them to `Database`:

    XET = Schema("xet", ("CREATE TABLE xet_files (...)", ...))
    db = Database(root / "hub.sqlite3", (CORE, XET))
"""

from __future__ import annotations

import sqlite3
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hubshard.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["CORE", "Database", "Schema"]

_BUSY_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of one part of the program.

    Attributes:
        name: names the part; its version is kept under this name.
        migrations: migration `i` (SQL statements) takes the tables from version `i` to `i + 1`; those of
            a release never change, new ones are appended.
    """

    name: str
    migrations: tuple[str, ...]


# Times are seconds since the epoch. Commit and blob oids are lower-case hex; `tree` is a key of `trees`.
CORE = Schema(
    "core",
    (
        """
        CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
        CREATE TABLE repos (
            id INTEGER PRIMARY KEY,
            type TEXT NOT NULL,
            namespace TEXT NOT NULL COLLATE NOCASE,
            name TEXT NOT NULL COLLATE NOCASE,
            private INTEGER NOT NULL,
            gated TEXT,
            created_at REAL NOT NULL,
            updated_at REAL NOT NULL,
            sdk TEXT,
            UNIQUE (type, namespace, name)
        );
        CREATE TABLE redirects (
            type TEXT NOT NULL,
            namespace TEXT NOT NULL COLLATE NOCASE,
            name TEXT NOT NULL COLLATE NOCASE,
            repo_id INTEGER NOT NULL REFERENCES repos (id) ON DELETE CASCADE,
            PRIMARY KEY (type, namespace, name)
        ) WITHOUT ROWID;
        CREATE TABLE trees (oid BLOB PRIMARY KEY, data BLOB NOT NULL, created_at REAL NOT NULL) WITHOUT ROWID;
        CREATE TABLE blobs (oid TEXT PRIMARY KEY, data BLOB NOT NULL, created_at REAL NOT NULL);
        CREATE TABLE commits (
            repo_id INTEGER NOT NULL REFERENCES repos (id) ON DELETE CASCADE,
            oid TEXT NOT NULL,
            parent TEXT,
            tree BLOB,
            author TEXT NOT NULL,
            title TEXT NOT NULL,
            message TEXT NOT NULL,
            date REAL NOT NULL,
            PRIMARY KEY (repo_id, oid)
        ) WITHOUT ROWID;
        CREATE TABLE refs (
            repo_id INTEGER NOT NULL REFERENCES repos (id) ON DELETE CASCADE,
            name TEXT NOT NULL,
            commit_oid TEXT NOT NULL,
            message TEXT,
            PRIMARY KEY (repo_id, name)
        ) WITHOUT ROWID;
        CREATE TABLE lfs_files (
            repo_id INTEGER NOT NULL REFERENCES repos (id) ON DELETE CASCADE,
            sha256 TEXT NOT NULL,
            nbytes INTEGER NOT NULL,
            touched_at REAL NOT NULL,
            PRIMARY KEY (repo_id, sha256)
        ) WITHOUT ROWID;
        CREATE INDEX lfs_files_by_sha256 ON lfs_files (sha256);
        CREATE TABLE discussions (
            repo_id INTEGER NOT NULL REFERENCES repos (id) ON DELETE CASCADE,
            num INTEGER NOT NULL,
            title TEXT NOT NULL,
            author TEXT NOT NULL,
            status TEXT NOT NULL,
            is_pull_request INTEGER NOT NULL,
            base TEXT,
            base_commit TEXT,
            merge_commit TEXT,
            created_at REAL NOT NULL,
            PRIMARY KEY (repo_id, num)
        ) WITHOUT ROWID;
        CREATE TABLE events (
            id TEXT PRIMARY KEY,
            repo_id INTEGER NOT NULL,
            num INTEGER NOT NULL,
            position INTEGER NOT NULL,
            type TEXT NOT NULL,
            author TEXT NOT NULL,
            created_at REAL NOT NULL,
            data TEXT NOT NULL,
            UNIQUE (repo_id, num, position),
            FOREIGN KEY (repo_id, num) REFERENCES discussions (repo_id, num) ON DELETE CASCADE
        );
        CREATE TABLE grants (
            repo_id INTEGER NOT NULL REFERENCES repos (id) ON DELETE CASCADE,
            user TEXT NOT NULL COLLATE NOCASE,
            PRIMARY KEY (repo_id, user)
        ) WITHOUT ROWID;
        CREATE TABLE publishers (
            repo_id INTEGER NOT NULL REFERENCES repos (id) ON DELETE CASCADE,
            claims TEXT NOT NULL,
            PRIMARY KEY (repo_id, claims)
        ) WITHOUT ROWID;
        """,
    ),
)


class Database:
    """One SQLite file, shared by threads and processes.

    Args:
        path: the file; made, with its tables, when it is missing.
        schemas: the tables of every part of the program.

    Raises:
        StoreError: the file was written by a newer version, or cannot be opened.
    """

    def __init__(self, path: Path, schemas: Sequence[Schema] = (CORE,)) -> None:
        self.path = path
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        try:
            self._migrate(schemas)
        except BaseException:
            self.close()
            raise

    def connection(self) -> sqlite3.Connection:
        """This thread's connection, in autocommit mode; rows are `sqlite3.Row`."""
        found: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if found is None:
            found = self._connect()
            self._local.connection = found
            with self._lock:
                self._connections.append(found)
        return found

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A transaction that may write: durable at the end, rolled back on an error. Never nested."""
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A transaction that sees one state of all tables. Never nested."""
        with self._transaction("BEGIN") as connection:
            yield connection

    def close(self) -> None:
        """Close the connections of all threads; nobody may be using one."""
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
        self._local = threading.local()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=_BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        return connection

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        connection = self.connection()
        connection.execute(begin)
        try:
            yield connection
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    def _migrate(self, schemas: Sequence[Schema]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.write() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS schemas (name TEXT PRIMARY KEY, version INTEGER NOT NULL)")
            for schema in schemas:
                self._migrate_one(connection, schema)

    def _migrate_one(self, connection: sqlite3.Connection, schema: Schema) -> None:
        row = connection.execute("SELECT version FROM schemas WHERE name = ?", (schema.name,)).fetchone()
        version = 0 if row is None else int(row["version"])
        known = len(schema.migrations)
        if version > known:
            raise StoreError(
                f"{self.path}: its {schema.name} tables have version {version}, this program knows {known}",
                hint="use the version of hubshard that wrote it, or a newer one",
            )
        for migration in schema.migrations[version:]:
            # Not executescript: it would commit the transaction that makes a migration all or nothing.
            for statement in filter(None, (part.strip() for part in migration.split(";"))):
                connection.execute(statement)
        connection.execute("REPLACE INTO schemas VALUES (?, ?)", (schema.name, known))
