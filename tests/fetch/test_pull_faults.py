"""Bytes that come wrong, late or not at all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from hubshard.errors import IntegrityError, StoreError
from hubshard.events import Event, ignore
from hubshard.fetch.folder import FolderLayout
from hubshard.fetch.hf_cache import CacheLayout
from hubshard.fetch.layout import Layout
from hubshard.fetch.parts import PIECE_BYTES
from hubshard.fetch.pulling import pull_from

if sys.platform != "win32":
    import resource

MakeLayout = Callable[[], Layout]


@pytest.fixture(params=["cache", "directory"])
def make_layout(request: pytest.FixtureRequest, tmp_path: Path) -> MakeLayout:
    if request.param == "directory":
        return lambda: FolderLayout(tmp_path / "model", "org/model", variant=None, on_event=ignore)
    return lambda: CacheLayout(tmp_path / "cache", "org/model")


class Times:
    """A fault that strikes the first so many reads of a file, from a byte on."""

    def __init__(self, count: int, path: str, start: int, strike: Callable[[memoryview], None]) -> None:
        self.left, self.path, self.start, self.strike = count, path, start, strike
        self._lock = threading.Lock()

    def __call__(self, path: str, start: int, data: memoryview) -> None:
        with self._lock:
            strikes = path == self.path and start == self.start and self.left > 0
            self.left -= strikes
        if strikes:
            self.strike(data)


def flip(data: memoryview) -> None:
    data[len(data) // 2] ^= 1


def lose(_: memoryview) -> None:
    raise StoreError("the connection was closed", retryable=True)


def truncate(_: memoryview) -> None:
    raise IntegrityError("the body ended early")


@pytest.mark.parametrize("strike", [lose, truncate])
def test_a_piece_that_fails_is_tried_again_and_said(
    memory: ModuleType, make_layout: MakeLayout, strike: Callable[[memoryview], None]
) -> None:
    hub = memory.MemoryHub(Times(2, "model.safetensors", PIECE_BYTES, strike))
    files = memory.single(1, nbytes=3 * PIECE_BYTES)
    hub.put(files)
    events: list[Event] = []
    assert memory.held(pull_from(hub, make_layout(), memory.request(on_event=events.append))) == files
    assert [event.path for event in events if event.kind == "retry"] == ["model.safetensors"] * 2
    received = sum(event.nbytes for event in events if event.kind == "received" and event.path == "model.safetensors")
    assert received == 3 * PIECE_BYTES


def test_a_piece_that_fails_too_often_ends_the_pull_with_its_error(memory: ModuleType, make_layout: MakeLayout) -> None:
    hub = memory.MemoryHub(Times(99, "model.safetensors", PIECE_BYTES, lose))
    hub.put(memory.single(1, nbytes=3 * PIECE_BYTES))
    with pytest.raises(StoreError, match=r"was closed"):
        pull_from(hub, make_layout(), memory.request(max_retries=1))
    assert hub.fault.left == 97


def test_an_error_that_no_try_can_mend_is_final_at_once(memory: ModuleType, make_layout: MakeLayout) -> None:
    def forbid(_: memoryview) -> None:
        raise StoreError("forbidden")

    hub = memory.MemoryHub(Times(99, "model.safetensors", 0, forbid))
    hub.put(memory.single(1, nbytes=PIECE_BYTES))
    with pytest.raises(StoreError, match=r"forbidden"):
        pull_from(hub, make_layout(), memory.request())
    assert hub.fault.left == 98


@pytest.mark.parametrize("path", ["model-00002-of-00002.safetensors", "config.json", "model.safetensors.index.json"])
def test_flipped_bytes_are_found_and_fetched_again(memory: ModuleType, make_layout: MakeLayout, path: str) -> None:
    files = memory.sharded(1, count=2, nbytes=2 * PIECE_BYTES)
    hub = memory.MemoryHub(Times(1, path, 0, flip))
    hub.put(files)
    events: list[Event] = []
    assert memory.held(pull_from(hub, make_layout(), memory.request(on_event=events.append))) == files
    assert {event.path for event in events if event.kind == "retry"} == {path}


def test_bytes_that_stay_wrong_are_refused_by_name_and_nothing_of_them_is_left(
    memory: ModuleType, make_layout: MakeLayout
) -> None:
    name = "model-00002-of-00002.safetensors"
    hub = memory.MemoryHub(Times(99, name, PIECE_BYTES, flip))
    files = memory.sharded(1, count=2, nbytes=2 * PIECE_BYTES)
    hub.put(files)
    with pytest.raises(IntegrityError, match=name):
        pull_from(hub, make_layout(), memory.request())
    assert hub.fault.left == 96
    layout = make_layout()
    shown = layout.private.parents[2] if isinstance(layout, FolderLayout) else layout.private.parent / "snapshots"
    assert not shown.exists() or memory.held(shown) == {}
    assert not list((layout.private / "parts").glob("*"))
    hub.fault, hub.nbytes_read = None, 0
    assert memory.held(pull_from(hub, make_layout(), memory.request())) == files
    assert hub.nbytes_read == len(files[name]) + len(files["model.safetensors.index.json"])


def test_wrong_bytes_that_an_earlier_run_has_left_are_found_by_the_hash(
    memory: ModuleType, make_layout: MakeLayout
) -> None:
    def flip_then_fail(path: str, start: int, data: memoryview) -> None:
        if path == "model.safetensors" and start == 0:
            flip(data)
        if start == 2 * PIECE_BYTES:
            raise StoreError("forbidden")

    hub = memory.MemoryHub(flip_then_fail)
    files = memory.single(1, nbytes=3 * PIECE_BYTES)
    hub.put(files)
    with pytest.raises(StoreError, match=r"forbidden"):
        pull_from(hub, make_layout(), memory.request(workers=1))
    hub.fault = None
    events: list[Event] = []
    assert memory.held(pull_from(hub, make_layout(), memory.request(on_event=events.append))) == files
    assert [event.path for event in events if event.kind == "retry"] == ["model.safetensors"]


def test_a_block_that_a_power_cut_has_torn_out_is_fetched_again_with_its_piece_alone(
    memory: ModuleType, make_layout: MakeLayout
) -> None:
    def fail(path: str, start: int, _: memoryview) -> None:
        if start == 3 * PIECE_BYTES:
            raise StoreError("forbidden")

    hub = memory.MemoryHub(fail)
    files = memory.single(1, nbytes=4 * PIECE_BYTES)
    hub.put(files)
    with pytest.raises(StoreError, match=r"forbidden"):
        pull_from(hub, make_layout(), memory.request(workers=1))
    [part] = (make_layout().private / "parts").glob("*.part")
    with part.open("r+b") as file:
        file.seek(PIECE_BYTES + 4096)
        file.write(bytes(4096))
    hub.fault, hub.nbytes_read = None, 0
    assert memory.held(pull_from(hub, make_layout(), memory.request())) == files
    assert hub.nbytes_read == 2 * PIECE_BYTES


def test_the_old_revision_stays_whole_when_the_new_one_cannot_be_had(
    memory: ModuleType, make_layout: MakeLayout
) -> None:
    hub = memory.MemoryHub()
    old = memory.sharded(1, count=2, nbytes=500)
    commit = hub.put(old)
    folder = pull_from(hub, make_layout(), memory.request())
    hub.fault = Times(99, "model-00002-of-00002.safetensors", 0, flip)
    hub.put(memory.sharded(2, count=2, nbytes=500))
    with pytest.raises(IntegrityError):
        pull_from(hub, make_layout(), memory.request())
    assert memory.held(folder) == old
    recalled = make_layout().recall("main")
    assert recalled is not None
    assert recalled.at.commit == commit


def test_at_most_two_pieces_per_thread_are_held(memory: ModuleType, make_layout: MakeLayout) -> None:
    reading, most, lock = 0, 0, threading.Lock()

    class Counting(memory.MemoryHub):  # type: ignore[misc, name-defined]
        def read(self, *arguments: object) -> None:
            nonlocal reading, most
            with lock:
                reading += 1
                most = max(most, reading)
            super().read(*arguments)
            with lock:
                reading -= 1

    hub = Counting()
    files = memory.sharded(1, count=5, nbytes=2 * PIECE_BYTES)
    hub.put(files)
    assert memory.held(pull_from(hub, make_layout(), memory.request(workers=3))) == files
    assert 1 <= most <= 3


@pytest.mark.skipif(sys.platform == "win32", reason="only POSIX limits the size of a file")
def test_a_disk_that_refuses_what_is_noted_at_the_end_is_told_by_name(
    memory: ModuleType, make_layout: MakeLayout
) -> None:
    hub = memory.MemoryHub()
    files = memory.single(1, nbytes=500) | {f"text-{number}.txt": b"text" for number in range(50)}
    hub.put(files)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))  # more than any file, less than the list of all
    try:
        with pytest.raises(StoreError, match=r"hubshard.*: cannot write: File too large") as caught:
            pull_from(hub, make_layout(), memory.request())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "ulimit -f" in str(caught.value.hint)
    hub.nbytes_read = 0
    assert memory.held(pull_from(hub, make_layout(), memory.request())) == files
    assert hub.nbytes_read == 0


def test_a_cache_that_cannot_be_made_is_told_by_name(memory: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    hub = memory.MemoryHub()
    hub.put(memory.single(1, nbytes=100))
    with pytest.raises(StoreError, match=r"file.*cannot write") as caught:
        pull_from(hub, CacheLayout(tmp_path / "file/cache", "org/model"), memory.request())
    assert "HF_HOME" in str(caught.value.hint)


def test_a_target_that_cannot_be_a_folder_is_told_by_name(memory: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    hub = memory.MemoryHub()
    hub.put(memory.single(1, nbytes=100))
    layout = FolderLayout(tmp_path / "file", "org/model", variant=None, on_event=ignore)
    with pytest.raises(StoreError, match="file"):
        pull_from(hub, layout, memory.request())
    assert (tmp_path / "file").read_text() == "no folder"
