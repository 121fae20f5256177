"""Starts ranks as torchrun does, whose own store needs what torch lacks on Windows; where one fails, all end.

Arguments: how many, and those of Python for each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from torch._C._distributed_c10d import TCPStore

LOCALHOST = "127.0.0.1"


def main() -> int:
    world, argv = int(sys.argv[1]), sys.argv[2:]
    store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False, use_libuv=sys.platform != "win32")
    shared = {
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    env = {"OMP_NUM_THREADS": "1", **os.environ, **shared}
    ranks = [
        subprocess.Popen([sys.executable, *argv], env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(0.05)
    for rank in ranks:
        rank.terminate()
    failed = [number for number, rank in enumerate(ranks) if rank.wait()]
    if failed:
        print(f"ranks that failed: {failed}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
