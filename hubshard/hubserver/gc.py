"""Garbage collection: what no repo can reach any more, and what was uploaded and never committed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hubshard.hubserver import refs, repos, trees
from hubshard.hubserver.multipart import sweep_parts
from hubshard.hubserver.xet.files import XetFiles
from hubshard.hubserver.xet.gc import collect_xet

if TYPE_CHECKING:
    import sqlite3

    from hubshard.hubserver.state import HubState

__all__ = ["GcReport", "collect"]

_BATCH = 100
_IN_FLIGHT_SECONDS = 3600.0
"""How long nothing must have been written to an unfinished upload before it counts as given up."""


@dataclass(frozen=True, slots=True)
class GcReport:
    """What a collection removed.

    Attributes:
        commits: commits that no ref leads to.
        lfs_files: large files that repos held and no commit named.
        objects: contents of large files, stored plainly.
        xorbs: xorbs of Xet storage.
        blobs: contents of regular files.
        freed_bytes: on disk, outside the database.
    """

    commits: int
    lfs_files: int
    objects: int
    xorbs: int
    blobs: int
    freed_bytes: int


@dataclass(slots=True)
class _Reached:
    commits: set[tuple[int, str]]
    trees: set[bytes]
    blobs: set[str]
    large: set[tuple[int, str]]


def collect(state: HubState, *, grace_seconds: float) -> GcReport:
    """Remove what nobody can reach, if it is older than the grace period; safe beside a running server.

    Args:
        state: the server's parts, opened by this process or by the server itself.
        grace_seconds: uploads that are younger stay although no commit names them yet; commits and files that
            lost their last ref are judged by when they were uploaded. Unfinished uploads are spared for an hour
            after their last byte, whatever the grace period is.
    """
    cutoff = time.time() - grace_seconds
    with state.db.write() as connection:
        reached = _reach(connection)
        gone_commits = _forget_commits(connection, reached, cutoff)
        gone_large = _forget_large(connection, reached, cutoff)
        gone_blobs = _forget_unreached(connection, "blobs", reached.blobs, cutoff)
        _forget_unreached(connection, "trees", reached.trees, cutoff)
    objects, freed = _remove_objects(state, cutoff)
    files = state.objects.xet if isinstance(state.objects.xet, XetFiles) else XetFiles(state.root, state.db)
    xet = collect_xet(files, older_than=cutoff)
    idle = min(cutoff, time.time() - _IN_FLIGHT_SECONDS)
    freed += xet.nbytes + state.objects.sweep(older_than=idle) + sweep_parts(state.root, older_than=idle)
    return GcReport(gone_commits, gone_large, objects, xet.xorbs, gone_blobs, freed)


def _reach(connection: sqlite3.Connection) -> _Reached:
    """Everything that the refs of all repos lead to; open pull requests also need where they started."""
    reached = _Reached(set(), set(), set(), set())
    for repo in repos.owned(connection):
        names = [ref.commit for ref in refs.listing(connection, repo.id)]
        starts = connection.execute(
            "SELECT base_commit FROM discussions WHERE repo_id = ? AND base_commit IS NOT NULL", (repo.id,)
        )
        for oid in [*names, *(row["base_commit"] for row in starts)]:
            _reach_commits(connection, repo.id, oid, reached)
    return reached


def _reach_commits(connection: sqlite3.Connection, repo_id: int, oid: str | None, reached: _Reached) -> None:
    seen: set[bytes] = set()  # per repo: another repo's nodes say nothing of what this one holds
    while oid is not None and (repo_id, oid) not in reached.commits:
        row = connection.execute(
            "SELECT parent, tree FROM commits WHERE repo_id = ? AND oid = ?", (repo_id, oid)
        ).fetchone()
        if row is None:
            return
        reached.commits.add((repo_id, oid))
        for entry in trees.reachable(connection, row["tree"], seen):
            if entry.sha256 is None:
                reached.blobs.add(entry.oid)
            else:
                reached.large.add((repo_id, entry.sha256))
        oid = row["parent"]
    reached.trees |= seen


def _forget_commits(connection: sqlite3.Connection, reached: _Reached, cutoff: float) -> int:
    rows = connection.execute("SELECT repo_id, oid FROM commits WHERE date < ?", (cutoff,)).fetchall()
    gone = [(row["repo_id"], row["oid"]) for row in rows if (row["repo_id"], row["oid"]) not in reached.commits]
    connection.executemany("DELETE FROM commits WHERE repo_id = ? AND oid = ?", gone)
    # The trees and files of a commit that stays because it is young must stay too.
    for row in connection.execute("SELECT repo_id, oid FROM commits WHERE date >= ?", (cutoff,)).fetchall():
        _reach_commits(connection, row["repo_id"], row["oid"], reached)
    return len(gone)


def _forget_large(connection: sqlite3.Connection, reached: _Reached, cutoff: float) -> int:
    rows = connection.execute("SELECT repo_id, sha256 FROM lfs_files WHERE touched_at < ?", (cutoff,)).fetchall()
    gone = [key for key in ((row["repo_id"], row["sha256"]) for row in rows) if key not in reached.large]
    connection.executemany("DELETE FROM lfs_files WHERE repo_id = ? AND sha256 = ?", gone)
    return len(gone)


def _forget_unreached(connection: sqlite3.Connection, table: str, reached: set[str] | set[bytes], cutoff: float) -> int:
    rows = connection.execute(f"SELECT oid FROM {table} WHERE created_at < ?", (cutoff,)).fetchall()  # noqa: S608
    gone = [(row["oid"],) for row in rows if row["oid"] not in reached]
    connection.executemany(f"DELETE FROM {table} WHERE oid = ?", gone)  # noqa: S608  the name is one of two above
    return len(gone)


def _remove_objects(state: HubState, cutoff: float) -> tuple[int, int]:
    """Plain contents that no repo holds go, a few per transaction, so that an upload of them cannot slip between."""
    old = [item.sha256 for item in state.objects.listing() if item.modified < cutoff]
    count = freed = 0
    for at in range(0, len(old), _BATCH):
        with state.db.write() as connection:
            for sha256 in old[at : at + _BATCH]:
                row = connection.execute("SELECT 1 FROM lfs_files WHERE sha256 = ? LIMIT 1", (sha256,)).fetchone()
                nbytes = state.objects.delete(sha256, older_than=cutoff) if row is None else 0
                count, freed = count + (nbytes > 0), freed + nbytes
    return count, freed
