"""A plain PyTorch loop that may be killed at any moment: started again, here or elsewhere, it goes on exactly.

    pip install ".[torch]"
    python recipes/train_loop.py --repo my-org/my-run --steps 300

It trains a small model of bytes on a module that ships with Python, saves every tenth step to a folder and to the
branch "resume" of the repo, and when it is told to go (SIGTERM) saves and stops at the end of its step. A scheduler
that signals every process of a job should send SIGUSR1: SIGTERM also ends the data loader's workers.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hubshard

TEXT = Path(textwrap.__file__).read_bytes()


class Windows:
    """Windows of the text, moved at random: the loader sees to it that a run that goes on draws the same."""

    def __len__(self) -> int:
        return len(TEXT) // 32 - 2

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = 32 * index + int(torch.randint(32, ()))
        window = torch.tensor(list(TEXT[start : start + 33]))
        return window[:-1], window[1:]


class Model(nn.Module):
    """Guesses the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 48)
        self.body = nn.GRU(48, 96, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(96, 256))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(seen))[0])  # type: ignore[no-any-return]


def train(repo_id: str, *, steps: int, local_dir: str, workers: int) -> int:
    """Train to the last step, or until told to stop; what to end the process with."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    # 16 samples a step, in two parts whose gradients add up
    loader = hubshard.ResumableLoader(Windows(), global_batch_size=16, micro_batch_size=8, num_workers=workers)
    state = hubshard.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)

    with hubshard.ResumeBranch(repo_id, local_dir=local_dir, every=10) as branch:
        step = branch.restore(state)
        print("starting anew" if step is None else f"going on from step {step}", flush=True)
        while state.step < steps and not branch.should_stop(state.step):
            total = 0.0
            for seen, wanted in loader:  # what is left of the epoch
                loss = cross_entropy(model(seen).flatten(0, 1), wanted.flatten()) * loader.weight
                loss.backward()
                total += loss.item()
                if not loader.ends_step:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                state.step += 1
                print(f"step {state.step} loss {total!r}", flush=True)
                total = 0.0
                if branch.should_save(state.step) or state.step == steps:
                    branch.save(state, state.step)
                if branch.should_stop(state.step) or state.step == steps:
                    break
        branch.wait()  # until the Hub has it
        return branch.exit_code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repo", required=True, help="org/name; made, private, if it does not exist")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--local-dir", default="train_loop_steps")
    parser.add_argument("--workers", type=int, default=2)
    told = parser.parse_args()
    sys.exit(train(told.repo, steps=told.steps, local_dir=told.local_dir, workers=told.workers))
