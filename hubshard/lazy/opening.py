"""What may be opened as a checkpoint, and how each kind is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hubshard.errors import FormatError, IncompleteError, IntegrityError, NotFoundError, StoreError
from hubshard.lazy.checkpoint import Checkpoint
from hubshard.protocols import Content, Entry, Revision, Source, Staged, Store
from hubshard.store.local import LocalStore
from hubshard.target import RepoTarget, parse_target

__all__ = ["open_checkpoint"]


def open_checkpoint(
    source: str | os.PathLike[str] | Source,
    *,
    revision: str | None = None,
    variant: str | None = None,
    subfolder: str = "",
    token: str | bool | None = None,
    endpoint: str | None = None,
) -> Checkpoint:
    """Open a checkpoint without reading a tensor: its index and the headers of its files are all that moves.

    Index and headers are checked against each other completely. Of a repo, the local cache is used where it holds the
    checkpoint and its config of that commit, also without a network.

    Args:
        source: a directory, a safetensors file or its index, `org/name[@revision]`, `hf://org/name[@revision]`, or a
            `Source`.
        revision: branch, tag or commit of a repo; None for main, or what `source` says.
        variant: as in `model.fp16.safetensors`.
        subfolder: of the repo or directory, where the checkpoint is.
        token: for the Hub; None for the one that is logged in.
        endpoint: of the Hub; None for the usual one.

    Raises:
        NotFoundError: no such path, repo, revision, or no safetensors weights there.
        FormatError: index and shards do not agree, or something is not what it should be.
        IncompleteError: shards without their index.
    """
    if not isinstance(source, (str, os.PathLike)):
        if revision or variant or subfolder:
            raise FormatError("a Source has no revision, variant or subfolder", hint="leave them out")
        return Checkpoint(source)
    target = parse_target(source if isinstance(source, str) else Path(source))
    if isinstance(target, RepoTarget):
        return _open_repo(
            target, revision=revision, subfolder=subfolder, variant=variant, token=token, endpoint=endpoint
        )
    if revision:
        raise FormatError(f"{target} is a path, which has no revision {revision!r}", hint="leave revision out")
    return _open_path(target, subfolder, variant)


def _open_path(path: Path, subfolder: str, variant: str | None) -> Checkpoint:
    if path.is_dir():
        return _at_head(LocalStore(path), folder=subfolder, variant=variant)
    if subfolder:
        raise FormatError(f"{path} is not a directory, so it has no folder {subfolder!r}", hint="leave subfolder out")
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist", hint="give a directory, a safetensors file, its index, or a repo")
    if path.name.endswith(".json"):
        return _at_head(LocalStore(path.parent), path=path.name, variant=variant)
    store = _LoneFile(path)
    return Checkpoint.of_store(store, store.at, path=path.name, root=path.parent)


def _at_head(store: LocalStore, *, variant: str | None, folder: str = "", path: str | None = None) -> Checkpoint:
    at = store.head("main")
    if at is None:
        raise NotFoundError(f"{store.root} does not exist")
    return Checkpoint.of_store(store, at, folder=folder, path=path, variant=variant)


def _open_repo(
    target: RepoTarget,
    *,
    revision: str | None,
    subfolder: str,
    variant: str | None,
    token: str | bool | None,
    endpoint: str | None,
) -> Checkpoint:
    from hubshard.store.hub import HubStore  # noqa: PLC0415  # the client is slow to import

    if revision and target.revision and revision != target.revision:
        raise FormatError(f"two revisions are asked for, {target.revision!r} and {revision!r}", hint="leave one out")
    branch = revision or target.revision or "main"
    store = HubStore(target.repo_id, token=token, endpoint=endpoint)
    try:
        at = store.head(branch)
    except StoreError:  # no network: the newest that was fetched
        cached = _from_cache(target.repo_id, branch, subfolder, variant)
        if cached is None:
            raise
        return cached
    if at is None:
        raise NotFoundError(f"{target.repo_id} has no revision {branch!r}")
    cached = _from_cache(target.repo_id, at.commit, subfolder, variant)
    return cached or Checkpoint.of_store(store, at, folder=subfolder, variant=variant)


def _from_cache(repo_id: str, revision: str, subfolder: str, variant: str | None) -> Checkpoint | None:
    """The checkpoint in the Hugging Face cache, if all of it is there."""
    from hubshard.store.hub_cache import cached_snapshot  # noqa: PLC0415  # the client is slow to import

    snapshot = cached_snapshot(repo_id, revision)
    if snapshot is None or not (snapshot / subfolder / "config.json").is_file():
        return None
    try:
        return _at_head(LocalStore(snapshot), folder=subfolder, variant=variant)
    except (NotFoundError, FormatError, IncompleteError):  # not all of it, or damaged: the Hub has it whole
        return None


class _LoneFile(Store):
    # a directory with one file, whatever lies beside it

    def __init__(self, path: Path) -> None:
        self._path = path
        status = path.stat()
        self.at = Revision("main", f"{status.st_size}-{status.st_mtime_ns}")
        self._nbytes = status.st_size

    def head(self, branch: str) -> Revision | None:
        return self.at if branch == self.at.branch else None

    def list(self, at: Revision) -> Sequence[Entry]:
        return [Entry(self._path.name, self._nbytes, None, at.commit)]

    def read(self, at: Revision, path: str, start: int, stop: int, into: memoryview) -> None:
        with self._path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if f"{status.st_size}-{status.st_mtime_ns}" != at.commit or path != self._path.name:
                raise IntegrityError(f"{self._path} has changed since it was opened", hint="open it again")
            file.seek(start)
            rest = into.cast("B")[: stop - start]
            while rest.nbytes:
                count = file.readinto(rest)
                if not count:
                    raise IntegrityError(f"{self._path} ends before byte {stop}")
                rest = rest[count:]

    def stage(self, branch: str, path: str, data: Content, *, nbytes: int, sha256: str | None = None) -> Staged:
        raise NotImplementedError("a lone file is only read")

    def commit(self, branch: str, **_: Any) -> Revision:
        raise NotImplementedError("a lone file is only read")
