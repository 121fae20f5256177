"""Small models on a Hub: how they are put there, published, and what a plain client makes of them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from huggingface_hub import HfApi
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

import hubshard

if TYPE_CHECKING:
    from tests.conftest import Hub

__all__ = ["INDEX", "SHARD_BYTES", "Repo", "Weights", "equal", "new_repo", "read_folder", "weights"]

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 40_000
"""Bound per shard: two tensors of `weights`."""

Weights = dict[str, NDArray[np.float32]]


def weights(seed: int = 0, layers: int = 8) -> Weights:
    """Tensors of 16 kB each, which differ from seed to seed and from layer to layer."""
    return {
        f"layers.{i}.weight": np.random.default_rng((seed, i)).standard_normal((32, 128), dtype=np.float32)
        for i in range(layers)
    }


def equal(a: Mapping[str, NDArray[Any]], b: Mapping[str, NDArray[Any]]) -> bool:
    """Whether both have the same tensors, bit for bit."""
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def read_folder(folder: Path) -> Weights:
    """The tensors, as a loader finds them: the single file, else what the index names, all of it.

    Raises:
        FileNotFoundError: there is no whole model.
    """
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_bytes())["weight_map"]
    shards = {name: load_file(folder / name) for name in set(weight_map.values())}
    assert all(set(shards[file]) == {t for t, f in weight_map.items() if f == file} for file in shards)
    return {name: shards[file][name] for name, file in weight_map.items()}


@dataclass(frozen=True)
class Repo:
    """A repo on a Hub, published to through `url`, looked at directly."""

    hub: Hub
    repo_id: str
    url: str

    def through(self, url: str) -> Repo:
        """The same, published to by another way."""
        return replace(self, url=url)

    def push(self, source: Any, **options: Any) -> hubshard.Published:
        """Publish in small shards, each committed to the staging branch at once."""
        usual: dict[str, Any] = {"max_shard_size": SHARD_BYTES, "staging_batch_size": 1, "token": "hf_test"}
        return hubshard.push_to_hub(source, self.repo_id, endpoint=self.url, **(usual | options))

    def pull(self, **options: Any) -> Path:
        """Pull."""
        return hubshard.pull(self.repo_id, endpoint=self.url, **({"token": "hf_test"} | options))

    def put(self, model: Mapping[str, NDArray[Any]], *, shards: int = 1, **more: bytes) -> str:
        """Commit a model by plain HTTP, whole; the commit."""
        files = {"config.json": b'{"a": 1}', **more}
        if shards == 1:
            files["model.safetensors"] = save(dict(model), metadata={"format": "pt"})
        else:
            weight_map = {
                name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(model)
            }
            for file in set(weight_map.values()):
                mine = {name: value for name, value in model.items() if weight_map[name] == file}
                files[file] = save(mine, metadata={"format": "pt"})
            files[INDEX] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
        gone = [name for name in self.files() if name.startswith("model") and name not in files]
        return self.put_files(files, remove=gone)

    def put_files(self, files: Mapping[str, bytes], *, remove: list[str] | None = None, branch: str = "main") -> str:
        """Commit files by plain HTTP; the commit."""
        api = self.hub.api()
        lines: list[tuple[str, Any]] = [("deletedFile", {"path": path}) for path in remove or ()]
        for path, data in files.items():
            if path.endswith(".safetensors"):
                oid = api.upload(f"models/{self.repo_id}", data)
                lines.append(("lfsFile", {"path": path, "algo": "sha256", "oid": oid, "size": len(data)}))
            else:
                lines.append(api.file(path, data))
        answer = api.commit(f"models/{self.repo_id}", *lines, revision=branch)
        assert answer.status == 200, answer.body
        return str(answer.json["commitOid"])

    def files(self, revision: str = "main") -> dict[str, str]:
        """Path to content id."""
        items = self.hub.api()(
            "GET", f"/api/models/{self.repo_id}/tree/{revision.replace('/', '%2F')}?recursive=1"
        ).json
        return {item["path"]: item["oid"] for item in items if item["type"] == "file"}

    def branches(self) -> list[str]:
        """All of them."""
        refs = self.hub.api()("GET", f"/api/models/{self.repo_id}/refs").json
        return sorted(ref["name"] for ref in refs["branches"])

    def tags(self) -> dict[str, str]:
        """Tag to commit."""
        refs = self.hub.api()("GET", f"/api/models/{self.repo_id}/refs").json
        return {ref["name"]: ref["targetCommit"] for ref in refs["tags"]}

    def titles(self, revision: str = "main") -> list[str]:
        """Of the commits, newest first."""
        quoted = revision.replace("/", "%2F")
        return [item["title"] for item in self.hub.api()("GET", f"/api/models/{self.repo_id}/commits/{quoted}").json]

    def tensors(self, cache: Path, revision: str = "main") -> Weights:
        """What a plain client downloads into a cache, and loads."""
        api = HfApi(endpoint=self.hub.url, token="hf_test")
        return read_folder(Path(api.snapshot_download(self.repo_id, revision=revision, cache_dir=cache)))

    def nbytes_received(self) -> int:
        """Bytes of large files that the server took in, since the counters were reset."""
        counted = self.hub.counters(f"models/{self.repo_id}")
        return int(counted["xet_received"]) + int(counted["lfs_received"])

    def nbytes_sent(self) -> int:
        """Bytes of files that the server gave out."""
        counted = self.hub.counters(f"models/{self.repo_id}")
        return int(counted["xet_sent"]) + int(counted["resolve_sent"])


def new_repo(hub: Hub, url: str | None = None, *, namespace: str = "org") -> Repo:
    """A repo with a name of its own."""
    name = uuid.uuid4().hex[:12]
    answer = hub.api()("POST", "/api/repos/create", {"name": name, "organization": namespace, "type": "model"})
    assert answer.status == 200, answer.body
    return Repo(hub, f"{namespace}/{name}", url or hub.url)
