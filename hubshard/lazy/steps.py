"""The model of a saved training step as a checkpoint: read lazily, by exact ranges, every byte of them checked."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hubshard.errors import FormatError
from hubshard.events import OnRetry
from hubshard.lazy.checkpoint import Checkpoint
from hubshard.lazy.reading import LOCAL, REMOTE, FileReader, Policy
from hubshard.lazy.verifying import verify_files
from hubshard.protocols import Reader, Revision
from hubshard.steps.places import OpenStep
from hubshard.steps.source import StepSource, open_step
from hubshard.store.patience import Patience
from hubshard.target import RepoTarget, parse_target

if TYPE_CHECKING:
    from hubshard.store.hub_client import Token

__all__ = ["WhichStep", "checkpoint_of_step", "open_step_checkpoint", "verify_step"]

WhichStep = int | Literal["newest"]
"""The number of a saved step, or the newest that is whole."""

_KEPT_BYTES = 32 * 2**20
_BLOCKS_A_READ = 16  # at the ends of a read a block may be read twice
_MOST_READ_BYTES = 64 * 2**20


def open_step_checkpoint(
    source: object,
    step: WhichStep,
    *,
    part: str,
    revision: str | None,
    subfolder: str,
    token: Token,
    endpoint: str | None,
    on_retry: OnRetry,
) -> Checkpoint:
    """Open the model of a step, in a folder of steps or on a branch of a repo; see `open_checkpoint`.

    Of a repo, what lies beside a model, such as its config, is that of main.

    Raises:
        FormatError: this is no place of steps, or `step` is none.
        HubshardError: see `open_checkpoint`.
    """
    number = _number(step)
    if not isinstance(source, (str, os.PathLike)):
        raise FormatError(f"a {type(source).__name__} holds no steps", hint="give a folder of steps, or org/name")
    target = parse_target(source if isinstance(source, str) else Path(source))
    if not isinstance(target, RepoTarget):
        if revision is not None:
            raise FormatError(f"{target} is a path, which has no revision {revision!r}", hint="leave revision out")
        opened = open_step(None, step=number, branch="", local_dir=target)
        return checkpoint_of_step(opened, part, folder=subfolder, root=target)
    branch = target.asked_for(revision) or "resume"
    from hubshard.store.hub import HubStore  # noqa: PLC0415  # the client is slow to import

    store = HubStore(target.repo_id, token=token, endpoint=endpoint, patience=Patience(on_retry=on_retry))
    opened = open_step(store, step=number, branch=branch, where=target.repo_id)
    return checkpoint_of_step(opened, part, folder=subfolder, store=store, at=store.head("main"))


def checkpoint_of_step(
    opened: OpenStep,
    part: str,
    *,
    folder: str = "",
    store: Reader | None = None,
    at: Revision | None = None,
    root: Path | None = None,
) -> Checkpoint:
    """A checkpoint whose tensors are those of a part of a step.

    Args:
        opened: the step.
        part: as `StepSource` takes it.
        folder: where the model's small files are, in `store` or `root`.
        store: holds those files, or None.
        at: the revision of `store`.
        root: the local folder that holds them.

    Raises:
        NotFoundError, FormatError: as `StepSource` says.
    """
    source = StepSource(opened, part, kept_bytes=_KEPT_BYTES)
    policy = _policy(opened, LOCAL if root is not None else REMOTE)
    reader = FileReader(source.reader, opened.folder.at, source.part_manifest, policy)
    return Checkpoint(source, reader=reader, store=store, at=at, folder=folder, root=root)


def verify_step(source: StepSource, policy: Policy) -> None:
    """Read all files that hold a tensor of the part, from end to end, several at once.

    Raises:
        IntegrityError: one is not as it was saved.
    """
    verify_files(source.reader, source.opened.folder.at, source.part_manifest, source.files(), policy)


def _policy(opened: OpenStep, usual: Policy) -> Policy:
    largest = max((file.block_bytes for file in opened.step.files), default=0)
    read_bytes = min(_MOST_READ_BYTES, max(usual.max_read_bytes, _BLOCKS_A_READ * largest))
    return replace(usual, max_read_bytes=read_bytes)


def _number(step: object) -> int | None:
    if step == "newest":
        return None
    if type(step) is not int or step < 0:
        raise FormatError(f"{step!r} is no step", hint='give its number, or "newest"')
    return step
