"""What each of several ranks reads when it restores its share of a large step, saved by another number of ranks.

`python tests/bench/bench_resume_ranks.py [--gb 4] [--saved-by 2] [--restored-by 4] [--dir FOLDER]` trains one step of a
model of square layers, split by FSDP2 over gloo ranks, saves it from the first number of ranks, and restores it on the
second. Prints for each rank the bytes that it holds, those that it read, their ratio, the seconds, and by how much its
peak memory grew. The step is in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench.bench_resume_save import after_a_step, status_bytes

WIDTH = 2048


def make_state(nbytes: int) -> dict[str, Any]:
    """A model and its AdamW after a step, of so many bytes over all ranks (12 per parameter)."""
    import torch
    from torch.distributed.fsdp import fully_shard

    layers = max(1, round(nbytes / 12 / (WIDTH * WIDTH)))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return after_a_step(model)


def held_bytes(state: dict[str, Any]) -> int:
    """Bytes of the shares of this rank."""
    tensors = [*state["model"].parameters(), *(v for held in state["optimizer"].state.values() for v in held.values())]
    return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors)


def rank_main(do: str, nbytes: int, folder: str) -> None:
    """One rank: save or restore."""
    import torch
    import torch.distributed as dist

    from hubshard import ResumeBranch

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = make_state(nbytes)
    read: list[int] = []

    def note(event: Any) -> None:
        if event.operation == "restore" and event.kind == "received":
            read.append(event.nbytes)

    with ResumeBranch(None, local_dir=folder, signals=(), on_event=note) as branch:
        if do == "save":
            branch.save(state, 1)
        else:
            held = held_bytes(state)
            Path("/proc/self/clear_refs").write_text("5")
            before, began = status_bytes("VmRSS"), time.perf_counter()
            branch.restore(state)
            took, grew = time.perf_counter() - began, status_bytes("VmHWM") - before
            Path(folder, f"rank-{dist.get_rank()}.json").write_text(json.dumps([held, sum(read), took, grew]))
    dist.destroy_process_group()


def launch(do: str, ranks: int, nbytes: int, folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    subprocess.run([*command, "--rank", do, "--nbytes", str(nbytes), "--dir", str(folder)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--saved-by", type=int, default=2)
    parser.add_argument("--restored-by", type=int, default=4)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--rank", choices=("save", "restore"))
    parser.add_argument("--nbytes", type=int)
    given = parser.parse_args()
    if given.rank:
        rank_main(given.rank, given.nbytes, str(given.dir))
        return
    folder = Path(tempfile.mkdtemp(dir=given.dir))
    try:
        for do, ranks in (("save", given.saved_by), ("restore", given.restored_by)):
            launch(do, ranks, int(given.gb * 1e9), folder)
        print(f"saved by {given.saved_by}, restored by {given.restored_by} ranks on {os.cpu_count()} cores")
        print("| rank | holds, MB | read, MB | read / held | seconds | peak memory, + MB |\n|--:|--:|--:|--:|--:|--:|")
        for rank in range(given.restored_by):
            held, read, took, grew = json.loads((folder / f"rank-{rank}.json").read_text())
            print(
                f"| {rank} | {held / 1e6:.1f} | {read / 1e6:.1f} | {read / held:.4f} | {took:.1f} | {grew / 1e6:.0f} |"
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
