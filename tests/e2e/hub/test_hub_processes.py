"""Several client processes at once, and a server that dies between requests."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import HfApi

if TYPE_CHECKING:
    from tests.conftest import Hub
    from tests.e2e.hub.conftest import Client

WRITER = """
    import json, random, sys, time
    from pathlib import Path
    from huggingface_hub import CommitOperationAdd, HfApi, constants
    repo, number, meeting = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    rng, api, won = random.Random(number), HfApi(), []

    def meet(name):
        (meeting / f"{name}-{number}").touch()
        while len(list(meeting.glob(f"{name}-*"))) < 4:
            time.sleep(0.01)

    meet("start")
    for way in ("xet", "lfs"):
        constants.HF_HUB_DISABLE_XET = way == "lfs"
        api.create_branch(repo, branch=f"b/{number}", exist_ok=True)
        api.upload_file(repo_id=repo, path_or_fileobj=rng.randbytes(300_000), path_in_repo=f"{way}.bin",
                        revision=f"b/{number}")
        api.upload_file(repo_id=repo, path_or_fileobj=rng.randbytes(300_000), path_in_repo=f"{way}-{number}.bin")
        meet(f"{way}-written")
        head = api.repo_info(repo).sha
        meet(f"{way}-seen")
        try:
            api.create_commit(repo, [CommitOperationAdd("one.txt", f"{way}{number}".encode())],
                              commit_message=f"{way} won", parent_commit=head)
            won.append(way)
        except Exception as error:
            assert error.response.status_code == 412, error
        meet(f"{way}-done")
    print(json.dumps(won))
"""


def test_four_processes_write_at_once_and_one_wins_each_race(client: Client, tmp_path: Path) -> None:
    repo = client.repo()
    (tmp_path / "meeting").mkdir()

    def write(number: int) -> str:
        return client.hub.client(WRITER, repo, str(number), tmp_path / "meeting", home=tmp_path / f"home-{number}")

    with ThreadPoolExecutor(4) as pool:
        printed = list(pool.map(write, range(4)))
    assert sorted(way for line in printed for way in json.loads(line)) == ["lfs", "xet"]
    assert sorted(title for title in client.titles(repo) if "won" in title) == ["lfs won", "xet won"]
    shared = {f"{way}-{number}.bin" for way in ("xet", "lfs") for number in range(4)}
    assert client.files(repo) == {"one.txt", *shared}
    for number in range(4):
        rng = random.Random(number)
        for way in ("xet", "lfs"):
            assert client.read(repo, f"{way}.bin", revision=f"b/{number}") == rng.randbytes(300_000)
            assert client.read(repo, f"{way}-{number}.bin") == rng.randbytes(300_000)
    assert len(client.titles(repo)) == 1 + 8 + 2


def test_a_killed_server_has_everything_that_it_acknowledged(hub: Hub, tmp_path: Path, way: str) -> None:
    api = HfApi(endpoint=hub.url, token="hf_test")
    repo = api.create_repo("killed", private=True).repo_id
    rng = random.Random(4)
    large: dict[str, bytes] = {}
    for number in range(2):
        large[f"{number}.bin"] = rng.randbytes(400_000)
        api.upload_file(repo_id=repo, path_or_fileobj=large[f"{number}.bin"], path_in_repo=f"{number}.bin")
        api.create_tag(repo, tag=f"v{number}")
        api.create_pull_request(repo, f"Number {number}")
        hub.kill()
        hub.restart()
    assert [ref.name for ref in api.list_repo_refs(repo).tags] == ["v0", "v1"]
    assert [pull.title for pull in api.get_repo_discussions(repo)] == ["Number 1", "Number 0"]
    assert api.repo_info(repo).private
    assert len(api.list_repo_commits(repo)) == 3
    for path, data in large.items():
        local = api.hf_hub_download(repo, path, cache_dir=tmp_path / "cache")
        assert Path(local).read_bytes() == data


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_upload_goes_on_when_the_server_comes_back(hub: Hub, tmp_path: Path, when: str) -> None:
    api = HfApi(endpoint=hub.url, token="hf_test")
    repo = api.create_repo("again").repo_id
    folder = tmp_path / "up"
    folder.mkdir()
    rng = random.Random(5)
    for number in range(4):
        (folder / f"{number}.bin").write_bytes(rng.randbytes(500_000))
    if when == "after":
        api.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=["0.bin", "1.bin"])
    before = hub.counters(f"models/{repo}")["xet_received"]
    hub.kill()
    hub.restart()
    api.upload_folder(repo_id=repo, folder_path=folder)
    sent = hub.counters(f"models/{repo}")["xet_received"]
    assert sent < 1_100_000 if when == "after" else sent > 1_900_000
    assert (before > 900_000) == (when == "after")
    assert len(api.list_repo_files(repo)) == 5
