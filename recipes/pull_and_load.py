"""Look at a model that is too large to load, take the piece that is needed, then pull all of it and check it.

    pip install ".[torch]"
    python recipes/pull_and_load.py my-org/my-model --tensor model.embed_tokens.weight --rows 10 --into ./copy

Pulled again after a kill, it goes on from the bytes that have arrived.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import hubshard


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("repo", help="org/name")
    options.add_argument("--revision", help="branch, tag or commit")
    options.add_argument("--tensor", required=True, help="a matrix of the model")
    options.add_argument("--rows", type=int, default=10, help="how many of its rows are wanted")
    options.add_argument("--into", required=True, type=Path, help="directory for the whole model")
    chosen = options.parse_args()

    # from the Hub, piece by piece: the index, a header per shard, then the bytes that are asked for
    with hubshard.open_checkpoint(chosen.repo, revision=chosen.revision) as checkpoint:
        print(f"tensors: {len(checkpoint)}, bytes: {checkpoint.nbytes}")
        for name, tensor in checkpoint.items():
            print(name, tensor.get_dtype(), tensor.get_shape())
        rows = checkpoint[chosen.tensor][: chosen.rows]

    # all of it, each file checked by its SHA-256, then each tensor by the index
    path = hubshard.pull(chosen.repo, revision=chosen.revision, local_dir=chosen.into)
    verified = hubshard.verify(path)
    print(f"{path}: {'whole' if verified.ok else 'damaged'}, tensors: {verified.tensors}")

    # into a module of one's own that has no memory yet: on the CPU, pages of the file rather than a copy
    columns = rows.shape[1]
    with torch.device("meta"):
        part = nn.Linear(columns, 1, bias=False)
        part.weight = nn.Parameter(torch.empty(_shape(path, chosen.tensor), device="meta"), requires_grad=False)
    hubshard.load_into(part, path, rename={chosen.tensor: "weight"}, strict=False)
    assert torch.equal(part.weight[: chosen.rows], rows)
    print(f"{chosen.tensor}[:{len(rows)}] is equal on the Hub and on disk")


def _shape(path: Path, name: str) -> list[int]:
    with hubshard.open_checkpoint(path) as checkpoint:
        return checkpoint[name].get_shape()


if __name__ == "__main__":
    main()
