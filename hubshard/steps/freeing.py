"""Storage given back: the large files of steps that are gone, deleted for good once nothing names them. No torch.

What may go is found from what the repo says it keeps, not from what we remember of it: a run that was killed between
the squash and the deletion is finished by the next one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hubshard.engine import run
from hubshard.errors import ConflictError, IntegrityError, NotFoundError
from hubshard.messages import counted, listed

if TYPE_CHECKING:
    from hubshard.events import Operation
    from hubshard.store.hub_storage import HubStorage, StoredFile

__all__ = ["Freed", "free_storage", "unneeded_files"]

_OF_A_STEP = re.compile(r"step-[0-9]{8,18}/[^/]+\Z")
_WORKERS = 8
_COMMITS_PER_WORD = 100
_MOST_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Freed:
    """Large files that were deleted for good, or would be.

    Attributes:
        files: how many.
        nbytes: their sizes (bytes).
    """

    files: int
    nbytes: int


def unneeded_files(
    storage: HubStorage,
    refs: Mapping[str, str],
    *,
    op: Operation,
    instead: Mapping[str, frozenset[str]] | None = None,
) -> list[StoredFile]:
    """Files of steps that the repo keeps and that no commit names which a branch, tag or pull request leads to.

    Args:
        storage: the repo's.
        refs: all of them, with their commits.
        op: is told how far it is.
        instead: what a ref will lead to: the files that it needs then, rather than those of its history.
    """
    stored = [file for file in storage.stored_files() if _OF_A_STEP.match(file.path)]
    if not stored:
        return []
    planned = instead or {}
    named: set[str] = set().union(*planned.values())
    commits = {
        change.commit: None for ref, head in refs.items() if ref not in planned for change in storage.history(head)
    }
    looked = run(commits, cost=lambda _: 1, work=storage.large_files, budget_bytes=len(commits) + 1, workers=_WORKERS)
    for number, found in enumerate(looked, start=1):
        named |= found
        if number % _COMMITS_PER_WORD == 0:
            op.tell("look", op.path, detail=f"at commit {number:,} of {len(commits):,} for the files it names")
    return [file for file in stored if not file.ids & named]


def free_storage(storage: HubStorage, *, ref: str, op: Operation) -> Freed:
    """Delete the files that `unneeded_files` finds. Nothing is deleted on the ground of what has changed meanwhile.

    Args:
        storage: the repo's.
        ref: of the branch, whose steps must all be readable afterwards.
        op: is told.

    Raises:
        ConflictError: the branches and tags change all the time.
        IntegrityError: a save was going on, and named a file that was deleted just then.
    """
    gone: dict[str, StoredFile] = {}
    for _ in range(_MOST_ROUNDS):
        refs = storage.refs()
        unneeded = [file for file in unneeded_files(storage, refs, op=op) if file.sha256 not in gone]
        if not unneeded:
            _check_kept(storage, ref)
            return Freed(len(gone), sum(file.nbytes for file in gone.values()))
        for file in _delete(storage, unneeded, refs):
            gone[file.sha256] = file
            op.tell("freed", file.path, file.nbytes)
    raise ConflictError(
        f"{op.path}: its branches and tags change all the time: {counted(len(gone), 'file')} deleted, not all",
        hint="run it again when nothing else writes to the repo",
    )


def _delete(storage: HubStorage, files: Sequence[StoredFile], refs: Mapping[str, str]) -> list[StoredFile]:
    """Delete files batch by batch while all refs stand still; those that are gone."""
    gone = 0
    ordered = sorted(files, key=lambda file: file.sha256)
    try:
        if storage.refs() == refs:
            for count in storage.delete_files([file.sha256 for file in ordered]):
                gone += count
                if storage.refs() != refs:
                    break
    except NotFoundError:  # the answer to an attempt was lost, and what it asked for is done: the list tells
        left = {file.sha256 for file in storage.stored_files()}
        return [file for file in files if file.sha256 not in left]
    return ordered[:gone]


def _check_kept(storage: HubStorage, ref: str) -> None:
    head = storage.refs().get(ref)
    if head is None:
        return
    kept = {name for file in storage.stored_files() for name in file.ids}
    lost = sorted(storage.large_files(head) - kept)
    if lost:
        raise IntegrityError(
            f"{ref} names {counted(len(lost), 'file')} that the repo does not hold any more "
            f"(sha256 {listed(lost, most=2)}): was a step saved just now?",
            hint="save it again: see `hubshard resume list`",
        )
