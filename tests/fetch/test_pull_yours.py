"""What somebody has put into a directory, or changed there, is not lost by a pull."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hubshard.digests import git_blob_id
from hubshard.errors import FormatError
from hubshard.events import Event, ignore
from hubshard.fetch.folder import FolderLayout
from hubshard.fetch.pulling import pull_from
from hubshard.report import verify

NOTES = ".cache/huggingface/download"
CHANGES: dict[str, Callable[[Any], dict[str, bytes]]] = {
    "the same commit": lambda memory: memory.single(1, 500),
    "other weights": lambda memory: memory.single(2, 500),
    "weights of another size": lambda memory: memory.single(2, 600),
    "shards": lambda memory: memory.sharded(2, 2, 500),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "model"


def into(directory: Path, repo_id: str = "org/model", **how: Any) -> FolderLayout:
    return FolderLayout(directory, repo_id, **({"variant": None, "on_event": ignore} | how))


def warnings(events: list[Event]) -> dict[str, str]:
    return {event.path: event.detail for event in events if event.kind == "warning"}


def write(folder: Path, files: dict[str, bytes]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def note(folder: Path, path: str, etag: str) -> None:
    """As `hf download --local-dir` leaves it."""
    write(folder, {f"{NOTES}/{path}.metadata": f"{'0' * 40}\n{etag}\n1700000000.0\n".encode()})


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_since_a_pull_is_refused_whatever_comes(
    memory: ModuleType, directory: Path, change: str
) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.single(1, 500))
    pull_from(hub, into(directory), memory.request())
    mine = {"model.safetensors": memory.weights(9, 500), "config.json": b'{"seed": 9}'}  # trained in place
    write(directory, mine)
    before = memory.held(directory)
    new = CHANGES[change](memory)
    hub.put(new)
    hub.nbytes_read = 0
    with pytest.raises(FormatError) as caught:
        pull_from(hub, into(directory), memory.request())
    assert set(mine) <= set(str(caught.value).replace(",", " ").replace(":", " ").split())
    assert all(way in str(caught.value.hint) for way in ("move them", "--local-dir", "--overwrite"))
    assert memory.held(directory) == before
    assert hub.nbytes_read <= len(new.get("model.safetensors.index.json", b""))
    events: list[Event] = []
    layout = into(directory, overwrite=True, on_event=events.append)
    assert memory.held(pull_from(hub, layout, memory.request())) == new
    assert set(warnings(events)) == set(mine)
    hub.put(memory.single(3, 500))  # what was overwritten is the pull's again
    assert memory.held(pull_from(hub, into(directory), memory.request())) == memory.single(3, 500)


def test_files_that_no_pull_has_placed_are_refused_all_in_one_error(memory: ModuleType, directory: Path) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.single(1, 500) | {"README.md": b"theirs"})
    mine = {"README.md": b"mine", "model.safetensors": b"mine", "notes.txt": b"mine", "pytorch_model.bin": b"mine"}
    write(directory, mine)
    with pytest.raises(FormatError) as caught:
        pull_from(hub, into(directory), memory.request())
    whose = "not put there by a pull, or changed since, and"
    assert str(caught.value) == (
        f"{directory}: README.md, model.safetensors: {whose} would be lost; "
        f"pytorch_model.bin: {whose} may be loaded instead of what is pulled"
    )
    assert "notes.txt" not in str(caught.value)
    assert memory.held(directory) == mine


def test_files_of_the_same_content_are_no_obstacle(memory: ModuleType, directory: Path) -> None:
    hub = memory.MemoryHub()
    files = memory.sharded(1, 2, 500)
    hub.put(files)
    write(directory, files)
    hub.nbytes_read = 0
    assert memory.held(pull_from(hub, into(directory), memory.request())) == files
    assert hub.nbytes_read == len(files["model.safetensors.index.json"])


def test_what_hf_download_has_placed_is_replaced_unless_it_was_changed(memory: ModuleType, directory: Path) -> None:
    hub = memory.MemoryHub()
    old, new = memory.sharded(1, 2, 500), memory.single(2, 500)
    write(directory, old)
    for path, content in old.items():
        is_large = path.endswith(".safetensors")
        note(directory, path, hashlib.sha256(content).hexdigest() if is_large else git_blob_id(content))
    hub.put(new)
    first = "model-00001-of-00002.safetensors"
    write(directory, {"config.json": b"mine", first: b"mine"})
    with pytest.raises(FormatError, match=r"config\.json: not put there"):
        pull_from(hub, into(directory), memory.request())
    write(directory, {"config.json": old["config.json"]})
    assert memory.held(pull_from(hub, into(directory), memory.request())) == new | {first: b"mine"}


def test_pulls_of_parts_and_of_other_repos_know_what_they_have_placed(memory: ModuleType, directory: Path) -> None:
    hub, other = memory.MemoryHub(), memory.MemoryHub()
    hub.put(memory.single(1, 500))
    pull_from(hub, into(directory), memory.request(include=["config.json", "sub/*"]))
    hub.put(memory.single(2, 500))
    pull_from(hub, into(directory), memory.request(include=["model.safetensors"]))
    hub.put(memory.single(3, 500))
    assert memory.held(pull_from(hub, into(directory), memory.request())) == memory.single(3, 500)
    other.put(memory.single(4, 700))
    pull_from(other, into(directory, "org/other"), memory.request(include=["config.json"]))
    other.put(memory.single(5, 700))
    assert memory.held(pull_from(other, into(directory, "org/other"), memory.request())) == memory.single(5, 700)
    (directory / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(FormatError, match=r"model\.safetensors: not put there"):
        pull_from(hub, into(directory), memory.request())


@pytest.mark.parametrize("path", ["model.safetensors", "config.json", "new.txt"])
def test_what_is_changed_while_the_files_arrive_is_refused_then(memory: ModuleType, directory: Path, path: str) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.single(1, 500))
    pull_from(hub, into(directory), memory.request())
    new = memory.single(2, 500) | {"new.txt": b"new"}
    hub.put(new)
    hub.fault = lambda *_: write(directory, {path: b"mine"})
    with pytest.raises(FormatError, match=f"{path}: not put there"):
        pull_from(hub, into(directory), memory.request())
    assert memory.held(directory) == memory.single(1, 500) | {path: b"mine"}
    hub.fault, hub.nbytes_read = None, 0
    assert memory.held(pull_from(hub, into(directory, overwrite=True), memory.request())) == new
    assert hub.nbytes_read == 0


@pytest.mark.parametrize("path", ["config.json", "model.safetensors", "model-00001-of-00002.safetensors"])
def test_what_is_changed_after_its_own_hash_is_refused_then(memory: ModuleType, directory: Path, path: str) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.sharded(1, 2, 500))
    pull_from(hub, into(directory), memory.request())
    single = memory.single(2, 500)
    hub.put(single)
    (directory / "model.safetensors").write_bytes(single["model.safetensors"])  # right already, and taken aside once

    def edit(event: Event) -> None:
        if event.kind == "hashed" and event.path == path:
            write(directory, {path: mine})

    mine = memory.weights(9, 500)
    told, tells = (ignore, edit) if path == "model.safetensors" else (edit, ignore)  # whoever hashes it last
    with pytest.raises(FormatError, match=f"{path}: not put there"):
        pull_from(hub, into(directory, on_event=told), memory.request(on_event=tells))
    assert memory.held(directory)[path] == mine


def test_what_an_earlier_revision_brought_and_somebody_removed_is_not_missing(
    memory: ModuleType, directory: Path
) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.single(1, 500) | {"old.txt": b"old"})
    pull_from(hub, into(directory), memory.request())
    (directory / "model.safetensors").unlink()
    hub.put(memory.single(2, 500) | memory.sharded(2, 2, 500) | {"new.txt": b"new"})
    pull_from(hub, into(directory), memory.request(exclude=["model.safetensors"]))
    (directory / "old.txt").unlink()
    (directory / "new.txt").unlink()
    kinds = {problem.path: problem.kind for problem in verify(directory).problems}
    assert {path for path, kind in kinds.items() if kind == "missing"} == {"new.txt"}


@pytest.mark.skipif(os.name == "nt", reason="links need a right there")
def test_a_link_of_the_user_is_his(memory: ModuleType, directory: Path, tmp_path: Path) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.single(1, 500))
    (tmp_path / "mine").write_bytes(b"mine")
    directory.mkdir()
    for target in ("../mine", "nowhere"):
        (directory / "config.json").symlink_to(target)
        with pytest.raises(FormatError, match=r"config\.json: not put there"):
            pull_from(hub, into(directory), memory.request())
        (directory / "config.json").unlink()


def test_a_record_of_before_is_understood(memory: ModuleType, directory: Path) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.single(1, 500))
    pull_from(hub, into(directory), memory.request())
    record = directory / ".cache/huggingface/hubshard/pulled.json"
    table = json.loads(record.read_bytes())
    del table["foreign"]
    record.write_text(json.dumps(table))
    hub.put(memory.single(2, 500))
    assert memory.held(pull_from(hub, into(directory), memory.request())) == memory.single(2, 500)
