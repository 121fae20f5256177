"""Sharded training (FSDP2) that goes on exactly, on as many ranks as before or on others.

    pip install ".[torch]"
    torchrun --nproc-per-node 2 recipes/train_fsdp2.py --repo my-org/my-run --steps 300

Each rank saves its own shards, and restores what it needs of those of all. On another number of ranks the weights, the
state of the optimizer and the order of the samples are the same; dropout draws anew. Told to go, all ranks save and
stop after the same step: by SIGUSR1 where every process of the job is told, as SIGTERM also ends the loaders' workers.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import hubshard

TEXT = Path(textwrap.__file__).read_bytes()
CONTEXT, WIDTH = 32, 64


class Windows:
    """Windows of the text, moved at random: the loader sees to it that a run that goes on draws the same."""

    def __len__(self) -> int:
        return len(TEXT) // CONTEXT - 2

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = CONTEXT * index + int(torch.randint(CONTEXT, ()))
        window = torch.tensor(list(TEXT[start : start + CONTEXT + 1]))
        return window[:-1], window[1:]


class Model(nn.Module):
    """A small transformer that guesses the next byte, and says how well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, seen: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = self.embed(seen) + self.position.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return cross_entropy(self.head(x).flatten(0, 1), wanted.flatten())


def train(repo_id: str, *, steps: int, local_dir: str, workers: int) -> int:
    """Train to the last step, or until told to stop; what to end the process with."""
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)  # the same weights on all ranks
    model = Model().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    # 16 samples a step over all ranks, whatever their number
    loader = hubshard.ResumableLoader(Windows(), global_batch_size=16, num_workers=workers)
    state = hubshard.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    torch.manual_seed(1 + dist.get_rank())  # other dropout on each

    with hubshard.ResumeBranch(repo_id, local_dir=local_dir, every=10) as branch:
        step = branch.restore(state)
        if dist.get_rank() == 0:
            print("starting anew" if step is None else f"going on from step {step}", flush=True)
        while state.step < steps and not branch.should_stop(state.step):
            for seen, wanted in loader:  # what is left of the epoch
                loss = model(seen.to(device), wanted.to(device)) * loader.weight
                (loss * dist.get_world_size()).backward()  # FSDP takes the mean over the ranks
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                state.step += 1
                dist.all_reduce(loss.detach_())
                if dist.get_rank() == 0:
                    print(f"step {state.step} loss {loss.item()!r}", flush=True)
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
    parser.add_argument("--local-dir", default="train_fsdp2_steps")
    parser.add_argument("--workers", type=int, default=2)
    told = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    code = train(told.repo, steps=told.steps, local_dir=told.local_dir, workers=told.workers)
    dist.destroy_process_group()
    sys.exit(code)
