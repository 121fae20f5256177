"""Fine-tune a causal language model on a text and publish it: weights in shards, config, tokenizer, one commit, a tag.

    pip install ".[transformers]"
    python recipes/publish_fine_tune.py --base HuggingFaceTB/SmolLM2-135M --text notes.txt --repo my-org/notes --tag v1

Run it again after a crash with the same weights, and only what is missing is sent.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import hubshard


def batches(ids: torch.Tensor, *, tokens: int, steps: int, seed: int = 0) -> Any:
    """So many windows of the text, at random places: tensors of shape (1, tokens)."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        start = int(torch.randint(max(1, len(ids) - tokens), (1,), generator=random))
        yield ids[start : start + tokens][None]


def fine_tune(model: Any, ids: torch.Tensor, *, tokens: int, steps: int, learning_rate: float) -> float:
    """Train on the text; the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    loss = torch.tensor(float("nan"))
    model.train()
    for batch in batches(ids, tokens=tokens, steps=steps):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return loss.item()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--base", required=True, help="a directory, or org/name on the Hub")
    options.add_argument("--text", required=True, type=Path, help="what to train on")
    options.add_argument("--repo", required=True, help="org/name; made if it does not exist")
    options.add_argument("--tag", help="of the new commit")
    options.add_argument("--max-shard-size", default="5GB")
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--learning-rate", type=float, default=1e-5)
    chosen = options.parse_args()

    model = hubshard.from_pretrained(chosen.base)  # of a repo, only the bytes of the weights are fetched
    tokenizer = AutoTokenizer.from_pretrained(chosen.base)
    ids = torch.tensor(tokenizer(chosen.text.read_text("utf-8"))["input_ids"])
    loss = fine_tune(model, ids, tokens=chosen.tokens, steps=chosen.steps, learning_rate=chosen.learning_rate)

    published = hubshard.push_to_hub(
        model,
        chosen.repo,
        companions=[tokenizer],
        max_shard_size=chosen.max_shard_size,
        tag=chosen.tag,
        message=f"Fine-tune of {chosen.base}, loss {loss:.3f}",
    )
    print(f"{published.url}: shards: {published.shards}, bytes sent: {published.sent_bytes}")


if __name__ == "__main__":
    main()
