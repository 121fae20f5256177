"""Rewriting the history of a repo without some of its large files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hubshard.hubserver import commits, refs, trees

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection

    from hubshard.hubserver.commits import Commit

__all__ = ["drop_files"]


def drop_files(connection: sqlite3.Connection, repo_id: int, sha256s: Collection[str]) -> None:
    """Take large files out of every commit that a ref leads to, inside a write transaction.

    Commits before the first that has one of them stay as they are; all later ones get new ids, and keep author,
    date and message. Refs and pull requests follow.
    """
    renamed: dict[str, str] = {}
    for ref in refs.listing(connection, repo_id):
        for commit in reversed(commits.history(connection, repo_id, ref.commit)):
            if commit.oid not in renamed:
                renamed[commit.oid] = _rewritten(connection, repo_id, commit, renamed, sha256s)
        refs.set_head(connection, repo_id, ref.name, renamed[ref.commit])
    changed = [(new, repo_id, old) for old, new in renamed.items() if new != old]
    for column in ("base_commit", "merge_commit"):
        connection.executemany(
            f"UPDATE discussions SET {column} = ? WHERE repo_id = ? AND {column} = ?",  # noqa: S608  two fixed names
            changed,
        )


def _rewritten(
    connection: sqlite3.Connection,
    repo_id: int,
    commit: Commit,
    renamed: dict[str, str],
    sha256s: Collection[str],
) -> str:
    gone = {entry.path: None for entry in trees.load(connection, commit.tree) if entry.sha256 in sha256s}
    parent = renamed.get(commit.parent, commit.parent) if commit.parent else None
    if not gone and parent == commit.parent:
        return commit.oid
    made = commits.write(
        connection,
        repo_id,
        parent=parent,
        tree=trees.update(connection, commit.tree, gone),
        author=commit.author,
        title=commit.title,
        message=commit.message,
        date=commit.date,
    )
    return made.oid
