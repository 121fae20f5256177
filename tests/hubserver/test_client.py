"""The unmodified huggingface_hub against the embedded Hub, through Xet and through plain LFS."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psutil
import pytest

from hubshard.hubserver import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Api, Hub, StartHub

ROUND_TRIP = """
    import sys
    from pathlib import Path
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    folder, name = sys.argv[1:]
    api = HfApi()
    repo = api.create_repo(name, private=True).repo_id
    commit = api.upload_folder(repo_id=repo, folder_path=folder)
    api.create_tag(repo, tag="v1.0", revision=commit.oid)
    local = Path(snapshot_download(repo, revision="v1.0"))
    for path in Path(folder).rglob("*"):
        if path.is_file():
            assert (local / path.relative_to(folder)).read_bytes() == path.read_bytes(), path
    assert api.upload_folder(repo_id=repo, folder_path=folder).oid == commit.oid  # nothing has changed
    print(repo)
"""


def fill(folder: Path, seed: int) -> Path:
    rng = random.Random(seed)
    (folder / "sub dir").mkdir(parents=True)
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Title\n")
    (folder / "empty.txt").touch()
    (folder / "sub dir" / "ünï.txt").write_text("text")
    for number in range(3):
        (folder / f"model-{number}.safetensors").write_bytes(rng.randbytes(2_000_000 + number))
    return folder


@pytest.mark.parametrize("xet", [True, False], ids=["xet", "lfs"])
def test_a_folder_goes_up_and_comes_back(hub: Hub, tmp_path: Path, xet: bool) -> None:
    folder = fill(tmp_path / "folder", 1)
    hub.client(ROUND_TRIP, folder, "model", xet=xet)
    counted = hub.counters("models/hubshard/model")
    sent, other = ("xet_received", "lfs_received") if xet else ("lfs_received", "xet_received")
    assert counted[other] == 0
    assert 6_000_003 <= counted[sent] < 6_100_000
    assert counted["commits"] == 1


@pytest.mark.parametrize(("up", "down"), [(True, False), (False, True)], ids=["xet then lfs", "lfs then xet"])
def test_what_one_way_stores_the_other_reads(hub: Hub, tmp_path: Path, up: bool, down: bool) -> None:
    folder = fill(tmp_path / "folder", 2)
    hub.client(ROUND_TRIP, folder, "model", xet=up)
    code = """
        import sys
        from pathlib import Path
        from huggingface_hub import snapshot_download
        local = Path(snapshot_download("hubshard/model"))
        for path in Path(sys.argv[1]).rglob("*.safetensors"):
            assert (local / path.relative_to(sys.argv[1])).read_bytes() == path.read_bytes(), path
    """
    hub.client(code, folder, home=tmp_path / "another-home", xet=down)


@pytest.mark.parametrize("xet", [True, False], ids=["xet", "lfs"])
def test_somebody_else_proposes_weights_and_the_owner_merges_them(start_hub: StartHub, xet: bool) -> None:
    hub = start_hub(Settings(tokens={"t-alice": "alice", "t-bob": "bob"}))
    hub.client("from huggingface_hub import HfApi; HfApi().create_repo('m')", token="t-alice")
    propose = """
        from huggingface_hub import HfApi
        api = HfApi()
        first = api.upload_file(
            path_or_fileobj=bytes(3_000_000), path_in_repo="m.bin", repo_id="alice/m", create_pr=True
        )
        more = {"path_or_fileobj": b"2" * 9000, "path_in_repo": "n.bin"}
        api.upload_file(repo_id="alice/m", revision=first.pr_revision, **more)
        print(first.pr_num)
    """
    num = hub.client(propose, token="t-bob", xet=xet).strip()
    merge = """
        import sys
        from huggingface_hub import HfApi, hf_hub_download
        HfApi().merge_pull_request("alice/m", int(sys.argv[1]))
        assert open(hf_hub_download("alice/m", "m.bin"), "rb").read() == bytes(3_000_000)
        assert open(hf_hub_download("alice/m", "n.bin"), "rb").read() == b"2" * 9000
    """
    hub.client(merge, num, token="t-alice", xet=xet)


def test_a_large_file_goes_in_parts(start_hub: StartHub, tmp_path: Path) -> None:
    hub = start_hub(Settings(lfs_part_bytes=600_000))
    hub.client(ROUND_TRIP, fill(tmp_path / "folder", 3), "model", xet=False)
    assert hub.counters()["requests"]["lfs_complete"] == 3


def test_four_processes_at_once(hub: Hub, tmp_path: Path) -> None:
    def one(number: int) -> str:
        folder = fill(tmp_path / f"folder-{number}", number)
        return hub.client(ROUND_TRIP, folder, f"model-{number}", home=tmp_path / f"home-{number}", xet=number % 2 == 0)

    with ThreadPoolExecutor(4) as pool:
        repos = [printed.strip() for printed in pool.map(one, range(4))]
    assert repos == [f"hubshard/model-{number}" for number in range(4)]


def test_a_restart_keeps_everything(hub: Hub, tmp_path: Path) -> None:
    hub.client(ROUND_TRIP, fill(tmp_path / "folder", 4), "model")
    hub.restart()
    code = """
        from huggingface_hub import HfApi
        api = HfApi()
        print(api.model_info("hubshard/model").private, [tag.name for tag in api.list_repo_refs("hubshard/model").tags])
    """
    assert hub.client(code).strip() == "True ['v1.0']"


def test_memory_stays_small_while_a_large_file_goes_through(hub: Hub) -> None:
    api, peak, done = hub.api(), [0], threading.Event()
    server = psutil.Process(hub.pid)

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], server.memory_info().rss)
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        _through(api, nbytes=240 << 20)
    finally:
        done.set()
        watcher.join()
    assert 20 << 20 < peak[0] < 150 << 20


def _through(api: Api, nbytes: int) -> None:
    api("POST", "/api/repos/create", {"name": "big"})
    data = random.Random(0).randbytes(1 << 20) * (nbytes >> 20)
    sha256 = api.upload("models/hubshard/big", data)
    line = ("lfsFile", {"path": "big.bin", "algo": "sha256", "oid": sha256, "size": nbytes})
    assert api.commit("models/hubshard/big", line).status == 200
    back = api("GET", "/hubshard/big/resolve/main/big.bin").body
    assert hashlib.sha256(back).hexdigest() == sha256
