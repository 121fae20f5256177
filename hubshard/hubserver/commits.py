"""Commits: reading them, and making one from a list of operations, all or nothing."""

from __future__ import annotations

import bisect
import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hubshard.hubserver import registry, trees
from hubshard.hubserver.errors import ApiError, bad_request, revision_not_found, unprocessable
from hubshard.hubserver.trees import Entry

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "Commit",
    "Delete",
    "Operation",
    "Put",
    "PutLarge",
    "apply",
    "check_path",
    "get",
    "history",
    "last_commits",
    "store_blob",
    "write",
]


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit.

    Attributes:
        oid: 40 hexadecimal digits.
        parent: the commit before, or None.
        tree: its files, see `trees`.
        author: a user.
        title: the first line of its message.
        message: the rest.
        date: seconds since the epoch.
    """

    oid: str
    parent: str | None
    tree: bytes | None
    author: str
    title: str
    message: str
    date: float


@dataclass(frozen=True, slots=True)
class Put:
    """Add or replace a regular file, whose content is the stored blob `oid`."""

    path: str
    oid: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PutLarge:
    """Add or replace a large file that the repo holds; `nbytes` None where the client did not name the size."""

    path: str
    sha256: str
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a file, or a folder with all that is in it."""

    path: str


Operation = Put | PutLarge | Delete


def get(connection: sqlite3.Connection, repo_id: int, oid: str) -> Commit:
    """A commit by its whole id.

    Raises:
        ApiError: 404, code RevisionNotFound.
    """
    row = connection.execute("SELECT * FROM commits WHERE repo_id = ? AND oid = ?", (repo_id, oid)).fetchone()
    if row is None:
        raise revision_not_found(oid)
    return _commit(row)


def history(connection: sqlite3.Connection, repo_id: int, oid: str, *, start: int = 0, count: int = -1) -> list[Commit]:
    """A commit and those before it, the newest first.

    Args:
        connection: the database.
        repo_id: the repo.
        oid: where to begin.
        start: how many to leave out first.
        count: how many to give at most; negative for all.
    """
    rows = connection.execute(
        "WITH RECURSIVE line (oid, position) AS ("
        " VALUES (?, 0) UNION ALL"
        " SELECT commits.parent, line.position + 1 FROM line JOIN commits"
        " ON commits.repo_id = ? AND commits.oid = line.oid WHERE commits.parent IS NOT NULL)"
        " SELECT commits.* FROM line JOIN commits ON commits.repo_id = ? AND commits.oid = line.oid"
        " ORDER BY line.position LIMIT ? OFFSET ?",
        (oid, repo_id, repo_id, count, start),
    )
    return [_commit(row) for row in rows]


def last_commits(connection: sqlite3.Connection, repo_id: int, oid: str, paths: Sequence[str]) -> dict[str, Commit]:
    """For each file, the commit that changed it last, seen from a commit that has all of them."""
    missing, found = set(paths), {}
    for commit, older in _pairs(connection, repo_id, oid):
        if not missing:
            break
        changed = trees.changed_paths(connection, older.tree if older else None, commit.tree) & missing
        found.update(dict.fromkeys(changed, commit))
        missing -= changed
    return found


def write(
    connection: sqlite3.Connection,
    repo_id: int,
    *,
    parent: str | None,
    tree: bytes | None,
    author: str,
    title: str,
    message: str = "",
    date: float | None = None,
) -> Commit:
    """Add a commit, inside a write transaction. Its id is the sha1 of what it is, in the order git writes it."""
    date = time.time() if date is None else date
    lines = [
        f"tree {tree.hex() if tree else ''}",
        *([f"parent {parent}"] if parent else []),
        f"author {author} {date:.6f}",
        "",
        title,
        message,
    ]
    oid = hashlib.sha1(f"{repo_id}\n{chr(10).join(lines)}".encode(), usedforsecurity=False).hexdigest()
    connection.execute(
        "INSERT INTO commits VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (repo_id, oid, parent, tree, author, title, message, date),
    )
    connection.execute("UPDATE repos SET updated_at = ? WHERE id = ?", (date, repo_id))
    return Commit(oid, parent, tree, author, title, message, date)


def store_blob(connection: sqlite3.Connection, data: bytes) -> str:
    """Keep the content of a regular file, inside a write transaction; its git blob id."""
    oid = trees.blob_oid(data)
    connection.execute(
        "INSERT INTO blobs VALUES (?, ?, ?) ON CONFLICT (oid) DO UPDATE SET created_at = excluded.created_at",
        (oid, data, time.time()),
    )
    return oid


def apply(
    connection: sqlite3.Connection,
    repo_id: int,
    files: Mapping[str, Entry],
    operations: Sequence[Operation],
) -> dict[str, Entry | None]:
    """What the operations, one after the other, change in a tree; checked, not written.

    Args:
        connection: of a write transaction.
        repo_id: the repo; a large file must be one that it holds.
        files: path → file, before, in the order of the paths.
        operations: what to do.

    Returns:
        Path → the new file, or None where it goes.

    Raises:
        ApiError: 404, code EntryNotFound: a path to delete is not there; 400: the repo does not hold a large
            file; 422: a file would be a folder too.
    """
    changes: dict[str, Entry | None] = {}
    for operation in operations:
        if isinstance(operation, Delete):
            changes.update(_removed(files, changes, operation.path))
        elif isinstance(operation, Put):
            changes[operation.path] = Entry(operation.path, operation.oid, operation.nbytes)
        else:
            changes[operation.path] = _large(connection, repo_id, operation)
    _refuse_file_and_folder(files, changes)
    return changes


def check_path(path: object) -> str:
    """A path in the repo, without slashes around it.

    Raises:
        ApiError: 422: it leads elsewhere, or cannot be a path in every file system.
    """
    if not isinstance(path, str):
        raise unprocessable(f"Invalid path in repo: {path!r}")
    clean = path.strip("/")
    parts = clean.split("/")
    wrong = any(part in {"", ".", "..", ".git"} for part in parts)
    if wrong or path.startswith("/") or "\\" in path or any(ord(char) < 32 for char in path) or len(path) > 1024:
        raise unprocessable(f"Invalid path in repo: {path!r}")
    return clean


def _large(connection: sqlite3.Connection, repo_id: int, operation: PutLarge) -> Entry:
    nbytes = registry.held_bytes(connection, repo_id, operation.sha256)
    if nbytes is None:
        raise bad_request(
            f"LFS pointer pointed to a file that does not exist: {operation.path} (sha256 {operation.sha256}) was"
            " not uploaded to this repo; upload it, then commit again"
        )
    if operation.nbytes not in {None, nbytes}:
        raise bad_request(f"{operation.path}: {operation.nbytes} bytes announced, {nbytes} bytes uploaded")
    oid = trees.blob_oid(trees.pointer(operation.sha256, nbytes))
    return Entry(operation.path, oid, nbytes, operation.sha256)


def _removed(files: Mapping[str, Entry], changes: Mapping[str, Entry | None], path: str) -> dict[str, Entry | None]:
    if changes.get(path, files.get(path)) is not None:
        return {path: None}
    there = [name for name in files if name not in changes] + [name for name, new in changes.items() if new]
    gone: dict[str, Entry | None] = {name: None for name in there if name.startswith(f"{path}/")}
    if not gone:
        # The client adds a hint to errors with just these words.
        raise ApiError(404, f"A file with this name doesn't exist: {path}", code="EntryNotFound")
    return gone


def _refuse_file_and_folder(files: Mapping[str, Entry], changes: Mapping[str, Entry | None]) -> None:
    """A path cannot name a file and a folder; only new paths need a look."""
    before = list(files)
    for path in (path for path, entry in changes.items() if entry is not None and path not in files):
        parts = path.split("/")
        above = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
        both = next((name for name in above if changes.get(name, files.get(name)) is not None), None)
        if both is None and _is_folder(before, changes, path):
            both = path
        if both is not None:
            raise unprocessable(f"Invalid path in repo: {both!r} would be a file and a folder ({path!r})")


def _is_folder(before: Sequence[str], changes: Mapping[str, Entry | None], path: str) -> bool:
    """Whether some file that was there, and stays, lies in the folder; a new one is refused by what is above it."""
    prefix = f"{path}/"
    at = bisect.bisect_left(before, prefix)
    while at < len(before) and before[at].startswith(prefix):
        if before[at] not in changes:
            return True
        at += 1
    return False


def _pairs(connection: sqlite3.Connection, repo_id: int, oid: str) -> Iterator[tuple[Commit, Commit | None]]:
    """Each commit of a history with the one before it, read in batches."""
    start, batch = 0, 200
    while True:
        line = history(connection, repo_id, oid, start=start, count=batch + 1)
        for at, commit in enumerate(line[:batch]):
            yield commit, line[at + 1] if at + 1 < len(line) else None
        if len(line) <= batch:
            return
        start += batch


def _commit(row: sqlite3.Row) -> Commit:
    return Commit(
        oid=row["oid"],
        parent=row["parent"],
        tree=row["tree"],
        author=row["author"],
        title=row["title"],
        message=row["message"],
        date=row["date"],
    )
