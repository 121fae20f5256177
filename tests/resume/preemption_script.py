"""Run by torchrun on gloo ranks that sum something in each step: rounds in which somebody is told to stop.

Arguments: a folder for what each rank found, and "rounds" or "outside". With "outside" the signals come from the test,
and the save takes a while.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hubshard.resume.agreement import StepAgreement
from hubshard.resume.cadence import Cadence
from hubshard.resume.preemption import DEFAULT_SIGNALS, Preemption

assert sys.platform != "win32"  # which has no such signals

OUT = Path(sys.argv[1])
NUMBERS = itertools.count()


def agreement_on(what: str) -> StepAgreement:
    """One of its own, over the store of the default process group."""
    store = torch.distributed.distributed_c10d._get_default_store()
    return StepAgreement(store, name=f"test/{what}/{next(NUMBERS)}", world_size=dist.get_world_size())


def train(preemption: Preemption, *, rng: random.Random, tell: Callable[[int], None] = lambda _: None) -> int:
    """Steps, in each of which the ranks wait for each other, until all are to stop."""
    step = 0
    while True:
        step += 1
        tell(step)
        total = torch.ones(4)
        dist.all_reduce(total)
        assert int(total[0]) == dist.get_world_size()
        if rng.random() < 0.2:
            time.sleep(rng.random() / 200)  # some ranks are late now and then
        if preemption.should_stop(step):
            assert preemption.should_stop(step)
            return step


def one_round(number: int, *, notice: bool) -> dict[str, Any]:
    """Some of the ranks are told at some moment of some step, by a signal or by a notice."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rng, common = random.Random(1000 * number + rank), random.Random(number)
    told = common.sample(range(world), common.randint(1, world))
    chosen = common.choice(DEFAULT_SIGNALS)
    delay = common.random() / 20 + rng.random() / 100
    noticed = threading.Event()

    def go() -> None:
        time.sleep(delay)
        if notice:
            noticed.set()
        else:
            os.kill(os.getpid(), chosen)

    agreement = agreement_on("stop")
    listening = Preemption(
        notice=noticed.is_set if notice else None, grace_seconds=50, agreement=agreement, poll_seconds=0.002
    )
    with listening:
        thread = threading.Thread(target=go)
        if rank in told:
            thread.start()
        step = train(listening, rng=rng)
        if rank in told:
            thread.join()  # or it would tell the next round
        return {
            "step": step,
            "stop_step": listening.stop_step,
            "exit_code": listening.exit_code,
            "expected": 75 if notice else 128 + chosen,
            "seconds_left": listening.seconds_left,
            "told": rank in told,
        }


def rounds() -> list[dict[str, Any]]:
    found = [one_round(number, notice=number % 4 == 3) for number in range(24)]
    found.append({"cadence": cadence()})
    return found


def cadence() -> Sequence[int]:
    """Every rank has its own idea of the time; the steps that are saved are the same."""
    chosen = Cadence("0.02s", rank=dist.get_rank(), agreement=agreement_on("save"))
    saved = []
    for step in range(1, 300):
        dist.all_reduce(torch.ones(4))
        if chosen.due(step):
            saved.append(step)
            chosen.saved(step, 0.0, 0.0)
    return saved


def outside() -> dict[str, Any]:
    rank = dist.get_rank()
    events: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: events.append(number))
    with Preemption(grace_seconds=40, agreement=agreement_on("stop")) as preemption:
        (OUT / f"pid{rank}.part").write_text(str(os.getpid()))
        (OUT / f"pid{rank}.part").rename(OUT / f"pid{rank}")
        step = train(preemption, rng=random.Random(rank))
        with (OUT / f"saved{rank}.part").open("wb") as file:
            for part in range(20):
                file.write(bytes([part]) * 1000)
                file.flush()
                os.fsync(file.fileno())
                time.sleep(0.05)
        (OUT / f"saved{rank}.part").rename(OUT / f"saved{rank}")
        dist.barrier()
        return {"step": step, "exit_code": preemption.exit_code, "events": events, "left": preemption.seconds_left}


def main() -> None:
    dist.init_process_group("gloo")
    found = rounds() if sys.argv[2] == "rounds" else outside()
    (OUT / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    if isinstance(found, dict):
        sys.exit(found["exit_code"])


if __name__ == "__main__":
    main()
