"""A program that saves to a Hub which then answers no more, and ends in some way, or is ended.

Arguments: an empty folder, how it ends, and the seconds of grace. It reads a line once it has printed READY.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

import torch

from hubshard import ResumeBranch

FOLDER, HOW, GRACE = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
STATE = {"w": torch.arange(1000.0), "n": 1}


def train() -> int:
    """Two steps on a Hub that is well, and one on a Hub that hangs; then as it is told."""
    rank = 0
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
    with ResumeBranch("org/run", local_dir=FOLDER / f"disk{rank}", grace_seconds=GRACE, keep=9) as branch:
        branch.save(STATE, 1)
        branch.wait()
        (FOLDER / f"pid{rank}").write_text(str(os.getpid()))
        print("READY", flush=True)
        while not (FOLDER / "go").exists():
            time.sleep(0.02)
        branch.save(STATE, 2)
        branch._saver.wait_for_disk()
        print("SAVED", flush=True)
        for step in range(3, 2 if HOW == "over" else 10**6):
            time.sleep(0.05)
            if rank or "RANK" in os.environ:
                torch.distributed.all_reduce(torch.ones(1))
            if branch.should_stop(step):
                branch.save(STATE, step)
                break
    return branch.exit_code


def leave() -> int:
    """A save, and the end of the program, without a `with` block or close()."""
    branch = ResumeBranch(None if HOW == "full disk" else "org/run", local_dir=FOLDER / "disk0", signals=())
    if HOW == "full disk":
        import resource  # not on Windows

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    assert branch.save(STATE, 1)
    if HOW == "forgotten":
        del branch
    if HOW == "raises":
        raise ZeroDivisionError
    return 3 if HOW == "exit 3" else 0


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(train() if HOW in {"over", "trains"} else leave())
