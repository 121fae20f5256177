"""What a stranger does who has huggingface_hub, and has never heard of hubshard; the demo runs this text as a program.

It imports nothing of hubshard. Usage: `list REPO`, `read REPO`, `hash DIR`, `embed DIR [DIR ...]`; prints JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.hf_api import RepoFile
from safetensors import deserialize


def list_repo(repo_id: str) -> dict[str, object]:
    """Head and files of a repo: path to size and hash."""
    api = HfApi()
    files = {
        item.path: [item.size, item.lfs.sha256 if item.lfs else item.blob_id]
        for item in api.list_repo_tree(repo_id, recursive=True)
        if isinstance(item, RepoFile)
    }
    branches = {branch.name: branch.target_commit for branch in api.list_repo_refs(repo_id).branches}
    return {"head": branches["main"], "branches": sorted(branches), "files": files}


def read_repo(repo_id: str) -> dict[str, object]:
    """Download a repo as anybody would, and hash each tensor that its index names."""
    folder = snapshot_download(repo_id)
    return {"folder": folder, "tensors": tensor_hashes(Path(folder))}


def tensor_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the bytes of each tensor, read by safetensors' own parser."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.exists():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return {
        name: hashlib.sha256(tensor["data"]).hexdigest()
        for file in sorted(names)
        for name, tensor in deserialize((folder / file).read_bytes())  # type: ignore[no-untyped-call]  # safetensors has no types
    }


def embed(folders: list[str]) -> list[str]:
    """SHA-256 of what the model in each folder makes of the same tokens, loaded by transformers."""
    import torch
    from transformers import AutoModel, logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # nor has transformers here
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # likewise
    digests = []
    for folder in folders:
        model = AutoModel.from_pretrained(folder).eval()
        tokens = torch.arange(3, 35).reshape(1, -1)
        with torch.inference_mode():
            state = model(input_ids=tokens).last_hidden_state
        digests.append(hashlib.sha256(state.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest())
    return digests


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    if verb == "list":
        answer: object = list_repo(arguments[0])
    elif verb == "read":
        answer = read_repo(arguments[0])
    elif verb == "hash":
        answer = tensor_hashes(Path(arguments[0]))
    else:
        answer = embed(arguments)
    sys.stdout.write(json.dumps(answer) + "\n")
