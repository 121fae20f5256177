"""A publish from memory against `save_pretrained` + `upload_folder`, to the embedded Hub on the same machine, by turns.

`python tests/bench/bench_publish.py [--root DIR] [--nbytes N] [--pairs N] [--max-shard-size S] [--streams N]
[--line MBS] [--no-xet] [--skip-kill]` makes a Llama of random bf16 bits in memory (they do not compress), each time in
a new process with an empty home and against a new Hub (`--line`: behind a line of so many MB/s), and prints:

- seconds from the call to the commit (imports and making the model left out), and their ratio per pair;
- extra peak memory: the highest resident size during the call less that before it;
- scratch: bytes that lie on the disk at the end beside the Hub's own;
- bytes that the Hub receives when the same is pushed again from a new process;
- bytes that it receives again after SIGKILL at 60 %: those before the kill and those of the next run, less the model's;
  once more with a next run that asks for no chunk of unfinished uploads, as if the Hub offered only what was finished
  (the embedded Hub offers all that has arrived).

`--root` should be a memory disk, so that the disk does not set the pace, with room for five times the model.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
from hubshard.hubserver import running
from tests.bench.line import line_to

OURS, PEER = "push_to_hub", "save + upload_folder"
KINDS = ("xet_received", "lfs_received", "regular_received")
KILL_AT = 0.6
ASKS_NOTHING = {"HF_XET_DEDUPLICATION_GLOBAL_DEDUP_QUERY_ENABLED": "false"}

PROGRAM = """
import json, os, sys, time
from pathlib import Path
import hf_xet, torch, transformers
from huggingface_hub import HfApi
import hubshard

hubshard.push_to_hub  # what it needs is imported now

who, nbytes, seed, shard, scratch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
layers = max((nbytes // 2 - 2 * 32000 * 1024) // 12_600_000, 1)  # elements: two embeddings, and so many blocks
config = transformers.LlamaConfig(hidden_size=1024, intermediate_size=2730, num_hidden_layers=layers,
                                  num_attention_heads=16, vocab_size=32000, dtype="bfloat16")
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
model.to_empty(device="cpu")
torch.manual_seed(seed)
for parameter in model.parameters():
    parameter.data.view(torch.int16).random_(-2**15, 2**15)
total = sum(parameter.nbytes for parameter in model.parameters())

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

print(total, flush=True)
sys.stdin.readline()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before, wall, cpu = status("VmRSS"), time.perf_counter(), time.process_time()
if who == "push_to_hub":
    hubshard.push_to_hub(model, "org/model", max_shard_size=shard, streams=int(sys.argv[6]) or None)
else:
    model.save_pretrained(scratch, max_shard_size=shard)
    api = HfApi()
    api.create_repo("org/model", exist_ok=True)
    api.upload_folder(repo_id="org/model", folder_path=scratch)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
print(json.dumps([wall, cpu, status("VmHWM") - before]))
"""


@dataclass(frozen=True)
class Bench:
    """What every run has in common."""

    folder: Path
    nbytes: int
    shard: str
    xet: bool
    streams: int
    line: float | None

    @contextmanager
    def hub(self) -> Iterator[str]:
        """A Hub that holds nothing."""
        root = Path(tempfile.mkdtemp(dir=self.folder))
        with running(root / "hub") as url:
            yield url
        shutil.rmtree(root)

    @contextmanager
    def started(
        self, who: str, url: str, home: Path, seed: int, more: Mapping[str, str]
    ) -> Iterator[tuple[subprocess.Popen[str], int]]:
        """A process that has the model in memory, and the model's bytes; it goes on when it is sent a line."""
        command = [sys.executable, "-c", PROGRAM, who, str(self.nbytes), str(seed), self.shard]
        command += [str(home / "scratch"), str(self.streams)]
        env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        env |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_TOKEN": "hf_bench", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        env |= dict(more) if self.xet else {"HF_HUB_DISABLE_XET": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, env=env, text=True, **pipes) as process:  # type: ignore[call-overload]
            yield process, int(process.stdout.readline())

    def run(
        self, who: str, url: str, seed: int, more: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[list[float], int, int]:
        """Seconds of wall and CPU and extra memory; bytes of scratch; bytes of the model."""
        home = Path(tempfile.mkdtemp(dir=self.folder))
        with self.started(who, url, home, seed, more) as (process, total):
            said = process.communicate("\n")[0]
        scratch = sum(path.stat().st_size for path in home.rglob("*") if path.is_file())
        shutil.rmtree(home)
        return json.loads(said), scratch, total

    def killed(self, who: str, url: str, seed: int) -> int:
        """Kill it when the Hub has received 60 % of the model; the model's bytes."""
        home = Path(tempfile.mkdtemp(dir=self.folder))
        with self.started(who, url, home, seed, {}) as (process, total):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            while received(url) < KILL_AT * total:
                if process.poll() is not None:
                    raise SystemExit(f"{who} ended before it was to be killed")
                time.sleep(0.005)
            process.kill()
        shutil.rmtree(home)
        return total


def received(url: str) -> int:
    with urllib.request.urlopen(f"{url}/-/counters") as answer:  # noqa: S310  # our own Hub
        total: Mapping[str, int] = json.load(answer)["total"]
    return sum(total[kind] for kind in KINDS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path)
    parser.add_argument("--nbytes", type=int, default=2**30)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--max-shard-size", default="256MB")
    parser.add_argument("--streams", type=int, default=0, help="of push_to_hub; 0 for its default")
    parser.add_argument("--line", type=float, help="MB/s in each direction")
    parser.add_argument("--no-xet", action="store_true")
    parser.add_argument("--skip-kill", action="store_true")
    options = parser.parse_args()
    print(f"load {psutil.getloadavg()[0]:.1f} on {os.cpu_count()} cores; shards of {options.max_shard_size}")
    print(f"streams: {options.streams or 'default'}; line: {options.line or 'none'}")
    with tempfile.TemporaryDirectory(dir=options.root) as name:
        bench = Bench(
            Path(name), options.nbytes, options.max_shard_size, not options.no_xet, options.streams, options.line
        )
        compare(bench, options.pairs)
        if not options.skip_kill:
            for who in (OURS, PEER):
                for hub, more in (("", {}), (", Hub that offers only finished files", ASKS_NOTHING)):
                    print(
                        f"{who:22} sent again after SIGKILL at 60 %{hub}: {sent_again(bench, who, more) / 1e6:.1f} MB"
                    )


def sent_again(bench: Bench, who: str, more: Mapping[str, str]) -> int:
    """Bytes that the Hub receives twice, when the next run has such environment variables."""
    with bench.hub() as url:
        total = bench.killed(who, url, seed=1000)
        bench.run(who, url, seed=1000, more=more)
        return received(url) - total


def compare(bench: Bench, pairs: int) -> None:
    rows: dict[str, list[list[float]]] = {OURS: [], PEER: []}
    for number in range(pairs):
        for who in (OURS, PEER) if number % 2 else (PEER, OURS):
            with bench.hub() as url, line_to(url, bench.line and bench.line * 1e6) as at:
                figures, scratch, total = bench.run(who, at, seed=number)
                rows[who].append(figures)
                if number == 0:
                    first = received(url)
                    bench.run(who, url, seed=number)
                    again = received(url) - first
                    print(
                        f"{who:22} {total / 1e6:.0f} MB model, {first / 1e6:.1f} MB received, "
                        f"{scratch / 1e6:.1f} MB of scratch, {again / 1e6:.3f} MB received when pushed again"
                    )
    for who, found in rows.items():
        walls = ", ".join(f"{wall:.2f}" for wall, _, _ in found)
        wall, cpu, memory = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{who:22} {wall:6.2f} s ({walls})  CPU {cpu:.2f} s  {memory / 1e6:.0f} MB extra")
    ratios = [ours[0] / theirs[0] for ours, theirs in zip(rows[OURS], rows[PEER], strict=True)]
    said = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"ratio of each pair: {said}; median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
