from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hubshard.lazy.drop_behind import DropBehind, available_memory
from hubshard.lazy.pages import forget
from hubshard.store.local import LocalStore

MEBI = 2**20


def from_disk() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text("ascii").splitlines())
    return int(lines["read_bytes"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that is not in the cache."""
    made = tmp_path / "a.bin"
    made.write_bytes(os.urandom(32 * MEBI))
    with made.open("rb+") as file:
        os.fsync(file.fileno())
        forget(file.fileno(), 0, 32 * MEBI)
    return made


def test_what_was_read_is_right_and_dropped(path: Path) -> None:
    store = LocalStore(path.parent)
    at = store.head("main")
    assert at is not None
    reader = DropBehind(store, path.parent)
    assert reader.head("main") == at
    assert [entry.path for entry in reader.list(at)] == ["a.bin"]
    wanted = path.read_bytes()
    buffer = memoryview(bytearray(MEBI))
    for start in (0, 5 * MEBI, 31 * MEBI):
        reader.read(at, "a.bin", start, start + MEBI, buffer)
        assert buffer == wanted[start : start + MEBI]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bytes from the disk are counted in /proc/self/io")
def test_ranges_that_lie_apart_cost_their_bytes_from_the_disk(path: Path) -> None:
    store = LocalStore(path.parent).for_ranges()
    at = store.head("main")
    assert at is not None
    buffer = memoryview(bytearray(MEBI))
    before = from_disk()
    for start in range(0, 32 * MEBI, 8 * MEBI):
        store.read(at, "a.bin", start, start + MEBI, buffer)
    read = from_disk() - before
    if not read:
        pytest.skip("this folder is on no disk")
    assert read <= 4 * MEBI * 1.02


def test_available_memory_is_some() -> None:
    found = available_memory()
    assert found is None or found > 16 * MEBI
