"""Run by torchrun on 2 ranks: a pipeline of two stages, each with a ResumeBranch of its own, as `TrainState` advises.

Arguments: a folder for what is found, one for the steps, a repo, and what is to happen: "whole", "refused", "killed"
(rank 1 dies before its save of step 6, when rank 0 has made its own) or "told" (rank 1 gets a signal in step 7).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hubshard import ResumableLoader, ResumeBranch, TrainState
from hubshard.errors import FormatError
from hubshard.steps.step import step_folder

OUT, STEPS, REPO, WHAT = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
LAST, EVERY, WIDTH = 10, 2, 8


class Stage:
    """Half of a model: the first sends what comes out of it to the second, which knows the loss."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(rank)
        self.rank = rank
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.model = torch.nn.ModuleDict({f"layer{rank}": self.layer, "drop": torch.nn.Dropout(0.2)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.data = ResumableLoader(torch.randn(64, WIDTH), global_batch_size=8, seed=1, rank=0, world_size=1)
        self.state = TrainState(model=self.model, optimizer=self.optimizer, data=self.data)

    def through(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model["drop"](self.layer(batch))
        return out

    def train(self, batch: torch.Tensor) -> float:
        """A step; its loss, on the second stage."""
        loss = torch.zeros(())
        if self.rank == 0:
            out = self.through(batch)
            dist.send(out.detach(), dst=1)
            grad = torch.empty_like(out)
            dist.recv(grad, src=1)
            torch.autograd.backward(out, grad)
        else:
            middle = torch.empty_like(batch)
            dist.recv(middle, src=0)
            middle.requires_grad_()
            loss = self.through(middle).square().mean()
            torch.autograd.backward(loss)
            assert middle.grad is not None
            dist.send(middle.grad, dst=0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def restore_common(branch: ResumeBranch, state: TrainState) -> int | None:
    """The newest step that all stages have."""
    saved: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(saved, branch.steps())
    common = max(set.intersection(*map(set, saved)), default=None)
    if common is not None:
        branch.restore(state, step=common)
        branch.rollback(common)
    return common


def any_stage(flag: bool) -> bool:
    """Whether it is up on any of them."""
    held = torch.tensor(int(flag))
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return bool(held)


def hurt(stage: Stage, branch: ResumeBranch) -> None:
    """What is to happen in this step happens."""
    if WHAT == "killed" and stage.state.step == 6:
        if stage.rank == 0:
            branch.save(stage.state, 6)
            branch.wait()
            (STEPS / "rank 0 has saved").touch()
        else:
            branch.wait()
            while not (STEPS / "rank 0 has saved").exists():
                time.sleep(0.05)
            os.kill(os.getpid(), 9)
    if WHAT == "told" and stage.state.step == 7 and stage.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)


def train(stage: Stage, group: dist.ProcessGroup) -> dict[str, Any]:
    """The run; what it found."""
    rank, state, losses = stage.rank, stage.state, {}
    with ResumeBranch(
        REPO,
        branch=f"resume-{rank}",
        local_dir=STEPS / f"stage-{rank}",
        process_group=group,
        every=EVERY,
        keep=9,
        keep_every=2 * EVERY,
    ) as branch:
        there = branch.steps()
        begun = restore_common(branch, state)
        is_over = False
        while not is_over:
            for batch in stage.data:
                loss = stage.train(batch)
                state.step += 1
                losses[state.step] = loss
                hurt(stage, branch)
                is_over = any_stage(branch.should_stop(state.step)) or state.step == LAST
                if is_over or branch.should_save(state.step):
                    branch.save(state, state.step)
                if is_over:
                    break
        branch.wait()
        weight = stage.layer.weight.detach().double().sum().item()
        return {"there": there, "begun": begun, "losses": losses, "steps": branch.steps(), "weight": weight}


def refused(stage: Stage) -> dict[str, Any]:
    """One ResumeBranch for both stages: what each of the ranks is told, by a restore and by a save."""
    found: dict[str, Any] = {}
    with ResumeBranch(REPO, branch="both", local_dir=STEPS / "both", signals=()) as branch:
        for name, call in (("restore", branch.restore), ("save", lambda state: branch.save(state, 1))):
            try:
                call(stage.state)
            except FormatError as error:
                found[name] = [error.message, error.hint]
        found["steps"] = branch.steps()
    found["folder"] = (STEPS / "both" / step_folder(1)).exists()
    return found


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([one]) for one in range(dist.get_world_size())]
    stage = Stage(rank)
    found = refused(stage) if WHAT == "refused" else train(stage, groups[rank])
    (OUT / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
