from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubshard.errors import StoreError
from hubshard.fetch.parts import PIECE_BYTES, Part, clean_parts, missing_bytes, name_of
from tests import warm

NAME = "ab" * 32


def arrived(part: Part, piece: int) -> bytes | None:
    """The bytes of a piece, where it has arrived."""
    start, stop = part.span(piece)
    into = bytearray(stop - start)
    return bytes(into) if part.read(piece, memoryview(into)) else None


def test_pieces_that_were_written_are_there_when_the_part_is_opened_again(tmp_path: Path) -> None:
    part = Part(tmp_path, NAME, 2 * PIECE_BYTES + 5)
    part.write(2, b"tail.")
    part.write(0, bytes(PIECE_BYTES))
    part.close()
    again = Part(tmp_path, NAME, 2 * PIECE_BYTES + 5)
    assert again.arrived_bytes == PIECE_BYTES + 5
    assert arrived(again, 2) == b"tail."
    assert arrived(again, 1) is None
    assert arrived(again, 0) == bytes(PIECE_BYTES)
    again.close()


def test_a_piece_that_is_no_longer_what_was_written_has_not_arrived(tmp_path: Path) -> None:
    part = Part(tmp_path, NAME, 5)
    part.write(0, b"right")
    part.close()
    part.path.write_bytes(b"wrong")
    again = Part(tmp_path, NAME, 5)
    assert arrived(again, 0) is None
    assert again.arrived_bytes == 0
    again.close()


@pytest.mark.parametrize("damage", ["size", "no part", "header", "empty map"])
def test_a_part_that_does_not_fit_starts_anew(tmp_path: Path, damage: str) -> None:
    part = Part(tmp_path, NAME, 5)
    part.write(0, b"right")
    part.close()
    map_path = part.path.with_suffix(".map")
    if damage == "no part":
        part.path.unlink()
    if damage == "header":
        map_path.write_bytes(b"X" + map_path.read_bytes()[1:])
    if damage == "empty map":
        map_path.write_bytes(b"")
    nbytes = 6 if damage == "size" else 5
    again = Part(tmp_path, NAME, nbytes)
    assert again.arrived_bytes == 0
    assert again.path.stat().st_size == nbytes
    again.write(0, b"anew!!"[:nbytes])
    again.close()
    third = Part(tmp_path, NAME, nbytes)
    assert arrived(third, 0) == b"anew!!"[:nbytes]
    third.close()


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 40), junk=st.binary(max_size=20))
def test_a_map_that_was_cut_or_scribbled_on_never_gives_wrong_bytes(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes
) -> None:
    folder = tmp_path_factory.mktemp("part")
    part = Part(folder, NAME, 7)
    part.write(0, b"content")
    part.close()
    map_path = part.path.with_suffix(".map")
    map_path.write_bytes(map_path.read_bytes()[:cut] + junk)
    again = Part(folder, NAME, 7)
    assert arrived(again, 0) in {None, b"content"}
    again.write(0, b"written")
    again.close()
    third = Part(folder, NAME, 7)
    assert arrived(third, 0) == b"written"
    third.close()


def test_an_empty_file_is_one_empty_piece(tmp_path: Path) -> None:
    part = Part(tmp_path, NAME, 0)
    part.write(0, b"")
    assert arrived(part, 0) == b""
    part.close()
    part.move(tmp_path / "final")
    assert (tmp_path / "final").read_bytes() == b""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final"]


def test_cleaning_keeps_the_parts_that_are_named(tmp_path: Path) -> None:
    for name in ("aa" * 32, "bb" * 32):
        part = Part(tmp_path, name, 100)
        part.write(0, bytes(100))
        part.close()
    assert clean_parts(tmp_path, keep=["bb" * 32]) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bb" * 32 + ".map", "bb" * 32 + ".part"]
    assert clean_parts(tmp_path / "nowhere", keep=[]) == 0


def test_the_room_that_a_part_still_needs_counts_what_is_on_the_disk(tmp_path: Path) -> None:
    part = Part(tmp_path, NAME, 2 * PIECE_BYTES)
    assert missing_bytes(tmp_path, NAME, 2 * PIECE_BYTES) == 2 * PIECE_BYTES
    part.write(1, b"\1" * PIECE_BYTES)
    part.sync()
    part.close()
    assert missing_bytes(tmp_path, NAME, 2 * PIECE_BYTES) == PIECE_BYTES


def test_names_of_contents_are_plain_file_names() -> None:
    assert name_of(NAME) == NAME
    assert name_of("../../etc/passwd").isalnum()


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    part = Part(tmp_path, NAME, 5)
    part.close()
    with pytest.raises(StoreError, match=r"cannot write") as caught:
        part.write(0, b"right")
    assert str(part.path) in str(caught.value)


@pytest.mark.skipif(sys.platform == "win32", reason="only POSIX limits the size of a file")
def test_a_file_that_the_disk_cannot_hold_is_named_and_nothing_stays_open(tmp_path: Path) -> None:
    code = f"""
    import os, resource
    from pathlib import Path
    from hubshard.errors import StoreError
    from hubshard.fetch.parts import Part
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    before = len(os.listdir("/dev/fd"))
    try:
        Part(Path({str(tmp_path)!r}), "name", 5000)
    except StoreError as error:
        print(error, error.hint, len(os.listdir("/dev/fd")) - before)
    """
    told = warm.run(["-c", dedent(code)], imports="client").stdout
    assert f"{tmp_path}/name.part: cannot write: File too large" in told
    assert "ulimit -f" in told
    assert told.split()[-1] == "0"


def test_a_folder_that_cannot_be_is_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreError, match=r"file: cannot write"):
        Part(tmp_path / "file", "name", 5)
