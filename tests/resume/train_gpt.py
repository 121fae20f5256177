"""A small real training: a GPT on bytes, with everything in it that makes it hard to go on exactly.

One process per rank trains as told by a JSON object (see `Told`); `serve` starts them as forks of a process that has
imported everything already, so that a life is short enough to be ended many times.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import textwrap
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first step of an optimizer would import it
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from hubshard.resume.branch import ResumeBranch
from hubshard.resume.data.loader import ResumableLoader
from hubshard.resume.state import train_parts as train_parts  # noqa: PLC0414  # imported once, before the forks
from hubshard.resume.state.train_state import TrainState
from hubshard.steps.canonical import encode
from hubshard.store import hub as hub  # noqa: PLC0414  # imported once, before the forks

assert sys.platform != "win32"  # it forks

CONTEXT, WIDTH, HEADS = 24, 32, 4
GLOBAL_BATCH, MICRO_BATCH = 8, 2
TEXT = Path(textwrap.__file__).read_bytes()  # a module of Python itself


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a rank is to do."""

    out: str
    local_dir: str
    repo: str | None = None
    steps: int
    stop_at: int | None = None
    every: int = 2
    rank: int = 0
    ranks: int = 1
    store: str = ""
    workers: int = 0
    epochs: int = 99
    seed: int = 5
    keep: int = 2
    dump: list[str] = field(default_factory=list)


class Windows:
    """Windows of the text, moved and with errors, both drawn anew each time."""

    def __len__(self) -> int:
        return 101

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        start = index * 37 + random.randrange(37)
        window = torch.tensor(list(TEXT[start : start + CONTEXT + 1]))
        seen = window[:-1].clone()
        seen[torch.rand(CONTEXT) < 0.05] = torch.randint(0, 256, ()).item()
        if np.random.random() < 0.1:
            seen[:3] = 32
        return seen, window[1:], index


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, WIDTH))
        done: torch.Tensor = x + self.mlp(self.norm2(x))
        return done


class Gpt(nn.Module):
    """Its embedding and its head are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores


class Run:
    """The training of one rank."""

    def __init__(self, told: Told) -> None:
        self.told = told
        torch.manual_seed(1)  # the same weights on all ranks
        self.model = Gpt()
        if told.ranks > 1:
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
        groups: list[dict[str, Any]] = [
            {"params": [weight for weight in self.model.parameters() if weight.dim() > 1]},
            {"params": [weight for weight in self.model.parameters() if weight.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.99))
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, told.steps)
        self.ema = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.loader = ResumableLoader(
            Windows(),
            global_batch_size=GLOBAL_BATCH,
            micro_batch_size=MICRO_BATCH,
            seed=told.seed,
            drop_last=False,
            num_workers=told.workers,
            prefetch_factor=3 if told.workers else None,
            persistent_workers=bool(told.workers),
        )
        self.history: list[float] = []
        self.state = TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            ema=self.ema,
            data=self.loader,
            history=self.history,
        )
        torch.manual_seed(100 + told.rank)  # other dropout on each rank
        random.seed(told.rank)
        np.random.seed(told.rank)
        self._log = os.open(Path(told.out) / f"log-{told.rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def train(self) -> None:
        told = self.told
        with ResumeBranch(told.repo, local_dir=told.local_dir, keep=told.keep, every=told.every) as branch:
            restored = branch.restore(self.state)
            self.log(restored=restored)
            self.dump("restored")
            stop_at = told.stop_at or told.steps
            while self.state.step < stop_at:
                self._epoch(branch, stop_at)
            self.dump("saved")

    def _epoch(self, branch: ResumeBranch, stop_at: int) -> None:
        loss, indices = 0.0, []
        for seen, wanted, index in self.loader:
            predicted = self.model(seen)
            part = cross_entropy(predicted.flatten(0, 1), wanted.flatten()) * self.loader.weight * self.told.ranks
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.item()
            indices += index.tolist()
            if self.loader.ends_step:
                self._step(branch, loss, indices)
                loss, indices = 0.0, []
                if self.state.step == stop_at:
                    return

    def _step(self, branch: ResumeBranch, loss: float, indices: list[int]) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        for name, weight in self.model.named_parameters():
            self.ema[name].mul_(0.9).add_(weight.detach(), alpha=0.1)
        self.state.step += 1
        self.state.samples += len(indices)
        self.state.epoch = self.loader.epoch
        self.history.append(loss)
        drawn = [random.random(), np.random.random(), torch.rand(()).item()]  # the loop's own generators
        self.log(step=self.state.step, loss=loss.hex(), indices=indices, drawn=drawn)
        if branch.should_save(self.state.step) or self.state.step == self.told.stop_at:
            branch.save(self.state, self.state.step)

    def log(self, **what: Any) -> None:
        os.write(self._log, json.dumps(what).encode() + b"\n")  # one write: a kill leaves a whole line or none

    def dump(self, when: str) -> None:
        """Write down the hash of all tensors, and everything else."""
        if when in self.told.dump:
            found = digests_of(self.state)
            if self.told.rank == 0:
                (Path(self.told.out) / f"{when}.json").write_text(json.dumps(found, indent=1, sort_keys=True))


def digests_of(state: TrainState) -> dict[str, Any]:
    """The sha256 of each tensor of a state, as a whole, and what is no tensor; without what is a rank's own."""
    tree = state.state_dict()
    found: dict[str, Any] = {"values": encode(tree["values"]).decode("ascii")}
    for part in sorted(tree.keys() - {"values", "rng"}):
        for name, tensor in sorted(tree[part].items()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            raw = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[f"{part}.{name}"] = [str(whole.dtype), list(whole.shape), hashlib.sha256(raw).hexdigest()]
    return found


def train(told: Told) -> None:
    torch.use_deterministic_algorithms(mode=True)
    if told.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{told.store}", rank=told.rank, world_size=told.ranks)
    try:
        Run(told).train()
    finally:
        if told.ranks > 1:
            dist.destroy_process_group()


def serve() -> None:
    """Fork a rank for each line of input, in a group of its own with its workers; answer with its number.

    An empty line ends it all. "wait N" answers with the status of process N once it has ended.
    """
    torch.set_num_threads(1)  # no thread may run when a process is forked
    for line in sys.stdin:
        command = line.strip()
        if not command:
            return
        if command.startswith("wait "):
            _, status = os.waitpid(int(command[5:]), 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _live(Told(**json.loads(command)))
        os.setpgid(pid, pid)  # here too: it may be killed at once
        print(pid, flush=True)


def _live(told: Told) -> None:
    os.setpgid(0, 0)
    errors = os.open(Path(told.out) / f"errors-{told.rank}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    try:
        train(told)
    except BaseException:  # noqa: BLE001  # of a fork: nothing of its parent's may run
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    serve()
