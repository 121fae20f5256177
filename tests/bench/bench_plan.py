"""How long it takes to plan a checkpoint of very many tensors and to write its index, and how much memory.

`python tests/bench/bench_plan.py [COUNT ...]` prints a table for 10,000, 100,000 and 1,000,000 tensors, a hundred to a
shard. Each count runs in a process of its own, so that its peak memory is its own; the tensors' specs are made before
the clock starts. What is timed: `plan_shards`, the header of every shard, and the bytes of the index.
"""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise

import psutil

from hubshard.plan import plan_shards
from hubshard.tensors import TensorSpec

COUNTS = (10_000, 100_000, 1_000_000)
SHAPE = (64, 128)
PER_SHARD = 100


def _specs(count: int) -> list[TensorSpec]:
    # a mixture of experts: names as long and as alike as real ones
    return [
        TensorSpec(f"model.layers.{number // 1000}.mlp.experts.{number % 1000}.down_proj.weight", "BF16", SHAPE)
        for number in range(count)
    ]


def _peak_bytes() -> int:
    if sys.platform != "win32":
        import resource

        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    else:
        found = int(psutil.Process().memory_info().peak_wset)
    return found


def measure(count: int) -> str:
    """One row of the table."""
    specs = _specs(count)
    max_shard_bytes = PER_SHARD * (specs[0].nbytes + 200)
    before = _peak_bytes()
    wall, cpu = time.perf_counter(), [time.process_time()]
    plan = plan_shards(specs, max_shard_bytes=max_shard_bytes)
    cpu.append(time.process_time())
    nbytes = plan.nbytes
    cpu.append(time.process_time())
    index = plan.index()
    cpu.append(time.process_time())
    wall = time.perf_counter() - wall
    planned, headers, indexed = (stop - start for start, stop in pairwise(cpu))
    return (
        f"| {count:,} | {len(plan.shards):,} | {nbytes / 1e9:,.1f} | {planned:.2f} | {headers:.2f} | {indexed:.2f} | "
        f"{cpu[-1] - cpu[0]:.2f} | {wall:.2f} | {(cpu[-1] - cpu[0]) / count * 1e6:.1f} | {len(index) / 1e6:.1f} | "
        f"{before / 1e6:.0f} | {_peak_bytes() / 1e6:.0f} |"
    )


def main() -> None:
    counts = [int(argument) for argument in sys.argv[1:]] or list(COUNTS)
    if len(counts) == 1:
        print(measure(counts[0]))
        return
    print(
        "| tensors | shards | GB | plan, CPU s | headers, CPU s | index, CPU s | all, CPU s | all, wall s | "
        "CPU µs per tensor | index, MB | peak MB of the specs | peak MB |"
    )
    print("|--:" * 12 + "|")
    for count in counts:
        print(
            subprocess.run([sys.executable, __file__, str(count)], capture_output=True, text=True, check=True).stdout,
            end="",
        )


if __name__ == "__main__":
    main()
