"""Trees of files as immutable hash tries, against dictionaries."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hubshard.hubserver import trees
from hubshard.hubserver.db import Database
from hubshard.hubserver.trees import Entry

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator
    from pathlib import Path

COMMON = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NAMES = st.sampled_from([f"{folder}{number}.txt" for folder in ("", "a/", "a/b/") for number in range(120)])
FILES = st.dictionaries(NAMES, st.integers(0, 3), max_size=300)


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    db = Database(tmp_path / "hub.sqlite3")
    yield db.connection()
    db.close()


def entries(files: dict[str, int]) -> dict[str, Entry]:
    return {path: Entry(path, f"{version:040x}", version) for path, version in files.items()}


def build(connection: sqlite3.Connection, files: dict[str, int]) -> bytes | None:
    return trees.update(connection, None, entries(files))


def listed(connection: sqlite3.Connection, tree: bytes | None) -> dict[str, Entry]:
    return {entry.path: entry for entry in trees.load(connection, tree)}


@COMMON
@given(before=FILES, after=FILES)
def test_an_updated_tree_holds_exactly_what_a_dictionary_would(
    connection: sqlite3.Connection, before: dict[str, int], after: dict[str, int]
) -> None:
    changes: dict[str, Entry | None] = dict.fromkeys(before)
    tree = trees.update(connection, build(connection, before), changes | entries(after))
    assert listed(connection, tree) == entries(after)
    assert all(trees.find(connection, tree, path) == entry for path, entry in entries(after).items())
    assert trees.find(connection, tree, "not/there") is None


@COMMON
@given(before=FILES, after=FILES)
def test_the_name_of_a_tree_depends_on_its_files_alone(
    connection: sqlite3.Connection, before: dict[str, int], after: dict[str, int]
) -> None:
    changes: dict[str, Entry | None] = dict.fromkeys(before)
    assert trees.update(connection, build(connection, before), changes | entries(after)) == build(connection, after)


@COMMON
@given(before=FILES, after=FILES)
def test_changed_paths_are_those_that_differ(
    connection: sqlite3.Connection, before: dict[str, int], after: dict[str, int]
) -> None:
    found = trees.changed_paths(connection, build(connection, before), build(connection, after))
    assert found == {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


def test_a_change_in_a_large_tree_writes_a_few_kilobytes(connection: sqlite3.Connection) -> None:
    tree = build(connection, {f"folder/file-{number:05}.safetensors": number for number in range(10_000)})
    size = "SELECT count(*), sum(length(data)) FROM trees"
    nodes, nbytes = connection.execute(size).fetchone()
    trees.update(connection, tree, {"new": Entry("new", "0" * 40, 1)})
    nodes_after, nbytes_after = connection.execute(size).fetchone()
    assert nodes_after - nodes <= 4
    assert nbytes_after - nbytes < 20_000


def test_reachable_visits_shared_nodes_once(connection: sqlite3.Connection) -> None:
    tree = build(connection, {str(number): 0 for number in range(1000)})
    changed = trees.update(connection, tree, {"1": Entry("1", "f" * 40, 9)})
    seen: set[bytes] = set()
    assert len(list(trees.reachable(connection, tree, seen))) == 1000
    assert len(list(trees.reachable(connection, changed, seen))) < 129


def test_whole_trees_are_sorted_by_path_and_kept(connection: sqlite3.Connection) -> None:
    tree = build(connection, {str(number): 0 for number in range(500)})
    kept = trees.Trees()
    assert list(kept.get(connection, tree)) == sorted(str(number) for number in range(500))
    assert kept.get(connection, tree) is kept.get(connection, tree)
    assert kept.get(connection, None) == {}


@pytest.mark.parametrize("data", [b"", b"hello\n", bytes(1000)])
def test_blob_ids_are_those_of_git(data: bytes) -> None:
    done = subprocess.run(["git", "hash-object", "--stdin"], input=data, capture_output=True, check=True)
    assert trees.blob_oid(data) == done.stdout.decode().strip()
