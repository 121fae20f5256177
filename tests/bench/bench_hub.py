"""Throughput of the embedded Hub with the real client, run by hand:

    python tests/bench/bench_hub.py --root /dev/shm/hub-bench --size 1GB [--repeat 3] [--memory-size 2GB]

Uploads and downloads one file of random bytes by Xet and by plain LFS (client and server on this machine, so they
share its cores), asks for ranges of 64 KiB over plain HTTP from both kinds of storage, and passes a large file for
the server's peak memory. Prints a table. `--root` is made, and removed at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hubshard.hubserver import Settings, process, stop

if TYPE_CHECKING:
    from collections.abc import Iterator

RANGE_BYTES = 64 << 10
RANGES = 400
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}

UPLOAD = """
import sys, time
from huggingface_hub import HfApi
api = HfApi()
api.create_repo(sys.argv[1], exist_ok=True)
start = time.perf_counter()
api.upload_file(path_or_fileobj=sys.argv[2], path_in_repo="file.bin", repo_id=sys.argv[1])
print(time.perf_counter() - start)
"""
DOWNLOAD = """
import sys, time
from huggingface_hub import HfApi, hf_hub_download
HfApi().whoami()
start = time.perf_counter()
hf_hub_download(sys.argv[1], "file.bin", local_dir=sys.argv[2])
print(time.perf_counter() - start)
"""


def main() -> None:
    chosen = _parser().parse_args()
    chosen.root.mkdir(parents=True)
    try:
        figures = [_round(chosen.root / f"round-{number}", chosen.size) for number in range(chosen.repeat)]
        peak = _peak_bytes(chosen.root / "memory", chosen.memory_size)
    finally:
        shutil.rmtree(chosen.root)
    print(f"{'':24}{'median':>10}{'best':>10}{'worst':>10}   of {chosen.repeat}, load now {psutil.getloadavg()[0]:.1f}")
    for name, unit in figures[0]:
        _print_row(name, unit, [row[name, unit] for row in figures])
    print(f"{'server peak memory':24}{peak / 1e6:10.0f} MB   ({chosen.memory_size / 1e9:g} GB through Xet and LFS)")


def _print_row(name: str, unit: str, values: list[float]) -> None:
    ordered = sorted(values, reverse=unit == "MB/s")
    print(f"{name:24}{statistics.median(ordered):10.1f}{ordered[0]:10.1f}{ordered[-1]:10.1f} {unit}")


def _round(folder: Path, nbytes: int) -> dict[tuple[str, str], float]:
    """All measurements once, with a server and clients that remember nothing."""
    figures: dict[tuple[str, str], float] = {}
    folder.mkdir()
    source = folder / "source.bin"
    _write_random(source, nbytes)
    with _server(folder / "hub") as (url, _):
        for kind in ("xet", "lfs"):
            repo = f"bench/{kind}"
            seconds = _client(url, folder / f"up-{kind}", kind, UPLOAD, repo, source)
            figures[f"{kind} up", "MB/s"] = nbytes / seconds / 1e6
            seconds = _client(url, folder / f"down-{kind}", kind, DOWNLOAD, repo, folder / f"got-{kind}")
            figures[f"{kind} down", "MB/s"] = nbytes / seconds / 1e6
            if (folder / f"got-{kind}" / "file.bin").stat().st_size != nbytes:
                raise SystemExit("the download has another size")
            latencies = _range_seconds(url, repo, nbytes)
            for name, rank in (("p50", 0.50), ("p95", 0.95)):
                figures[f"{kind} 64 KiB {name}", "ms"] = latencies[int(rank * len(latencies))] * 1000
    shutil.rmtree(folder)
    return figures


def _peak_bytes(folder: Path, nbytes: int) -> int:
    """The server's largest resident size while a file goes up and down by Xet and by LFS."""
    folder.mkdir()
    source = folder / "source.bin"
    _write_random(source, nbytes)
    with _server(folder / "hub") as (url, pid):
        for kind in ("xet", "lfs"):
            _client(url, folder / f"up-{kind}", kind, UPLOAD, f"bench/{kind}", source)
            _client(url, folder / f"down-{kind}", kind, DOWNLOAD, f"bench/{kind}", folder / "got")
            shutil.rmtree(folder / "got")
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@contextmanager
def _server(root: Path) -> Iterator[tuple[str, int]]:
    started, url = process(root, settings=Settings())
    try:
        yield url, started.pid
    finally:
        stop(started)


def _client(url: str, home: Path, kind: str, code: str, *arguments: str | Path) -> float:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_TOKEN": "hf_bench", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if kind == "lfs":
        env["HF_HUB_DISABLE_XET"] = "1"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def _range_seconds(url: str, repo: str, nbytes: int) -> list[float]:
    """How long each of many ranges took, over one connection, in order of duration."""
    connection = HTTPConnection(url.removeprefix("http://"))
    rng, seconds = random.Random(0), []
    for _ in range(RANGES):
        first = rng.randrange(nbytes - RANGE_BYTES)
        start = time.perf_counter()
        headers = {"Range": f"bytes={first}-{first + RANGE_BYTES - 1}", "Authorization": "Bearer hf_bench"}
        connection.request("GET", f"/{repo}/resolve/main/file.bin", headers=headers)
        answer = connection.getresponse()
        if len(answer.read()) != RANGE_BYTES or answer.status != 206:
            raise SystemExit(f"a range was answered with {answer.status}")
        seconds.append(time.perf_counter() - start)
    connection.close()
    return sorted(seconds)


def _write_random(path: Path, nbytes: int) -> None:
    with path.open("wb") as file:
        for at in range(0, nbytes, 10**7):
            file.write(os.urandom(min(10**7, nbytes - at)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Throughput of the embedded Hub with the real client.")
    parser.add_argument("--root", type=Path, required=True, help="a directory that does not exist; a tmpfs is best")
    parser.add_argument("--size", type=_nbytes, default=10**9, help="of the file, such as 1GB")
    parser.add_argument("--memory-size", type=_nbytes, default=2 * 10**9, help="of the file for the peak memory")
    parser.add_argument("--repeat", type=int, default=3)
    return parser


def _nbytes(text: str) -> int:
    return int(float(text[:-2]) * _UNITS[text[-2:].upper()])


if __name__ == "__main__":
    main()
