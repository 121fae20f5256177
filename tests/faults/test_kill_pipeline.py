"""A publish of a pipeline that is killed: readers see all components of the old one, or all of the new one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import HfApi
from safetensors.numpy import load_file, save_file

from tests.faults.clients import Clients, Victim, clients
from tests.faults.models import SHARD_BYTES, Repo, Weights, equal, new_repo, weights
from tests.faults.proxy import proxied
from tests.systems import posix_only

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("starlette", reason="needs the extra hub")
pytestmark = posix_only

STEMS = {"text_encoder": "model", "unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model"}
SHARDS = 2 * len(STEMS)
NBYTES_OF_SHARD = 2 * 16_384 + 200
XET_OVERHEAD_BYTES = 100  # per file, for the frames of its chunks
BOUNDARIES = [
    (r"POST .*/xorbs/", 1),
    (r"POST .*/xorbs/", SHARDS),
    (r"POST .*/commit/hubshard%2Fstaging", 1),
    (r"POST .*/commit/hubshard%2Fstaging", SHARDS // 2),
    (r"POST .*/commit/hubshard%2Fstaging", SHARDS),
    (r"POST .*/commit/main", 1),
    (r"DELETE .*/branch/", 1),
]


@pytest.fixture(scope="module")
def forked(module_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    with clients(module_hub.client_env(tmp_path_factory.mktemp("home"))) as made:
        yield made


def components(seed: int) -> dict[str, Weights]:
    return {folder: weights(10 * seed + n, layers=4) for n, folder in enumerate(STEMS)}


def write_pipeline(folder: Path, seed: int) -> Path:
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"seed": seed}))
    for name, tensors in components(seed).items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
        save_file(tensors, folder / name / f"{STEMS[name]}.safetensors", {"format": "pt"})
    return folder


def read_pipeline(repo: Repo, cache: Path) -> dict[str, Weights]:
    """What a plain client finds, by the index of each folder, which names all that is there."""
    root = Path(HfApi(endpoint=repo.hub.url, token="hf_test").snapshot_download(repo.repo_id, cache_dir=cache))
    found: dict[str, Weights] = {}
    for folder, stem in STEMS.items():
        index = root / folder / f"{stem}.safetensors.index.json"
        files = {f"{stem}.safetensors"}
        if index.exists():
            files = set(json.loads(index.read_text())["weight_map"].values())
        assert {path.name for path in (root / folder).glob("*.safetensors")} == files
        found[folder] = {name: value for file in files for name, value in load_file(root / folder / file).items()}
    return found


def seed_of(found: dict[str, Weights]) -> int | None:
    return next((s for s in (1, 2) if all(equal(found[name], mine) for name, mine in components(s).items())), None)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("pattern", "number"), BOUNDARIES)
def test_old_or_new_is_seen_and_the_next_run_sends_nothing_twice(
    module_hub: Hub, forked: Clients, tmp_path: Path, pattern: str, number: int, when: str
) -> None:
    repo, victim = new_repo(module_hub), Victim()
    repo.push(write_pipeline(tmp_path / "old", 1), max_shard_size="1GB")
    options = {"max_shard_size": SHARD_BYTES, "staging_batch_size": 1, "message": "new", "token": "hf_test"}
    arguments = {"repo_id": repo.repo_id, "source": str(write_pipeline(tmp_path / "new", 2)), **options}
    with proxied(module_hub.port) as proxy:
        victim.dies_at(proxy, pattern, number, when=when)
        ended = forked.run("push", tmp_path / "1", victim=victim, arguments={**arguments, "endpoint": proxy.url})
        proxy.settle()
    assert ended.is_killed
    seen = seed_of(read_pipeline(repo, tmp_path / "seen"))
    assert seen in {1, 2}
    kept = SHARDS if seen == 2 else staged_shards(repo)
    before = repo.nbytes_received()
    assert forked.run("push", tmp_path / "2", arguments={**arguments, "endpoint": module_hub.url}).status == 0
    assert repo.nbytes_received() - before <= (SHARDS - kept) * (NBYTES_OF_SHARD + XET_OVERHEAD_BYTES)
    assert seed_of(read_pipeline(repo, tmp_path / "seen again")) == 2
    assert repo.titles().count("new") == 1
    assert repo.branches() == ["main"]


def staged_shards(repo: Repo) -> int:
    branches = [name for name in repo.branches() if name != "main"]
    return sum(path.startswith("staged/") for path in repo.files(branches[0])) if branches else 0
