"""Scratch files of a publish: two at a time, none left behind, those of live runs spared."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from hubshard.errors import StoreError
from hubshard.publish.scratch import scratch_in

DATA = bytes(range(256)) * 1000

KILLED = """
import os, signal, sys
from pathlib import Path
from hubshard.publish.scratch import scratch_in
with scratch_in(Path(sys.argv[1]), [10]) as scratch, scratch.holding(lambda: [b"x" * 10], "a", lambda _: None):
    print("held", flush=True)
    sys.stdin.read()
"""


def ignore(_: int) -> None:
    pass


def test_a_file_is_there_as_long_as_it_is_needed_with_its_hash(tmp_path: Path) -> None:
    told: list[int] = []
    with scratch_in(tmp_path / "new", [len(DATA)]) as scratch:
        with scratch.holding(lambda: [DATA[:1000], memoryview(DATA)[1000:]], "a", told.append) as (path, sha256):
            assert path.read_bytes() == DATA
            assert sha256 == hashlib.sha256(DATA).hexdigest()
        assert not path.exists()
    assert told == [1000, len(DATA) - 1000]
    assert list((tmp_path / "new").iterdir()) == []


def test_nothing_is_left_behind_after_a_failure(tmp_path: Path) -> None:
    def fail_half_way() -> Iterator[bytes]:
        yield b"1"
        assert len(list(tmp_path.iterdir())) == 2
        raise StoreError("the source is gone")

    def run() -> None:
        with scratch_in(tmp_path, [1]) as scratch, scratch.holding(fail_half_way, "a", ignore):
            pass

    with pytest.raises(StoreError, match="gone"):
        run()
    assert list(tmp_path.iterdir()) == []


def test_free_space_is_checked_first_and_the_error_says_how_much_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", ["total", "used", "free"])  # noqa: PYI024  # as shutil's
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, 5_000_000_000))
    with pytest.raises(StoreError, match=r"lacks 2\.00 GB: the 2 largest shards take 7\.00 GB, 5\.00 GB are free"):
        scratch_in(tmp_path, [1, 4_000_000_000, 3_000_000_000]).__enter__()
    with scratch_in(tmp_path, [1, 1, 5_000_000_000 - 1]):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file"):
        scratch_in(tmp_path / "file", []).__enter__()


def test_what_a_killed_run_has_left_is_removed_and_what_a_live_one_holds_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    (tmp_path / "somebody's.part").write_bytes(b"1")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        held = set(tmp_path.iterdir())
        assert len(held) == 3
        with scratch_in(tmp_path, []):
            assert held < set(tmp_path.iterdir())
        assert set(tmp_path.iterdir()) == held
        process.kill()
        process.wait()
    assert set(tmp_path.iterdir()) == held
    with scratch_in(tmp_path, []):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["somebody's.part"]
