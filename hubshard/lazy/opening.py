"""What may be opened as a checkpoint, and how each kind is."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hubshard.errors import FormatError, IncompleteError, NotFoundError, StoreError
from hubshard.events import OnEvent, Operation, ignore
from hubshard.lazy.checkpoint import Checkpoint
from hubshard.lazy.steps import WhichStep, open_step_checkpoint, verify_step
from hubshard.lazy.verifying import promised, verify_files
from hubshard.protocols import Source
from hubshard.readers import ListedReader
from hubshard.sources.model_config import ADAPTER_CONFIG, CONFIG
from hubshard.sources.several import variants_by_folder
from hubshard.steps.source import MODEL_PART, StepSource
from hubshard.store.local import LocalStore
from hubshard.store.lone_file import LoneFile
from hubshard.store.opening import Opened, open_path, open_target
from hubshard.store.patience import Patience
from hubshard.target import RepoTarget, parse_target

__all__ = ["open_checkpoint", "open_checkpoints", "opened"]

_CONFIGS = (CONFIG, ADAPTER_CONFIG)
_LOG = logging.getLogger("hubshard")


def open_checkpoint(
    source: str | os.PathLike[str] | Source,
    *,
    revision: str | None = None,
    step: WhichStep | None = None,
    part: str = MODEL_PART,
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
        revision: branch, tag or commit of a repo; None for what `source` says, or main, or "resume" for a step.
        step: open a saved training step: its number, or "newest" for the newest that is whole. `source` is then a repo,
            or a folder that holds a folder per step. The names are those of the model; every byte is checked as it is
            read. What lies beside a model, such as its config, is taken from the repo's main, or from the folder.
        part: of a step: the key of the saved state under which the tensors are, perhaps with more after dots, such as
            "ema"; "" for all of them.
        variant: as in `model.fp16.safetensors`.
        subfolder: of the repo or directory, where the checkpoint is, such as "unet" of a pipeline of diffusers.
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
    where: dict[str, Any] = {"revision": revision, "subfolder": subfolder, "token": token, "endpoint": endpoint}
    if step is None and part != MODEL_PART:
        raise FormatError(f"only a step has a part {part!r}", hint='name the step too, or step="newest"')
    if step is not None:
        if variant is not None:
            raise FormatError(f"a step has no variant {variant!r}", hint="leave variant out")
        checkpoint = open_step_checkpoint(source, step, part=part, on_retry=op.retry, **where)
    else:
        checkpoint = _open(source, variant=variant, op=op, **where)
    if verify and isinstance(checkpoint.source, StepSource):
        verify_step(checkpoint.source, checkpoint.reader.policy)
    elif verify:
        if checkpoint.manifest is None or checkpoint.store is None or checkpoint.at is None:
            raise FormatError("a Source has no files to verify", hint="leave verify out")
        sha256 = promised(checkpoint.manifest, checkpoint.root)
        verify_files(checkpoint.store, checkpoint.at, checkpoint.manifest, sha256, checkpoint.reader.policy)
    return checkpoint


def open_checkpoints(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    variant: str | None = None,
    token: str | bool | None = None,
    endpoint: str | None = None,
    on_event: OnEvent = ignore,
) -> Mapping[str, Checkpoint]:
    """Open the checkpoints of all folders of a repo or directory, as those of a pipeline of diffusers.

    Args:
        source: a path or a repo, as `open_checkpoint` takes it.
        revision: of a repo.
        variant: as in `model.fp16.safetensors`; a folder without it gives its plain weights, if another folder has it.
        token: for the Hub.
        endpoint: of the Hub.
        on_event: is told of each retry.

    Returns:
        By folder, "" of the root; the one of a file is that of the root.

    Raises:
        NotFoundError, FormatError, IncompleteError: as `open_checkpoint` says, of any of them.
    """
    op = Operation("load", _name(source), on_event)
    try:
        patience = Patience(on_retry=op.retry)
        found = open_target(source, revision=revision, token=token, endpoint=endpoint, patience=patience)
    except StoreError as error:
        found = open_path(_snapshot_instead(error, source, revision, op))
    if found.path is not None:
        return {"": _checkpoint(found, "", variant)}
    if not isinstance(found.store, LocalStore):
        found = replace(found, store=ListedReader(found.store))
    variants = variants_by_folder((entry.path for entry in found.store.list(found.at)), variant=variant)
    return {folder: _checkpoint(found, folder, chosen) for folder, chosen in variants.items()}


@contextmanager
def opened(source: str | os.PathLike[str] | Source | Checkpoint, **where: Any) -> Iterator[Checkpoint]:
    """A checkpoint that is open already, as it is; anything else is opened, and closed at the end.

    Args:
        source: what `open_checkpoint` takes, or an open checkpoint.
        **where: what else it takes.

    Raises:
        FormatError: another step, revision, variant or folder of an open checkpoint is asked for.
    """
    if not isinstance(source, Checkpoint):
        with open_checkpoint(source, **where) as checkpoint:
            yield checkpoint
        return
    for what in ("step", "revision", "variant", "subfolder"):
        if where.get(what) not in (None, ""):
            raise FormatError("this checkpoint is open already", hint=f"ask for the {what} where it is opened")
    yield source


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
    cached = _from_cache(target, revision, subfolder, variant) if _is_unreachable(error) else None
    if cached is None:
        raise error
    _warn(f"the server cannot be reached ({error}): using {cached.root}", op)
    return cached


def _snapshot_instead(error: StoreError, source: str | os.PathLike[str], revision: str | None, op: Operation) -> Path:
    """The snapshot in the Hugging Face cache, where the Hub cannot be reached."""
    from hubshard.store.hub_cache import cached_snapshot  # noqa: PLC0415  # the client is slow to import

    target = parse_target(source if isinstance(source, str) else Path(source))
    if isinstance(target, Path) or not _is_unreachable(error):
        raise error
    snapshot = cached_snapshot(target.repo_id, target.asked_for(revision) or "main")
    if snapshot is None:
        raise error
    _warn(f"the server cannot be reached ({error}): using {snapshot}", op)
    return snapshot


def _is_unreachable(error: StoreError) -> bool:
    from hubshard.store.hub_errors import is_unreachable  # noqa: PLC0415  # the client is slow to import

    return is_unreachable(error)


def _warn(text: str, op: Operation) -> None:
    _LOG.warning(text)
    op.tell("warning", detail=text)


def _checkpoint(opened: Opened, subfolder: str, variant: str | None) -> Checkpoint:
    store, path = opened.store, opened.path
    if path is not None and subfolder:
        raise FormatError(f"{path} is a file, which has no folder {subfolder!r}", hint="leave subfolder out")
    with opened.named():
        if isinstance(store, LoneFile):
            return Checkpoint.of_store(store, opened.at, path=path, root=store.path.parent)
        root = store.root if isinstance(store, LocalStore) else None
        return Checkpoint.of_store(store, opened.at, folder=subfolder, path=path, variant=variant, root=root)


def _from_cache(target: RepoTarget, revision: str, subfolder: str, variant: str | None) -> Checkpoint | None:
    """The checkpoint in the Hugging Face cache, if all of it is there."""
    from hubshard.store.hub_cache import cached_snapshot  # noqa: PLC0415  # the client is slow to import

    snapshot = cached_snapshot(target.repo_id, revision)
    if snapshot is None or not any((snapshot / subfolder / name).is_file() for name in _CONFIGS):
        return None
    try:
        return _checkpoint(open_path(snapshot), subfolder, variant)
    except (NotFoundError, FormatError, IncompleteError):  # not all of it, or damaged: the Hub has it whole
        return None
