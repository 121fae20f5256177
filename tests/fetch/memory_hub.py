"""A store in memory that can fail on request, and a reader that takes for whole what a loader would."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hubshard.errors import NotFoundError, StoreError
from hubshard.fetch.parts import PIECE_BYTES
from hubshard.fetch.pulling import Request
from hubshard.protocols import Content, Entry, Revision, Staged

Fault = Callable[[str, int, memoryview], None]
"""Called after each read with the path, the first byte and what was read: may change it, wait, or raise."""


def entry_of(path: str, content: bytes) -> Entry:
    """As the Hub would list it: large or binary files by sha256, others by git's blob id."""
    blob_id = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    sha256 = hashlib.sha256(content).hexdigest() if path.endswith((".safetensors", ".bin")) else None
    return Entry(path, len(content), sha256, blob_id)


Hook = Callable[[str, tuple[object, ...]], None]
"""What `sys.addaudithook` takes."""


class MemoryHub:
    """A Store of revisions that were put there; it counts the bytes that are read."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.is_down = False
        self.nbytes_read = 0
        self._commits: dict[str, Mapping[str, bytes]] = {}
        self._branches: dict[str, str] = {}
        self._lock = threading.Lock()

    def put(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Make a commit of exactly these files; its id."""
        listing = json.dumps([(path, entry_of(path, content).blob_id) for path, content in sorted(files.items())])
        commit = hashlib.sha1(listing.encode(), usedforsecurity=False).hexdigest()
        self._commits[commit] = dict(files)
        self._branches[branch] = commit
        return commit

    def head(self, branch: str) -> Revision | None:
        self._reach()
        commit = branch if branch in self._commits else self._branches.get(branch)
        return Revision(branch, commit) if commit else None

    def list(self, at: Revision) -> Sequence[Entry]:
        self._reach()
        return [entry_of(path, content) for path, content in sorted(self._commits[at.commit].items())]

    def read(self, at: Revision, path: str, start: int, stop: int, into: memoryview) -> None:
        self._reach()
        if path not in self._commits[at.commit]:
            raise NotFoundError(path)
        into[:] = self._commits[at.commit][path][start:stop]
        with self._lock:
            self.nbytes_read += stop - start
        if self.fault:
            self.fault(path, start, into)

    def stage(self, branch: str, path: str, data: Content, *, nbytes: int, sha256: str | None = None) -> Staged:
        raise NotImplementedError

    def commit(
        self,
        branch: str,
        *,
        parent: Revision | None,
        add: Sequence[Staged],
        remove: Sequence[str],
        message: str,
        publish_id: str,
    ) -> Revision:
        raise NotImplementedError

    def _reach(self) -> None:
        if self.is_down:
            raise StoreError("no route to host", retryable=True)


def request(hub: object = None, **changes: object) -> Request:
    """A request for everything usual, with changes."""
    usual: dict[str, object] = {
        "repo_id": "org/model",
        "revision": "main",
        "variant": None,
        "include": None,
        "exclude": None,
        "workers": 4,
        "max_retries": 3,
        "is_offline": False,
        "on_event": lambda _: None,
    }
    return Request(**(usual | changes))  # type: ignore[arg-type]


def noise(seed: int, nbytes: int) -> bytes:
    """Bytes that differ from seed to seed."""
    return random.Random(seed).randbytes(nbytes)


def weights(seed: int, nbytes: int) -> bytes:
    """A safetensors file of so many bytes, which differ from seed to seed."""
    for header_nbytes in range(64, 200):
        size = nbytes - 8 - header_nbytes
        text = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        if len(text) <= header_nbytes:
            return header_nbytes.to_bytes(8, "little") + text.ljust(header_nbytes) + noise(seed, size)
    raise AssertionError(nbytes)


def sharded(seed: int, count: int, nbytes: int) -> dict[str, bytes]:
    """The files of a model of `count` shards."""
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    index = {"metadata": {"seed": seed}, "weight_map": {f"layer.{i}": name for i, name in enumerate(names)}}
    shards = {name: weights(seed * 100 + i, nbytes + i) for i, name in enumerate(names)}
    return shards | small(seed) | {"model.safetensors.index.json": json.dumps(index).encode()}


def single(seed: int, nbytes: int) -> dict[str, bytes]:
    """The files of a model of one file."""
    return {"model.safetensors": weights(seed, nbytes)} | small(seed)


def small(seed: int) -> dict[str, bytes]:
    """Config and tokenizer; two files are empty."""
    return {
        "config.json": json.dumps({"seed": seed}).encode(),
        "sub/tokenizer.json": b"{}",
        "a.py": b"",
        "b.py": b"",
    }


def pipeline(seed: int, *, unet: str) -> dict[str, bytes]:
    """The files of a pipeline of diffusers: a unet, "sharded" or "single", and a vae that is always the same."""
    stem = "unet/diffusion_pytorch_model"
    if unet == "sharded":
        names = [f"{stem}-{number:05d}-of-00002.safetensors" for number in (1, 2)]
        weight_map = {str(number): name.removeprefix("unet/") for number, name in enumerate(names)}
        files = {name: weights(seed * 100 + number, 700 + number) for number, name in enumerate(names)}
        files[f"{stem}.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    else:
        files = {f"{stem}.safetensors": weights(seed * 100, 900)}
    components = {name: ["diffusers", f"Class{seed}"] for name in ("unet", "vae")}
    return files | {
        "model_index.json": json.dumps({"_class_name": "Pipeline", **components}).encode(),
        "vae/diffusion_pytorch_model.safetensors": weights(0, 500),
        "vae/config.json": b"{}",
        "unet/config.json": json.dumps({"seed": seed}).encode(),
        "scheduler/scheduler_config.json": json.dumps({"seed": seed}).encode(),
    }


_SHARD_BYTES = 5000
REVISIONS: Mapping[str, Callable[[], dict[str, bytes]]] = {
    "old": lambda: sharded(1, 2, _SHARD_BYTES),
    "other weights in as many shards": lambda: sharded(2, 2, _SHARD_BYTES),
    "a single file": lambda: single(2, _SHARD_BYTES),
    "only the config": lambda: sharded(1, 2, _SHARD_BYTES) | {"config.json": b"{}"},
    "six pieces": lambda: single(1, 6 * PIECE_BYTES),
    "old pipeline": lambda: pipeline(1, unet="sharded"),
    "a pipeline with other shards": lambda: pipeline(2, unet="sharded"),
    "a pipeline with a single file": lambda: pipeline(2, unet="single"),
    "a pipeline with another list alone": lambda: (
        pipeline(1, unet="sharded")
        | {"model_index.json": json.dumps({"unet": ["diffusers", "Other"], "vae": ["diffusers", "Other"]}).encode()}
    ),
}
"""Made anew in each process, to the same bytes."""


def held(folder: Path) -> dict[str, bytes]:
    """What a directory or snapshot holds, our private files left out."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".cache" not in path.relative_to(folder).parts
    }


def whole_model(folder: Path) -> dict[str, bytes] | None:
    """The config and weights that a loader would load, by its order of preference; None where it would fail."""
    single_file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not (folder / "config.json").exists():
        return None
    if single_file.exists():
        names = {"model.safetensors"}
    elif index.exists():
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    elif (folder / "pytorch_model.bin").exists():
        names = {"pytorch_model.bin"}
    else:
        return None
    if not all((folder / name).exists() for name in names):
        return None
    return {name: (folder / name).read_bytes() for name in {*names, "config.json"}}


def whole_pipeline(folder: Path) -> dict[str, bytes] | None:
    """The list of components, their configs and weights, that diffusers would load; None where it would fail."""
    model_index = folder / "model_index.json"
    if not model_index.exists():
        return None
    view = {"model_index.json": model_index.read_bytes()}
    for name, value in json.loads(view["model_index.json"]).items():
        component = whole_component(folder, name) if isinstance(value, list) else {}
        if component is None:
            return None
        view |= component
    return view


def whole_component(folder: Path, name: str) -> dict[str, bytes] | None:
    """The config and weights of a component, likewise, by the order of preference of diffusers."""
    stem = "diffusion_pytorch_model"
    index, config = folder / name / f"{stem}.safetensors.index.json", folder / name / "config.json"
    files = [folder / name / f"{stem}.safetensors"]
    if index.exists():
        files = [folder / name / file for file in set(json.loads(index.read_bytes())["weight_map"].values())]
    if not all(file.exists() for file in (config, *files)):
        return None
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in (config, *files)}
