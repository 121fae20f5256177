"""Trees of files, as huggingface_hub lists them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, RepoFile, RepoFolder
from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

from hubshard.hubserver import Settings

if TYPE_CHECKING:
    from tests.conftest import StartHub
    from tests.e2e.hub.conftest import Client


@pytest.fixture
def repo(client: Client) -> str:
    name = client.repo()
    client.commit(name, {"a.txt": "a", "x/b.txt": "b", "x/y/c.bin": b"\0" * 500, "z/d.txt": "d"}, "first")
    client.commit(name, {"x/b.txt": "bb"}, "second")
    return name


def test_a_folder_is_listed_alone_or_with_all_below(client: Client, repo: str) -> None:
    def listed(path: str | None = None, *, recursive: bool = False) -> list[str]:
        return [item.path for item in client.api.list_repo_tree(repo, path, recursive=recursive)]

    assert sorted(listed()) == [".gitattributes", "a.txt", "x", "z"]
    assert sorted(listed("x")) == ["x/b.txt", "x/y"]
    assert sorted(listed("x/y")) == ["x/y/c.bin"]
    assert sorted(listed("x", recursive=True)) == ["x/b.txt", "x/y", "x/y/c.bin"]
    everything = [".gitattributes", "a.txt", "x", "x/b.txt", "x/y", "x/y/c.bin", "z", "z/d.txt"]
    assert sorted(listed(recursive=True)) == everything
    for missing in ("never-made", "x/b", "x/never"):
        with pytest.raises(EntryNotFoundError):
            listed(missing)
    with pytest.raises(RevisionNotFoundError):
        list(client.api.list_repo_tree(repo, revision="never-made"))


def test_files_have_sizes_ids_and_hashes(client: Client, repo: str) -> None:
    found = {item.path: item for item in client.api.list_repo_tree(repo, recursive=True)}
    text, large, folder = found["x/b.txt"], found["x/y/c.bin"], found["x"]
    assert isinstance(text, RepoFile)
    assert isinstance(large, RepoFile)
    assert isinstance(folder, RepoFolder)
    assert (text.size, text.lfs, text.xet_hash, text.last_commit) == (2, None, None, None)
    assert text.blob_id == hashlib.sha1(b"blob 2\0bb", usedforsecurity=False).hexdigest()
    assert large.lfs is not None
    assert large.xet_hash is not None
    assert (large.size, large.lfs.size, large.lfs.sha256) == (500, 500, hashlib.sha256(bytes(500)).hexdigest())
    assert len(large.xet_hash) == 64
    assert len(folder.tree_id) == 40


def test_expanded_entries_name_their_last_commit(client: Client, repo: str) -> None:
    found = {item.path: item for item in client.api.list_repo_tree(repo, recursive=True, expand=True)}
    titles = {path: item.last_commit.title for path, item in found.items() if item.last_commit}
    assert titles == {
        ".gitattributes": "initial commit",
        "a.txt": "first",
        "x": "second",
        "x/b.txt": "second",
        "x/y": "first",
        "x/y/c.bin": "first",
        "z": "first",
        "z/d.txt": "first",
    }
    (info,) = client.api.get_paths_info(repo, "x/b.txt", expand=True)
    assert info.last_commit is not None
    assert (info.last_commit.title, info.last_commit.oid) == ("second", client.head(repo))


def test_paths_info_gives_files_and_folders_and_leaves_out_the_rest(client: Client, repo: str) -> None:
    found = client.api.get_paths_info(repo, ["a.txt", "x", "x/y/", "never-made", "x/y/c.bin"])
    assert {(item.path, type(item)) for item in found} == {
        ("a.txt", RepoFile),
        ("x", RepoFolder),
        ("x/y", RepoFolder),
        ("x/y/c.bin", RepoFile),
    }
    assert client.api.get_paths_info(repo, ["never-made"]) == []
    first = client.api.list_repo_commits(repo)[1].commit_id
    (old,) = client.api.get_paths_info(repo, "x/b.txt", revision=first)
    assert isinstance(old, RepoFile)
    assert old.size == 1


def test_a_folder_goes_with_its_last_file_and_keeps_its_id_while_nothing_changes(client: Client, repo: str) -> None:
    def ids() -> dict[str, str]:
        items = client.api.list_repo_tree(repo, recursive=True)
        return {item.path: item.tree_id for item in items if isinstance(item, RepoFolder)}

    before = ids()
    client.commit(repo, {"z/e.txt": "e"})
    after = ids()
    assert (after["x"], after["x/y"]) == (before["x"], before["x/y"])
    assert after["z"] != before["z"]
    client.api.delete_folder("x/y", repo)
    assert set(ids()) == {"x", "z"}


def test_long_listings_come_whole_over_pages(start_hub: StartHub) -> None:
    hub = start_hub(Settings(page_size=10))
    api = HfApi(endpoint=hub.url, token="hf_test")
    repo = api.create_repo("paged").repo_id
    paths = {f"d{number % 7}/é{number}.txt" for number in range(95)}
    api.create_commit(
        repo,
        [CommitOperationAdd(path, b"x") for path in sorted(paths)],
        commit_message="many",
    )
    assert set(api.list_repo_files(repo)) == {*paths, ".gitattributes"}
    expanded = list(api.list_repo_tree(repo, recursive=True, expand=True))
    assert {item.path for item in expanded if isinstance(item, RepoFile)} == {*paths, ".gitattributes"}
    assert len(expanded) == len({item.path for item in expanded}) == 95 + 1 + 7
    assert len(list(api.list_repo_tree(repo, "d0"))) == 14
    assert len(api.get_paths_info(repo, sorted(paths))) == 95
