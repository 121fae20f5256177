"""Small JSON files on a disk that may hold anything."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from hubshard.errors import FormatError, StoreError
from hubshard.jsonfile import read_json
from hubshard.store.pull_record import read_record


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, what="note", most_bytes=1000)


def test_an_object_is_read_and_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    path.write_bytes(b'{"a": [1, "b"]}' + b" " * 985)
    assert _read(path) == {"a": [1, "b"]}
    for missing in (tmp_path / "other", path / "below"):
        with pytest.raises(FileNotFoundError):
            _read(missing)


@pytest.mark.parametrize(
    "raw", [b"", b"[" * 900, b"[]", b"\xff", b'{"a": 1, "a": 2}', b'{"a": NaN}', b"{}" + b" " * 999]
)
def test_what_is_none_is_refused_by_name(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "note.json"
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=re.escape(f"{path}: the note ")):
        _read(path)


def test_deep_json_is_refused_and_a_record_of_a_pull_of_it_is_none(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    path.write_bytes(b"[" * 100_000)
    with pytest.raises(FormatError, match="nested too deeply"):
        read_json(path, what="note", most_bytes=2**20)
    assert read_record(path) is None


def test_what_is_no_file_is_refused_and_nobody_is_waited_for(tmp_path: Path) -> None:
    found = [tmp_path / "folder"]
    found[0].mkdir()
    if hasattr(os, "mkfifo"):
        found += [tmp_path / "fifo", tmp_path / "loop", tmp_path / "s"]
        os.mkfifo(found[1])
        found[2].symlink_to(found[2])
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(found[3]))  # an address has few bytes
    for path in found:
        with pytest.raises(FormatError, match="the note is no file"):
            _read(path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_what_the_disk_refuses_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    path.write_bytes(b"{}")
    path.chmod(0)
    with pytest.raises(StoreError, match=re.escape(str(path))):
        _read(path)
