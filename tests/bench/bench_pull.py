"""A verified pull against the unverified download of huggingface_hub, from one embedded Hub, in turns.

`python tests/bench/bench_pull.py [--root DIR] [--nbytes N] [--pairs N] [--line MBS] [--no-xet] [--skip-kill]` makes a
repo of four shards of random bytes, then lets both fetch it by turns, each time in a new process with an empty cache.
Printed: seconds from the call to its return (imports left out), seconds of CPU, and peak memory of the process; then
the bytes that are fetched again after SIGKILL at 60 %: what the Hub sends to the killed run and the next one, less what
it sends to one that is left alone. `--line` puts a line of so many MB/s between client and Hub; without it the two
cores that both share set the pace. `--root` should be a memory disk, so that the disk does not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
from hubshard.hubserver import running
from tests.bench.line import line_to

REPO = "org/model"
KILL_AT = 0.6
PREPARE = """
import json, os, sys
from pathlib import Path
from huggingface_hub import HfApi
folder, nbytes = Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir()
names = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
index = {"metadata": {}, "weight_map": {f"t{number}": name for number, name in enumerate(names)}}
(folder / "model.safetensors.index.json").write_text(json.dumps(index))
(folder / "config.json").write_text("{}")
size = nbytes // 4 - 8 - 96
head = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode().ljust(96)
for name in names:
    (folder / name).write_bytes((96).to_bytes(8, "little") + head + os.urandom(size))
HfApi().create_repo("org/model", exist_ok=True)
HfApi().upload_folder(repo_id="org/model", folder_path=folder)
"""
MEASURE = """
import json, resource, sys, time
{imports}
wall, cpu = time.perf_counter(), time.process_time()
{call}
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
print(json.dumps([wall, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""
CALLS = {
    "hubshard.pull": MEASURE.format(imports="from hubshard import pull\nimport hf_xet", call="pull('org/model')"),
    "snapshot_download": MEASURE.format(
        imports="from huggingface_hub import snapshot_download\nimport hf_xet",
        call="snapshot_download('org/model', ignore_patterns=['.gitattributes'])",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path)
    parser.add_argument("--nbytes", type=int, default=2**30)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--line", type=float, help="MB/s in each direction")
    parser.add_argument("--no-xet", action="store_true")
    parser.add_argument("--skip-kill", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.root) as name, running(Path(name) / "hub") as url:
        folder = Path(name)
        env = environment(url, folder / "home", xet=not options.no_xet)
        subprocess.run([sys.executable, "-c", PREPARE, folder / "made", str(options.nbytes)], env=env, check=True)
        shutil.rmtree(folder / "made")
        print(f"load {psutil.getloadavg()[0]:.1f} on {os.cpu_count()} cores; line: {options.line or 'none'}")
        with line_to(url, options.line and options.line * 1e6) as at:
            report(compare(folder, env | {"HF_ENDPOINT": at}, options.pairs), options.nbytes)
        for who in () if options.skip_kill else CALLS:
            again = fetched_again(who, folder / "killed", env, url, options.nbytes)
            print(f"{who:18} fetched again after SIGKILL at 60 %: {again / 1e6:.1f} MB")


def environment(url: str, home: Path, *, xet: bool) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_TOKEN": "hf_bench", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return env if xet else env | {"HF_HUB_DISABLE_XET": "1"}


def compare(folder: Path, env: dict[str, str], pairs: int) -> dict[str, list[list[float]]]:
    """What each call measured, by turns."""
    found: dict[str, list[list[float]]] = {name: [] for name in CALLS}
    for number in range(pairs):
        for name in list(CALLS) if number % 2 else list(reversed(CALLS)):
            home = folder / "fresh"
            done = subprocess.run(
                [sys.executable, "-c", CALLS[name]],
                env=env | {"HF_HOME": str(home)},
                check=True,
                stdout=subprocess.PIPE,
            )
            found[name].append(json.loads(done.stdout))
            shutil.rmtree(home)
    return found


def fetched_again(name: str, home: Path, env: dict[str, str], url: str, nbytes: int) -> int:
    """Bytes that the Hub sends more than once when a run is killed and the next one goes on from what it left."""
    command, env = [sys.executable, "-c", CALLS[name]], env | {"HF_HOME": str(home)}
    before = sent(url)
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(home)
    alone = sent(url) - before
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
        while sent(url) - before - alone < KILL_AT * nbytes:
            if process.poll() is not None:
                raise SystemExit(f"{name} ended before it was to be killed")
            time.sleep(0.002)
        process.kill()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(home)
    return sent(url) - before - 2 * alone


def sent(url: str) -> int:
    with urllib.request.urlopen(f"{url}/-/counters") as answer:  # noqa: S310  # our own Hub
        total: dict[str, int] = json.load(answer)["total"]
    return total["xet_sent"] + total["resolve_sent"]


def report(found: dict[str, list[list[float]]], nbytes: int) -> None:
    for name, rows in found.items():
        walls = ", ".join(f"{wall:.2f}" for wall, _, _ in rows)
        wall, cpu, memory = (statistics.median(column) for column in zip(*rows, strict=True))
        speed = f"{nbytes / wall / 1e6:5.0f} MB/s"
        print(f"{name:18} {wall:6.2f} s ({walls})  {speed}  CPU {cpu:.2f} s  {memory / 1e6:.0f} MB")
    ours, theirs = ([row[0] for row in found[name]] for name in ("hubshard.pull", "snapshot_download"))
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    print(
        f"ratio of each pair: {', '.join(f'{ratio:.2f}' for ratio in ratios)}; median {statistics.median(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
