"""What a directory as a store does beyond the contract: links, modes, other writers, the disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hubshard.errors import ConflictError, FormatError, IntegrityError, NotFoundError, StoreError
from hubshard.protocols import Revision
from hubshard.store.local import LocalStore
from hubshard.store.local_stage import check_free_space
from tests.systems import make_pipe, posix_only


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    return folder


def head(store: LocalStore) -> Revision:
    found = store.head("main")
    assert found is not None
    return found


def paths(store: LocalStore) -> list[str]:
    return [entry.path for entry in store.list(head(store))]


def add(store: LocalStore, path: str, content: bytes = b"new", remove: tuple[str, ...] = ()) -> Revision:
    staged = store.stage("main", path, lambda: [content], nbytes=len(content))
    parent = store.head("main")
    return store.commit("main", parent=parent, add=[staged], remove=remove, message="m", publish_id="p")


@pytest.mark.parametrize("change", ["write", "replace", "add", "remove"])
def test_the_head_changes_with_whatever_changes_the_directory(root: Path, change: str) -> None:
    store = LocalStore(root)
    before, file = head(store), root / "config.json"
    if change == "write":
        file.write_bytes(b'{"a": 1}')
    elif change == "replace":
        (root.parent / "other").write_bytes(b"[]")
        (root.parent / "other").replace(file)
    elif change == "add":
        (root / "a.txt").touch()
    else:
        file.unlink()
    assert head(LocalStore(root)) != before
    assert head(store) != before
    with pytest.raises(ConflictError):
        store.commit("main", parent=before, add=[], remove=[], message="m", publish_id="p")


def test_a_file_that_is_written_after_the_look_is_not_read(root: Path) -> None:
    store = LocalStore(root)
    at = head(store)
    (root / "config.json").write_bytes(b"[1]")
    with pytest.raises(IntegrityError, match="was written since") as caught:
        store.read(at, "config.json", 0, 2, memoryview(bytearray(2)))
    assert "when it is at rest" in str(caught.value.hint)
    (root / "config.json").unlink()
    with pytest.raises(NotFoundError):
        store.read(at, "config.json", 0, 2, memoryview(bytearray(2)))


def test_a_file_that_is_replaced_after_the_look_is_not_read(root: Path) -> None:
    store = LocalStore(root)
    at = head(store)
    add(store, "config.json", b"[]")
    with pytest.raises(NotFoundError, match="was replaced since") as caught:
        store.read(at, "config.json", 0, 2, memoryview(bytearray(2)))
    assert "when it is at rest" in str(caught.value.hint)


def test_nothing_is_left_beside_the_directory(root: Path) -> None:
    store = LocalStore(root)
    store.stage("main", "never.bin", lambda: [b"x"], nbytes=1)
    assert len(list(root.parent.iterdir())) == 2
    staged = store.stage("main", "a.bin", lambda: [b"y"], nbytes=1)
    unused = store.stage("main", "never.bin", lambda: [b"x"], nbytes=1)
    store.commit("main", parent=head(store), add=[staged, unused], remove=[], message="m", publish_id="p")
    assert list(root.parent.iterdir()) == [root]


def test_a_directory_and_its_parents_are_made(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "a" / "b" / "model")
    add(store, "x/y.bin")
    assert paths(store) == ["x/y.bin"]


def test_a_file_is_no_directory(root: Path) -> None:
    with pytest.raises(FormatError, match="is not a directory"):
        LocalStore(root / "config.json").head("main")


def test_there_is_no_branch_but_main(root: Path) -> None:
    store = LocalStore(root)
    assert store.head("other") is None
    with pytest.raises(FormatError, match="no branch 'other'"):
        store.stage("other", "a", lambda: [b""], nbytes=0)


def test_notes_of_tools_are_no_part_of_a_revision_and_stay(root: Path) -> None:
    for name in (".git/HEAD", ".cache/huggingface/x.metadata"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(name)
    store = LocalStore(root)
    add(store, "a.bin", remove=("config.json",))
    assert paths(store) == ["a.bin"]
    assert (root / ".git/HEAD").read_text() == ".git/HEAD"
    assert (root / ".cache/huggingface/x.metadata").exists()


def test_empty_folders_stay_and_folders_that_become_empty_go(root: Path) -> None:
    (root / "empty").mkdir()
    (root / "full").mkdir()
    (root / "full/a").touch()
    add(LocalStore(root), "b", remove=("full/a",))
    assert sorted(file.name for file in root.iterdir()) == ["b", "config.json", "empty"]


def test_unchanged_files_are_not_copied(root: Path) -> None:
    before = (root / "config.json").stat()
    add(LocalStore(root), "a.bin")
    after = (root / "config.json").stat()
    assert (before.st_ino, before.st_mtime_ns, after.st_nlink) == (after.st_ino, after.st_mtime_ns, 1)


def test_two_files_of_one_content_are_not_tied_to_each_other(root: Path) -> None:
    store = LocalStore(root)
    staged = [store.stage("main", path, lambda: [b"same"], nbytes=4) for path in ("a", "b")]
    store.commit("main", parent=head(store), add=staged, remove=[], message="m", publish_id="p")
    (root / "a").write_bytes(b"other")
    assert (root / "b").read_bytes() == b"same"


@posix_only
def test_files_and_folders_get_the_modes_that_the_user_wants(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        add(LocalStore(tmp_path / "model"), "x/a.bin")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("model", "model/x", "model/x/a.bin")]
    assert modes == [0o755, 0o755, 0o644]


@posix_only
def test_the_mode_of_the_directory_is_kept(root: Path) -> None:
    root.chmod(0o750)
    add(LocalStore(root), "a.bin")
    assert stat.S_IMODE(root.stat().st_mode) == 0o750


@posix_only
@pytest.mark.parametrize("target", ["../outside.txt", "/etc/hostname", "../model-2/x", "sub/../../outside.txt"])
def test_a_link_that_leads_out_is_refused(root: Path, target: str) -> None:
    (root.parent / "outside.txt").write_text("secret")
    (root.parent / "model-2").mkdir()
    (root.parent / "model-2/x").write_text("secret")
    (root / "link.txt").symlink_to(target)
    with pytest.raises(FormatError, match=r"link\.txt .* outside the directory"):
        LocalStore(root).head("main")


@posix_only
def test_a_link_of_links_that_leads_out_is_refused(root: Path) -> None:
    (root.parent / "outside").mkdir()
    (root / "folder").symlink_to("../outside")
    with pytest.raises(FormatError, match=r"folder in .* outside the directory"):
        LocalStore(root).head("main")


@posix_only
def test_a_link_to_nothing_is_named(root: Path) -> None:
    (root / "link.txt").symlink_to("nothing.txt")
    with pytest.raises(FormatError, match=r"nothing\.txt, which does not exist"):
        LocalStore(root).head("main")


@posix_only
def test_a_link_to_itself_is_named(root: Path) -> None:
    (root / "link.txt").symlink_to("link.txt")
    with pytest.raises(FormatError, match=r"link\.txt"):
        LocalStore(root).head("main")


@posix_only
def test_links_inside_are_files_and_links_to_folders_are_left_out(root: Path) -> None:
    (root / "sub").mkdir()
    (root / "sub/a.bin").write_bytes(b"abc")
    (root / "again").symlink_to("sub")
    (root / "link.bin").symlink_to("sub/a.bin")
    store = LocalStore(root)
    assert paths(store) == ["config.json", "link.bin", "sub/a.bin"]
    into = bytearray(3)
    store.read(head(store), "link.bin", 0, 3, memoryview(into))
    assert into == b"abc"
    add(store, "b")
    assert (root / "link.bin").readlink() == Path("sub/a.bin")


@posix_only
def test_a_snapshot_of_the_hugging_face_cache_is_a_directory_like_any_other(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    for folder in ("blobs", "snapshots/0123"):
        (repo / folder).mkdir(parents=True)
    (repo / "blobs/abc").write_bytes(b"weights")
    (repo / "snapshots/0123/model.safetensors").symlink_to("../../blobs/abc")
    store = LocalStore(repo / "snapshots/0123")
    assert [(entry.path, entry.nbytes) for entry in store.list(head(store))] == [("model.safetensors", 7)]
    (tmp_path / "outside").write_bytes(b"secret")
    (repo / "snapshots/0123/other").symlink_to("../../../outside")
    with pytest.raises(FormatError, match="outside the directory"):
        store.head("main")


@posix_only
def test_what_is_neither_file_nor_folder_is_refused(root: Path) -> None:
    make_pipe(root / "pipe")
    with pytest.raises(FormatError, match=r"pipe in .* neither a file nor a folder"):
        LocalStore(root).head("main")


def test_names_that_differ_by_case_only_are_refused(root: Path) -> None:
    store = LocalStore(root)
    with pytest.raises(FormatError, match=r"Config\.json and config\.json differ by case only"):
        add(store, "Config.json")
    assert paths(store) == ["config.json"]


@pytest.mark.parametrize("name", ["../config.json", "staged-a-1-b/../../model/config.json", "staged-a-1-b\\c", "new/x"])
def test_a_receipt_cannot_name_a_file_elsewhere(root: Path, name: str) -> None:
    store = LocalStore(root)
    staged = store.stage("main", "a", lambda: [b"12"], nbytes=2)
    forged = type(staged)("a", 2, staged.sha256, {"staged": name})
    with pytest.raises(StoreError, match="no name of a staged file"):
        store.commit("main", parent=head(store), add=[forged], remove=[], message="m", publish_id="p")


def test_a_staged_file_that_is_gone_is_named_and_nothing_changes(root: Path) -> None:
    store = LocalStore(root)
    before = head(store)
    staged = store.stage("main", "a", lambda: [b"12"], nbytes=2)
    for file in root.parent.glob(f".model.hubshard/staged-*/{staged.sha256}"):
        file.unlink()
    with pytest.raises(StoreError, match="is gone"):
        store.commit("main", parent=before, add=[staged], remove=["config.json"], message="m", publish_id="p")
    assert store.head("main") == before


def test_a_disk_without_room_is_told_before_anything_is_written(root: Path) -> None:
    store = LocalStore(root)

    def never() -> list[bytes]:
        raise AssertionError("the content was asked for")

    with pytest.raises(StoreError, match=r"no room for huge\.bin .* are missing"):
        store.stage("main", "huge.bin", never, nbytes=1 << 60)
    with pytest.raises(StoreError, match=r"it needs 1152921\.50 TB"):
        check_free_space(root, 1 << 60, what="huge.bin")
    assert paths(store) == ["config.json"]


@posix_only
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_cannot_be_written_is_named(root: Path) -> None:
    root.parent.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="Permission denied"):
            add(LocalStore(root), "a")
    finally:
        root.parent.chmod(0o700)


def test_the_root_of_a_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="root of a disk"):
        LocalStore(Path(tmp_path.anchor))
