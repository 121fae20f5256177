"""The files of a commit: an immutable hash trie, shared between commits.

A tree is named by the sha256 of its root node. A node with at most 128 files is a leaf that lists them; any other
has 16 children, chosen by the next hexadecimal digit of the sha256 of the file's path. So a commit to a repo of
10,000 files writes three nodes, of a few kilobytes; equal trees have equal names; and two trees are compared by
looking only where their nodes differ. The form of a tree depends on its files alone, not on how it came about.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["Entry", "Trees", "blob_oid", "changed_paths", "find", "load", "pointer", "reachable", "update"]

_LEAF_ENTRIES = 128
_CACHED_ENTRIES = 50_000


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a commit.

    Attributes:
        path: posix path in the repo.
        oid: git blob id: of the content, or of the pointer of an LFS file.
        nbytes: size of the content.
        sha256: of the content of an LFS file; None for a regular file, whose content is the blob `oid`.
    """

    path: str
    oid: str
    nbytes: int
    sha256: str | None = None


def blob_oid(data: bytes) -> str:
    r"""The git id of a blob: sha1 over `blob <size>\\0` and the content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def pointer(sha256: str, nbytes: int) -> bytes:
    """The LFS pointer that stands for a large file in git (git-lfs specification, version 1)."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {nbytes}\n".encode()


def load(connection: sqlite3.Connection, tree: bytes | None) -> Iterator[Entry]:
    """Every file of a tree, in no particular order; None is the empty tree."""
    for kind, items in _walk(connection, tree):
        if kind == "leaf":
            for path, oid, nbytes, sha256 in items:
                yield Entry(path, oid, nbytes, sha256)


def find(connection: sqlite3.Connection, tree: bytes | None, path: str) -> Entry | None:
    """One file of a tree."""
    digits, oid = _digits(path), tree
    for digit in digits:
        if oid is None:
            return None
        node = _read(connection, oid)
        if "children" not in node:
            return next((Entry(*item) for item in node["entries"] if item[0] == path), None)
        child = node["children"][int(digit, 16)]
        oid = bytes.fromhex(child) if child else None
    return None


def update(connection: sqlite3.Connection, tree: bytes | None, changes: Mapping[str, Entry | None]) -> bytes | None:
    """Write the tree that results from changes, inside a write transaction.

    Args:
        connection: of the transaction.
        tree: where to start from; None is the empty tree.
        changes: path → the new file, or None where it goes.

    Returns:
        The name of the new tree, None when it has no files.
    """
    keyed = [(_digits(path), path, entry) for path, entry in changes.items()]
    node = _update(connection, tree, keyed, 0)
    return None if node is None else node[0]


def changed_paths(connection: sqlite3.Connection, old: bytes | None, new: bytes | None) -> set[str]:
    """Paths that were added, removed or changed between two trees."""
    if old == new:
        return set()
    children = _children(connection, old), _children(connection, new)
    if children[0] is None or children[1] is None:
        before = {entry.path: entry for entry in load(connection, old)}
        after = {entry.path: entry for entry in load(connection, new)}
        return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    pairs = zip(children[0], children[1], strict=True)
    return set().union(*(changed_paths(connection, one, other) for one, other in pairs))


def reachable(connection: sqlite3.Connection, tree: bytes | None, seen: set[bytes]) -> Iterator[Entry]:
    """Files of the nodes of a tree that are not in `seen` yet; the nodes are added to it."""
    if tree is None or tree in seen:
        return
    seen.add(tree)
    node = _read(connection, tree)
    if "children" not in node:
        yield from (Entry(*item) for item in node["entries"])
        return
    for child in node["children"]:
        yield from reachable(connection, bytes.fromhex(child) if child else None, seen)


def _update(
    connection: sqlite3.Connection,
    oid: bytes | None,
    changes: list[tuple[str, str, Entry | None]],
    depth: int,
) -> tuple[bytes, int] | None:
    """The node after the changes, with its number of files; None when it is empty."""
    children = _children(connection, oid)
    if children is None:
        entries = {entry.path: entry for entry in load(connection, oid)}
        _apply(entries, changes)
        return _write_entries(connection, entries.values(), depth)
    counts = _read(connection, oid or b"")["counts"]
    by_digit: dict[int, list[tuple[str, str, Entry | None]]] = {}
    for change in changes:
        by_digit.setdefault(int(change[0][depth], 16), []).append(change)
    for digit, group in by_digit.items():
        made = _update(connection, children[digit], group, depth + 1)
        children[digit], counts[digit] = made or (None, 0)
    if sum(counts) <= _LEAF_ENTRIES:
        entries = {entry.path: entry for child in children for entry in load(connection, child)}
        return _write_entries(connection, entries.values(), depth)
    return _write_branch(connection, children, counts)


def _apply(entries: dict[str, Entry], changes: Iterable[tuple[str, str, Entry | None]]) -> None:
    for _, path, entry in changes:
        if entry is None:
            entries.pop(path, None)
        else:
            entries[path] = entry


def _write_entries(connection: sqlite3.Connection, entries: Iterable[Entry], depth: int) -> tuple[bytes, int] | None:
    found = sorted(entries, key=lambda entry: entry.path)
    if not found:
        return None
    if len(found) <= _LEAF_ENTRIES:
        items = [(entry.path, entry.oid, entry.nbytes, entry.sha256) for entry in found]
        return _write(connection, {"entries": items}), len(found)
    groups: list[list[Entry]] = [[] for _ in range(16)]
    for entry in found:
        groups[int(_digits(entry.path)[depth], 16)].append(entry)
    made = [_write_entries(connection, group, depth + 1) or (None, 0) for group in groups]
    return _write_branch(connection, [oid for oid, _ in made], [count for _, count in made])


def _write_branch(connection: sqlite3.Connection, children: list[bytes | None], counts: list[int]) -> tuple[bytes, int]:
    names = [child.hex() if child else None for child in children]
    return _write(connection, {"children": names, "counts": counts}), sum(counts)


def _write(connection: sqlite3.Connection, node: dict[str, object]) -> bytes:
    data = json.dumps(node, separators=(",", ":"), ensure_ascii=False).encode()
    oid = hashlib.sha256(data).digest()
    connection.execute("INSERT OR IGNORE INTO trees VALUES (?, ?, ?)", (oid, data, time.time()))
    return oid


def _read(connection: sqlite3.Connection, oid: bytes) -> dict[str, list[Any]]:
    row = connection.execute("SELECT data FROM trees WHERE oid = ?", (oid,)).fetchone()
    found: dict[str, list[Any]] = json.loads(row["data"])
    return found


def _children(connection: sqlite3.Connection, oid: bytes | None) -> list[bytes | None] | None:
    """The children of a branch; None for a leaf and for the empty tree."""
    node = {} if oid is None else _read(connection, oid)
    if "children" not in node:
        return None
    return [bytes.fromhex(child) if child else None for child in node["children"]]


def _walk(connection: sqlite3.Connection, oid: bytes | None) -> Iterator[tuple[str, list[Any]]]:
    if oid is None:
        return
    node = _read(connection, oid)
    if "children" not in node:
        yield "leaf", node["entries"]
        return
    for child in node["children"]:
        yield from _walk(connection, bytes.fromhex(child) if child else None)


def _digits(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()


class Trees:
    """Whole trees, sorted by path, kept in memory up to a number of files; safe with several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trees: OrderedDict[bytes, dict[str, Entry]] = OrderedDict()

    def get(self, connection: sqlite3.Connection, tree: bytes | None) -> Mapping[str, Entry]:
        """Path → file of a tree, in the order of the paths; not to be changed."""
        if tree is None:
            return {}
        with self._lock:
            found = self._trees.get(tree)
            if found is not None:
                self._trees.move_to_end(tree)
                return found
        made = {entry.path: entry for entry in sorted(load(connection, tree), key=lambda entry: entry.path)}
        self._keep(tree, made)
        return made

    def derive(self, tree: bytes | None, before: Mapping[str, Entry], changes: Mapping[str, Entry | None]) -> None:
        """Keep the tree that the changes made of another one, so that the next commit need not read it."""
        if tree is not None:
            merged = {**before, **changes}
            self._keep(tree, {path: entry for path in sorted(merged) if (entry := merged[path]) is not None})

    def _keep(self, tree: bytes, files: dict[str, Entry]) -> None:
        with self._lock:
            self._trees[tree] = files
            while len(self._trees) > 1 and sum(map(len, self._trees.values())) > _CACHED_ENTRIES:
                self._trees.popitem(last=False)
