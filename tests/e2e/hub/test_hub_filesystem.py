"""HfFileSystem on a Hub: listing, reading ranges, writing."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import HfFileSystem

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.hub.conftest import Client


@pytest.fixture
def fs(client: Client) -> Any:  # fsspec has no types
    return HfFileSystem(endpoint=client.hub.url, token=client.token, skip_instance_cache=True)


@pytest.fixture
def repo(client: Client, noise: bytes) -> str:
    name = client.repo()
    client.commit(name, {"config.json": "{}", "w/m.safetensors": noise, "w/sub dir/ü.txt": "text", "x.bin": b"\0" * 9})
    client.api.create_branch(name, branch="resume/state")
    client.commit(name, {"w/new.txt": "new"})
    return name


def test_folders_are_listed(fs: Any, repo: str) -> None:
    assert sorted(fs.ls(repo, detail=False)) == [
        f"{repo}/{name}" for name in (".gitattributes", "config.json", "w", "x.bin")
    ]
    (large,) = (item for item in fs.ls(f"{repo}/w") if item["name"].endswith("safetensors"))
    assert (large["size"], large["type"], large["lfs"]["size"]) == (1 << 20, "file", 1 << 20)
    assert large["last_commit"] is None or large["last_commit"].title == "a commit"
    with pytest.raises(FileNotFoundError):
        fs.ls(f"{repo}/never-made")
    with pytest.raises(FileNotFoundError):
        fs.ls("hubshard/never-made")


def test_paths_are_found_by_pattern(fs: Any, repo: str) -> None:
    assert fs.glob(f"{repo}/**/*.txt") == [f"{repo}/w/new.txt", f"{repo}/w/sub dir/ü.txt"]
    assert fs.glob(f"{repo}/*.json") == [f"{repo}/config.json"]
    assert len(fs.find(repo)) == 6
    assert [(name, len(found)) for _, found, name in fs.walk(f"{repo}/w")] == [
        (["m.safetensors", "new.txt"], 1),
        (["ü.txt"], 0),
    ]


def test_a_revision_is_part_of_the_path(fs: Any, repo: str) -> None:
    at = f"{repo}@resume%2Fstate"
    assert fs.exists(f"{repo}/w/new.txt")
    assert not fs.exists(f"{at}/w/new.txt")
    assert fs.read_text(f"{at}/w/sub dir/ü.txt") == "text"
    assert fs.isdir(f"{at}/w")
    assert fs.isfile(f"{at}/x.bin")
    assert fs.info(f"{at}/w/m.safetensors")["size"] == 1 << 20
    assert fs.exists(f"hf://{repo}@main/config.json")


def test_ranges_are_read(fs: Any, repo: str, noise: bytes, client: Client) -> None:
    path = f"{repo}/w/m.safetensors"
    client.hub.reset_counters()
    rng = random.Random(9)
    with fs.open(path, "rb", block_size=10_000) as file:
        for _ in range(10):
            at = rng.randrange(len(noise))
            file.seek(at)
            assert file.read(100) == noise[at : at + 100]
    assert client.hub.counters()["total"]["resolve_sent"] < 300_000
    assert fs.cat_file(path, start=5, end=50) == noise[5:50]
    assert fs.cat_file(path, start=-10) == noise[-10:]
    with fs.open(path, "rb", block_size=0) as stream:
        assert stream.read(1000) + stream.read() == noise
    assert fs.read_bytes(path) == noise


def test_files_are_taken_home(fs: Any, repo: str, noise: bytes, tmp_path: Path, way: str) -> None:
    fs.get_file(f"{repo}/w/m.safetensors", str(tmp_path / "m.safetensors"))
    assert (tmp_path / "m.safetensors").read_bytes() == noise
    fs.get(f"{repo}/w/", str(tmp_path / "w"), recursive=True)
    assert (tmp_path / "w" / "sub dir" / "ü.txt").read_text() == "text"


def test_files_are_written_copied_and_removed(fs: Any, repo: str, client: Client, noise: bytes, way: str) -> None:
    with fs.open(f"{repo}/out/new.bin", "wb") as file:
        file.write(noise)
    with fs.open(f"{repo}/out/a.txt", "w") as text:
        text.write("one\n")
    fs.cp_file(f"{repo}/out/new.bin", f"{repo}/out/copy.bin")
    fs.mv(f"{repo}/x.bin", f"{repo}/y.bin")
    assert client.read(repo, "out/copy.bin") == noise
    assert client.read(repo, "out/a.txt") == b"one\n"
    fs.rm(f"{repo}/out", recursive=True)
    assert {"y.bin", "config.json"} <= client.files(repo)
    assert not any(path.startswith("out/") or path == "x.bin" for path in client.files(repo))
    fs.invalidate_cache()
    with pytest.raises(FileNotFoundError):
        fs.info(f"{repo}/out/a.txt")
