"""Models in a job's workspace, and what a reader of the Hub sees of a repo."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi
from numpy.typing import NDArray
from safetensors.numpy import save_file

import hubshard
from hubshard.steps.places import LocalPlace
from hubshard.steps.step import step_folder
from hubshard.steps.writing import commit_step, stage_local
from hubshard.store.hub import HubStore
from tests.faults.models import weights
from tests.steps.saving import random_tensors, save_step

if TYPE_CHECKING:
    from tests.action.github_runner import Job, Ran
    from tests.conftest import Hub

__all__ = ["TOKEN", "Repo", "model", "ok", "publish", "save_step_of"]

TOKEN = "hf_test"
BOUND = "40KB"
"""Two tensors of `weights` per shard."""


class Repo:
    """A repo, as its readers see it."""

    def __init__(self, hub: Hub, name: str, *, token: str = TOKEN) -> None:
        self.hub = hub
        self.api = HfApi(endpoint=hub.url, token=token)
        self.name = name

    @property
    def heads(self) -> dict[str, str]:
        """Branches and tags."""
        refs = self.api.list_repo_refs(self.name)
        return {ref.name: ref.target_commit for ref in (*refs.branches, *refs.tags)}

    @property
    def head(self) -> str:
        """Of main."""
        return self.heads["main"]

    def files(self, revision: str = "main") -> set[str]:
        """Paths, but for what a repo is born with."""
        return set(self.api.list_repo_files(self.name, revision=revision)) - {".gitattributes"}

    def titles(self) -> list[str]:
        """Of main's commits, the newest first."""
        return [commit.title for commit in self.api.list_repo_commits(self.name)]

    def received(self, *, large: bool = False) -> int:
        """Bytes that the Hub received for it; those of large files alone if so wished."""
        kinds = ("lfs_received", "xet_received", *(() if large else ("regular_received",)))
        return sum(self.hub.counters(f"models/{self.name}")[kind] for kind in kinds)


def write_model(folder: Path, seed: int = 0, layers: int = 8) -> None:
    """Replace a folder by one of safetensors."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save_file(dict(weights(seed, layers)), folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")


def model(job: Job, seed: int = 0, layers: int = 8, *, name: str = "out") -> dict[str, str]:
    """A model in the workspace, and the inputs that name it."""
    write_model(job.workspace / name, seed, layers)
    return {"path": name, "max-shard-size": BOUND, "token": TOKEN}


def publish(repo: Repo, seed: int = 0, layers: int = 8, *, tag: str | None = None) -> None:
    """Publish a model without the action."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", seed, layers)
        hubshard.push_to_hub(
            Path(folder) / "model", repo.name, max_shard_size=BOUND, tag=tag, endpoint=repo.hub.url, token=TOKEN
        )


def save_step_of(repo: Repo, root: Path, step: int) -> dict[str, NDArray[Any]]:
    """Commit a step to the repo's branch of resume steps; the model in it."""
    tensors = random_tensors(6, (100, 20), seed=step)
    save_step(root, tensors | random_tensors(6, (100, 20), seed=99, prefix="optimizer.m."), step=step, world=2)
    store = HubStore(repo.name, token=TOKEN, endpoint=repo.hub.url)
    opened, folder = LocalPlace(root).open(step), root / step_folder(step)
    staged = [stage_local(store, "resume", folder / file.name, file, step=step) for file in opened.step.files]
    raw = (folder / "manifest.json").read_bytes()
    commit_step(store, "resume", parent=store.head("resume"), step=opened.step, raw=raw, staged=staged)
    return {name.removeprefix("model."): array for name, (_, array) in tensors.items()}


def ok(ran: Ran) -> Ran:
    """The run itself, which has to have succeeded."""
    assert ran.outcome == "success", ran.log
    return ran
