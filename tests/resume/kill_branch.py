"""A program: saves in forked children, each of which kills itself one step later, and looks at what is left.

Arguments: an empty folder, and what to do: "disk" (one process, a local folder), "ranks" (two ranks, one of which
dies), or "hub" and a repo (one process, the Hub of the environment). Prints what was seen, as JSON. A step is what
Python's audit hooks report below the folder (a file opened, renamed or removed), or an answer of the Hub.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hubshard import ResumeBranch
from hubshard.errors import HubshardError
from hubshard.steps.places import BranchPlace, LocalPlace
from hubshard.steps.step import MANIFEST_NAME, step_folder
from hubshard.store.hub import HubStore

assert sys.platform != "win32"  # it forks

STEPS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
ENDED_WHOLE, FAILED, _ANSWER = 0, 7, 100
FOLDER = Path(sys.argv[1])


def state_of(seed: int, ranks: list[int]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = {"same": torch.randn(200, 300, generator=generator), "n": seed}
    for rank in ranks:
        state[f"rank{rank}"] = {"own": torch.full((50_000,), seed * 10.0 + rank), "n": seed}
    return state


def is_state(state: dict[str, Any], seed: int, ranks: list[int]) -> bool:
    other = state_of(seed, ranks)
    tensors = [(state["same"], other["same"])]
    tensors += [(state[f"rank{rank}"]["own"], other[f"rank{rank}"]["own"]) for rank in ranks]
    return state["n"] == seed and all(torch.equal(one, two) for one, two in tensors)


def open_branch(disk: Path, repo: str | None, **options: Any) -> ResumeBranch:
    return ResumeBranch(repo, local_dir=disk, keep=2, signals=(), max_file_size="250KB", **options)


def save(disk: Path, repo: str | None, steps: list[int], ranks: list[int]) -> None:
    with open_branch(disk, repo) as branch:
        branch.restore(state_of(0, ranks))
        for step in steps:
            branch.save(state_of(step, ranks), step)
            branch.wait()


def restored(disk: Path, repo: str | None, ranks: list[int]) -> int:
    state = state_of(0, ranks)
    with open_branch(disk, repo) as branch:
        step = branch.restore(state)
    assert step is not None
    assert is_state(state, step, ranks), step
    return step


def fork(work: Callable[[], None]) -> int:
    """Start a child; its process id."""
    child = os.fork()
    if child:
        return child
    status = FAILED
    try:
        work()
        status = ENDED_WHOLE
    except HubshardError as error:
        print(error, file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


def end_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(work: Callable[..., int | None], *arguments: Any) -> int:
    """Do something in a child that must not fail; a small number that it found."""

    def answer() -> None:
        os._exit(_ANSWER + (work(*arguments) or 0))

    status = end_of(fork(answer))
    assert status >= _ANSWER, status
    return status - _ANSWER


def die(killer: Killer, *, answers: bool, work: Callable[[], None]) -> int:
    """Do something in a child that dies at a step; its status, which is `ENDED_WHOLE` where it has fewer steps."""

    def victim() -> None:
        killer.arm(answers=answers)
        work()

    status = end_of(fork(victim))
    assert status in {ENDED_WHOLE, -signal.SIGKILL}, status
    return status


class Killer(logging.Handler):
    """Kills this process at a step."""

    def __init__(self, below: Path, die_at: int) -> None:
        super().__init__()
        self.below, self.die_at, self.steps = str(below), die_at, 0
        self.guard = threading.Lock()

    def step(self) -> None:
        with self.guard:
            self.steps += 1
            if self.steps == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in STEPS and str(arguments[0]).startswith(self.below):
            self.step()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:  # "HTTP Request: ..."
            self.step()

    def arm(self, *, answers: bool) -> None:
        if answers:
            logger = next(logging.getLogger(name) for name in ("httpx2", "httpx") if name in sys.modules)
            logger.addHandler(self)
            logger.setLevel(logging.INFO)
        else:
            sys.addaudithook(self.on_audit)


def start_ranks(world: int, store: Path, act: Callable[[int], None]) -> list[int]:
    def on(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        act(rank)

    return [fork(lambda rank=rank: on(rank)) for rank in range(world)]  # type: ignore[misc]


def look_at_disk(disk: Path, ranks: list[int]) -> int:
    """What is restored: one of both steps, and the older one is whole."""
    assert LocalPlace(disk).open(2).step.step == 2
    found = restored(disk, None, ranks)
    assert found in {2, 3}, found
    return found


def leftovers(disk: Path, kept: set[int]) -> int:
    """Whether anything of the killed save is left after the next one."""
    names = {path.name for path in disk.iterdir() if not path.name.startswith(".here-")}
    found = names != {step_folder(step) for step in kept}
    for step in kept:
        there = {path.name for path in (disk / step_folder(step)).iterdir()}
        found |= there != {*LocalPlace(disk).open(step).step.file_of, MANIFEST_NAME}
    return int(found)


def note(seen: dict[str, int], found: int) -> None:
    seen["old"] += found == 2
    seen["new"] += found == 3


def on_disk(seen: dict[str, int]) -> None:
    before = FOLDER / "before"
    in_child(save, before, None, [1, 2], [0])
    status = -signal.SIGKILL

    def look_and_go_on(disk: Path) -> int:
        found = look_at_disk(disk, [0])
        save(disk, None, [4], [0])
        return 10 * leftovers(disk, {found, 4}) + found

    while status != ENDED_WHOLE:
        seen["steps"] += 1
        disk = FOLDER / str(seen["steps"])
        shutil.copytree(before, disk)
        killer = Killer(disk, seen["steps"])
        status = die(killer, answers=False, work=partial(save, disk, None, [3], [0]))
        answer = in_child(look_and_go_on, disk)
        seen["left_behind"] += answer // 10
        note(seen, answer % 10)
        shutil.rmtree(disk)


def on_ranks(seen: dict[str, int]) -> None:
    before = FOLDER / "before"

    def act(rank: int, disk: Path, steps: list[int], store: Path, die_at: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        if die_at:
            Killer(disk, die_at).arm(answers=False)
        save(disk, None, steps, [rank])

    def both(disk: Path, steps: list[int], victim: int = -1, die_at: int = 0) -> list[int]:
        store = FOLDER / f"store-{os.urandom(4).hex()}"
        dying = [die_at if rank == victim else 0 for rank in range(2)]
        children = [fork(partial(act, rank, disk, steps, store, dying[rank])) for rank in range(2)]
        return [end_of(child) for child in children]

    assert both(before, [1, 2]) == [ENDED_WHOLE, ENDED_WHOLE]
    for victim in range(2):
        statuses: list[int] = []
        die_at = 1 + victim
        while statuses != [ENDED_WHOLE, ENDED_WHOLE]:
            seen["steps"] += 1
            disk = FOLDER / str(seen["steps"])
            shutil.copytree(before, disk)
            statuses = both(disk, [3], victim, die_at)
            assert set(statuses) <= {ENDED_WHOLE, FAILED, -signal.SIGKILL}, statuses
            found = in_child(look_at_disk, disk, [0, 1])
            note(seen, found)
            assert both(disk, [4]) == [ENDED_WHOLE, ENDED_WHOLE]
            seen["left_behind"] += leftovers(disk, {found, 4})
            shutil.rmtree(disk)
            die_at += 3


def on_hub(seen: dict[str, int], repo: str) -> None:
    disk = FOLDER / "disk"
    status, step = -signal.SIGKILL, 3

    def look_and_go_on(step: int) -> int:
        store = HubStore(repo)
        head = store.head("resume")
        assert head is not None
        place = BranchPlace(store, head, repo)
        whole = sorted(place.open(number).step.step for number in place.steps())
        assert len(whole) == 2, whole
        assert whole[-1] == step or (whole[-1] == step - 1 and step not in whole), (whole, step)
        assert restored(FOLDER / f"empty-{step}", repo, [0]) == whole[-1]
        save(disk, repo, [step + 1], [0])
        return int(whole[-1] == step)

    in_child(save, disk, repo, [1, 2], [0])
    while status != ENDED_WHOLE:
        seen["steps"] += 1
        status = die(Killer(disk, seen["steps"]), answers=True, work=partial(save, disk, repo, [step], [0]))
        is_new = in_child(look_and_go_on, step)
        seen["new"] += is_new
        seen["old"] += not is_new
        step += 2


def main() -> None:
    torch.set_num_threads(1)  # a thread would not outlive the fork
    save(FOLDER / "imports", None, [1], [0])  # what this imports is imported once, before the forks
    restored(FOLDER / "imports", None, [0])
    seen = {"steps": 0, "old": 0, "new": 0, "left_behind": 0}
    if sys.argv[2] == "disk":
        on_disk(seen)
    elif sys.argv[2] == "ranks":
        on_ranks(seen)
    else:
        on_hub(seen, sys.argv[3])
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
