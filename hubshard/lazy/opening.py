"""What may be opened as a checkpoint, and how each kind is."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hubshard.errors import FormatError, IncompleteError, NotFoundError, StoreError
from hubshard.events import OnEvent, Operation, ignore
from hubshard.lazy.checkpoint import Checkpoint
from hubshard.lazy.verifying import promised, verify_files
from hubshard.protocols import Source
from hubshard.store.local import LocalStore
from hubshard.store.lone_file import LoneFile
from hubshard.store.opening import Opened, open_path, open_target
from hubshard.store.patience import Patience
from hubshard.target import RepoTarget, parse_target

__all__ = ["open_checkpoint"]

_LOG = logging.getLogger("hubshard")


def open_checkpoint(
    source: str | os.PathLike[str] | Source,
    *,
    revision: str | None = None,
    variant: str | None = None,
    subfolder: str = "",
    verify: bool = False,
    token: str | bool | None = None,
    endpoint: str | None = None,
    on_event: OnEvent = ignore,
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
        verify: read all files from end to end first, and compare with the sha256 that the Hub, or its cache, promises
            for them; `load_into` does so while it loads, in one pass.
        token: for the Hub; None for the one that is logged in.
        endpoint: of the Hub; None for the usual one.
        on_event: is told of each retry, as long as the checkpoint is open.

    Raises:
        NotFoundError: no such path, repo, revision, or no safetensors weights there.
        FormatError: index and shards do not agree, or something is not what it should be.
        IncompleteError: shards without their index.
        IntegrityError: `verify` is set, and a file has another sha256.
    """
    op = Operation("load", _name(source), on_event)
    checkpoint = _open(
        source,
        revision=revision,
        variant=variant,
        subfolder=subfolder,
        token=token,
        endpoint=endpoint,
        op=op,
    )
    if verify:
        if checkpoint.manifest is None or checkpoint.store is None or checkpoint.at is None:
            raise FormatError("a Source has no files to verify", hint="leave verify out")
        sha256 = promised(checkpoint.manifest, checkpoint.root)
        verify_files(checkpoint.store, checkpoint.at, checkpoint.manifest, sha256, checkpoint.reader.policy)
    return checkpoint


def _name(source: object) -> str:
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else ""


def _open(
    source: str | os.PathLike[str] | Source,
    *,
    revision: str | None,
    variant: str | None,
    subfolder: str,
    token: str | bool | None,
    endpoint: str | None,
    op: Operation,
) -> Checkpoint:
    if not isinstance(source, (str, os.PathLike)):
        if revision or variant or subfolder:
            raise FormatError("a Source has no revision, variant or subfolder", hint="leave them out")
        return Checkpoint(source)
    target = parse_target(source if isinstance(source, str) else Path(source))
    if isinstance(target, Path):
        return _checkpoint(open_target(target, revision=revision), subfolder, variant)
    try:
        patience = Patience(on_retry=op.retry)
        opened = open_target(source, revision=revision, token=token, endpoint=endpoint, patience=patience)
    except StoreError as error:
        return _without_network(error, target, revision or target.revision or "main", subfolder, variant, op)
    return _from_cache(target, opened.at.commit, subfolder, variant) or _checkpoint(opened, subfolder, variant)


def _without_network(
    error: StoreError, target: RepoTarget, revision: str, subfolder: str, variant: str | None, op: Operation
) -> Checkpoint:
    """The newest that was fetched, where nobody can say what is the newest of all."""
    from hubshard.store.hub_errors import is_unreachable  # noqa: PLC0415  # the client is slow to import

    cached = _from_cache(target, revision, subfolder, variant) if is_unreachable(error) else None
    if cached is None:
        raise error
    warning = f"the server cannot be reached ({error}): using {cached.root}"
    _LOG.warning(warning)
    op.tell("warning", detail=warning)
    return cached


def _checkpoint(opened: Opened, subfolder: str, variant: str | None) -> Checkpoint:
    store, path = opened.store, opened.path
    if path is not None and subfolder:
        raise FormatError(f"{path} is a file, which has no folder {subfolder!r}", hint="leave subfolder out")
    if isinstance(store, LoneFile):
        return Checkpoint.of_store(store, opened.at, path=path, root=store.path.parent)
    root = store.root if isinstance(store, LocalStore) else None
    return Checkpoint.of_store(store, opened.at, folder=subfolder, path=path, variant=variant, root=root)


def _from_cache(target: RepoTarget, revision: str, subfolder: str, variant: str | None) -> Checkpoint | None:
    """The checkpoint in the Hugging Face cache, if all of it is there."""
    from hubshard.store.hub_cache import cached_snapshot  # noqa: PLC0415  # the client is slow to import

    snapshot = cached_snapshot(target.repo_id, revision)
    if snapshot is None or not (snapshot / subfolder / "config.json").is_file():
        return None
    try:
        return _checkpoint(open_path(snapshot), subfolder, variant)
    except (NotFoundError, FormatError, IncompleteError):  # not all of it, or damaged: the Hub has it whole
        return None
