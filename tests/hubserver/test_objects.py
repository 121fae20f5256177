"""The object store: durable, checked, content-addressed files."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from hubshard.errors import FormatError, IntegrityError, NotFoundError
from hubshard.hubserver.objects import READ_BYTES, ObjectStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DATA = bytes(range(256)) * 20_000  # more than one piece
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path)


def files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_what_was_written_in_pieces_is_read_back(store: ObjectStore) -> None:
    with store.writer() as writer:
        for start in range(0, len(DATA), 70_001):
            writer.write(DATA[start : start + 70_001])
        stored = writer.commit(SHA256, len(DATA))
    assert (stored.sha256, stored.nbytes, stored.xet_hash) == (SHA256, len(DATA), None)
    assert store.stat(SHA256) == stored
    pieces = list(store.read(SHA256))
    assert b"".join(pieces) == DATA
    assert max(map(len, pieces)) <= READ_BYTES
    assert stored.path is not None
    assert stored.path.read_bytes() == DATA


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 0), (5, READ_BYTES + 9), (len(DATA) - 1, len(DATA))])
def test_a_range_is_a_slice(store: ObjectStore, start: int, stop: int) -> None:
    store.put(DATA)
    assert b"".join(store.read(SHA256, start, stop)) == DATA[start:stop]


def test_ranges_outside_and_missing_objects_are_refused(store: ObjectStore) -> None:
    store.put(DATA)
    with pytest.raises(FormatError, match="is no part of it"):
        store.read(SHA256, 0, len(DATA) + 1)
    with pytest.raises(NotFoundError, match="not in the store"):
        store.read("0" * 64)
    assert store.stat("0" * 64) is None


@pytest.mark.parametrize("name", ["", "abc", "../" * 20 + "etcd", SHA256.upper(), SHA256 + "0", "/" + SHA256[1:]])
def test_only_a_sha256_names_an_object(store: ObjectStore, name: str) -> None:
    with pytest.raises(FormatError, match="64 lower-case hex digits"):
        store.stat(name)


def test_content_that_is_not_what_was_announced_leaves_nothing(store: ObjectStore, tmp_path: Path) -> None:
    for sha256, nbytes in [("0" * 64, None), (None, len(DATA) - 1), (SHA256, len(DATA) + 1)]:
        with store.writer() as writer:
            writer.write(DATA)
            with pytest.raises(IntegrityError):
                writer.commit(sha256, nbytes)
    assert files_under(tmp_path) == []


def test_an_upload_that_stops_leaves_nothing(store: ObjectStore, tmp_path: Path) -> None:
    writer = store.writer()
    writer.write(DATA)
    assert list(store.listing()) == []
    writer.abort()
    writer.abort()
    assert files_under(tmp_path) == []


def test_the_same_content_again_keeps_one_file_and_makes_it_young(store: ObjectStore, tmp_path: Path) -> None:
    path = store.put(DATA).path
    assert path is not None
    os.utime(path, (1000, 1000))
    store.put(DATA)
    assert files_under(tmp_path) == [path]
    (listed,) = store.listing()
    assert (listed.sha256, listed.nbytes) == (SHA256, len(DATA))
    assert listed.modified > 1000


def test_a_truncated_object_is_healed_by_an_upload(store: ObjectStore) -> None:
    path = store.put(DATA).path
    assert path is not None
    path.write_bytes(DATA[:-1])
    store.put(DATA)
    assert b"".join(store.read(SHA256)) == DATA


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_files_have_the_usual_permissions(store: ObjectStore) -> None:
    before = os.umask(0o027)
    try:
        path = store.put(DATA).path
    finally:
        os.umask(before)
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_many_at_once_may_upload_the_same_content(store: ObjectStore, tmp_path: Path) -> None:
    other = ObjectStore(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda number: (store, other)[number % 2].put(DATA).sha256, range(24)))
    assert set(results) == {SHA256}
    assert b"".join(store.read(SHA256)) == DATA
    assert len(files_under(tmp_path)) == 1


def test_removal_spares_what_is_young(store: ObjectStore) -> None:
    store.put(DATA)
    assert store.delete(SHA256, older_than=time.time() - 60) == 0
    assert b"".join(store.read(SHA256)) == DATA
    assert store.delete(SHA256) == len(DATA)
    assert store.stat(SHA256) is None
    assert store.delete(SHA256) == 0


def test_an_upload_beside_garbage_collection_is_never_lost(store: ObjectStore) -> None:
    data = b"small"
    for _ in range(150):
        stored = store.put(data)
        assert stored.path is not None
        os.utime(stored.path, (1000, 1000))
        start = threading.Barrier(2)

        def collect(sha256: str = stored.sha256, start: threading.Barrier = start) -> None:
            start.wait()
            store.delete(sha256, older_than=2000)

        collector = threading.Thread(target=collect)
        collector.start()
        start.wait()
        store.put(data)
        collector.join()
        assert b"".join(store.read(stored.sha256)) == data


def test_what_a_killed_process_left_is_swept(store: ObjectStore, tmp_path: Path) -> None:
    left = tmp_path / "tmp" / "new-1-abc"
    left.write_bytes(b"half")
    leaving = tmp_path / "tmp" / f"leaving-{SHA256}-1-abc"
    leaving.write_bytes(DATA)
    young = store.writer()
    os.utime(left, (1000, 1000))
    os.utime(leaving, (1000, 1000))
    (tmp_path / "objects" / SHA256[:2]).mkdir()
    assert store.sweep(older_than=2000) == 4
    assert b"".join(store.read(SHA256)) == DATA
    young.write(b"still here")
    assert b"".join(store.read(young.commit().sha256)) == b"still here"


class _OneXetFile:
    """Xet storage that holds one file."""

    def find(self, sha256: str) -> tuple[str, int] | None:
        return ("f" * 64, len(DATA)) if sha256 == SHA256 else None

    def read(self, xet_hash: str, start: int, stop: int) -> Iterator[bytes]:
        assert xet_hash == "f" * 64
        yield DATA[start:stop]


def test_content_in_xet_storage_is_found_and_a_plain_file_comes_first(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path, _OneXetFile())
    stored = store.stat(SHA256)
    assert stored is not None
    assert (stored.nbytes, stored.xet_hash, stored.path) == (len(DATA), "f" * 64, None)
    assert b"".join(store.read(SHA256, 3, 700_000)) == DATA[3:700_000]
    both = store.put(DATA)
    assert both.xet_hash == "f" * 64
    assert both.path is not None
    assert store.stat(SHA256) == both
