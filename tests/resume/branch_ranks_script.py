"""Run by torchrun on 3 ranks: groups of them save and restore; writes what each rank found.

Arguments: a folder, and the name of a repo on the Hub of the environment.
"""

from __future__ import annotations

import json
import logging
import resource
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hubshard import ResumeBranch, TrainState
from hubshard.errors import HubshardError
from hubshard.events import Event
from hubshard.steps.step import step_folder

OUT, REPO = Path(sys.argv[1]), sys.argv[2]
ROWS, COLUMNS = 1500, 300


def full(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


class Rank:
    """One rank of a group, and the state that it holds."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.rank, self.world = mesh.get_local_rank(), mesh.size()
        self.group = mesh.get_group()

    def state(self, seed: int) -> dict[str, Any]:
        whole = full(seed)
        part = whole.chunk(self.world)[self.rank].contiguous()
        shape: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
        return {
            "model": {
                "cut": DTensor.from_local(part, self.mesh, [Shard(0)], **shape),
                "same": DTensor.from_local(torch.full((40,), float(seed)), self.mesh, [Replicate()]),
                "count": torch.tensor(seed),
            },
            "epoch": seed,
            "rng": {f"rank{self.rank}": seed * 100 + self.rank},
        }

    def empty(self, saved_on: int) -> dict[str, Any]:
        state = self.state(0)
        state["rng"] = {key: value for key, value in state["rng"].items() if self.rank < saved_on}
        return state

    def check(self, state: dict[str, Any], seed: int, *, saved_on: int) -> None:
        expected = self.state(seed)
        assert state["epoch"] == seed
        assert state["rng"] == (expected["rng"] if self.rank < saved_on else {}), state["rng"]
        for key in ("cut", "same"):
            assert torch.equal(state["model"][key].to_local(), expected["model"][key].to_local()), key
        assert state["model"]["count"] == seed

    def open(self, folder: str, **options: Any) -> ResumeBranch:
        options = {"keep": 9, "signals": (), "process_group": self.group, **options}
        return ResumeBranch(options.pop("repo", REPO), local_dir=OUT / folder, **options)

    def restored(self, folder: str, *, saved_on: int, **options: Any) -> tuple[int | None, int]:
        """The step that was found, and the bytes that this rank read."""
        events: list[Event] = []
        state = self.empty(saved_on)
        with self.open(folder, on_event=events.append, **options) as branch:
            step = branch.restore(state)
        self.check(state, step or 0, saved_on=saved_on)
        return step, sum(event.nbytes for event in events if event.kind == "received")

    def barrier(self) -> None:
        dist.barrier(self.group)


def failure(call: Callable[[], Any]) -> str:
    try:
        call()
    except HubshardError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it did not fail")


def save_on_two(on: Rank, found: dict[str, Any]) -> None:
    with on.open("shared", branch="moved") as branch:
        for step in (1, 2):
            branch.save(on.state(step), step)
        branch.wait()
        found["saved"] = branch.steps()
        found["unsent"] = branch._saver.unsent
        found["is_first_of_disk"] = branch._saver._is_first_of_disk
        if on.rank == 1:
            time.sleep(0.3)
            (OUT / "last look").touch()
    found["left together"] = (OUT / "last look").exists()


def restore_elsewhere(on: Rank, found: dict[str, Any]) -> None:
    step, nbytes = on.restored(f"empty-{on.world}", branch="moved", saved_on=2)
    found[f"on {on.world}"] = step
    found[f"read on {on.world}"] = nbytes
    found[f"held on {on.world}"] = on.state(0)["model"]["cut"].to_local().nbytes


def disks_of_their_own(on: Rank, found: dict[str, Any]) -> None:
    disk = f"disk-{on.rank}"
    with on.open(disk, branch="own") as branch:
        branch.save(on.state(1), 1)
        found["owns its disk"] = branch._saver._is_first_of_disk
    files = sorted(path.name[:10] for path in (OUT / disk / step_folder(1)).iterdir())
    found["on its disk"] = files
    assert on.restored(disk, branch="own", saved_on=2)[0] == 1  # partly from its disk, partly from the branch
    with on.open(disk, repo=None) as branch:
        branch.save(on.state(2), 2)
    # no rank has what only the other stored, and the branch has it not: not a step of all
    assert on.restored(disk, branch="own", saved_on=2)[0] == 1
    on.barrier()
    if on.rank == 1:
        shutil.rmtree(OUT / disk)
    on.barrier()
    found["after the loss of a disk"] = on.restored(disk, branch="own", saved_on=2)[0]


def failures(on: Rank, found: dict[str, Any]) -> None:
    disk = f"failing-{on.rank}"
    with on.open(disk, repo=None) as branch:
        wrong = on.state(1) | ({"bad": object()} if on.rank == 1 else {})
        found["refused"] = failure(lambda: branch.save(wrong, 1))
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if on.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # its disk takes no file of a step
        on.barrier()
        branch.save(on.state(1), 1)
        found["failed"] = failure(branch.wait)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        branch.save(on.state(2), 2)
        branch.wait()


def busy(on: Rank, found: dict[str, Any]) -> None:
    gate, reached = threading.Event(), threading.Event()

    def hold(event: Event) -> None:
        if event.kind == "commit" and on.rank == 1:
            reached.set()
            gate.wait(100)

    with on.open("busy", repo=None, busy="skip", on_event=hold) as branch:
        assert branch.save(on.state(1), 1)
        if on.rank == 1:
            reached.wait(100)
        else:
            branch._saver.wait_for_disk()
        on.barrier()
        found["skipped"] = not branch.save(on.state(2), 2)
        gate.set()
        branch.wait()
        on.barrier()
        assert branch.save(on.state(3), 3)
        branch.wait()
        found["steps of a busy run"] = branch.steps()


def layouts(on: Rank, found: dict[str, Any]) -> None:
    with on.open("layouts", repo=None) as branch:
        state = on.state(1)
        branch.save(state, 1)
        plans = [branch._taker._plan]
        state["epoch"] = 2
        branch.save(state, 2)
        plans.append(branch._taker._plan)
        state[f"only{on.rank}"] = {"t": torch.full((3,), 7.0)} if on.rank == 1 else {}
        branch.save(state, 3)
        plans.append(branch._taker._plan)
        found["planned once"] = plans[0] is plans[1]
        found["planned anew"] = plans[1] is not plans[2]
        wanted = on.state(0) | ({"only1": {"t": torch.zeros(3)}} if on.rank == 1 else {})
        assert branch.restore(wanted) == 3
        assert on.rank == 0 or wanted["only1"]["t"].tolist() == [7.0] * 3


def flipped(on: Rank, found: dict[str, Any]) -> None:
    with on.open("flipped", repo=None) as branch:
        for step in (1, 2):
            branch.save(on.state(step), step)
    if on.rank == 0:
        (path,) = (OUT / "flipped" / step_folder(2)).glob("rank-00001-*")
        raw = bytearray(path.read_bytes())
        raw[-5] ^= 1
        path.write_bytes(raw)
    on.barrier()
    found["flipped"] = on.restored("flipped", repo=None, saved_on=2)[0]
    with on.open("flipped", repo=None) as branch:
        branch.restore(on.state(0))
        found["removed"] = branch.rollback(1)


def stage(rank: int, *, name: str, seed: int) -> TrainState:
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(6, 5), "norm": torch.nn.LayerNorm(5)})
    return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1 * (rank + 1)))


def unlike_ranks(on: Rank, found: dict[str, Any]) -> None:
    rank = on.rank
    layers = stage(rank, name=f"layer{rank}", seed=rank)
    shares = stage(rank, name="layer", seed=rank)
    alike = stage(rank, name="layer", seed=7)
    with on.open("unlike", repo=None) as branch:
        found["other layers"] = failure(lambda: branch.save(layers, 1))
        found["other shares"] = failure(lambda: branch.save(shares, 1))
        branch.save(alike, 1)
        branch.wait()
        found["saved of unlike"] = branch.steps()


def stages_apart(on: Rank, found: dict[str, Any], alone: list[Any]) -> None:
    with on.open(f"stage{on.rank}", repo=None, process_group=alone[on.rank]) as branch:
        saved = stage(on.rank, name=f"layer{on.rank}", seed=on.rank)
        saved.step = 10 + on.rank
        branch.save(saved, 1)
        other = stage(on.rank, name=f"layer{on.rank}", seed=5)
        assert branch.restore(other) == 1
        found["restored apart"] = other.step


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    try:
        alone = [dist.new_group([rank]) for rank in range(2)]
        meshes = {world: DeviceMesh("cpu", torch.arange(world)) for world in (1, 2, 3)}
        for world, act in [
            (2, save_on_two),
            (1, restore_elsewhere),
            (3, restore_elsewhere),
            (2, disks_of_their_own),
            (2, failures),
            (2, busy),
            (2, layouts),
            (2, flipped),
            (2, unlike_ranks),
        ]:
            if meshes[world].get_coordinate() is not None:
                act(Rank(meshes[world]), found)
            dist.barrier()
        if dist.get_rank() < 2:
            stages_apart(Rank(meshes[2]), found, alone)
    except BaseException:
        traceback.print_exc()
        raise
    (OUT / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
