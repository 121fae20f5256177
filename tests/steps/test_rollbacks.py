"""What the branch and the disks of a run tell of rollbacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubshard.errors import FormatError
from hubshard.resume.saves.seen_rollbacks import NAME, SeenRollbacks
from hubshard.steps.places import BranchPlace
from hubshard.steps.rollbacks import ROLLBACKS_NAME, Rollback, decode_rollbacks, encode_rollbacks
from hubshard.store.local import LocalStore

FIRST, SECOND = Rollback("a", 5), Rollback("b", 7)


def test_what_is_written_is_read_back() -> None:
    assert decode_rollbacks(encode_rollbacks([FIRST, SECOND]), path="p") == (FIRST, SECOND)
    assert decode_rollbacks(encode_rollbacks([]), path="p") == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"version": 1', b'"version": 2'),
        (b"hubshard-rollbacks", b"something-else"),
        (b'"a", 5', b'"a"'),
        (b'"a", 5', b'"a", "5"'),
        (b'"a", 5', b"7, 5"),
        (b'[["a", 5]]', b"null"),
        (b"{", b"["),
        (b"{", b"\xff"),
    ],
)
def test_what_is_none_is_refused_by_name(before: bytes, after: bytes) -> None:
    raw = encode_rollbacks([FIRST])
    assert before in raw
    with pytest.raises(FormatError, match="the/file: "):
        decode_rollbacks(raw.replace(before, after), path="the/file")


def test_a_list_that_is_far_too_long_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / ROLLBACKS_NAME).open("wb") as file:
        file.truncate(2**24 + 1)
    store = LocalStore(tmp_path)
    at = store.head("main")
    assert at is not None
    with pytest.raises(FormatError, match=r"there/rollbacks\.json has 16777217 bytes, too many"):
        _ = BranchPlace(store, at, "there").rollbacks


def test_a_record_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SeenRollbacks(tmp_path / "nowhere").meet("org/run@resume", ["a"])
    assert "may bring back steps that were rolled back" in caplog.text


def test_a_folder_is_void_after_the_lowest_rollback_that_it_has_not_followed(tmp_path: Path) -> None:
    seen = SeenRollbacks(tmp_path)
    assert seen.last_valid_step("org/run@resume", [FIRST]) is None  # it has nothing to do with the branch
    seen.meet("org/run@resume", [])
    assert seen.last_valid_step("org/run@resume", []) is None
    assert seen.last_valid_step("org/run@resume", [FIRST, SECOND]) == 5
    seen.meet("org/run@resume", ["a"])  # which is no step that goes on from there
    assert seen.last_valid_step("org/run@resume", [FIRST, SECOND]) == 5
    seen.follow("org/run@resume", ["a"])
    assert seen.last_valid_step("org/run@resume", [FIRST, SECOND]) == 7
    seen.follow("org/run@resume", ["a", "b"])
    assert SeenRollbacks(tmp_path).last_valid_step("org/run@resume", [FIRST, SECOND]) is None
    seen.follow("org/run@resume", ["a"])  # a Hub restored from a backup
    assert seen.last_valid_step("org/run@resume", [FIRST, SECOND]) is None
    assert seen.last_valid_step("org/other@resume", [FIRST]) is None


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[]", b'{"org/run@resume": 3}', b'{"org/run@resume": [3]}'])
def test_a_record_that_is_none_is_as_good_as_not_there(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / NAME).write_bytes(raw)
    seen = SeenRollbacks(tmp_path)
    assert seen.last_valid_step("org/run@resume", [FIRST]) is None
    seen.meet("org/run@resume", [])
    assert seen.last_valid_step("org/run@resume", [FIRST]) == 5
