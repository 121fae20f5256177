"""Commits, as huggingface_hub makes them: all or nothing, on the parent that was seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import huggingface_hub
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete
from huggingface_hub.errors import BadRequestError, EntryNotFoundError, HfHubHTTPError, RevisionNotFoundError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.hub.conftest import Client


def apply(client: Client, repo: str, *operations: object, **options: object) -> str:
    made = client.api.create_commit(repo, operations, commit_message="operations", **options)  # type: ignore[call-overload]
    return str(made.oid)


def test_a_commit_adds_replaces_and_deletes_at_once(client: Client) -> None:
    repo = client.repo()
    client.commit(repo, {"old.txt": "o", "kept.txt": "k", "changed.txt": "1", "folder/a": "a", "folder/b/c": "c"})
    apply(
        client,
        repo,
        CommitOperationAdd("new.bin", b"\0" * 10),
        CommitOperationAdd("changed.txt", b"2"),
        CommitOperationDelete("old.txt"),
        CommitOperationDelete("folder/"),
    )
    assert client.files(repo) == {"new.bin", "kept.txt", "changed.txt"}
    assert client.read(repo, "changed.txt") == b"2"
    assert client.titles(repo) == ["operations", "a commit", "initial commit"]


def test_a_parent_that_is_the_head_is_taken(client: Client) -> None:
    repo = client.repo()
    first = client.head(repo)
    second = client.commit(repo, {"a.txt": "1"}, parent_commit=first).oid
    third = client.commit(repo, {"a.txt": "2"}, parent_commit=second[:7]).oid
    assert client.head(repo) == third


def test_a_stale_parent_changes_nothing(client: Client) -> None:
    repo = client.repo()
    first = client.head(repo)
    second = client.commit(repo, {"a.txt": "1"}).oid
    with pytest.raises(HfHubHTTPError) as caught:
        client.commit(repo, {"b.txt": "2"}, parent_commit=first)
    assert caught.value.response.status_code == 412
    text = "The branch was updated since you opened this page. Please refresh and try again."
    assert caught.value.server_message == text
    assert client.head(repo) == second
    assert client.files(repo) == {"a.txt"}
    with pytest.raises(HfHubHTTPError, match="was updated since"):
        client.api.upload_file(repo_id=repo, path_or_fileobj=b"2", path_in_repo="b.txt", parent_commit="f" * 40)


def test_a_commit_to_a_missing_branch_is_a_missing_revision(client: Client) -> None:
    repo = client.repo()
    with pytest.raises(RevisionNotFoundError):
        client.commit(repo, {"a.txt": "a"}, revision="never-made")
    client.api.create_tag(repo, tag="v1")
    with pytest.raises(BadRequestError):
        client.commit(repo, {"a.txt": "a"}, revision="v1")
    assert client.files(repo) == set()


def test_unchanged_files_are_dropped_by_the_client(client: Client) -> None:
    repo = client.repo()
    files: dict[str, bytes | str] = {"a.txt": "text", "m.bin": b"\0" * 1000, "empty": b""}
    first = client.commit(repo, files).oid
    client.hub.reset_counters()
    again = client.commit(repo, files)
    assert again.oid == first
    assert client.titles(repo) == ["a commit", "initial commit"]
    part = client.commit(repo, {**files, "a.txt": "other"})
    assert part.oid != first
    counted = client.hub.counters()
    assert (counted["total"]["commits"], counted["total"]["regular_received"]) == (1, 5)
    assert (counted["total"]["xet_received"], counted["requests"].get("xet_xorb", 0)) == (0, 0)


def test_empty_files_are_files(client: Client) -> None:
    repo = client.repo()
    client.commit(repo, {"empty.txt": b"", "empty.safetensors": b"", "folder/.keep": b""})
    assert client.read(repo, "empty.safetensors") == b""
    assert client.read(repo, "folder/.keep") == b""
    found = {item.path: item for item in client.api.list_repo_tree(repo, recursive=True)}
    assert found["empty.safetensors"].size == 0  # type: ignore[union-attr]
    assert found["empty.safetensors"].lfs is None  # type: ignore[union-attr]


def test_a_file_is_large_by_its_name_or_its_content(client: Client) -> None:
    repo = client.repo()
    client.commit(repo, {"a.safetensors": "text", "b.unknown": b"\0\1\2", "c.txt": "text", "d.unknown": "text"})
    large = client.large(repo, "a.safetensors", "b.unknown", "c.txt", "d.unknown")
    assert large == {"a.safetensors", "b.unknown"}
    client.commit(repo, {".gitattributes": "*.unknown filter=lfs\n"})
    client.commit(repo, {"e.unknown": "text", "f.safetensors": "text"})
    assert client.large(repo, "e.unknown", "f.safetensors") == {"e.unknown"}


def test_a_path_without_a_slash_deletes_the_folder(client: Client) -> None:
    repo = client.repo()
    client.commit(repo, {"1": "a file", "2/a.txt": "a", "2/b/c.txt": "c", "22/d.txt": "d"})
    apply(client, repo, CommitOperationDelete("2"))
    assert client.files(repo) == {"1", "22/d.txt"}
    apply(client, repo, CommitOperationDelete("1"))
    assert client.files(repo) == {"22/d.txt"}


def test_what_is_not_there_cannot_be_deleted(client: Client) -> None:
    repo = client.repo()
    head = client.commit(repo, {"a/b.txt": "b"}).oid
    for operation in (
        CommitOperationDelete("never-made.txt"),
        CommitOperationDelete("never-made/"),
        CommitOperationDelete("a/b"),
    ):
        with pytest.raises(EntryNotFoundError) as caught:
            apply(client, repo, CommitOperationAdd("c.txt", b"c"), operation)
        assert "A file with this name doesn't exist" in str(caught.value)
        assert "trailing '/'" in str(caught.value)
    assert client.head(repo) == head


def test_the_shorthands_delete_too(client: Client) -> None:
    repo = client.repo()
    client.commit(repo, {"a.txt": "a", "b/c.txt": "c", "d/e.txt": "e", "d/f.bin": b"\0", "g.txt": "g"})
    client.api.delete_file("a.txt", repo)
    client.api.delete_folder("b", repo)
    client.api.delete_files(repo, ["d/*.txt"])
    assert client.files(repo) == {"d/f.bin", "g.txt"}
    with pytest.raises(EntryNotFoundError):
        client.api.delete_file("a.txt", repo)


@pytest.mark.skipif(
    huggingface_hub.__version__.startswith("2.0."),
    reason="huggingface_hub 2.0 leaves out an unchanged file beside the removal of its folder",
)
def test_a_delete_and_an_addition_of_one_path_follow_their_order(client: Client) -> None:
    repo = client.repo()
    client.commit(repo, {"folder/a.txt": "1", "folder/b.txt": "b"})
    apply(client, repo, CommitOperationDelete("folder/"), CommitOperationAdd("folder/a.txt", b"1"))
    assert client.files(repo) == {"folder/a.txt"}
    assert client.read(repo, "folder/a.txt") == b"1"


def test_a_file_may_become_a_folder(client: Client) -> None:
    repo = client.repo()
    client.commit(repo, {"x": "a file"})
    with pytest.raises(HfHubHTTPError) as caught:
        client.commit(repo, {"x/y.txt": "y"})
    assert caught.value.response.status_code == 422
    apply(client, repo, CommitOperationDelete("x"), CommitOperationAdd("x/y.txt", b"y"))
    assert client.files(repo) == {"x/y.txt"}


@pytest.mark.parametrize("path", ["a\\b.txt", "folder\\..\\x", "a/../../b", "a/./b"])
def test_a_path_that_leads_elsewhere_is_refused_by_the_server(client: Client, path: str) -> None:
    repo = client.repo()
    operation = CommitOperationAdd("placeholder", b"x")
    operation.path_in_repo = path  # the client would refuse some of them before it asks
    with pytest.raises(HfHubHTTPError) as caught:
        apply(client, repo, operation)
    assert caught.value.response.status_code == 422
    assert client.files(repo) == set()


@pytest.mark.parametrize(
    "path",
    [
        "sub dir/a b.txt",
        "ünï/cödé 日本語.txt",
        "100%/50%25.txt",
        "a+b&c=d?e#f.txt",
        "q'uo\"te.txt",
        "[x]{y}(z)*.txt",
        "~$;,@!.txt",
    ],
)
def test_paths_come_back_as_they_were(client: Client, path: str) -> None:
    repo = client.repo()
    client.commit(repo, {path: "text", f"{path}.bin": b"\0large"})
    assert client.files(repo) == {path, f"{path}.bin"}
    assert client.read(repo, path) == b"text"
    assert client.read(repo, f"{path}.bin") == b"\0large"
    assert {item.path for item in client.api.get_paths_info(repo, [path, f"{path}.bin"])} == {path, f"{path}.bin"}
    folder = path.rpartition("/")[0]
    assert path in {item.path for item in client.api.list_repo_tree(repo, folder or None)}
    apply(client, repo, CommitOperationDelete(path))
    assert client.files(repo) == {f"{path}.bin"}


def test_files_are_copied_within_a_revision_and_from_another(client: Client, noise: bytes) -> None:
    repo = client.repo()
    first = client.commit(repo, {"a.txt": "old", "m.bin": noise}).oid
    client.commit(repo, {"a.txt": "new", "m.bin": b"\0"})
    client.hub.reset_counters()
    apply(
        client,
        repo,
        CommitOperationCopy("m.bin", "copies/now.bin"),
        CommitOperationCopy("m.bin", "copies/then.bin", src_revision=first),
        CommitOperationCopy("a.txt", "copies/now.txt"),
        CommitOperationCopy("a.txt", "copies/then.txt", src_revision=first),
    )
    read = {path: client.read(repo, f"copies/{path}") for path in ("now.bin", "then.bin", "now.txt", "then.txt")}
    assert read == {"now.bin": b"\0", "then.bin": noise, "now.txt": b"new", "then.txt": b"old"}
    assert client.hub.counters()["total"]["xet_received"] == 0
    with pytest.raises(EntryNotFoundError):
        apply(client, repo, CommitOperationCopy("never-made", "x"))


def test_files_are_copied_between_repos_without_moving_a_byte(client: Client, noise: bytes) -> None:
    source, target = client.repo("source"), client.repo("target", repo_type="dataset")
    client.commit(source, {"m.bin": noise, "a.txt": "text"})
    client.hub.reset_counters()
    copies = [
        CommitOperationCopy("m.bin", "in/m.bin", src_repo_id=source, src_repo_type="model"),
        CommitOperationCopy("a.txt", "in/a.txt", src_repo_id=source, src_repo_type="model"),
    ]
    apply(client, target, *copies, repo_type="dataset")
    assert client.hub.counters()["total"]["xet_received"] == 0
    client.api.delete_repo(source)
    assert client.read(target, "in/m.bin", repo_type="dataset") == noise
    assert client.read(target, "in/a.txt", repo_type="dataset") == b"text"


def test_copy_files_copies_folders(client: Client, noise: bytes) -> None:
    source, target = client.repo("source"), client.repo("target")
    client.commit(source, {"w/m.bin": noise, "w/sub/a.txt": "a", "other.txt": "o"})
    client.api.copy_files(f"hf://{source}/w", f"hf://{target}/new/")
    client.api.copy_files(f"hf://{source}/other.txt", f"hf://{target}/renamed.txt")
    client.api.copy_files(f"hf://{source}/w/", f"hf://{source}/again")
    assert "renamed.txt" in client.files(target)
    assert {path.rpartition("/")[2] for path in client.files(target)} == {"m.bin", "a.txt", "renamed.txt"}
    assert {"again/m.bin", "again/sub/a.txt"} <= client.files(source)
    assert client.read(source, "again/m.bin") == noise


def test_gitignore_in_the_repo_counts(client: Client, tmp_path: Path) -> None:
    repo = client.repo()
    client.commit(repo, {".gitignore": "*.log\nsecret/\n!kept.log\n"})
    client.commit(repo, {"a.log": "x", "kept.log": "x", "secret/key": "x", "b.txt": "x"})
    assert client.files(repo) == {".gitignore", "kept.log", "b.txt"}
    client.commit(repo, {".gitignore": "*.txt\n", "c.txt": "x", "d.log": "x"})
    assert client.files(repo) == {".gitignore", "kept.log", "b.txt", "d.log"}


@pytest.mark.parametrize("call", ["create_commit", "upload_folder"])
def test_gitignore_in_the_same_upload_counts(client: Client, tmp_path: Path, call: str) -> None:
    repo = client.repo()
    files: dict[str, bytes | str] = {
        ".gitignore": "ignored/*\n*.tmp\n",
        "ignored/a.bin": b"\0",
        "b.tmp": "x",
        "c.txt": "x",
    }
    if call == "create_commit":
        client.commit(repo, files)
    else:
        for path, data in files.items():
            (tmp_path / "up" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "up" / path).write_bytes(data.encode() if isinstance(data, str) else data)
        client.api.upload_folder(repo_id=repo, folder_path=tmp_path / "up")
    assert client.files(repo) == {".gitignore", "c.txt"}


def test_invalid_metadata_is_refused_before_anything_is_sent(client: Client, noise: bytes) -> None:
    repo = client.repo()
    head = client.head(repo)
    client.hub.reset_counters()
    bad = "---\nlicense: [1, 2]\nmodel-index: wrong\n---\n# Card\n"
    with pytest.raises(ValueError, match="Invalid metadata in README") as caught:
        client.commit(repo, {"README.md": bad, "m.bin": noise})
    assert '"model-index" must be an array' in str(caught.value)
    assert client.head(repo) == head
    assert client.hub.counters()["total"]["xet_received"] == 0
    with pytest.warns(UserWarning, match="empty or missing yaml metadata in repo card"):
        client.commit(repo, {"README.md": "# No metadata\n"})
    assert client.files(repo) == {"README.md"}


def test_thousands_of_files_are_one_commit(client: Client) -> None:
    repo = client.repo()
    client.commit(repo, {f"f/{number // 100}/{number}.txt": f"{number}" for number in range(1500)})
    assert len(client.files(repo)) == 1500
    assert client.titles(repo) == ["a commit", "initial commit"]
    tree = list(client.api.list_repo_tree(repo, recursive=True))
    assert len(tree) == 1500 + 1 + 15 + 1
