"""Garbage collection beside a running server."""

from __future__ import annotations

import hashlib
import os
import random
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from hubshard.hubserver import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Api, Hub, StartHub

REPO = "models/hubshard/m"


def noise(seed: object, nbytes: int = 50_000) -> bytes:
    return random.Random(str(seed)).randbytes(nbytes)


@pytest.fixture
def api(hub: Hub) -> Api:
    api = hub.api()
    assert api("POST", "/api/repos/create", {"name": "m"}).status == 200
    return api


def put_large(api: Api, path: str, data: bytes, revision: str = "main") -> int:
    line = {"path": path, "algo": "sha256", "oid": api.upload(REPO, data), "size": len(data)}
    return api.commit(REPO, ("lfsFile", line), revision=revision).status


def make_old(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (time.time() - 2 * 3600,) * 2)


def objects(hub: Hub) -> list[Path]:
    return [path for path in (hub.root / "objects").rglob("*") if path.is_file()]


def test_an_upload_that_no_commit_names_lives_for_the_grace_period(hub: Hub, api: Api) -> None:
    data = noise(1)
    sha256 = api.upload(REPO, data)
    assert hub.gc(grace_seconds=3600).objects == 0
    line = ("lfsFile", {"path": "m.bin", "algo": "sha256", "oid": sha256, "size": len(data)})
    assert api.commit(REPO, line).status == 200
    assert hub.gc().objects == 0
    assert api("GET", "/hubshard/m/resolve/main/m.bin").body == data
    api.upload(REPO, noise(2))
    report = hub.gc()
    assert (report.objects, report.lfs_files, report.freed_bytes) == (1, 1, 50_000)
    assert [path.name for path in objects(hub)] == [sha256]


def test_what_a_branch_tag_or_pull_request_names_stays_and_goes_with_it(hub: Hub, api: Api) -> None:
    api("POST", f"/api/{REPO}/branch/side", {})
    put_large(api, "m.bin", noise("side"), "side")
    api("POST", f"/api/{REPO}/tag/side", {"tag": "v1"})
    api("DELETE", f"/api/{REPO}/branch/side")
    pull = api.commit(REPO, api.file("x.txt", b"in a pull request"), query="?create_pr=1").json["commitOid"]
    assert hub.gc().objects == 0
    assert api("GET", "/hubshard/m/resolve/v1/m.bin").body == noise("side")
    assert api("GET", f"/hubshard/m/resolve/{pull}/x.txt").body == b"in a pull request"
    api("DELETE", f"/api/{REPO}/tag/v1")
    report = hub.gc()
    assert (report.objects, report.commits, objects(hub)) == (1, 1, [])


def test_squashed_history_is_collected_and_the_files_stay(hub: Hub, api: Api) -> None:
    for number in range(5):
        put_large(api, "m.bin", noise(number))
        api.put(REPO, "a.txt", str(number).encode())
    api("POST", f"/api/{REPO}/super-squash/main", {"message": "one"})
    report = hub.gc()
    assert (report.commits, report.objects, report.blobs) == (11, 4, 4)
    assert api("GET", "/hubshard/m/resolve/main/m.bin").body == noise(4)
    assert api("GET", "/hubshard/m/resolve/main/a.txt").body == b"4"
    assert hub.gc().freed_bytes == 0
    with closing(sqlite3.connect(hub.root / "hub.sqlite3")) as connection:
        assert connection.execute("SELECT count(*) FROM trees").fetchone() == (1,)


def test_a_deleted_repo_gives_its_space_back_unless_another_holds_the_same(hub: Hub, api: Api) -> None:
    put_large(api, "m.bin", noise("shared"))
    put_large(api, "own.bin", noise("own"))
    api("POST", f"/api/{REPO}/duplicate", {"repository": "hubshard/twin"})
    api.commit("models/hubshard/twin", ("deletedFile", {"path": "own.bin"}))
    api("POST", "/api/models/hubshard/twin/super-squash/main", {"message": "one"})
    api("DELETE", "/api/repos/delete", {"name": "m"})
    assert hub.gc().objects == 1
    assert api("GET", "/hubshard/twin/resolve/main/m.bin").body == noise("shared")


def test_parts_of_an_upload_that_never_ended_are_swept(start_hub: StartHub) -> None:
    hub = start_hub(Settings(lfs_part_bytes=10_000))
    api = hub.api()
    api("POST", "/api/repos/create", {"name": "m"})
    asked = {"operation": "upload", "objects": [{"oid": "a" * 64, "size": 25_000}]}
    header = api("POST", "/hubshard/m.git/info/lfs/objects/batch", asked).json["objects"][0]["actions"]["upload"][
        "header"
    ]
    assert api("PUT", header["1"], noise(1, 10_000)).status == 200
    assert hub.gc().freed_bytes == 0
    (upload,) = (hub.root / "parts").iterdir()
    make_old(upload, *upload.iterdir())
    assert hub.gc(grace_seconds=24 * 3600).freed_bytes == 0
    assert hub.gc().freed_bytes >= 10_000
    assert list((hub.root / "parts").iterdir()) == []


def test_what_a_killed_upload_left_is_swept_when_it_is_old(hub: Hub, api: Api) -> None:
    left = hub.root / "tmp" / "new-1-abc"
    left.write_bytes(b"half of it")
    assert hub.gc().freed_bytes == 0
    make_old(left)
    assert hub.gc().freed_bytes == 10
    assert not left.exists()


def test_collections_beside_writers_never_take_what_was_acknowledged(hub: Hub, api: Api) -> None:
    def write(number: int) -> int:
        data = noise(number)
        sha256 = hashlib.sha256(data).hexdigest()
        asked = {"operation": "upload", "objects": [{"oid": sha256, "size": len(data)}]}
        (item,) = api("POST", "/hubshard/m.git/info/lfs/objects/batch", asked).json["objects"]
        assert api("PUT", item["actions"]["upload"]["href"], data).status in {200, 503}
        line = ("lfsFile", {"path": f"{number}.bin", "algo": "sha256", "oid": sha256, "size": len(data)})
        status = api.commit(REPO, line, api.file(f"{number}.txt", data[:100])).status
        assert status in {200, 400, 503}  # collected before the commit: said, not lost
        if status == 200:
            assert api("GET", f"/hubshard/m/resolve/main/{number}.bin").body == data
            assert api("GET", f"/hubshard/m/resolve/main/{number}.txt").body == data[:100]
        return status

    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(write, number) for number in range(60)]
        while not all(job.done() for job in jobs):
            hub.gc(grace_seconds=0)
    assert 200 in [job.result() for job in jobs]


def test_xet_storage_of_a_deleted_repo_is_collected(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(noise("xet", 3_000_000))
    code = """
        import sys
        from huggingface_hub import HfApi
        api = HfApi()
        for name in ("one", "two"):
            api.create_repo(name)
            api.upload_file(path_or_fileobj=sys.argv[1], path_in_repo="m.bin", repo_id=f"hubshard/{name}")
        api.delete_repo("hubshard/one")
    """
    hub.client(code, path)
    xorbs = [item for item in (hub.root / "xorbs").rglob("*") if item.is_file()]
    assert hub.gc().xorbs == 0 or len(xorbs) > 1
    assert hub.api()("GET", "/hubshard/two/resolve/main/m.bin").body == path.read_bytes()
    hub.api()("DELETE", "/api/repos/delete", {"name": "two"})
    assert hub.gc().freed_bytes >= 3_000_000
    assert not [item for item in (hub.root / "xorbs").rglob("*") if item.is_file()]
