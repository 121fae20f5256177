"""What the branch and the disks of a run tell of rollbacks."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from hubshard.errors import ConflictError, FormatError
from hubshard.resume.saves.disk_line import BranchLine, DiskLine
from hubshard.resume.saves.local_steps import LocalSteps
from hubshard.resume.saves.seen_rollbacks import SeenRollbacks
from hubshard.steps.places import BranchPlace
from hubshard.steps.rollbacks import ROLLBACKS_NAME, Rollback, decode_rollbacks, encode_rollbacks
from hubshard.steps.step import MANIFEST_NAME
from hubshard.store.local import LocalStore

WHERE = "org/run@resume"
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
        (b'"a", 5', b'"a", -1'),
        (b'"a", 5', b'"a", 1' + b"0" * 30),
        (b'"a", 5', b'"a", true'),
        (b'"rollbacks"', b'"other"'),
        (b"{", b"[" * 100_000 + b"{"),
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
    SeenRollbacks(tmp_path / "nowhere").add(WHERE, ["a"])
    assert "a restore may pass over steps that have not reached the Hub" in caplog.text


def test_the_record_of_a_folder_grows_and_tells_of_each_branch_on_its_own(tmp_path: Path) -> None:
    seen = SeenRollbacks(tmp_path)
    assert seen.of(WHERE) is None
    seen.add(WHERE, [])
    assert seen.of(WHERE) == frozenset()
    seen.add(WHERE, ["a"])
    seen.add("org/other@resume", ["c"])
    seen.add(WHERE, ["b"])
    assert SeenRollbacks(tmp_path).of(WHERE) == frozenset(["a", "b"])
    assert SeenRollbacks(tmp_path).of("org/other@resume") == frozenset(["c"])


DAMAGED = [b"", b"\xff\xfe{", b"[]", b"[" * 100_000, b'{"org/run@resume": 3}', b'{"org/run@resume": [3]}', b" " * 2**25]


@pytest.mark.parametrize("raw", DAMAGED, ids=[repr(raw[:12]) for raw in DAMAGED])
def test_a_record_that_is_damaged_is_an_error_and_is_written_anew(tmp_path: Path, raw: bytes) -> None:
    seen = SeenRollbacks(tmp_path)
    seen.path.write_bytes(raw)
    with pytest.raises(FormatError, match=re.escape(str(seen.path))):
        seen.of(WHERE)
    seen.add(WHERE, ["a"])
    assert seen.of(WHERE) == frozenset(["a"])


def test_a_record_that_is_no_file_is_an_error_that_waits_for_nobody_and_is_written_anew(tmp_path: Path) -> None:
    seen = SeenRollbacks(tmp_path)
    makers: list[Callable[[Path], None]] = [Path.mkdir, *([os.mkfifo] if hasattr(os, "mkfifo") else [])]
    for make in makers:
        make(seen.path)
        with pytest.raises(FormatError, match=re.escape(str(seen.path))):
            seen.of(WHERE)
        seen.add(WHERE, ["a"])
        assert seen.of(WHERE) == frozenset(["a"])
        seen.path.unlink()


def test_the_record_is_durable_before_it_has_its_name_and_the_name_is_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []

    def fsync(descriptor: int) -> None:
        what = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        synced.append((what, SeenRollbacks(tmp_path).path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    SeenRollbacks(tmp_path).add(WHERE, ["a"])
    assert synced == [("file", False), *([] if os.name == "nt" else [("folder", True)])]


# Which steps of a disk count


def _disk(tmp_path: Path, *steps: int, files: Mapping[int, str] | None = None) -> LocalSteps:
    local = LocalSteps(tmp_path)
    for step in steps:
        local.folder(step).mkdir(parents=True)
        (local.folder(step) / MANIFEST_NAME).write_bytes(b"{}")
        (local.folder(step) / f"rank-{(files or {}).get(step, f'here-{step}')}.safetensors").touch()
    return local


def _line(*steps: int, rollbacks: Sequence[Rollback] = ()) -> BranchLine:
    return BranchLine(WHERE, {step: [f"rank-there-{step}.safetensors", MANIFEST_NAME] for step in steps}, rollbacks)


def test_of_a_disk_that_has_seen_the_branch_all_counts_but_what_is_after_a_rollback_that_it_has_not_followed(
    tmp_path: Path,
) -> None:
    local = _disk(tmp_path, 4, 6, 8)
    local.rollbacks.add(WHERE, ["a"])
    assert DiskLine(local).judge(_line(2)) == {}
    assert DiskLine(local).judge(_line(2, rollbacks=[FIRST])) == {}
    assert list(DiskLine(local).judge(_line(2, rollbacks=[FIRST, SECOND]))) == [8]
    assert list(DiskLine(local).judge(_line(2, 8, rollbacks=[Rollback("c", 3)]))) == [4, 6]  # the branch has 8
    assert DiskLine(local).judge(_line(2, rollbacks=[SECOND]), wanted=8) == {}
    assert list(DiskLine(local).judge(_line(2, rollbacks=[SECOND]), wanted=4)) == [8]
    assert DiskLine(local).judge(None) == {}


def test_a_disk_of_which_nothing_says_that_it_belongs_to_the_branch_may_hold_nothing_newer(tmp_path: Path) -> None:
    line = DiskLine(_disk(tmp_path, 4, 6, 8))
    assert line.judge(_line()) == {}
    assert line.judge(_line(rollbacks=[FIRST])) == {}
    with pytest.raises(ConflictError) as caught:
        line.judge(_line(2, 6))
    for word in (str(tmp_path), "step 8", "steps 2, 6", WHERE):
        assert word in caught.value.message
    with pytest.raises(ConflictError, match="holds steps 4, 8, but"):
        line.judge(_line(2, 6), wanted=4)
    assert list(line.judge(_line(2, 9))) == [4, 6, 8]
    with pytest.raises(ConflictError, match="holds step 6, but"):
        line.judge(_line(2, 9), wanted=6)


def test_a_disk_that_has_a_step_just_as_the_branch_has_it_belongs_to_it(tmp_path: Path) -> None:
    line = DiskLine(_disk(tmp_path, 4, 8, files={4: "there-4"}))
    assert line.judge(_line(2, 4)) == {}
    with pytest.raises(FormatError, match=r"rollbacks\.json is not there: .*step 8 in .* from before the rollback"):
        line.judge(_line(2, 4, rollbacks=[FIRST]))
    assert line.judge(_line(2, 4, rollbacks=[FIRST]), wanted=8) == {}
    assert line.judge(_line(2, 4, rollbacks=[Rollback("c", 8)])) == {}
    with pytest.raises(ConflictError):
        line.judge(_line(2))


def test_a_damaged_record_is_an_error_only_where_it_matters(tmp_path: Path) -> None:
    local = _disk(tmp_path, 4, 8, files={4: "there-4"})
    local.rollbacks.path.write_bytes(b"")
    line = DiskLine(local)
    assert line.judge(_line(2, 4)) == {}
    assert line.judge(_line(2, 4, 8, rollbacks=[FIRST])) == {}
    with pytest.raises(FormatError, match=r"step 8 in .* is from before the rollback") as caught:
        line.judge(_line(2, 4, rollbacks=[FIRST]))
    assert str(local.rollbacks.path) in caught.value.message
    line.judge(_line(2, 4))
    line.follow(WHERE, [], 9)
    assert local.rollbacks.of(WHERE) == frozenset()


def test_what_does_not_count_is_gone_before_the_record_says_so_and_a_step_that_stays_keeps_it_from_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = _disk(tmp_path, 4, 6, 8, 9)
    local.rollbacks.add(WHERE, [])
    line = DiskLine(local)
    line.follow(WHERE, ["a"], 9)  # nothing was judged yet
    assert local.rollbacks.of(WHERE) == frozenset()
    assert list(line.judge(_line(2, rollbacks=[FIRST]))) == [6, 8, 9]
    monkeypatch.setattr(LocalSteps, "drop", lambda _, step: step != 8)
    line.follow(WHERE, ["a"], 9)
    line.meet(WHERE, ["a"])
    assert local.rollbacks.of(WHERE) == frozenset()
    monkeypatch.undo()
    line.follow(WHERE, ["a"], 10)
    assert local.rollbacks.of(WHERE) == frozenset(["a"])
    assert local.numbers() == {4, 6, 9}  # 9 was just saved anew, and the removal of 6 did nothing
