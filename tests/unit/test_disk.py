"""Reads and writes of exactly so many bytes, and files that are to go."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from hubshard.disk import hint_for, read_exactly, refused, remove_unless_open, sync_folder, write_all
from hubshard.errors import IntegrityError, StoreError
from tests.systems import posix_only


def test_a_read_fills_its_buffer_from_where_the_file_stands(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    into = bytearray(30)
    with path.open("rb", buffering=0) as file:
        file.seek(50)
        assert read_exactly(file, memoryview(into)) == 0
        assert into == bytes(range(50, 80))


def test_a_read_past_the_end_tells_how_much_is_lacking(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    with path.open("rb", buffering=0) as file:
        assert read_exactly(file, memoryview(bytearray(10))) == 7
        assert read_exactly(file, memoryview(b"")) == 0


def test_a_write_puts_all_bytes_of_a_buffer_of_any_shape(tmp_path: Path) -> None:
    data = memoryview(bytes(range(256)) * 8)
    with (tmp_path / "file").open("wb", buffering=0) as file:
        write_all(file.fileno(), data.cast("B", (8, 256)))
        write_all(file.fileno(), memoryview(b""))
    sync_folder(tmp_path, tmp_path.parent)
    assert (tmp_path / "file").read_bytes() == data


REMOVE = """
import os, sys
from pathlib import Path
from hubshard.disk import remove_unless_open
if os.geteuid() == 0:
    os.setuid(65534)
try:
    remove_unless_open(Path(sys.argv[1]))
except OSError as error:
    print(type(error).__name__, error)
"""


def test_a_file_that_is_there_or_not_is_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    for _ in range(2):
        remove_unless_open(path)
        assert not path.exists()


@posix_only
def test_a_file_that_may_not_be_removed_is_told_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    tmp_path.chmod(0o500)  # to root, who may do everything, it is a stranger's folder
    done = subprocess.run([sys.executable, "-c", REMOVE, str(path)], capture_output=True, text=True, check=True)
    tmp_path.chmod(0o700)
    assert done.stdout.startswith(f"StoreError {path} is of no use any more, and cannot be removed: Permission denied")
    assert path.exists()


@pytest.mark.skipif(sys.platform != "win32", reason="elsewhere a file that is open can be removed")
def test_a_file_that_somebody_has_open_stays_on_windows(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb"):
        remove_unless_open(path)
        assert path.exists()


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "free some space, or choose another disk"),
        (errno.EMFILE, "too many files were open; raise the limit: `ulimit -n 1024`"),
        (errno.EFBIG, "the disk, or the system (`ulimit -f`), takes no file that large"),
        (errno.EIO, None),
    ],
)
def test_what_the_system_refuses_is_told_with_its_place_and_what_to_do(
    tmp_path: Path, number: int, hint: str | None
) -> None:
    named, place = tmp_path / "named", tmp_path / "place"
    for error, path in [(OSError(number, "no", str(named)), named), (OSError(number, "no"), place)]:
        with pytest.raises(StoreError) as told, refused(place):
            raise error
        assert (str(told.value), told.value.hint) == (f"{path}: no", hint)
    with pytest.raises(IntegrityError), refused(place):
        raise IntegrityError("it is ours already")


def test_too_many_open_files_are_found_among_the_causes() -> None:
    error = StoreError("no connection", hint="is there a network?")
    error.__cause__ = OSError(errno.EMFILE, "Too many open files")
    assert hint_for(error) == "too many files were open; raise the limit: `ulimit -n 1024`"
    assert hint_for(ValueError("something else")) is None
