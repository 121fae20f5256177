"""The real huggingface_hub and hf_xet against the Xet storage of the embedded Hub."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Hub

UPLOAD = """
    import sys
    from huggingface_hub import HfApi
    repo, path, name = sys.argv[1:]
    api = HfApi()
    api.create_repo(repo, exist_ok=True)
    print(api.upload_file(path_or_fileobj=path, path_in_repo=name, repo_id=repo).oid)
"""
DOWNLOAD = """
    import hashlib, sys
    from huggingface_hub import hf_hub_download
    print(hashlib.sha256(open(hf_hub_download(*sys.argv[1:]), "rb").read()).hexdigest())
"""


def noise(nbytes: int, seed: int) -> bytes:
    rng = random.Random(seed)
    return b"".join(rng.randbytes(min(1 << 20, nbytes - at)) for at in range(0, nbytes, 1 << 20))


def mixed(seed: int) -> bytes:
    """Content that is packed in all three ways, in one file."""
    floats = struct.pack("<200000f", *(1 + number / 65536 for number in range(200_000)))
    text = b"".join(b"line %07d of a text that repeats itself\n" % number for number in range(40_000))
    return noise(3_000_000, seed) + floats + text + noise(1_000_001, seed + 1)


def put(folder: Path, data: bytes, name: str = "file.bin") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "make", [lambda: noise(90_000_000, 1), lambda: mixed(2), lambda: b"x", lambda: bytes(30_000_000)]
)
def test_what_was_uploaded_comes_back_by_xet_and_by_plain_http(
    hub: Hub, tmp_path: Path, make: Callable[[], bytes]
) -> None:
    data = make()
    hub.client(UPLOAD, "hubshard/model", put(tmp_path, data), "model.safetensors")
    sha256 = hashlib.sha256(data).hexdigest()
    assert hub.client(DOWNLOAD, "hubshard/model", "model.safetensors").strip() == sha256
    plain = hub.client(DOWNLOAD, "hubshard/model", "model.safetensors", home=tmp_path / "plain", xet=False)
    assert plain.strip() == sha256
    counted = hub.counters("models/hubshard/model")
    assert 0 < counted["xet_received"] < len(data) * 1.01 + 1000
    assert counted["xet_sent"] == counted["xet_received"]
    assert counted["resolve_sent"] == len(data)
    assert counted["lfs_received"] == 0


def test_plain_ranges_of_a_xet_file_are_slices(hub: Hub, tmp_path: Path) -> None:
    data = mixed(7)
    hub.client(UPLOAD, "hubshard/model", put(tmp_path, data), "model.bin")
    rng = random.Random(8)
    ranges = [sorted((rng.randrange(len(data)), rng.randrange(len(data)))) for _ in range(40)]
    ranges += [[start, start + 65_535] for start in (rng.randrange(len(data) - 65_536) for _ in range(60))]
    code = """
        import hashlib, json, sys
        from huggingface_hub import get_session, hf_hub_url
        url = hf_hub_url("hubshard/model", "model.bin")
        for start, last in json.loads(sys.argv[1]):
            answer = get_session().get(url, headers={"Range": f"bytes={start}-{last}"})
            assert answer.status_code == 206
            print(hashlib.sha256(answer.content).hexdigest())
    """
    found = hub.client(code, json.dumps(ranges)).split()
    assert found == [hashlib.sha256(data[start : last + 1]).hexdigest() for start, last in ranges]


def test_xet_ranges_are_slices(hub: Hub, tmp_path: Path) -> None:
    data = mixed(9)
    path = put(tmp_path, data)
    hub.client(UPLOAD, "hubshard/model", path, "model.bin")
    code = """
        import random, sys
        import hf_xet
        from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
        from huggingface_hub.utils import build_hf_headers
        from huggingface_hub.utils._xet import refresh_xet_connection_info
        data = open(sys.argv[1], "rb").read()
        xet = get_hf_file_metadata(hf_hub_url("hubshard/model", "model.bin")).xet_file_data
        found = refresh_xet_connection_info(file_data=xet, headers=build_hf_headers())
        group = hf_xet.XetSession().new_download_stream_group(
            endpoint=found.endpoint, token=found.access_token, token_expiry_unix_secs=found.expiration_unix_epoch)
        info = hf_xet.XetFileInfo(xet.file_hash, len(data))
        rng = random.Random(10)
        for _ in range(40):
            start, stop = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
            assert b"".join(group.download_stream(info, start, stop + 1)) == data[start : stop + 1]
        print("equal")
    """
    assert hub.client(code, path).strip() == "equal"


def test_a_repeated_upload_sends_nothing_new(hub: Hub, tmp_path: Path) -> None:
    data = noise(70_000_000, 20)
    path = put(tmp_path, data)
    hub.client(UPLOAD, "hubshard/model", path, "one.bin")
    sent = hub.counters("models/hubshard/model")["xet_received"]
    # By clients that remember nothing.
    hub.client(UPLOAD, "hubshard/model", path, "two.bin", home=tmp_path / "fresh")
    assert hub.counters("models/hubshard/model")["xet_received"] == sent
    longer = put(tmp_path, data + noise(600_000, 21), "longer.bin")
    hub.client(UPLOAD, "hubshard/model", longer, "three.bin", home=tmp_path / "fresher")
    assert hub.counters("models/hubshard/model")["xet_received"] - sent < 1_000_000
    got = hub.client(DOWNLOAD, "hubshard/model", "three.bin").strip()
    assert got == hashlib.sha256(longer.read_bytes()).hexdigest()
    # To another repo everything travels: nobody learns what other repos hold.
    hub.client(UPLOAD, "hubshard/other", path, "one.bin", home=tmp_path / "freshest")
    assert hub.counters("models/hubshard/other")["xet_received"] > len(data)


def test_an_upload_that_was_killed_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    path = put(tmp_path, noise(140_000_000, 30))
    killed = """
        import os, sys, threading, time
        from huggingface_hub import HfApi, get_session
        api = HfApi()
        api.create_repo("hubshard/model")
        def watch():
            while True:
                counted = get_session().get(f"{api.endpoint}/-/counters").json()["total"]
                if counted["xet_received"] > 60_000_000:
                    os._exit(9)
                time.sleep(0.01)
        threading.Thread(target=watch, daemon=True).start()
        api.upload_file(path_or_fileobj=sys.argv[1], path_in_repo="model.bin", repo_id="hubshard/model")
    """
    assert hub.try_client(killed, path).returncode == 9
    before = hub.counters("models/hubshard/model")["xet_received"]
    hub.client(UPLOAD, "hubshard/model", path, "model.bin", home=tmp_path / "fresh")
    again = hub.counters("models/hubshard/model")["xet_received"] - before
    assert again < 140_000_000 - 60_000_000 + 1_000_000
    assert hub.client(DOWNLOAD, "hubshard/model", "model.bin").strip() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_four_clients_at_once_may_upload_the_same_bytes(hub: Hub, tmp_path: Path) -> None:
    path = put(tmp_path, noise(40_000_000, 40))
    code = """
        import sys
        from concurrent.futures import ThreadPoolExecutor
        import subprocess, os
        from huggingface_hub import HfApi
        api = HfApi()
        api.create_repo("hubshard/model")
        client = "import sys; from huggingface_hub import HfApi;" \\
            "HfApi().upload_file(path_or_fileobj=sys.argv[1], path_in_repo=sys.argv[2], repo_id='hubshard/model')"
        running = [
            subprocess.Popen([sys.executable, "-c", client, sys.argv[1], f"{number}.bin"],
                             env=os.environ | {"HF_HOME": f"{os.environ['HF_HOME']}-{number}"})
            for number in range(4)
        ]
        assert [item.wait() for item in running] == [0, 0, 0, 0]
        print(len({item.lfs.sha256 for item in api.list_repo_tree("hubshard/model") if getattr(item, "lfs", None)}))
    """
    assert hub.client(code, path).strip() == "1"
    assert sum(file.stat().st_size for file in (hub.root / "xorbs").glob("*/*")) < 41_000_000
    for number in range(4):
        got = hub.client(DOWNLOAD, "hubshard/model", f"{number}.bin", home=tmp_path / f"reader-{number}")
        assert got.strip() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_client_that_remembers_its_upload_can_upload_again_after_garbage_collection(hub: Hub, tmp_path: Path) -> None:
    path = put(tmp_path, noise(20_000_000, 50))
    hub.client(UPLOAD, "hubshard/model", path, "model.bin")
    hub.client("from huggingface_hub import HfApi; HfApi().delete_repo('hubshard/model')")
    assert hub.gc(grace_seconds=-1).xorbs == 1
    assert not list((hub.root / "xorbs").glob("*/*"))
    hub.client(UPLOAD, "hubshard/model", path, "model.bin")
    assert hub.client(DOWNLOAD, "hubshard/model", "model.bin").strip() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_another_server_behind_the_same_address_gets_everything(hub: Hub, tmp_path: Path) -> None:
    path = put(tmp_path, noise(20_000_000, 60))
    hub.client(UPLOAD, "hubshard/model", path, "model.bin")
    hub.stop()
    hub.root.rename(tmp_path / "gone")
    hub.restart()
    hub.client(UPLOAD, "hubshard/model", path, "model.bin")
    assert hub.counters("models/hubshard/model")["xet_received"] > 20_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_the_server_stays_small_while_large_files_pass(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        for seed in range(4):
            file.write(noise(50_000_000, 70 + seed))
    hub.client(UPLOAD, "hubshard/model", path, "model.bin")
    hub.client(DOWNLOAD, "hubshard/model", "model.bin", home=tmp_path / "one")
    hub.client(DOWNLOAD, "hubshard/model", "model.bin", home=tmp_path / "two", xet=False)
    lines = Path(f"/proc/{hub.pid}/status").read_text().splitlines()
    peak_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    assert peak_kib < 150_000
