"""Reads and writes of exactly so many bytes."""

from __future__ import annotations

from pathlib import Path

from hubshard.disk import read_exactly, sync_folder, write_all


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
