"""A pull into the cache and into a directory, from a store in memory."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hubshard.digests import content_id
from hubshard.errors import (
    FormatError,
    IncompleteError,
    IntegrityError,
    NotFoundError,
    StoreError,
)
from hubshard.events import Event, ignore
from hubshard.fetch.folder import FolderLayout
from hubshard.fetch.hf_cache import CacheLayout
from hubshard.fetch.layout import Layout
from hubshard.fetch.parts import PIECE_BYTES
from hubshard.fetch.pulling import pull_from

MakeLayout = Callable[[], Layout]


@pytest.fixture(params=["cache", "cache without links", "directory"])
def make_layout(request: pytest.FixtureRequest, tmp_path: Path) -> MakeLayout:
    if request.param == "directory":
        return lambda: FolderLayout(tmp_path / "model", "org/model", variant=None, on_event=ignore)
    return lambda: CacheLayout(tmp_path / "cache", "org/model", symlinks=request.param == "cache")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "model"


def folder_layout(directory: Path, events: list[Event] | None = None) -> FolderLayout:
    on_event = ignore if events is None else events.append
    return FolderLayout(directory, "org/model", variant=None, on_event=on_event)


def test_all_files_arrive_whole_and_a_second_pull_fetches_nothing(memory: ModuleType, make_layout: MakeLayout) -> None:
    hub = memory.MemoryHub()
    files = memory.sharded(1, count=2, nbytes=PIECE_BYTES + 3)
    hub.put(files)
    folder = pull_from(hub, make_layout(), memory.request())
    assert memory.held(folder) == files
    index_bytes = len(files["model.safetensors.index.json"])
    unique = {memory.entry_of(path, content).blob_id: len(content) for path, content in files.items()}
    assert hub.nbytes_read == sum(unique.values()) + index_bytes
    hub.nbytes_read = 0
    assert pull_from(hub, make_layout(), memory.request()) == folder
    assert hub.nbytes_read == index_bytes
    assert memory.held(folder) == files


def test_the_next_revision_replaces_what_differs_and_fetches_only_that(
    memory: ModuleType, make_layout: MakeLayout
) -> None:
    hub = memory.MemoryHub()
    old = memory.sharded(1, count=3, nbytes=5000)
    hub.put(old)
    pull_from(hub, make_layout(), memory.request())
    new = old | {"model-00002-of-00003.safetensors": memory.weights(7, 4000)}
    hub.put(new)
    hub.nbytes_read = 0
    folder = pull_from(hub, make_layout(), memory.request())
    assert memory.held(folder) == new
    assert hub.nbytes_read == 4000 + len(new["model.safetensors.index.json"])


@pytest.mark.parametrize("symlinks", [True, False])
def test_edits_of_files_in_the_cache_are_found_by_their_hash_and_undone(
    memory: ModuleType, tmp_path: Path, *, symlinks: bool
) -> None:
    hub = memory.MemoryHub()
    files = memory.single(1, nbytes=5000)
    hub.put(files)
    folder = pull_from(hub, CacheLayout(tmp_path, "org/model", symlinks=symlinks), memory.request())
    (folder / "model.safetensors").write_bytes(bytes(5000))
    (folder / "config.json").write_bytes(bytes(len(files["config.json"])))
    (folder / "sub/tokenizer.json").unlink()
    layout = CacheLayout(tmp_path, "org/model", symlinks=symlinks)
    assert memory.held(pull_from(hub, layout, memory.request())) == files


def test_a_pull_by_commit_gets_that_commit(memory: ModuleType, make_layout: MakeLayout) -> None:
    hub = memory.MemoryHub()
    old = memory.single(1, nbytes=500)
    commit = hub.put(old)
    hub.put(memory.single(2, nbytes=600))
    assert memory.held(pull_from(hub, make_layout(), memory.request(revision=commit))) == old


def test_a_revision_that_is_not_there_is_not_found_and_nothing_is_written(
    memory: ModuleType, make_layout: MakeLayout, tmp_path: Path
) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.single(1, nbytes=500))
    with pytest.raises(NotFoundError, match=r"org/model@v9"):
        pull_from(hub, make_layout(), memory.request(revision="v9"))
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_what_is_complete_is_used_and_said(memory: ModuleType, make_layout: MakeLayout) -> None:
    hub = memory.MemoryHub()
    files = memory.sharded(1, count=2, nbytes=500)
    commit = hub.put(files)
    folder = pull_from(hub, make_layout(), memory.request())
    hub.is_down = True
    events: list[Event] = []
    assert pull_from(hub, make_layout(), memory.request(on_event=events.append)) == folder
    assert any(event.kind == "warning" and commit in event.detail for event in events)
    assert pull_from(hub, make_layout(), memory.request(revision=commit)) == folder
    with pytest.raises(StoreError, match=r"no route"):
        pull_from(hub, make_layout(), memory.request(revision="other"))


def test_without_a_network_what_is_incomplete_is_refused_by_name(memory: ModuleType, make_layout: MakeLayout) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.sharded(1, count=2, nbytes=500))
    folder = pull_from(hub, make_layout(), memory.request())
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(bytes(501))
    hub.is_down = True
    with pytest.raises(IncompleteError, match=r"model-00002-of-00002"):
        pull_from(hub, make_layout(), memory.request())


def test_a_run_that_failed_is_continued_and_only_the_rest_is_fetched(
    memory: ModuleType, make_layout: MakeLayout
) -> None:
    files = memory.single(1, nbytes=6 * PIECE_BYTES)

    def fail_late(path: str, start: int, _: memoryview) -> None:
        if start == 4 * PIECE_BYTES:
            raise StoreError("forbidden")

    hub = memory.MemoryHub(fail_late)
    hub.put(files)
    with pytest.raises(StoreError, match=r"forbidden"):
        pull_from(hub, make_layout(), memory.request(workers=1))
    layout = make_layout()
    assert not (layout.private.parent / "snapshots").exists()
    hub.fault, hub.nbytes_read = None, 0
    events: list[Event] = []
    folder = pull_from(hub, make_layout(), memory.request(on_event=events.append))
    assert memory.held(folder) == files
    assert hub.nbytes_read == 2 * PIECE_BYTES
    skipped = [event.nbytes for event in events if event.kind == "skipped" and event.path == "model.safetensors"]
    assert skipped == [4 * PIECE_BYTES]
    assert not (layout.private / "parts").exists()


def test_bytes_of_the_events_add_up(memory: ModuleType, make_layout: MakeLayout) -> None:
    hub = memory.MemoryHub()
    files = memory.sharded(1, count=2, nbytes=PIECE_BYTES + 3)
    hub.put(files)
    events: list[Event] = []
    pull_from(hub, make_layout(), memory.request(on_event=events.append))
    total = sum(map(len, files.values()))
    assert [(event.kind, event.nbytes) for event in events if event.kind in {"start", "commit"}] == [
        ("start", total),
        ("commit", total),
    ]
    assert sum(event.nbytes for event in events if event.kind == "received") == total
    assert {event.path for event in events if event.kind == "verify"} >= set(files) - {"a.py", "b.py"}


def test_parts_of_other_revisions_are_cleaned_and_those_of_this_one_are_not(
    memory: ModuleType, make_layout: MakeLayout
) -> None:
    def fail(path: str, start: int, _: memoryview) -> None:
        if path == "model.safetensors" and start:
            raise StoreError("forbidden")

    hub = memory.MemoryHub(fail)
    old, new = memory.single(1, nbytes=PIECE_BYTES + 5), memory.single(2, nbytes=PIECE_BYTES + 6)
    for files in (old, new):
        hub.put(files)
        with pytest.raises(StoreError, match=r"forbidden"):
            pull_from(hub, make_layout(), memory.request(workers=1))
    parts = {path.stem for path in (make_layout().private / "parts").iterdir()}
    assert content_id(memory.entry_of("model.safetensors", new["model.safetensors"])) in parts
    assert content_id(memory.entry_of("model.safetensors", old["model.safetensors"])) not in parts


def test_two_pulls_into_one_target_take_turns_and_fetch_each_byte_once(
    memory: ModuleType, make_layout: MakeLayout
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold(path: str, start: int, _: memoryview) -> None:
        entered.set()
        go_on.wait(60)

    hub = memory.MemoryHub(hold)
    files = memory.single(1, nbytes=5000)
    hub.put(files)
    folders: list[Path] = []
    first = threading.Thread(target=lambda: folders.append(pull_from(hub, make_layout(), memory.request())))
    first.start()
    assert entered.wait(60)
    waits = threading.Event()

    def on_event(event: Event) -> None:
        if "waiting for it" in event.detail:
            waits.set()

    second = threading.Thread(
        target=lambda: folders.append(pull_from(hub, make_layout(), memory.request(on_event=on_event)))
    )
    second.start()
    assert waits.wait(60)
    go_on.set()
    first.join()
    second.join()
    assert len(set(folders)) == 1
    assert memory.held(folders[0]) == files
    assert hub.nbytes_read == sum(len(content) for content in files.values())


def test_a_disk_that_is_too_small_is_refused_before_anything_is_fetched(
    memory: ModuleType, make_layout: MakeLayout, tmp_path: Path
) -> None:
    class Endless(memory.MemoryHub):  # type: ignore[misc, name-defined]
        def list(self, at: Any) -> Any:
            entries = super().list(at)
            large = next(entry for entry in entries if entry.path == "model.safetensors")
            huge = type(large)(large.path, 1 << 60, large.sha256, large.blob_id)
            return [huge if entry is large else entry for entry in entries]

    hub = Endless()
    hub.put(memory.single(1, nbytes=500))
    with pytest.raises(StoreError, match=r"lacks 1\.15.* TB|lacks 115\d{4}\.\d+ TB") as caught:
        pull_from(hub, make_layout(), memory.request())
    assert "are free" in str(caught.value)
    assert hub.nbytes_read == 0


def test_what_the_server_gives_no_hash_for_is_refused(memory: ModuleType, make_layout: MakeLayout) -> None:
    class Hashless(memory.MemoryHub):  # type: ignore[misc, name-defined]
        def list(self, at: Any) -> Any:
            return [type(entry)(entry.path, entry.nbytes, None, "v7") for entry in super().list(at)]

    hub = Hashless()
    hub.put(memory.single(1, nbytes=500))
    with pytest.raises(IntegrityError, match=r"cannot be checked"):
        pull_from(hub, make_layout(), memory.request())


def test_a_snapshot_that_another_tool_began_is_completed(memory: ModuleType, tmp_path: Path) -> None:
    hub = memory.MemoryHub()
    files = memory.sharded(1, count=2, nbytes=500)
    commit = hub.put(files)
    layout = CacheLayout(tmp_path, "org/model")
    snapshot = layout.root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    blob = layout.root / "blobs" / content_id(memory.entry_of("config.json", files["config.json"]))
    blob.parent.mkdir()
    blob.write_bytes(files["config.json"])
    (snapshot / "config.json").symlink_to(f"../../blobs/{blob.name}")
    assert pull_from(hub, layout, memory.request()) == snapshot
    assert memory.held(snapshot) == files


def test_a_snapshot_that_another_tool_made_is_used_without_a_network(memory: ModuleType, tmp_path: Path) -> None:
    hub = memory.MemoryHub()
    commit = hub.put(memory.sharded(1, count=2, nbytes=500))
    layout = CacheLayout(tmp_path, "org/model")
    folder = pull_from(hub, layout, memory.request())
    shutil.rmtree(layout.private)
    (layout.root / "refs" / "main").unlink()
    hub.is_down = True
    assert pull_from(hub, layout, memory.request(revision=commit)) == folder
    (folder / "model-00001-of-00002.safetensors").unlink()
    shutil.rmtree(layout.private)
    with pytest.raises(IncompleteError, match=r"model-00001-of-00002"):
        pull_from(hub, layout, memory.request(revision=commit))


def test_files_of_equal_content_share_a_blob_and_links_are_relative(memory: ModuleType, tmp_path: Path) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.single(1, nbytes=500))
    folder = pull_from(hub, CacheLayout(tmp_path / "cache", "org/model"), memory.request())
    assert (folder / "a.py").readlink() == (folder / "b.py").readlink()
    assert not (folder / "sub/tokenizer.json").readlink().is_absolute()
    (tmp_path / "cache").rename(tmp_path / "moved")
    moved = tmp_path / "moved" / folder.relative_to(tmp_path / "cache")
    assert memory.held(moved) == memory.single(1, nbytes=500)


def test_the_ref_is_the_commit_and_a_commit_makes_no_ref(memory: ModuleType, tmp_path: Path) -> None:
    hub = memory.MemoryHub()
    commit = hub.put(memory.single(1, nbytes=500), "refs/pr/1")
    layout = CacheLayout(tmp_path, "org/model")
    pull_from(hub, layout, memory.request(revision=commit))
    assert not (layout.root / "refs").exists()
    pull_from(hub, layout, memory.request(revision="refs/pr/1"))
    assert (layout.root / "refs/refs/pr/1").read_text() == commit


def test_old_weights_of_a_pull_go_and_the_users_files_stay(memory: ModuleType, directory: Path) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.sharded(1, count=3, nbytes=500) | {"old.txt": b"old"})
    pull_from(hub, folder_layout(directory), memory.request())
    mine = {"notes.txt": b"mine", "adapter_model.safetensors": b"mine", "model.fp16.safetensors": b"mine"}
    mine |= {"model-00009-of-00009.safetensors": b"mine"}
    for name, content in mine.items():
        (directory / name).write_bytes(content)
    new = memory.single(2, nbytes=700)
    hub.put(new)
    events: list[Event] = []
    pull_from(hub, folder_layout(directory, events), memory.request())
    assert memory.held(directory) == new | mine | {"old.txt": b"old"}
    assert [e.path for e in events if "no pull has put" in e.detail] == ["model-00009-of-00009.safetensors"]


def test_back_and_forth_between_one_file_and_shards(memory: ModuleType, directory: Path) -> None:
    hub = memory.MemoryHub()
    for seed in range(1, 5):
        files = memory.sharded(seed, count=seed, nbytes=500) if seed % 2 else memory.single(seed, nbytes=500)
        hub.put(files)
        pull_from(hub, folder_layout(directory), memory.request())
        assert memory.held(directory) == files


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_of_somebody_else_that_would_be_loaded_instead_are_refused(
    memory: ModuleType, directory: Path, name: str
) -> None:
    hub = memory.MemoryHub()
    files = memory.sharded(1, count=2, nbytes=500)
    hub.put(files)
    directory.mkdir()
    (directory / name).write_bytes(b"mine")
    with pytest.raises(FormatError, match=r"loaded instead") as caught:
        pull_from(hub, folder_layout(directory), memory.request())
    assert name in str(caught.value)
    assert memory.held(directory) == {name: b"mine"}
    note = directory / ".cache/huggingface/download" / f"{name}.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{'0' * 40}\n{hashlib.sha256(b'mine').hexdigest()}\n1\n")  # as `hf download` does
    pull_from(hub, folder_layout(directory), memory.request())
    assert memory.held(directory) == files


def test_a_link_in_the_directory_that_leads_out_is_not_written_through(
    memory: ModuleType, directory: Path, tmp_path: Path
) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.single(1, nbytes=500))
    directory.mkdir()
    (tmp_path / "outside").mkdir()
    (directory / "sub").symlink_to(tmp_path / "outside")
    with pytest.raises(FormatError, match=r"leads out"):
        pull_from(hub, folder_layout(directory), memory.request())
    assert list((tmp_path / "outside").iterdir()) == []


@pytest.mark.parametrize(
    "shared", [".cache", ".cache/huggingface", ".cache/huggingface/hubshard", ".cache/huggingface/hubshard/pulled.json"]
)
def test_what_is_noted_of_another_directory_deletes_nothing(
    memory: ModuleType, directory: Path, tmp_path: Path, shared: str
) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.sharded(1, count=3, nbytes=500))
    other = tmp_path / "other"
    pull_from(hub, folder_layout(other), memory.request())
    mine = memory.sharded(2, count=3, nbytes=600)
    (directory / shared).parent.mkdir(parents=True)
    (directory / shared).symlink_to(other / shared)
    for name, content in mine.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    hub.put(memory.single(3, nbytes=700))
    before = memory.held(other)
    with pytest.raises(FormatError, match=r"leads elsewhere") as caught:
        pull_from(hub, folder_layout(directory), memory.request())
    assert str(directory / shared) in str(caught.value)
    assert memory.held(directory) == mine
    assert memory.held(other) == before


def test_nothing_is_written_through_a_link_of_the_own_folder(
    memory: ModuleType, directory: Path, tmp_path: Path
) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.single(1, nbytes=500))
    directory.mkdir()
    (tmp_path / "outside").mkdir()
    (directory / ".cache").symlink_to("../outside")
    with pytest.raises(FormatError, match=r"leads elsewhere"):
        pull_from(hub, folder_layout(directory), memory.request())
    assert list((tmp_path / "outside").iterdir()) == []


def test_what_huggingface_hub_has_noted_of_another_directory_deletes_nothing(
    memory: ModuleType, directory: Path, tmp_path: Path
) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.single(1, nbytes=500))
    note = tmp_path / "notes/model-00001-of-00001.safetensors.metadata"
    note.parent.mkdir()
    note.write_text(f"{'0' * 40}\n{hashlib.sha256(b'mine').hexdigest()}\n1\n")
    (directory / ".cache/huggingface").mkdir(parents=True)
    (directory / ".cache/huggingface/download").symlink_to(note.parent)
    (directory / "model-00001-of-00001.safetensors").write_bytes(b"mine")
    pull_from(hub, folder_layout(directory), memory.request())
    assert (directory / "model-00001-of-00001.safetensors").read_bytes() == b"mine"


def test_a_directory_that_was_moved_or_is_reached_by_a_link_is_known_again(
    memory: ModuleType, directory: Path, tmp_path: Path
) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.sharded(1, count=3, nbytes=500))
    pull_from(hub, folder_layout(directory), memory.request())
    moved, link = tmp_path / "moved", tmp_path / "link"
    directory.rename(moved)
    link.symlink_to(moved)
    files = memory.single(2, nbytes=700)
    hub.put(files)
    pull_from(hub, folder_layout(link), memory.request())
    assert memory.held(moved) == files


def test_a_link_that_leads_nowhere_is_told_as_one(memory: ModuleType, directory: Path) -> None:
    directory.symlink_to("not-there")
    with pytest.raises(FormatError, match=r"is a link to not-there, which is not there"):
        pull_from(memory.MemoryHub(), folder_layout(directory), memory.request())


@pytest.mark.parametrize(
    ("path", "is_folder"),
    [
        (".cache", False),
        (".cache/huggingface/hubshard", False),
        (".cache/huggingface/hubshard/parts", False),
        (".cache/huggingface/hubshard/lock", True),
        (".cache/huggingface/hubshard/pulled.json", True),
    ],
)
def test_an_own_folder_that_is_none_is_told_by_name(
    memory: ModuleType, directory: Path, path: str, *, is_folder: bool
) -> None:
    (directory / path).parent.mkdir(parents=True)
    if is_folder:
        (directory / path).mkdir()
    else:
        (directory / path).write_text("mine")
    with pytest.raises(FormatError) as caught:
        pull_from(memory.MemoryHub(), folder_layout(directory), memory.request())
    assert str(caught.value) == f"{directory / path} should be a {'file' if is_folder else 'folder'}, and is none"
    assert "move it away" in str(caught.value.hint)


@pytest.mark.parametrize("path", [".cache/huggingface/hubshard/pulled.json", ".Cache/HuggingFace/x", "sub"])
def test_paths_that_collide_with_what_is_there_are_refused(memory: ModuleType, directory: Path, path: str) -> None:
    hub = memory.MemoryHub()
    hub.put({path: b"x"})
    (directory / "sub").mkdir(parents=True)
    with pytest.raises(FormatError):
        pull_from(hub, folder_layout(directory), memory.request())


@pytest.mark.skipif(os.name == "nt", reason="POSIX modes")
def test_files_get_the_modes_that_the_user_has_chosen(memory: ModuleType, make_layout: MakeLayout) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.single(1, nbytes=500))
    before = os.umask(0o027)
    try:
        folder = pull_from(hub, make_layout(), memory.request())
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o640}
