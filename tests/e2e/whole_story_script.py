"""The training of the whole story: a tiny Llama on the bytes of a module of Python, one process per rank.

Arguments: the repo or "", the local folder, a folder for what it leaves, the step to go to, the step at which it dies
by SIGKILL (0: never).
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import hubshard
from hubshard import ResumableLoader, ResumeBranch, TrainState

REPO, LOCAL, OUT, STOP, DIES = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
TEXT = Path(textwrap.__file__).read_bytes()
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Windows:
    """Windows of the text, moved at random each time."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * 60 + int(torch.randint(0, 60, ()))
        return torch.tensor(list(TEXT[start : start + 24]))


def model_of_rank(rank: int, world: int) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.max_new_tokens = 12
    if REPO and rank == 0 and not (OUT / "published").exists():
        hubshard.push_to_hub(model, REPO, message="Before the training", private=True)
        (OUT / "published").touch()
    if world > 1:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model.train()


def main(rank: int, world: int) -> None:
    model = model_of_rank(rank, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    loader = ResumableLoader(Windows(), global_batch_size=8, micro_batch_size=2, seed=3)
    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    torch.manual_seed(100 + rank)
    losses = []
    with ResumeBranch(REPO or None, local_dir=LOCAL, every=3) as branch:
        restored = branch.restore(state)
        while state.step < STOP:
            loss = 0.0
            for tokens in loader:
                part = model(input_ids=tokens, labels=tokens).loss * loader.weight * world
                part.backward()
                loss += part.item()
                if not loader.ends_step:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                state.step += 1
                losses.append([state.step, loss.hex()])
                loss = 0.0
                if branch.should_save(state.step) or state.step == STOP:
                    branch.save(state, state.step)
                    branch.wait()
                if state.step == DIES:
                    os.kill(os.getpid(), 9)
                if state.step == STOP:
                    break
    whole = get_model_state_dict(model, options=WHOLE)
    if rank == 0:
        torch.save(whole, OUT / "trained.pt")
    (OUT / f"rank{rank}.json").write_text(json.dumps({"restored": restored, "losses": losses}))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="torch.distributed is .*assuming the intent is")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    try:
        main(int(os.environ.get("RANK", "0")), size)
    finally:
        if size > 1:
            dist.destroy_process_group()
