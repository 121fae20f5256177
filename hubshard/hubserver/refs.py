"""Branches, tags and revisions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hubshard.hubserver.errors import bad_request, conflict, forbidden, revision_not_found

if TYPE_CHECKING:
    import sqlite3

__all__ = [
    "MAIN",
    "Ref",
    "check_branch_name",
    "create",
    "delete",
    "get",
    "listing",
    "resolve",
    "set_head",
    "writable",
]

MAIN = "refs/heads/main"

_FULL_OID = re.compile(r"[0-9a-f]{40}")
_SHORT_OID = re.compile(r"[0-9a-f]{7,39}")
# What git check-ref-format forbids.
_BAD_NAME = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|^[./-]|\.lock(/|$)|[./]$|^@$")


@dataclass(frozen=True, slots=True)
class Ref:
    """A name for a commit.

    Attributes:
        name: the whole name: `refs/heads/main`, `refs/tags/v1`, `refs/pr/1`.
        commit: the commit's id.
    """

    name: str
    commit: str

    @property
    def short_name(self) -> str:
        """`main` and `v1`; a pull request's ref has no shorter name."""
        return self.name.removeprefix("refs/heads/").removeprefix("refs/tags/")


def get(connection: sqlite3.Connection, repo_id: int, name: str) -> Ref | None:
    """A ref by its whole name."""
    row = connection.execute("SELECT commit_oid FROM refs WHERE repo_id = ? AND name = ?", (repo_id, name)).fetchone()
    return None if row is None else Ref(name, row["commit_oid"])


def listing(connection: sqlite3.Connection, repo_id: int) -> list[Ref]:
    """All refs of a repo by name, `main` first."""
    rows = connection.execute("SELECT name, commit_oid FROM refs WHERE repo_id = ? ORDER BY name", (repo_id,))
    return sorted((Ref(row["name"], row["commit_oid"]) for row in rows), key=lambda ref: ref.name != MAIN)


def resolve(connection: sqlite3.Connection, repo_id: int, revision: str) -> str:
    """The commit that a branch, tag, whole ref, commit id, or beginning of one (7 digits or more) names.

    Raises:
        ApiError: 404, code RevisionNotFound.
    """
    for name in _candidates(revision):
        found = get(connection, repo_id, name)
        if found is not None:
            return found.commit
    if _FULL_OID.fullmatch(revision) or _SHORT_OID.fullmatch(revision):
        rows = connection.execute(
            "SELECT oid FROM commits WHERE repo_id = ? AND oid BETWEEN ? AND ? LIMIT 2",
            (repo_id, revision, revision + "g"),
        ).fetchall()
        if len(rows) == 1:
            return str(rows[0]["oid"])
    raise revision_not_found(revision)


def writable(connection: sqlite3.Connection, repo_id: int, revision: str) -> Ref:
    """The branch or pull request that a commit goes to.

    Raises:
        ApiError: 404, code RevisionNotFound: there is none; 400: it is a tag or a commit.
    """
    for name in _candidates(revision):
        found = get(connection, repo_id, name)
        if found is not None and not name.startswith("refs/tags/"):
            return found
    resolve(connection, repo_id, revision)
    raise bad_request(f"Invalid reference for a branch: {revision}")


def create(connection: sqlite3.Connection, repo_id: int, name: str, commit: str, *, message: str | None = None) -> None:
    """Make a ref, inside a write transaction.

    Raises:
        ApiError: 409: it exists; 400: git keeps refs as files in folders, and one of them would be both.
    """
    if get(connection, repo_id, name) is not None:
        raise conflict(f"Reference {name} already exists")
    other = _in_the_way(connection, repo_id, name)
    if other is not None:
        raise bad_request(f"Invalid reference: {name} cannot exist beside {other}; choose another name")
    connection.execute("INSERT INTO refs VALUES (?, ?, ?, ?)", (repo_id, name, commit, message))


def set_head(connection: sqlite3.Connection, repo_id: int, name: str, commit: str) -> None:
    """Move a ref, inside a write transaction."""
    connection.execute("UPDATE refs SET commit_oid = ? WHERE repo_id = ? AND name = ?", (commit, repo_id, name))


def delete(connection: sqlite3.Connection, repo_id: int, name: str) -> None:
    """Remove a branch or tag, inside a write transaction.

    Raises:
        ApiError: 403: it is main; 404, code RevisionNotFound: there is none.
    """
    if name == MAIN:
        raise forbidden(f"Cannot delete {MAIN}")
    if get(connection, repo_id, name) is None:
        raise revision_not_found(name.removeprefix("refs/heads/").removeprefix("refs/tags/"))
    connection.execute("DELETE FROM refs WHERE repo_id = ? AND name = ?", (repo_id, name))


def check_branch_name(name: str, *, what: str = "branch") -> None:
    """Refuse names that git would not take, or that would read as another kind of ref.

    Raises:
        ApiError: 400.
    """
    if not name or name.startswith("refs/") or name == "HEAD" or _BAD_NAME.search(name) or _FULL_OID.fullmatch(name):
        raise bad_request(f"Invalid reference for a {what}: {name!r}")


def _in_the_way(connection: sqlite3.Connection, repo_id: int, name: str) -> str | None:
    """A ref that is a folder of this one, or in a folder of its name."""
    parts = name.split("/")
    for depth in range(3, len(parts)):
        above = get(connection, repo_id, "/".join(parts[:depth]))
        if above is not None:
            return above.name
    # "0" comes after "/": these are the names that begin with "name/".
    row = connection.execute(
        "SELECT name FROM refs WHERE repo_id = ? AND name > ? AND name < ? LIMIT 1", (repo_id, f"{name}/", f"{name}0")
    ).fetchone()
    return None if row is None else str(row["name"])


def _candidates(revision: str) -> list[str]:
    if revision.startswith("refs/"):
        return [revision]
    if revision == "HEAD":
        return [MAIN]
    return [f"refs/heads/{revision}", f"refs/tags/{revision}"]
