"""`hubshard.pull`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants

from hubshard.errors import FormatError
from hubshard.events import OnEvent, ignore, operation
from hubshard.fetch.folder import FolderLayout
from hubshard.fetch.hf_cache import CacheLayout
from hubshard.fetch.layout import Layout
from hubshard.fetch.pulling import Request, pull_from
from hubshard.names import check_variant
from hubshard.store.hub import HubStore
from hubshard.store.hub_client import Token
from hubshard.store.patience import Patience
from hubshard.target import check_repo_id, check_revision

__all__ = ["pull"]


def pull(
    repo_id: str,
    *,
    revision: str | None = None,
    local_dir: str | Path | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    variant: str | None = None,
    cache_dir: str | Path | None = None,
    overwrite: bool = False,
    token: Token = None,
    endpoint: str | None = None,
    workers: int = 8,
    max_retries: int = 3,
    stall_seconds: float = 30.0,
    on_event: OnEvent = ignore,
) -> Path:
    """Fetch a model from the Hub into the Hugging Face cache, or into a directory.

    Of each folder of the revision, so of each component of a pipeline of diffusers, it takes the safetensors checkpoint
    (the single file, or what the index names) and all files that hold no weights. Every file is checked against the
    hash that the Hub promises (sha256, or git's blob id for small files) while it arrives; what is there already is
    checked too. A cache gets fetched again what was edited there; a directory is refused, unless `overwrite` is set:
    nothing of yours is lost. A run that is killed loses at most `workers` pieces of 8 MiB; the
    next one, also on another machine that shares the target, goes on. Readers see the revision whole or not at all.
    Without a network, what an earlier pull completed is used.

    Args:
        repo_id: such as "org/name".
        revision: branch, tag or commit; None for main.
        local_dir: a directory to put the files in; None for the cache.
        include: patterns (`fnmatch`, of paths in the repo) that replace the usual choice: all files that match are
            taken, pickles and other formats too.
        exclude: patterns of files that are not taken.
        variant: as in `model.fp16.safetensors`; a folder without it gives its plain weights, if another folder has it.
        cache_dir: the cache; None for that of `HF_HOME` and `HF_HUB_CACHE`.
        overwrite: replace and remove in `local_dir` also what no pull, nor `hf download`, has put there, or what was
            changed since; else that is refused.
        token: a token; None for the one that huggingface_hub knows; or a function that is asked before each request.
        endpoint: of the Hub; None for `HF_ENDPOINT`.
        workers: threads. Memory is at most two pieces of 8 MiB each.
        max_retries: of each piece, after its first try.
        stall_seconds: of silence that are a failure of a piece.
        on_event: told what happens, from any thread.

    Returns:
        The folder that holds the files: the snapshot in the cache, or `local_dir`.

    Raises:
        NotFoundError: no such repo, revision or variant, or no file matches.
        IncompleteError: the revision lacks files that its index names, or there is no network and the target is not
            complete.
        UnsafeFormatError: its only weights are pickles, and `include` does not name them.
        FormatError: arguments that make no sense, paths that no disk can hold safely, a file called safetensors that is
            none; or files in `local_dir` that are yours, and would be lost, or loaded instead of what is pulled.
        IntegrityError: content other than promised, also when fetched again.
        StoreError: the Hub refused or failed, or the disk is too small; says by how much.
    """
    check_repo_id(repo_id)
    check_variant(variant)
    check_revision(revision)
    if workers < 1 or max_retries < 0:
        raise FormatError(f"workers={workers}, max_retries={max_retries}: at least one thread, and no negative number")
    with operation("pull", repo_id, on_event) as op:
        request = Request(
            repo_id=repo_id,
            revision=revision or "main",
            variant=variant,
            include=_patterns(include),
            exclude=_patterns(exclude),
            workers=workers,
            max_retries=max_retries,
            is_offline=constants.HF_HUB_OFFLINE,
            on_event=op,
        )
        layout = _layout(repo_id, local_dir, cache_dir, variant, op, overwrite=overwrite)
        patience = Patience(max_retries, stall_seconds, op.retry)
        shown = pull_from(HubStore(repo_id, token=token, endpoint=endpoint, patience=patience), layout, request)
        op.end(str(shown))
    return shown


def _layout(
    repo_id: str,
    local_dir: str | Path | None,
    cache_dir: str | Path | None,
    variant: str | None,
    on_event: OnEvent,
    *,
    overwrite: bool,
) -> Layout:
    if local_dir is not None:
        if not os.fspath(local_dir):
            raise FormatError("local_dir is empty", hint="name a directory, or leave it out for the cache")
        if cache_dir is not None:
            raise FormatError("local_dir and cache_dir: only one of them can be the target")
        folder = Path(local_dir).expanduser()
        return FolderLayout(folder, repo_id, variant=variant, on_event=on_event, overwrite=overwrite)
    if overwrite:
        raise FormatError("overwrite is for a local_dir", hint="leave it out: the cache holds nothing of yours")
    folder = Path(cache_dir if cache_dir is not None else constants.HF_HUB_CACHE).expanduser().resolve()
    return CacheLayout(folder, repo_id, symlinks=not constants.HF_HUB_DISABLE_SYMLINKS)


def _patterns(given: str | Sequence[str] | None) -> Sequence[str] | None:
    """None where no pattern is given: an empty list, as command lines make it, is none."""
    return [given] if isinstance(given, str) else list(given or ()) or None
