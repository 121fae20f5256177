"""A program that forks others, so that what is slow to import is imported once for all of them.

Arguments: a socket's file descriptor, and the modules to import. Each message on the socket is one job as JSON, with
the standard streams of the new process and a pipe: its process id is written there, and its exit status when it has
ended. It ends when the other end of the socket is closed. See `warm.py`, which is that other end.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

assert sys.platform != "win32"  # it forks

LOCALHOST = "127.0.0.1"


def main() -> int:
    for name in sys.argv[2:]:
        import_module(name)
    if "torch" in sys.modules:
        complete_streams(sys.modules["torch"].cpu)
    gc.collect()
    gc.freeze()  # the children share it with us
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        while True:
            message, streams, _, _ = socket.recv_fds(channel, 1 << 20, 4)
            reap()
            if not message:
                return 0
            if os.fork() == 0:
                channel.close()
                return keep(json.loads(message), streams)
            for stream in streams:
                os.close(stream)


def complete_streams(cpu: Any) -> None:
    """Give streams of the CPU, which do nothing, the two methods that torch 2.6 lacks and its FSDP2 calls."""
    if not hasattr(cpu.Stream, "record_event"):
        cpu.Stream.record_event = lambda *_: cpu.Event()
        cpu.Stream.wait_event = lambda *_: None


def reap() -> None:
    """Take leave of those that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def keep(job: dict[str, Any], streams: list[int]) -> int:
    """Fork the program and tell how it ended; returns in the program alone, with its status."""
    *standard, told = streams
    child = os.fork()
    if child == 0:
        os.close(told)
        for number, stream in enumerate(standard):
            os.dup2(stream, number)
            os.close(stream)
        return begin(job)
    for stream in standard:
        os.close(stream)
    os.write(told, f"{child}\n".encode())
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(told, f"{status}\n".encode())
    os._exit(0)


def begin(job: dict[str, Any]) -> int:
    """Be a process of its own, and the program in it, or the launcher of its ranks."""
    os.setsid()
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as other processes, each has its own
    if job["ranks"]:
        return launch(job["ranks"], job["argv"])
    become(job["argv"])
    return 0


def launch(world: int, argv: list[str]) -> int:
    """Start ranks as torchrun does, with a store that outlives each of them; where one fails, all end."""
    pipes = [os.pipe() for _ in range(world)]
    ranks: dict[int, int] = {}
    for rank, (port_read, _) in enumerate(pipes):
        child = os.fork()
        if child == 0:
            be_rank(rank, world, os.read(port_read, 16).decode())
            become(argv)
            return 0
        ranks[child] = rank
    import_module("torch.distributed")
    store = sys.modules["torch.distributed"].TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    for _, port_write in pipes:
        os.write(port_write, str(store.port).encode())
    is_failed = False
    while ranks:
        child, status = os.wait()
        rank = ranks.pop(child)
        if status and not is_failed:
            is_failed = True
            print(f"rank {rank} failed: {os.waitstatus_to_exitcode(status)}", file=sys.stderr, flush=True)
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    os._exit(int(is_failed))


def be_rank(rank: int, world: int, port: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR=LOCALHOST,
        MASTER_PORT=port,
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"),
    )


def become(argv: list[str]) -> None:
    """Run what the arguments of `python` say: a script, or `-c` and code, or `-m` and a module."""
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:  # which is read when it is loaded
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    kind, *rest = argv
    if kind == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        program = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), program.__dict__)  # noqa: S102  the tests' own code
    elif kind == "-m":
        sys.path[0], sys.argv = str(Path.cwd()), rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(kind).resolve().parent), argv
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
