"""Run by torchrun: trains until it is told to go, and saves to a Hub.

Arguments: a folder, the Hub's URL, the last step.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hubshard import ResumeBranch

OUT, ENDPOINT, LAST = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def main() -> int:
    faulthandler.enable()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    OUT.mkdir(parents=True, exist_ok=True)
    state = {"sum": torch.zeros(10_000), f"of rank {rank}": torch.zeros(1000)}
    disk = OUT / f"disk{rank}"  # each rank has its own, as on two machines
    with ResumeBranch("org/run", local_dir=disk, every=10_000, token="hf_test", endpoint=ENDPOINT) as branch:
        restored = branch.restore(state)
        (OUT / f"pid{rank}.part").write_text(str(os.getpid()))
        (OUT / f"pid{rank}.part").rename(OUT / f"pid{rank}")
        step = restored or 0
        assert state["sum"][0] == step * dist.get_world_size()
        while step < LAST:
            step += 1
            ones = torch.ones(10_000)
            dist.all_reduce(ones)
            state["sum"] += ones
            state[f"of rank {rank}"] += rank + 1
            time.sleep(0.01)
            if branch.should_save(step):
                branch.save(state, step)
            if branch.should_stop(step):
                break
        branch.wait()
        found: dict[str, Any] = {"restored": restored, "step": step, "exit_code": branch.exit_code}
        found |= {"steps": branch.steps(), "mine": float(state[f"of rank {rank}"][0])}
    (OUT / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return int(found["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
