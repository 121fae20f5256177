"""Discussions and pull requests: what happened to them, and what a merge does."""

from __future__ import annotations

import difflib
import json
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hubshard.hubserver import commits, contents, refs, trees
from hubshard.hubserver.errors import ApiError, bad_request, conflict

if TYPE_CHECKING:
    import sqlite3

    from hubshard.hubserver.repos import Repo
    from hubshard.hubserver.trees import Entry

__all__ = [
    "Discussion",
    "add_event",
    "conflicts",
    "diff",
    "edit_comment",
    "events",
    "get",
    "listing",
    "merge",
    "of_ref",
    "open_discussion",
    "open_pull",
    "rename",
    "set_status",
]

_MAX_DIFF_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Discussion:
    """A discussion, or a pull request.

    Attributes:
        num: counted per repo, discussions and pull requests together.
        title: its title.
        author: a user.
        status: `draft`, `open`, `closed` or `merged`.
        is_pull_request: what it is.
        base: the ref that the pull request is for.
        base_commit: the commit that it started from.
        merge_commit: the commit that the merge made.
        created_at: seconds since the epoch.
    """

    num: int
    title: str
    author: str
    status: str
    is_pull_request: bool
    base: str | None
    base_commit: str | None
    merge_commit: str | None
    created_at: float

    @property
    def ref(self) -> str:
        """The ref of a pull request."""
        return f"refs/pr/{self.num}"


def get(connection: sqlite3.Connection, repo_id: int, num: str) -> Discussion:
    """A discussion by its number.

    Raises:
        ApiError: 404.
    """
    found = connection.execute(
        "SELECT * FROM discussions WHERE repo_id = ? AND num = ?", (repo_id, int(num) if num.isdecimal() else -1)
    ).fetchone()
    if found is None:
        raise ApiError(404, f"Discussion {num} not found")
    return _discussion(found)


def of_ref(connection: sqlite3.Connection, repo_id: int, ref: str) -> Discussion | None:
    """The pull request that a ref belongs to."""
    if not ref.startswith("refs/pr/"):
        return None
    return get(connection, repo_id, ref.removeprefix("refs/pr/"))


def listing(connection: sqlite3.Connection, repo_id: int) -> list[Discussion]:
    """All of a repo, the newest first."""
    rows = connection.execute("SELECT * FROM discussions WHERE repo_id = ? ORDER BY num DESC", (repo_id,))
    return [_discussion(row) for row in rows]


def open_discussion(
    connection: sqlite3.Connection, repo_id: int, *, title: str, description: str, author: str
) -> Discussion:
    """Start a discussion, inside a write transaction."""
    return _open(connection, repo_id, title, description, author, status="open", base=None)


def open_pull(
    connection: sqlite3.Connection,
    repo_id: int,
    *,
    title: str,
    description: str,
    author: str,
    base: refs.Ref,
    status: str = "draft",
) -> Discussion:
    """Start a pull request without commits of its own, inside a write transaction; its ref is made."""
    made = _open(connection, repo_id, title, description, author, status=status, base=base)
    refs.create(connection, repo_id, made.ref, base.commit)
    return made


def add_event(
    connection: sqlite3.Connection, repo_id: int, num: int, kind: str, author: str, data: dict[str, Any]
) -> dict[str, Any]:
    """Note what happened, inside a write transaction; the event as `events` gives it."""
    event_id, now = secrets.token_hex(12), time.time()
    connection.execute(
        "INSERT INTO events SELECT ?, ?, ?, count(*), ?, ?, ?, ? FROM events WHERE repo_id = ? AND num = ?",
        (event_id, repo_id, num, kind, author, now, json.dumps(data), repo_id, num),
    )
    return {"id": event_id, "type": kind, "author": author, "created_at": now, "data": data}


def events(connection: sqlite3.Connection, repo_id: int, num: int) -> list[dict[str, Any]]:
    """What happened, in order: `id, type, author, created_at, data`."""
    rows = connection.execute(
        "SELECT id, type, author, created_at, data FROM events WHERE repo_id = ? AND num = ? ORDER BY position",
        (repo_id, num),
    )
    return [{**dict(row), "data": json.loads(row["data"])} for row in rows]


def edit_comment(
    connection: sqlite3.Connection, repo_id: int, num: int, event_id: str, changes: dict[str, Any]
) -> dict[str, Any]:
    """Change the data of a comment, inside a write transaction; its history keeps the texts before.

    Raises:
        ApiError: 404: there is no such comment.
    """
    for event in events(connection, repo_id, num):
        if event["id"] == event_id and event["type"] == "comment":
            data = event["data"]
            before = {"raw": data["raw"], "updated_at": data.get("updated_at", event["created_at"])}
            data |= {**changes, "updated_at": time.time(), "history": [*data.get("history", ()), before]}
            connection.execute("UPDATE events SET data = ? WHERE id = ?", (json.dumps(event["data"]), event_id))
            return event
    raise ApiError(404, f"Comment {event_id} not found")


def rename(
    connection: sqlite3.Connection, repo_id: int, discussion: Discussion, title: str, author: str
) -> dict[str, Any]:
    """Give a new title, inside a write transaction."""
    connection.execute(
        "UPDATE discussions SET title = ? WHERE repo_id = ? AND num = ?", (title, repo_id, discussion.num)
    )
    data = {"from": discussion.title, "to": title}
    return add_event(connection, repo_id, discussion.num, "title-change", author, data)


def set_status(
    connection: sqlite3.Connection, repo_id: int, discussion: Discussion, status: str, author: str
) -> dict[str, Any]:
    """Open or close, inside a write transaction.

    Raises:
        ApiError: 400: it is merged, or is in that state already.
    """
    if discussion.status == "merged" or status not in {"open", "closed"} or status == discussion.status:
        raise bad_request(f"the status cannot change from {discussion.status!r} to {status!r}")
    connection.execute(
        "UPDATE discussions SET status = ? WHERE repo_id = ? AND num = ?", (status, repo_id, discussion.num)
    )
    return add_event(connection, repo_id, discussion.num, "status-change", author, {"status": status})


def conflicts(connection: sqlite3.Connection, repo_id: int, discussion: Discussion) -> list[str]:
    """Files that the pull request and its base changed since it began, to different contents."""
    if discussion.status == "merged" or refs.get(connection, repo_id, discussion.base or refs.MAIN) is None:
        return []
    return _merged(connection, repo_id, discussion)[1]


def merge(connection: sqlite3.Connection, repo: Repo, discussion: Discussion, *, author: str) -> dict[str, Any]:
    """Put the changes of a pull request on its base as one commit, inside a write transaction.

    Returns:
        The event.

    Raises:
        ApiError: 400: it is not open, or changes nothing; 409: conflicts, named.
    """
    if not discussion.is_pull_request or discussion.status != "open":
        raise bad_request(f"only an open pull request can be merged; number {discussion.num} is {discussion.status}")
    changes, conflicting = _merged(connection, repo.id, discussion)
    if conflicting:
        raise conflict(f"Merge conflict in {', '.join(conflicting)}", filesWithConflicts=conflicting)
    if not changes:
        raise bad_request(f"pull request {discussion.num} has no changes to merge")
    base = _ref(connection, repo.id, discussion.base or refs.MAIN)
    tree = trees.update(connection, commits.get(connection, repo.id, base.commit).tree, changes)
    made = commits.write(
        connection,
        repo.id,
        parent=base.commit,
        tree=tree,
        author=author,
        title=f"{discussion.title} (#{discussion.num})",
        message=_merge_message(connection, repo.id, discussion),
    )
    refs.set_head(connection, repo.id, base.name, made.oid)
    connection.execute(
        "UPDATE discussions SET status = 'merged', merge_commit = ? WHERE repo_id = ? AND num = ?",
        (made.oid, repo.id, discussion.num),
    )
    return add_event(connection, repo.id, discussion.num, "status-change", author, {"status": "merged"})


def diff(connection: sqlite3.Connection, repo_id: int, discussion: Discussion) -> str:
    """What a pull request changes, as a unified diff; of large files only that they differ."""
    before, after = _sides(connection, repo_id, discussion)
    return "".join(
        _file_diff(connection, path, trees.find(connection, before, path), trees.find(connection, after, path))
        for path in sorted(trees.changed_paths(connection, before, after))
    )


def _open(
    connection: sqlite3.Connection,
    repo_id: int,
    title: str,
    description: str,
    author: str,
    *,
    status: str,
    base: refs.Ref | None,
) -> Discussion:
    if not title.strip():
        raise bad_request("a discussion needs a title")
    row = connection.execute(
        "SELECT coalesce(max(num), 0) + 1 AS num FROM discussions WHERE repo_id = ?", (repo_id,)
    ).fetchone()
    is_pull, now = base is not None, time.time()
    name, commit = (base.name, base.commit) if base is not None else (None, None)
    made = Discussion(row["num"], title, author, status, is_pull, name, commit, None, now)
    connection.execute(
        "INSERT INTO discussions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (repo_id, made.num, title, author, status, is_pull, made.base, made.base_commit, None, now),
    )
    add_event(connection, repo_id, made.num, "comment", author, {"raw": description})
    return made


def _sides(connection: sqlite3.Connection, repo_id: int, discussion: Discussion) -> tuple[bytes | None, bytes | None]:
    """The trees that a pull request started from, and has now."""
    head = _ref(connection, repo_id, discussion.ref)
    start = commits.get(connection, repo_id, discussion.base_commit or head.commit)
    return start.tree, commits.get(connection, repo_id, head.commit).tree


def _merged(
    connection: sqlite3.Connection, repo_id: int, discussion: Discussion
) -> tuple[dict[str, Entry | None], list[str]]:
    """What a merge would change on the base, and the files that stand against it."""
    start, head = _sides(connection, repo_id, discussion)
    base = commits.get(connection, repo_id, _ref(connection, repo_id, discussion.base or refs.MAIN).commit).tree
    theirs = trees.changed_paths(connection, start, base)
    changes, conflicting = {}, []
    for path in sorted(trees.changed_paths(connection, start, head)):
        wanted, there = trees.find(connection, head, path), trees.find(connection, base, path)
        if wanted == there:
            continue
        if path in theirs:
            conflicting.append(path)
        changes[path] = wanted
    return changes, conflicting


def _merge_message(connection: sqlite3.Connection, repo_id: int, discussion: Discussion) -> str:
    head = _ref(connection, repo_id, discussion.ref).commit
    own = []
    for commit in commits.history(connection, repo_id, head, count=250):
        if commit.oid == discussion.base_commit:
            break
        own.append(f"- {commit.title} ({commit.oid})")
    return "\n".join(reversed(own))


def _file_diff(connection: sqlite3.Connection, path: str, old: Entry | None, new: Entry | None) -> str:
    sides = [side for side in (old, new) if side is not None]
    names = f"a/{path}" if old else "/dev/null", f"b/{path}" if new else "/dev/null"
    head = f"diff --git a/{path} b/{path}\n"
    if any(side.sha256 is not None or side.nbytes > _MAX_DIFF_BYTES for side in sides):
        return f"{head}Binary files {names[0]} and {names[1]} differ\n"
    texts = [contents.blob(connection, side).decode("utf-8", "replace") if side else "" for side in (old, new)]
    lines = [text.splitlines(keepends=True) for text in texts]
    body = difflib.unified_diff(lines[0], lines[1], names[0], names[1])
    return head + "".join(line if line.endswith("\n") else f"{line}\n" for line in body)


def _ref(connection: sqlite3.Connection, repo_id: int, name: str) -> refs.Ref:
    found = refs.get(connection, repo_id, name)
    if found is None:
        raise ApiError(404, f"Invalid rev id: {name}", code="RevisionNotFound")
    return found


def _discussion(row: sqlite3.Row) -> Discussion:
    return Discussion(
        num=row["num"],
        title=row["title"],
        author=row["author"],
        status=row["status"],
        is_pull_request=bool(row["is_pull_request"]),
        base=row["base"],
        base_commit=row["base_commit"],
        merge_commit=row["merge_commit"],
        created_at=row["created_at"],
    )
