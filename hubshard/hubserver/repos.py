"""Repos: making, finding, moving and deleting them."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hubshard.hubserver.errors import ApiError, bad_request, conflict, forbidden, repo_not_found

if TYPE_CHECKING:
    import sqlite3

    from hubshard.hubserver.auth import Principal

__all__ = ["TYPES", "Repo", "delete", "find", "insert", "move", "owned", "require_namespace", "split_id"]

TYPES = {"models": "model", "datasets": "dataset", "spaces": "space"}
"""How routes name a type of repo, and how JSON bodies do."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")


@dataclass(frozen=True, slots=True)
class Repo:
    """One repo.

    Attributes:
        id: its number in the database.
        type: `model`, `dataset` or `space`.
        namespace: the user or organisation.
        name: unique, with the type and the namespace, without regard to case.
        private: whether only its owners see it.
        gated: `auto` or `manual`: only its owners, and users who were granted access, read its files; or None.
        created_at: seconds since the epoch.
        updated_at: of the last commit.
        sdk: of a space.
    """

    id: int
    type: str
    namespace: str
    name: str
    private: bool
    gated: str | None
    created_at: float
    updated_at: float
    sdk: str | None

    @property
    def full_name(self) -> str:
        """`ns/name`."""
        return f"{self.namespace}/{self.name}"

    @property
    def key(self) -> str:
        """`models/ns/name`: how counters and tokens name it."""
        return f"{self.type}s/{self.full_name}"

    @property
    def url_path(self) -> str:
        """The path of its page: models have no prefix."""
        return self.full_name if self.type == "model" else self.key


def find(connection: sqlite3.Connection, kind: str, namespace: str, name: str) -> Repo | None:
    """A repo by its name, or by one that it had before.

    Args:
        connection: the database.
        kind: `model`, `dataset` or `space`.
        namespace: in any case.
        name: in any case.
    """
    where = (kind, namespace, name)
    row = connection.execute("SELECT * FROM repos WHERE type = ? AND namespace = ? AND name = ?", where).fetchone()
    if row is None:
        row = connection.execute(
            "SELECT repos.* FROM redirects JOIN repos ON repos.id = redirects.repo_id"
            " WHERE redirects.type = ? AND redirects.namespace = ? AND redirects.name = ?",
            where,
        ).fetchone()
    return None if row is None else _repo(row)


def owned(connection: sqlite3.Connection, kind: str | None = None) -> list[Repo]:
    """All repos, or those of one type, the newest first."""
    rows = connection.execute(
        "SELECT * FROM repos WHERE ? IS NULL OR type = ? ORDER BY updated_at DESC, id DESC", (kind, kind)
    )
    return [_repo(row) for row in rows]


def insert(
    connection: sqlite3.Connection,
    kind: str,
    full_name: str,
    *,
    private: bool,
    sdk: str | None = None,
    base_url: str = "",
) -> Repo:
    """Add a repo without any commit, inside a write transaction.

    Raises:
        ApiError: 400: the name is no good; 409: there is such a repo (the body has its `url`).
    """
    namespace, name = split_id(full_name)
    there = find(connection, kind, namespace, name)
    if there is not None and there.name.lower() == name.lower() and there.namespace.lower() == namespace.lower():
        raise conflict(
            f"You already created this {kind} repo", url=f"{base_url}/{there.url_path}", name=there.full_name
        )
    connection.execute("DELETE FROM redirects WHERE type = ? AND namespace = ? AND name = ?", (kind, namespace, name))
    now = time.time()
    connection.execute(
        "INSERT INTO repos (type, namespace, name, private, created_at, updated_at, sdk) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (kind, namespace, name, private, now, now, sdk),
    )
    made = find(connection, kind, namespace, name)
    if made is None:
        raise repo_not_found()
    return made


def move(connection: sqlite3.Connection, repo: Repo, full_name: str) -> None:
    """Rename a repo, inside a write transaction; the old name goes on leading to it.

    Raises:
        ApiError: 400 or 409, as for `insert`.
    """
    namespace, name = split_id(full_name)
    there = find(connection, repo.type, namespace, name)
    if there is not None and there.id != repo.id:
        raise conflict(f"A {repo.type} repo named {full_name} already exists")
    connection.execute(
        "DELETE FROM redirects WHERE type = ? AND namespace = ? AND name = ?", (repo.type, namespace, name)
    )
    connection.execute("UPDATE repos SET namespace = ?, name = ? WHERE id = ?", (namespace, name, repo.id))
    if (repo.namespace.lower(), repo.name.lower()) != (namespace.lower(), name.lower()):
        connection.execute(
            "REPLACE INTO redirects VALUES (?, ?, ?, ?)", (repo.type, repo.namespace, repo.name, repo.id)
        )


def delete(connection: sqlite3.Connection, repo: Repo) -> None:
    """Remove a repo and all that belongs to it, inside a write transaction; contents go with the next collection."""
    connection.execute("DELETE FROM repos WHERE id = ?", (repo.id,))


def split_id(full_name: str) -> tuple[str, str]:
    """`ns/name` → its two parts.

    Raises:
        ApiError: 400: not two names of letters, digits, `-`, `_` and `.`, at most 96 long.
    """
    namespace, _, name = full_name.partition("/")
    for part in (namespace, name):
        wrong = part.startswith("-") or part.endswith((".git", ".", "-")) or "--" in part or ".." in part
        if wrong or not _NAME.fullmatch(part):
            raise bad_request(
                f"Invalid repo name {full_name!r}: names have letters, digits, '-', '_', '.', at most 96, do not"
                " begin or end with '-' or '.', contain no '--' or '..', and do not end with '.git'"
            )
    return namespace, name


def require_namespace(principal: Principal, namespace: str, kind: str) -> None:
    """Refuse who may not make repos in a namespace.

    Raises:
        ApiError: 401 without a token, 403 with the reason.
    """
    if principal.name is None:
        raise ApiError(401, "Invalid username or password: a token is needed to create a repo")
    if principal.role in {"read", "repo"}:
        raise forbidden(
            f"Forbidden: a token with the role {principal.role!r} may not create repos; the role 'write' is needed"
        )
    if not principal.owns(namespace):
        raise forbidden(f'You don\'t have the rights to create a {kind} under the namespace "{namespace}"')


def _repo(row: sqlite3.Row) -> Repo:
    return Repo(
        id=row["id"],
        type=row["type"],
        namespace=row["namespace"],
        name=row["name"],
        private=bool(row["private"]),
        gated=row["gated"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        sdk=row["sdk"],
    )
