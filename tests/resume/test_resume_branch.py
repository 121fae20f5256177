"""ResumeBranch in one process, with a local folder alone."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hubshard import disk
from hubshard.errors import (
    ConflictError,
    FormatError,
    HubshardError,
    IncompleteError,
    IntegrityError,
    NotFoundError,
    StoreError,
)
from hubshard.events import Event
from hubshard.resume.saves import saving
from hubshard.steps import folder_lock, writing

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from hubshard import ResumeBranch  # noqa: E402
from hubshard.steps.step import MANIFEST_NAME, step_folder  # noqa: E402
from hubshard.steps.step_json import decode_step  # noqa: E402


def _state(seed: int, rows: int = 700) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (7, 8), dtype=torch.uint8, generator=generator)
    return {
        "model": {
            "large": torch.randn(rows, 300, generator=generator),
            "column": torch.randn(6, 10, generator=generator).t(),
            "part": torch.randn(100, generator=generator)[10:31],
            "conj": torch.randn(4, dtype=torch.complex64, generator=generator).conj(),
            "bf16": torch.randn(5, 3, generator=generator).bfloat16(),
            "fp8": bits.view(torch.float8_e4m3fn),
            "empty": torch.empty(0, 7),
            "scalar": torch.tensor(float(seed)),
            "mask": bits > 100,
        },
        "lists": [{"exp_avg": torch.randn(3, generator=generator)}, {"exp_avg": torch.full((2,), seed)}],
        "epoch": seed,
        "limits": [2**80 + seed, -0.0, {"a": None}],
    }


def _bits(value: Any) -> Any:
    """A state as something that is equal only where every bit is."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""
    if isinstance(value, dict):
        return {key: _bits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_bits(item) for item in value]
    return type(value).__name__, repr(value)


def _is(state: dict[str, Any], seed: int) -> bool:
    return bool(_bits(state) == _bits(_state(seed)))


def _open(folder: Path, **options: Any) -> ResumeBranch:
    return ResumeBranch(None, local_dir=folder, signals=(), **options)


def _saved(folder: Path, *steps: int, **options: Any) -> None:
    with _open(folder, **{"keep": 9, **options}) as branch:
        for step in steps:
            branch.save(_state(step), step)


def _restored(folder: Path, **options: Any) -> tuple[int | None, dict[str, Any]]:
    state = _state(0)
    with _open(folder) as branch:
        return branch.restore(state, **options), state


def _data_file(folder: Path, step: int) -> Path:
    (found,) = (folder / step_folder(step)).glob("rank-*.safetensors")
    return found


def _flip(path: Path, at: int = -9) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


class _Gate:
    """Stops the save of each step in its background when its files are shown on the disk, until it is opened."""

    def __init__(self, kind: str = "commit") -> None:
        self.events: list[Event] = []
        self.kind = kind
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if event.operation == "save" and event.kind == self.kind:
            self.reached.set()
            assert self.open.wait(60)

    def told(self, *kinds: str) -> list[tuple[str, str]]:
        return [(event.operation, event.kind) for event in self.events if event.kind in kinds]


# Saving and restoring


def test_what_was_saved_last_comes_back_bit_by_bit(tmp_path: Path) -> None:
    assert _restored(tmp_path)[0] is None
    _saved(tmp_path, 1, 2)
    step, state = _restored(tmp_path)
    assert step == 2
    assert _is(state, 2)


def test_a_step_can_be_named(tmp_path: Path) -> None:
    _saved(tmp_path, 1, 2)
    step, state = _restored(tmp_path, step=1)
    assert step == 1
    assert _is(state, 1)
    with pytest.raises(NotFoundError, match="no step 3 is saved; there are 1, 2"):
        _restored(tmp_path, step=3)


def test_the_state_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    gate = _Gate("start")
    state = _state(1)
    with _open(tmp_path, on_event=gate) as branch:
        gate.open.set()
        branch.save(state, 1)
        for tensor in state["model"].values():
            tensor.zero_()
    assert _is(_restored(tmp_path)[1], 1)


def test_models_and_optimizers_are_saved_and_filled_where_they_stand(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "n": seed}

    first, second = make(1), make(2)
    kept = second["model"]
    with _open(tmp_path) as branch:
        branch.save(first, 1)
        assert branch.restore(second) == 1
    assert second["model"] is kept
    assert _bits(dict(second["model"].state_dict())) == _bits(dict(first["model"].state_dict()))
    assert _bits(second["optimizer"].state_dict()) == _bits(first["optimizer"].state_dict())
    assert second["n"] == 1


def test_an_object_with_a_state_of_its_own_says_what_a_step_is_loaded_into(tmp_path: Path) -> None:
    class State:
        def __init__(self) -> None:
            self.tensors: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return self.tensors

        def prepare_load(self, step: Any) -> dict[str, Any]:
            return {name: torch.empty(held.spec.shape) for name, held in step.tensors.items()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.tensors = state

    saved, empty = State(), State()
    saved.tensors = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
    with _open(tmp_path) as branch:
        branch.save(saved, 7)
        assert branch.restore(empty) == 7
    assert _bits(empty.tensors) == _bits(saved.tensors)


def test_one_copy_is_kept_in_the_same_memory_from_save_to_save(tmp_path: Path) -> None:
    with _open(tmp_path) as branch:
        seen = set()
        for step in (1, 2, 3):
            branch.save(_state(step), step)
            seen.add(branch._taker._buffer._memory.data_ptr())
    assert len(seen) == 1


def test_a_layout_that_changes_between_two_saves_is_planned_anew(tmp_path: Path) -> None:
    state = _state(1)
    with _open(tmp_path) as branch:
        branch.save(state, 1)
        state["model"]["more"] = torch.ones(5)
        state["model"]["large"] = torch.ones(3)
        del state["model"]["column"]
        branch.save(state, 2)
        found = {**_state(0), "model": {**_state(0)["model"], "more": torch.zeros(5), "large": torch.zeros(3)}}
        del found["model"]["column"]
        assert branch.restore(found) == 2
    assert _bits(found) == _bits(state)


def test_nothing_is_pickled_and_the_files_are_bounded(tmp_path: Path) -> None:
    _saved(tmp_path, 1, max_file_size="300KB")
    files = list((tmp_path / step_folder(1)).iterdir())
    assert len(files) > 3
    assert all(path.stat().st_size <= 300_000 for path in files if path.name != MANIFEST_NAME)
    assert {path.suffix for path in files} == {".safetensors", ".json"}


def test_a_save_and_a_restore_are_told(tmp_path: Path) -> None:
    events: list[Event] = []
    with _open(tmp_path, on_event=events.append) as branch:
        branch.save(_state(1), 1)
        branch.restore(_state(0))
    told = [(event.operation, event.kind) for event in events]
    assert told == [
        ("save", "start"),
        ("save", "commit"),
        ("save", "end"),
        ("restore", "start"),
        ("restore", "received"),
        ("restore", "end"),
    ]
    assert events[0].detail == "step 1"
    assert events[1].path.endswith(step_folder(1))
    assert events[1].nbytes > 700 * 300 * 4
    assert events[5].totals is not None
    assert events[5].totals.received_bytes == events[4].nbytes > 700 * 300 * 4


# One save while another is under way


def test_a_save_is_skipped_while_another_is_under_way_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = _Gate()
    with _open(tmp_path, busy="skip", on_event=gate) as branch:
        assert branch.save(_state(1), 1)
        assert gate.reached.wait(60)
        assert not branch.save(_state(2), 2)
        gate.open.set()
        branch.wait()
        assert branch.save(_state(3), 3)
    assert "step 2 is not saved: the one before is still being written" in caplog.text
    assert gate.told("skipped") == [("save", "skipped")]
    with _open(tmp_path) as branch:
        assert branch.steps() == [1, 3]


def test_a_save_waits_for_another_and_they_are_never_mixed(tmp_path: Path) -> None:
    gate = _Gate()
    with _open(tmp_path, on_event=gate) as branch:
        branch.save(_state(1), 1)
        assert gate.reached.wait(60)
        second = threading.Thread(target=lambda: branch.save(_state(2), 2))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        assert len(gate.told("start")) == 1
        gate.open.set()
        second.join(60)
    assert [kind for _, kind in gate.told("start", "commit")] == ["start", "commit", "start", "commit"]
    for step in (1, 2):
        assert _is(_restored(tmp_path, step=step)[1], step)


def _no_room_for(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(folder: Path, *, rank: int, nbytes: int) -> None:
        if folder.name == step_folder(step):
            raise FileExistsError(folder)
        writing.prepare_folder(folder, rank=rank, nbytes=nbytes)

    monkeypatch.setattr(saving, "prepare_folder", prepare)


def test_what_fails_in_the_background_is_raised_by_the_next_call_with_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_room_for(2, monkeypatch)
    with _open(tmp_path) as branch:
        branch.save(_state(1), 1)
        branch.save(_state(2), 2)
        with pytest.raises(HubshardError, match="step 2 was not saved: FileExistsError"):
            branch.wait()
        branch.save(_state(2), 2)
        branch._saver.wait_for_disk()
        with pytest.raises(HubshardError, match="step 2 was not saved"):
            branch.should_save(2)
        branch.save(_state(2), 2)
        with pytest.raises(HubshardError, match="step 2 was not saved"):
            branch.save(_state(3), 3)
        branch.wait()
        assert branch.steps() == [1, 3]
    assert _is(_restored(tmp_path)[1], 3)


def test_an_error_of_the_background_is_raised_by_close_and_logged_beside_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_room_for(1, monkeypatch)
    with pytest.raises(HubshardError, match="step 1 was not saved"), _open(tmp_path) as branch:
        branch.save(_state(1), 1)

    def fail() -> None:
        with _open(tmp_path) as branch:
            with suppress(HubshardError):  # where the background was fast enough to have failed already
                branch.save(_state(1), 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "step 1: " in caplog.text


def test_what_cannot_be_stored_is_refused_by_its_path_and_nothing_is_written(tmp_path: Path) -> None:
    with _open(tmp_path) as branch:
        with pytest.raises(FormatError, match=r"limits\.1: an object cannot be stored"):
            branch.save(_state(1) | {"limits": {1: object()}}, 1)
        sparse = torch.eye(3).to_sparse()
        with pytest.raises(FormatError, match=r"'model\.large' is torch\.sparse_coo"):
            branch.save({"model": {"large": sparse}}, 1)
        with pytest.raises(FormatError, match=r"the state: duplicated flatten key model\.1"):
            branch.save({"model": {1: torch.ones(1), "1": torch.ones(2)}}, 1)
        with pytest.raises(FormatError, match="a state that is a list"):
            branch.save([torch.ones(1)], 1)
        with pytest.raises(FormatError, match="-1 is no number of a step"):
            branch.save(_state(1), -1)
        assert branch.steps() == []
        branch.save(_state(1), 1)
    assert _is(_restored(tmp_path)[1], 1)


# Which steps stay


def test_the_newest_steps_stay_with_every_nth_and_those_that_are_pinned(tmp_path: Path) -> None:
    _saved(tmp_path, *range(1, 12), keep=2, keep_every=4, pinned=[3])
    with _open(tmp_path) as branch:
        assert branch.steps() == [3, 4, 8, 10, 11]
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_folder(step) for step in (3, 4, 8, 10, 11)]


def test_what_a_killed_save_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    _saved(tmp_path, 1)
    for step in (2, 9):
        folder = tmp_path / step_folder(step)
        folder.mkdir()
        (folder / ".rank-00000-00001-abc.part").touch()
        (folder / "rank-00003-00001-0123456789ab.safetensors").touch()
    assert _restored(tmp_path)[0] == 1
    _saved(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_folder(1), step_folder(3)]


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    _saved(tmp_path, 1)
    notes = tmp_path / step_folder(1) / "notes.txt"
    notes.write_text("mine")
    (tmp_path / "other").mkdir()
    _saved(tmp_path, 2, keep=1)
    assert notes.read_text() == "mine"
    assert (tmp_path / "other").is_dir()
    with _open(tmp_path) as branch:
        assert branch.steps() == [2]


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path: Path) -> None:
    with _open(tmp_path) as branch:
        branch.save(_state(1), 5)
        branch.save(_state(2), 5)
    assert _is(_restored(tmp_path)[1], 2)
    assert len(list((tmp_path / step_folder(5)).iterdir())) == 2


def test_no_step_is_saved_behind_a_newer_one_until_that_is_rolled_back(tmp_path: Path) -> None:
    _saved(tmp_path, 4, 6, 8)
    with _open(tmp_path) as branch:
        with pytest.raises(ConflictError, match="step 8 is saved already, newer than 7"):
            branch.save(_state(7), 7)
        assert branch.restore(_state(0), step=4) == 4
        with pytest.raises(ConflictError, match="step 8 is saved already"):
            branch.save(_state(5), 5)
        with pytest.raises(NotFoundError, match="no step 5 is saved"):
            branch.rollback(5)
        assert branch.rollback(4) == [6, 8]
        assert branch.steps() == [4]
        branch.save(_state(5), 5)
    assert _is(_restored(tmp_path)[1], 5)


def test_a_step_that_somebody_else_put_in_the_folder_is_found_out(tmp_path: Path) -> None:
    _saved(tmp_path / "other", 7)
    with _open(tmp_path) as branch:
        branch.save(_state(1), 1)
        branch.wait()
        shutil.copytree(tmp_path / "other" / step_folder(7), tmp_path / step_folder(7))
        branch.save(_state(2), 2)
        with pytest.raises(ConflictError, match=r"step 2 was not saved: .*holds step 7, newer than 2: another run"):
            branch.wait()
    assert _is(_restored(tmp_path)[1], 7)


def test_another_run_in_the_same_folder_may_read_but_neither_saves_nor_removes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.0)
    refused = r"is in use: another ResumeBranch of this process, which was not closed, saves there"
    with _open(tmp_path, keep=9) as branch:
        branch.save(_state(1), 1)
        branch.save(_state(2), 2)
        branch.wait()
        state = _state(0)
        with _open(tmp_path) as other:
            assert other.restore(state) == 2
            assert re.search(refused, caplog.text)
            for forbidden in (lambda: other.save(_state(3), 3), lambda: other.rollback(1)):
                with pytest.raises(ConflictError, match=refused):
                    forbidden()
        with _open(tmp_path, every=1) as other, pytest.raises(ConflictError, match=refused):
            other.restore(state)
        assert branch.steps() == [1, 2]
        branch.save(_state(3), 3)
    assert not (tmp_path / folder_lock.NAME).exists()
    _saved(tmp_path, 4)
    with _open(tmp_path) as branch:
        assert branch.steps() == [1, 2, 3, 4]


def test_who_goes_back_to_an_older_step_is_told_what_to_do_before_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _saved(tmp_path, 4, 6, 8)
    with _open(tmp_path, keep=9) as branch:
        assert branch.restore(_state(0), step=4) == 4
        assert "step 8 is newer: call rollback(4) before the next save" in caplog.text
        with pytest.raises(ConflictError, match="step 8 is saved already, newer than 5") as refused:
            branch.save(_state(5), 5)
        assert refused.value.hint == "restore that and go on from there; or first roll back, with rollback(4)"


def test_a_step_may_be_any_integer_and_nothing_else(tmp_path: Path) -> None:
    with _open(tmp_path, keep=9) as branch:
        for step in (numpy.int64(3), torch.tensor(4), True):
            if step is True:
                branch.rollback(4)
            else:
                assert branch.save(_state(int(step)), step)
        assert branch.restore(_state(0), step=numpy.int32(3)) == 3
        wrongs: list[Any] = ["5", 5.0, None, True]
        for wrong in wrongs:
            with pytest.raises(FormatError, match="is no number of a step"):
                branch.save(_state(5), wrong)
        with pytest.raises(FormatError, match="'4' is no number of a step"):
            branch.restore(_state(0), step="4")  # type: ignore[arg-type]
        assert branch.steps() == [3, 4]


# Broken steps


def _lose(folder: Path) -> None:
    next(folder.glob("rank-*")).unlink()


def _truncate(folder: Path) -> None:
    path = next(folder.glob("rank-*"))
    os.truncate(path, path.stat().st_size - 1)


def _flip_data(folder: Path) -> None:
    _flip(next(folder.glob("rank-*")))


def _damage_manifest(folder: Path) -> None:
    _flip(folder / MANIFEST_NAME)


def _swap_manifest(folder: Path) -> None:
    (folder / MANIFEST_NAME).write_bytes((folder.parent / step_folder(1) / MANIFEST_NAME).read_bytes())


BREAKAGES = [
    (_lose, "missing: rank-"),
    (_truncate, "missing: rank-"),
    (_flip_data, "block .* is not as it was saved"),
    (_damage_manifest, "manifest"),
    (_swap_manifest, "is the manifest of step 1"),
]


@pytest.mark.parametrize(("break_it", "reason"), BREAKAGES)
def test_a_broken_step_is_passed_over_and_said_and_gone_with_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, break_it: Callable[[Path], None], reason: str
) -> None:
    _saved(tmp_path, 1, 2, 3)
    break_it(tmp_path / step_folder(3))
    events: list[Event] = []
    state = _state(0)
    with _open(tmp_path, on_event=events.append, keep=9) as branch:
        assert branch.restore(state) == 2
        assert _is(state, 2)
        assert re.search(f"step 3 is passed over: .*{reason}", caplog.text)
        assert [event.path for event in events if event.kind == "warning"] == [step_folder(3)]
        branch.save(_state(2), 2)
        branch.wait()
        assert branch.steps() == [1, 2]
        branch.save(_state(3), 3)
    assert _is(_restored(tmp_path)[1], 3)


def test_a_broken_step_counts_for_nothing_however_old_it_is(tmp_path: Path) -> None:
    _saved(tmp_path, 4, 8)
    _flip(_data_file(tmp_path, 8))
    state = _state(0)
    with _open(tmp_path, keep=2) as branch:
        assert branch.restore(state) == 4
        branch.save(_state(9), 9)
        branch.wait()
        assert branch.steps() == [4, 9]  # the good one did not go for the broken one
        branch.save(_state(12), 12)
    _flip(_data_file(tmp_path, 12))
    assert _restored(tmp_path)[0] == 9


def test_a_broken_step_that_is_saved_again_is_whole(tmp_path: Path) -> None:
    _saved(tmp_path, 4, 8)
    _flip(_data_file(tmp_path, 8))
    with _open(tmp_path, keep=9) as branch:
        assert branch.restore(_state(0)) == 4
        for step in (8, 12):
            branch.save(_state(step), step)
        branch.wait()
        assert branch.steps() == [4, 8, 12]


def test_a_manifest_that_does_not_fit_on_the_disk_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(tmp_path, 1)
    replace = Path.replace

    def full_disk(path: Path, target: Path) -> Path:
        if target.name == MANIFEST_NAME:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(path, target)

    with _open(tmp_path) as branch:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", full_disk)
            branch.save(_state(2), 2)
            branch._saver.wait_for_disk()
        with pytest.raises(StoreError, match=r"step 2 was not saved: no room for step-00000002 on the disk of "):
            branch.wait()
        assert [path.name for path in tmp_path.glob("step-*")] == [step_folder(1)]


def test_a_step_of_a_later_version_is_neither_passed_over_nor_removed(tmp_path: Path) -> None:
    _saved(tmp_path, 1, 2)
    path = tmp_path / step_folder(2) / MANIFEST_NAME
    path.write_bytes(path.read_bytes().replace(b'"version":1}', b'"version":2}'))
    state = _state(0)
    with _open(tmp_path) as branch:
        with pytest.raises(FormatError, match="version 2 of the step format") as refused:
            branch.restore(state)
        assert refused.value.hint == "update hubshard, or name an older step"
        assert _is(state, 0)
        assert branch.restore(state, step=1) == 1
        with pytest.raises(ConflictError, match="step 2 is saved already"):
            branch.save(state, 1)


def test_a_manifest_that_may_not_be_read_is_not_taken_for_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(tmp_path, 1, 2)
    read_bytes = Path.read_bytes

    def no_more_files(path: Path) -> bytes:
        if path.parent.name == step_folder(2):
            raise OSError(errno.EMFILE, "Too many open files")
        return read_bytes(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", no_more_files)
        with pytest.raises(StoreError, match="cannot be read: Too many open files"):
            _restored(tmp_path)
    assert _restored(tmp_path)[0] == 2


def test_a_save_that_fails_and_one_that_was_killed_take_no_room_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(tmp_path, 1)
    killed = tmp_path / step_folder(2)
    killed.mkdir()
    (killed / "rank-00000-00001-0123456789ab.safetensors").write_bytes(b"half")
    seen = []

    def full_disk(descriptor: int, data: memoryview) -> None:
        seen.append((killed.exists(), len(list((tmp_path / step_folder(3)).glob("rank-*")))))
        if seen[-1][1]:
            raise OSError(errno.ENOSPC, "No space left on device")
        disk.write_all(descriptor, data)

    with _open(tmp_path, max_file_size="300KB") as branch:
        with monkeypatch.context() as patch:
            patch.setattr(writing, "write_all", full_disk)
            branch.save(_state(3), 3)
            branch._saver.wait_for_disk()
        with pytest.raises(StoreError, match=r"step 3 was not saved: no room .* No space left on device"):
            branch.wait()
        assert seen[-1] == (False, 1)
        assert sorted(path.name for path in tmp_path.glob("step-*")) == [step_folder(1)]
        branch.save(_state(4), 4)
    assert _is(_restored(tmp_path)[1], 4)


def test_a_save_that_did_not_end_is_passed_over_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _saved(tmp_path, 1, 2)
    (tmp_path / step_folder(2) / MANIFEST_NAME).unlink()
    assert _restored(tmp_path)[0] == 1
    assert "step 2 is passed over: the save did not end" in caplog.text
    (tmp_path / step_folder(1) / MANIFEST_NAME).unlink()
    assert _restored(tmp_path)[0] is None


def test_a_flipped_byte_in_the_only_step_says_that_the_state_is_partly_overwritten(tmp_path: Path) -> None:
    _saved(tmp_path, 1)
    _flip(_data_file(tmp_path, 1))
    with pytest.raises(IntegrityError, match="no older step can be read, and the state is partly overwritten"):
        _restored(tmp_path)
    with pytest.raises(IntegrityError, match="it was asked for, and the state is partly overwritten"):
        _restored(tmp_path, step=1)


def test_a_step_without_a_file_is_refused_before_the_state_is_touched(tmp_path: Path) -> None:
    _saved(tmp_path, 1)
    _data_file(tmp_path, 1).unlink()
    state = _state(0)
    with _open(tmp_path) as branch, pytest.raises(IncompleteError, match="missing: rank-"):
        branch.restore(state)
    assert _is(state, 0)


def test_a_named_step_that_is_broken_is_not_replaced_by_another(tmp_path: Path) -> None:
    _saved(tmp_path, 1, 2)
    _data_file(tmp_path, 2).unlink()
    with pytest.raises(IncompleteError, match="missing: rank-"):
        _restored(tmp_path, step=2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"more": torch.ones(2)}, "model.more"),
        ({"scalar": torch.ones(2)}, "model.scalar"),
        ({"bf16": torch.ones(5, 3)}, "model.bf16"),
    ],
)
def test_a_state_that_a_step_does_not_fit_is_told_and_not_touched(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    _saved(tmp_path, 1)
    state = _state(0)
    state["model"] |= change
    before = _bits(state)
    with _open(tmp_path) as branch, pytest.raises(FormatError, match=reason):
        branch.restore(state)
    assert _bits(state) == before


# When to save, and when to stop


def test_it_is_to_be_saved_every_so_many_steps_and_not_twice(tmp_path: Path) -> None:
    with _open(tmp_path, every=3) as branch:
        due = []
        for step in range(1, 8):
            if branch.should_save(step):
                due.append(step)
                branch.save(_state(step), step)
                assert not branch.should_save(step)
            assert not branch.should_stop(step)
        assert branch.exit_code == 0
    assert due == [3, 6]


def test_a_signal_leads_to_a_last_save_and_to_the_exit_code_of_its_number(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ResumeBranch(None, local_dir=tmp_path, every=100, busy="skip", signals=[signal.SIGTERM]) as branch:
        for step in range(1, 9):
            if step == 5:
                signal.raise_signal(signal.SIGTERM)
            if branch.should_save(step):
                assert branch.save(_state(step), step)
            if branch.should_stop(step):
                break
        assert branch.exit_code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    step_found, state = _restored(tmp_path)
    assert step_found == 5
    assert _is(state, 5)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"busy": "perhaps"}, {"keep": 0}, {"every": 0}, {"max_file_size": "much"}, {"every": "auto"}, {"pinned": 5}),
        *({"grace_seconds": wrong} for wrong in (-1, float("nan"), "soon", None, True)),
        *({"signals": ("TERM",)}, {"signals": signal.SIGTERM}, {"signals": [True]}, {"notice": 3}),
        *({"repo_id": wrong} for wrong in ("a/b/c", "", "org/", 5, "https://x/y")),
        *({"repo_id": "org/run", "branch": wrong} for wrong in ("", "a b", "main", None)),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        ResumeBranch(wrong.pop("repo_id", None), local_dir=tmp_path / "steps", **wrong)
    assert not (tmp_path / "steps").exists()


def test_closing_twice_is_fine_and_the_manifest_tells_the_ranks(tmp_path: Path) -> None:
    branch = _open(tmp_path)
    branch.save(_state(1), 1)
    branch.close()
    branch.close()
    with pytest.raises(FormatError, match="closed"):
        branch.save(_state(2), 2)
    with pytest.raises(FormatError, match="closed"):
        branch.restore(_state(2))
    raw = (tmp_path / step_folder(1) / MANIFEST_NAME).read_bytes()
    assert decode_step(raw, path="manifest").world_size == 1


def test_a_grace_may_be_a_duration_and_main_be_that_of_a_repo_of_its_own(tmp_path: Path) -> None:
    _open(tmp_path / "a", grace_seconds="2m").close()
    _open(tmp_path / "b", resume_repo_id="org/steps", branch="main").close()


def test_a_folder_that_is_a_file_and_a_lock_that_is_a_folder_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("file", "file/below"):
        with pytest.raises(FormatError, match="is a file, or lies in one"):
            _open(tmp_path / folder)
    (tmp_path / "steps" / folder_lock.NAME).mkdir(parents=True)
    with pytest.raises(FormatError, match="cannot be the lock"):
        _open(tmp_path / "steps")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no FIFOs, and few links")
@pytest.mark.parametrize("what", ["whole link", "dangling link", "loop", "fifo"])
@pytest.mark.parametrize("of", ["data", "manifest"])
def test_what_is_no_plain_file_is_no_part_of_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, of: str
) -> None:
    _saved(tmp_path / "steps", 1, 2)
    path = _data_file(tmp_path / "steps", 2)
    path = path.with_name(MANIFEST_NAME) if of == "manifest" else path
    path.rename(tmp_path / "elsewhere")
    if what == "fifo":
        os.mkfifo(path)
    else:
        targets = {"whole link": tmp_path / "elsewhere", "dangling link": tmp_path / "nowhere", "loop": path}
        path.symlink_to(targets[what])
    assert _restored(tmp_path / "steps")[0] == 1
    assert "step 2 is passed over" in caplog.text
    _saved(tmp_path / "steps", 3)
    assert _restored(tmp_path / "steps")[0] == 3


@pytest.mark.parametrize("of", ["step", "manifest"])
def test_what_lies_where_a_step_should_be_is_passed_over_and_not_in_the_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, of: str
) -> None:
    _saved(tmp_path, 1, 2)
    folder = tmp_path / step_folder(2)
    if of == "step":
        shutil.rmtree(folder)
        folder.write_text("mine")
    else:
        (folder / MANIFEST_NAME).unlink()
        (folder / MANIFEST_NAME).mkdir()
    with _open(tmp_path) as branch:
        assert branch.restore(_state(0)) == 1
        assert "step 2 is passed over" in caplog.text
        branch.save(_state(2), 2)
    assert _restored(tmp_path)[0] == 2
    (aside,) = tmp_path.glob("not-a-step-*")
    assert of == "manifest" or aside.read_text() == "mine"


@pytest.mark.skipif(os.name == "nt", reason="Windows removes no folder that is in use")
def test_a_folder_that_is_removed_under_the_run_is_said_and_held_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _open(tmp_path / "steps") as branch:
        branch.save(_state(1), 1)
        branch.wait()
        shutil.rmtree(tmp_path / "steps")
        branch.save(_state(2), 2)
        branch.wait()
        assert "was removed while the run was saving" in caplog.text
        assert (tmp_path / "steps" / folder_lock.NAME).exists()
        shutil.rmtree(tmp_path / "steps")
        (tmp_path / "steps").touch()
        for _ in range(2):
            with pytest.raises(FormatError, match="is a file"):
                branch.save(_state(3), 3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
def test_a_process_that_was_forked_is_told_so_and_may_leave(tmp_path: Path) -> None:
    with _open(tmp_path) as branch:
        branch.save(_state(1), 1)
        pid = os.fork()
        if not pid:
            told = 0
            calls: list[Any] = [lambda: branch.save(_state(2), 2), branch.wait, lambda: branch.restore(_state(0))]
            for call in calls:
                try:
                    call()
                except FormatError as error:
                    told += "was forked" in str(error)
            branch.close()
            os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        branch.wait()
        assert branch.steps() == [1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_refused_by_its_path_and_dicts_keep_the_kind_they_are_loaded_into(tmp_path: Path) -> None:
    make: Any = torch.nested.nested_tensor
    nested = make([torch.ones(2), torch.ones(3)])
    with _open(tmp_path) as branch:
        with pytest.raises(FormatError, match=r"tensor 'a\.1' is a nested tensor"):
            branch.save({"a": [1, nested]}, 1)
        branch.save({"a": OrderedDict(x=1, y=2), "b": Counter("aab")}, 1)
        found = {"a": OrderedDict(x=0, y=0), "b": Counter(a=0, b=0)}
        assert branch.restore(found) == 1
    assert found == {"a": OrderedDict(x=1, y=2), "b": Counter("aab")}
    assert [type(item) for item in found.values()] == [OrderedDict, Counter]
