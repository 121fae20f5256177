"""What the Hugging Face cache of this machine holds of a repo."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants

__all__ = ["cached_snapshot"]


def cached_snapshot(repo_id: str, revision: str) -> Path | None:
    """The folder of a model's revision in the cache, whole or not; None where there is none.

    Layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache.

    Args:
        repo_id: "org/name".
        revision: a commit; or a branch or tag, which stands for the commit that it was when it was last looked at.
    """
    repo = Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}"
    ref = repo / "refs" / revision
    commit = ref.read_text("utf-8").strip() if ref.is_file() else revision
    snapshot = repo / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() and snapshot.parent == repo / "snapshots" else None
