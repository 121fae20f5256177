"""A program that forks clients: imports are paid for once, and each client can be killed alone.

Reads one job per line from stdin, as JSON: `{"do": "push" | "pull", "arguments": {...}, "home": ..., "die_at": ...}`.
Writes one line with the child's process id before the child begins, and one when it has ended: exit status and the
events that it told, with sizes; the error that ended it, by its name, is the last. One job at a time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

import hubshard
import hubshard.fetch.hub
import hubshard.publish.push
from hubshard.events import Event
from tests.faults.models import weights

assert sys.platform != "win32"  # it forks

FILE_STEPS = {"open", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate", "os.mkdir", "os.rmdir"}


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        begin_read, begin_write = os.pipe()
        told_read, told_write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(begin_write)
            os.close(told_read)
            os.read(begin_read, 1)  # until whoever is to kill us knows us
            _run(job, told_write)
        os.close(begin_read)
        os.close(told_write)
        print(child, flush=True)
        sys.stdin.readline()
        os.write(begin_write, b"x")
        os.close(begin_write)
        with os.fdopen(told_read, "rb") as told:
            events = [json.loads(event) for event in told.read().splitlines()]
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"status": status, "events": events}), flush=True)


def _run(job: dict[str, Any], told: int) -> None:
    home = Path(job["home"])
    os.environ.update(HF_HOME=str(home), HF_XET_CACHE=str(home / "xet"), TMPDIR=str(home / "tmp"))
    lock, count = threading.Lock(), 0

    def on_event(event: Event) -> None:
        nonlocal count
        with lock:
            os.write(told, json.dumps([event.kind, event.path, event.nbytes]).encode() + b"\n")
            count += 1
            if count == job.get("die_at_event"):
                os.kill(os.getpid(), signal.SIGKILL)

    if "die_at_step" in job:
        sys.addaudithook(_killer(job["home"], job["die_at_step"]))
    try:
        _do(job["do"], job["arguments"], on_event)
    except BaseException as error:  # noqa: BLE001  the parent is told, and the child ends here in any case
        os.write(told, json.dumps([type(error).__name__, str(error), 0]).encode() + b"\n")
        os._exit(1)
    os._exit(0)


def _do(what: str, arguments: dict[str, Any], on_event: Any) -> None:
    if what == "push":
        seed, repo_id = arguments.pop("seed", 0), arguments.pop("repo_id")
        model: dict[str, np.ndarray[Any, Any]] = dict(weights(seed))
        hubshard.push_to_hub(arguments.pop("source", model), repo_id, on_event=on_event, **arguments)
    else:
        hubshard.pull(arguments.pop("repo_id"), on_event=on_event, **arguments)


def _killer(below: str, die_at: int) -> Any:
    """An audit hook that ends this process before its n-th step among the files below a folder."""
    steps, lock = 0, threading.Lock()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal steps
        if event in FILE_STEPS and any(str(argument).startswith(below) for argument in arguments[:2]):
            with lock:
                steps += 1
                if steps == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)

    return hook


if __name__ == "__main__":
    main()
