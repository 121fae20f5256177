"""What large files cost: listed, given up for good, freed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError

from hubshard.hubserver import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Hub, StartHub
    from tests.e2e.hub.conftest import Client


def used_bytes(client: Client, repo: str) -> int:
    return client.api.model_info(repo, expand=["usedStorage"]).used_storage or 0


def on_disk(hub: Hub) -> int:
    return sum(path.stat().st_size for path in hub.root.rglob("*") if path.is_file() and "sqlite" not in path.name)


def test_large_files_are_listed_with_what_they_are(client: Client, way: str, noise: bytes) -> None:
    repo = client.repo()
    client.commit(repo, {"m.bin": noise, "a.txt": "text"})
    client.commit(repo, {"m.bin": noise[:1000]})
    found = {item.size: item for item in client.api.list_lfs_files(repo)}
    assert set(found) == {1000, len(noise)}
    assert {item.filename for item in found.values()} == {"m.bin"}
    assert found[1000].ref == "refs/heads/main"
    assert found[1000].pushed_at.year >= 2024
    assert used_bytes(client, repo) == 1000 + len(noise)


def test_a_deleted_file_keeps_its_storage_until_it_is_given_up(client: Client, way: str, noise: bytes) -> None:
    repo = client.repo()
    client.commit(repo, {"kept.bin": noise[:5000], "a.txt": "a"})
    client.commit(repo, {"old.bin": noise}, "with old")
    client.api.create_branch(repo, branch="b")
    client.api.create_tag(repo, tag="v1")
    client.api.delete_file("old.bin", repo)
    assert used_bytes(client, repo) == len(noise) + 5000
    assert client.read(repo, "old.bin", revision="v1") == noise
    before = on_disk(client.hub)
    gone = [item for item in client.api.list_lfs_files(repo) if item.filename == "old.bin"]
    client.api.permanently_delete_lfs_files(repo, gone)
    assert used_bytes(client, repo) == 5000
    assert [item.filename for item in client.api.list_lfs_files(repo)] == ["kept.bin"]
    for revision in ("main", "b", "v1"):
        assert client.files(repo, revision=revision) == {"kept.bin", "a.txt"}
        assert client.read(repo, "kept.bin", revision=revision, force_download=True) == noise[:5000]
    assert client.titles(repo)[-3:] == ["with old", "a commit", "initial commit"]
    client.hub.gc(grace_seconds=-1)
    assert before - on_disk(client.hub) > len(noise) * 9 // 10
    assert client.read(repo, "kept.bin", force_download=True) == noise[:5000]
    client.commit(repo, {"old.bin": noise})
    assert client.read(repo, "old.bin", force_download=True) == noise


def test_a_file_given_up_without_its_history_is_named_and_not_there(client: Client, noise: bytes) -> None:
    repo = client.repo()
    head = client.commit(repo, {"m.bin": noise}).oid
    client.api.permanently_delete_lfs_files(repo, client.api.list_lfs_files(repo), rewrite_history=False)
    assert client.head(repo) == head
    assert client.files(repo) == {"m.bin"}
    with pytest.raises(EntryNotFoundError):
        client.read(repo, "m.bin")


def test_storage_of_another_repo_is_its_own(client: Client, way: str, noise: bytes) -> None:
    one, other = client.repo(), client.repo()
    for repo in (one, other):
        client.commit(repo, {"m.bin": noise})
    client.api.permanently_delete_lfs_files(one, client.api.list_lfs_files(one))
    client.hub.gc(grace_seconds=-1)
    assert client.read(other, "m.bin") == noise
    before = on_disk(client.hub)
    client.api.delete_repo(other)
    client.hub.gc(grace_seconds=-1)
    assert before - on_disk(client.hub) > len(noise) * 9 // 10


def test_many_large_files_are_listed_over_pages(start_hub: StartHub, tmp_path: Path) -> None:
    hub = start_hub(Settings(page_size=4))
    api = HfApi(endpoint=hub.url, token="hf_test")
    repo = api.create_repo("many").repo_id
    for number in range(11):
        (tmp_path / "up").mkdir(exist_ok=True)
        (tmp_path / "up" / f"{number}.bin").write_bytes(bytes([number]) * 100)
    api.upload_folder(repo_id=repo, folder_path=tmp_path / "up")
    files = list(api.list_lfs_files(repo))
    assert {item.filename for item in files} == {f"{number}.bin" for number in range(11)}
    api.permanently_delete_lfs_files(repo, files)
    assert list(api.list_lfs_files(repo)) == []
    assert set(api.list_repo_files(repo)) == {".gitattributes"}


def test_storage_of_all_repos_is_shown_to_its_owner(client: Client, noise: bytes) -> None:
    repo = client.repo("owned")
    client.commit(repo, {"m.bin": noise})
    found = {item.id: item for item in client.api.list_user_repos()}
    assert (found[repo].storage, found[repo].type, found[repo].visibility) == (len(noise), "model", "public")
