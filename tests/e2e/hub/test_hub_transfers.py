"""Files on their way to a Hub and back, as the unmodified client moves them: through Xet and as plain LFS."""

from __future__ import annotations

import hashlib
import io
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RevisionNotFoundError

from hubshard.hubserver import Settings

if TYPE_CHECKING:
    from tests.conftest import StartHub
    from tests.e2e.hub.conftest import Client

MIB = 1 << 20


def folder_of(root: Path, seed: int = 3) -> Path:
    """A model's folder: two large files, some small ones."""
    rng = random.Random(seed)
    (root / "sub dir").mkdir(parents=True)
    (root / "config.json").write_text('{"a": 1}')
    (root / "README.md").write_text("---\nlicense: mit\n---\n# Title\n")
    (root / "empty.txt").touch()
    (root / "sub dir" / "ünï.txt").write_text("text")
    for number in (1, 2):
        (root / "sub dir" / f"model-{number}.safetensors").write_bytes(rng.randbytes(2 * MIB + number))
    return root


def contents(root: Path) -> dict[str, bytes]:
    hidden = root / ".cache"
    files = (path for path in root.rglob("*") if path.is_file() and hidden not in path.parents)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def test_a_folder_goes_up_and_comes_back(client: Client, tmp_path: Path, way: str) -> None:
    repo = client.repo()
    folder = folder_of(tmp_path / "up")
    client.hub.reset_counters()
    made = client.api.upload_folder(repo_id=repo, folder_path=folder, commit_message="A folder")
    got = contents(Path(client.api.snapshot_download(repo, cache_dir=client.cache)))
    assert got.pop(".gitattributes")
    assert got == contents(folder)
    assert client.titles(repo) == ["A folder", "initial commit"]
    assert client.api.upload_folder(repo_id=repo, folder_path=folder).oid == made.oid
    counted = client.hub.counters(f"models/{repo}")
    sent, other = ("xet_received", "lfs_received") if way == "xet" else ("lfs_received", "xet_received")
    assert 4 * MIB <= counted[sent] < 4 * MIB + 100_000
    assert counted[other] == 0
    assert counted["commits"] == 1


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # file objects go as plain LFS
@pytest.mark.parametrize("kind", ["path", "bytes", "file object"])
def test_a_file_is_given_in_any_way(client: Client, tmp_path: Path, way: str, noise: bytes, kind: str) -> None:
    repo = client.repo()
    path = tmp_path / "m.bin"
    path.write_bytes(noise)
    given: dict[str, Path | bytes | BinaryIO] = {"path": path, "bytes": noise, "file object": io.BytesIO(noise)}
    client.api.upload_file(repo_id=repo, path_or_fileobj=given[kind], path_in_repo="deep/m.bin")
    assert client.read(repo, "deep/m.bin") == noise
    assert client.titles(repo)[0] == "Upload deep/m.bin with huggingface_hub"


def test_sizes_around_every_bound_come_back(client: Client, way: str) -> None:
    repo = client.repo()
    rng = random.Random(5)
    sizes = [1, 7, 8, 511, 512, 513, 8191, 65_536, 131_073, 3 * MIB + 1]
    files: dict[str, bytes | str] = {f"{size}.bin": rng.randbytes(size) for size in sizes}
    files |= {"zeros.bin": bytes(4 * MIB), "text.safetensors": "abc " * 300_000}
    client.commit(repo, files)
    for path, data in files.items():
        assert client.read(repo, path) == (data.encode() if isinstance(data, str) else data), path


def test_a_large_text_without_a_pattern_is_a_large_file(client: Client, way: str) -> None:
    repo = client.repo()
    text = b"".join(b"%07d of a long text\n" % number for number in range(520_000))
    client.commit(repo, {"long.txt": text})
    assert client.large(repo, "long.txt") == {"long.txt"}
    assert client.read(repo, "long.txt") == text


def test_an_upload_of_known_bytes_sends_none(client: Client, way: str, noise: bytes) -> None:
    repo = client.repo()
    client.commit(repo, {"one.bin": noise})
    client.hub.reset_counters()
    client.commit(repo, {"two.bin": noise})
    counted = client.hub.counters()["total"]
    assert counted["lfs_received"] == 0
    assert counted["xet_received"] < 1000
    assert client.read(repo, "two.bin") == noise


def test_a_changed_tail_sends_only_the_difference(client: Client, tmp_path: Path) -> None:
    repo = client.repo()
    rng = random.Random(6)
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        for _ in range(64):
            file.write(rng.randbytes(MIB))
    client.api.upload_file(repo_id=repo, path_or_fileobj=path, path_in_repo="model.safetensors")
    first = client.hub.counters(f"models/{repo}")["xet_received"]
    assert 64 * MIB <= first < 65 * MIB
    with path.open("r+b") as file:
        file.seek(-MIB, io.SEEK_END)
        file.write(rng.randbytes(MIB))
    client.api.upload_file(repo_id=repo, path_or_fileobj=path, path_in_repo="model.safetensors")
    assert 0 < client.hub.counters(f"models/{repo}")["xet_received"] - first < 3 * MIB
    back = Path(client.api.hf_hub_download(repo, "model.safetensors", cache_dir=client.cache))
    assert hashlib.sha256(back.read_bytes()).digest() == hashlib.sha256(path.read_bytes()).digest()


def test_six_hundred_files_land_in_few_commits(client: Client, tmp_path: Path) -> None:
    repo = client.repo()
    for number in range(600):
        (tmp_path / f"up/{number % 5}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"up/{number % 5}/{number}.txt").write_text(str(number))
    client.api.upload_folder(repo_id=repo, folder_path=tmp_path / "up", commit_message="Many")
    *parts, first, _ = client.titles(repo)
    assert first == "Many"
    assert parts in (["Many (part 2)"], ["Many (part 3)", "Many (part 2)"])  # the client cuts as it finds the time
    assert len(client.files(repo)) == 600


def test_a_folder_replaces_what_patterns_name(client: Client, tmp_path: Path) -> None:
    repo = client.repo()
    client.commit(repo, {"old-1.bin": b"\0", "old-2.bin": b"\1", "kept.txt": "k", "w/old.bin": b"\2"})
    folder = folder_of(tmp_path / "up")
    head = client.head(repo)
    client.api.upload_folder(
        repo_id=repo,
        folder_path=folder,
        path_in_repo="w",
        delete_patterns=["*.bin"],
        ignore_patterns=["*.md"],
        parent_commit=head,
    )
    names = {f"w/{name}" for name in contents(folder) if not name.endswith(".md")}
    assert client.files(repo) == {"kept.txt", "old-1.bin", "old-2.bin", *names}
    with pytest.raises(HfHubHTTPError, match="was updated since"):
        client.api.upload_folder(repo_id=repo, folder_path=folder, parent_commit=head)


def test_preuploaded_files_are_committed_later(client: Client, way: str, noise: bytes) -> None:
    repo = client.repo()
    operation = CommitOperationAdd("m.bin", noise)
    client.api.preupload_lfs_files(repo, [operation])
    assert client.files(repo) == set()
    client.hub.reset_counters()
    client.api.create_commit(repo, [operation], commit_message="later")
    assert client.hub.counters()["total"]["xet_received"] == 0
    assert client.hub.counters()["total"]["lfs_received"] == 0
    assert client.read(repo, "m.bin") == noise


def test_a_download_is_made_once_per_commit(client: Client, way: str, noise: bytes) -> None:
    repo = client.repo()
    first = client.commit(repo, {"m.bin": noise, "a.txt": "1"}).oid
    assert client.read(repo, "m.bin") == noise
    client.hub.reset_counters()
    assert client.read(repo, "m.bin") == noise
    assert client.read(repo, "m.bin", revision=first) == noise
    counted = client.hub.counters()["total"]
    assert (counted["resolve_sent"], counted["xet_sent"]) == (0, 0)
    client.commit(repo, {"a.txt": "2"})  # another commit with the same large file
    assert client.read(repo, "m.bin") == noise
    assert client.read(repo, "a.txt") == b"2"
    counted = client.hub.counters()["total"]
    assert (counted["resolve_sent"], counted["xet_sent"]) == (1, 0)
    storage = client.cache / f"models--{repo.replace('/', '--')}"
    assert len(list((storage / "blobs").iterdir())) == 2
    assert (storage / "refs" / "main").read_text() == client.head(repo)


@pytest.mark.parametrize("name", ["branch", "tag", "commit", "pull request"])
def test_a_snapshot_is_of_any_revision(client: Client, way: str, name: str) -> None:
    repo = client.repo()
    head = client.commit(repo, {"w/m.bin": b"\0one", "a.txt": "1"}).oid
    client.api.create_branch(repo, branch="resume/state")
    client.api.create_tag(repo, tag="v1")
    client.api.create_pull_request(repo, "A title")
    client.commit(repo, {"w/m.bin": b"\0two", "b.txt": "2"})
    revision = {"branch": "resume/state", "tag": "v1", "commit": head, "pull request": "refs/pr/1"}[name]
    local = Path(client.api.snapshot_download(repo, revision=revision, cache_dir=client.cache))
    assert local.name == head
    assert set(contents(local)) == {".gitattributes", "w/m.bin", "a.txt"}
    assert (local / "w" / "m.bin").read_bytes() == b"\0one"
    some = client.api.snapshot_download(repo, allow_patterns=["*.txt"], ignore_patterns=["a*"], cache_dir=client.cache)
    assert set(contents(Path(some))) == {"b.txt"}
    with pytest.raises(RevisionNotFoundError):
        client.api.snapshot_download(repo, revision="never-made", cache_dir=client.cache)


def test_a_local_folder_follows_the_repo(client: Client, tmp_path: Path, way: str, noise: bytes) -> None:
    repo = client.repo()
    client.commit(repo, {"w/m.bin": noise, "a.txt": "1"})
    client.api.snapshot_download(repo, local_dir=tmp_path / "local")
    client.hub.reset_counters()
    client.api.snapshot_download(repo, local_dir=tmp_path / "local")
    counted = client.hub.counters()["total"]
    assert (counted["resolve_sent"], counted["xet_sent"]) == (0, 0)
    client.commit(repo, {"w/m.bin": noise[::-1]})
    client.api.snapshot_download(repo, local_dir=tmp_path / "local")
    got = contents(tmp_path / "local")
    assert (got["w/m.bin"], got["a.txt"]) == (noise[::-1], b"1")


def test_what_was_downloaded_is_there_without_the_server(start_hub: StartHub, tmp_path: Path, noise: bytes) -> None:
    hub = start_hub()
    api = HfApi(endpoint=hub.url, token="hf_test")
    repo = api.create_repo("offline").repo_id
    made = api.upload_file(repo_id=repo, path_or_fileobj=noise, path_in_repo="m.bin")
    api.snapshot_download(repo, cache_dir=tmp_path / "cache")
    hub.stop()
    assert Path(api.hf_hub_download(repo, "m.bin", revision=made.oid, cache_dir=tmp_path / "cache")).is_file()
    offline = """
        import sys
        from pathlib import Path
        from huggingface_hub import hf_hub_download, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
        repo, cache = sys.argv[1:]
        assert len(Path(hf_hub_download(repo, "m.bin", cache_dir=cache)).read_bytes()) == 1 << 20
        try:
            hf_hub_download(repo, "other.bin", cache_dir=cache)
        except LocalEntryNotFoundError:
            print(snapshot_download(repo, cache_dir=cache))
    """
    printed = hub.client(offline, repo, tmp_path / "cache", env={"HF_HUB_OFFLINE": "1"})
    assert printed.strip().endswith(made.oid)


def test_that_a_file_is_missing_is_remembered_with_the_commit(client: Client) -> None:
    repo = client.repo()
    with pytest.raises(EntryNotFoundError):
        client.read(repo, "never-made.json")
    storage = client.cache / f"models--{repo.replace('/', '--')}"
    assert (storage / ".no_exist" / client.head(repo) / "never-made.json").is_file()


def test_a_file_is_described_without_being_read(client: Client, way: str, noise: bytes) -> None:
    repo = client.repo()
    head = client.commit(repo, {"m.bin": noise, "a.txt": "text"}).oid
    url = hf_hub_url(repo, "m.bin", endpoint=client.hub.url)
    large = get_hf_file_metadata(url, token=client.token, endpoint=client.hub.url)
    assert (large.commit_hash, large.etag, large.size) == (head, hashlib.sha256(noise).hexdigest(), len(noise))
    assert (large.xet_file_data is not None) == (way == "xet")
    text = get_hf_file_metadata(hf_hub_url(repo, "a.txt", endpoint=client.hub.url), token=client.token)
    assert (text.size, text.xet_file_data) == (4, None)
    assert text.etag == hashlib.sha1(b"blob 4\0text", usedforsecurity=False).hexdigest()


def test_what_one_way_stores_the_other_reads(client: Client, way: str, noise: bytes) -> None:
    repo = client.repo()
    client.commit(repo, {"m.bin": noise})
    read = """
        import hashlib, sys
        from huggingface_hub import hf_hub_download
        print(hashlib.sha256(open(hf_hub_download(sys.argv[1], "m.bin"), "rb").read()).hexdigest())
    """
    got = client.hub.client(read, repo, home=client.folder / "home", xet=way == "lfs")
    assert got.strip() == hashlib.sha256(noise).hexdigest()


def test_an_upload_in_parts_comes_back_whole(start_hub: StartHub, tmp_path: Path, noise: bytes) -> None:
    hub = start_hub(Settings(lfs_part_bytes=300_000))
    code = """
        import sys
        from huggingface_hub import HfApi
        api = HfApi()
        repo = api.create_repo("parts").repo_id
        api.upload_file(repo_id=repo, path_or_fileobj=sys.argv[1], path_in_repo="m.bin")
    """
    (tmp_path / "m.bin").write_bytes(noise)
    hub.client(code, tmp_path / "m.bin", xet=False)
    counted = hub.counters()
    assert (counted["requests"]["lfs_upload"], counted["requests"]["lfs_complete"]) == (4, 1)
    local = hf_hub_download("hubshard/parts", "m.bin", cache_dir=tmp_path / "cache", endpoint=hub.url, token="hf_test")
    assert Path(local).read_bytes() == noise


def test_downloaded_checksums_can_be_verified(client: Client, way: str, noise: bytes) -> None:
    repo = client.repo()
    client.commit(repo, {"m.bin": noise, "a.txt": "a"})
    client.api.snapshot_download(repo, cache_dir=client.cache)
    found = client.api.verify_repo_checksums(repo, cache_dir=client.cache)
    assert (found.checked_count, found.mismatches, found.missing_paths) == (3, [], [])
    blob = next((client.cache / f"models--{repo.replace('/', '--')}" / "snapshots").glob("*/m.bin")).resolve()
    blob.chmod(0o644)
    os.truncate(blob, 10)
    assert [item["path"] for item in client.api.verify_repo_checksums(repo, cache_dir=client.cache).mismatches] == [
        "m.bin"
    ]
