"""`rollback`: an earlier tree of a repo again, as a new commit, without moving its large files."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from hubshard.errors import NotFoundError
from hubshard.events import OnEvent, Operation, ignore, operation
from hubshard.protocols import Entry, Revision, Staged
from hubshard.readers import read_bytes
from hubshard.store.commit import check_head
from hubshard.store.hub import HubStore
from hubshard.store.hub_client import Token
from hubshard.store.patience import Patience
from hubshard.target import check_commit, check_revision, check_text

__all__ = ["RolledBack", "rollback"]


@dataclass(frozen=True, slots=True)
class RolledBack:
    """What a rollback did.

    Attributes:
        commit: the new head.
        url: of it.
        restored: files that it brought back.
        removed: files that it deleted.
        sent_bytes: bytes that were uploaded: of small regular files only.
        changed: False where the branch had that tree already.
    """

    commit: str
    url: str
    restored: tuple[str, ...]
    removed: tuple[str, ...]
    sent_bytes: int
    changed: bool


def rollback(
    repo_id: str,
    *,
    to: str,
    revision: str = "main",
    expected_head: str | None = None,
    message: str | None = None,
    token: Token = None,
    endpoint: str | None = None,
    on_event: OnEvent = ignore,
) -> RolledBack:
    """Give a branch the tree of an earlier revision, by one new commit; history stays.

    Large files are named by their hashes, which the repo still holds: nothing of them is sent.

    Args:
        repo_id: "org/name".
        to: branch, tag or commit whose tree is wanted.
        revision: the branch that moves.
        expected_head: commit that the branch must be at.
        message: title of the commit.
        token: as in huggingface_hub.
        endpoint: of the Hub.
        on_event: is told of each step.

    Raises:
        FormatError: a revision without a name.
        NotFoundError: no such repo, branch or revision.
        ConflictError: the branch moved meanwhile, or is not at `expected_head`.
        StoreError: a large file of that revision was deleted for good; nothing was changed.
    """
    if message is not None:
        check_text(message, "the message")
    if expected_head is not None:
        check_commit(expected_head)
    with operation("rollback", repo_id, on_event) as op:
        store = HubStore(repo_id, token=token, endpoint=endpoint, patience=Patience(on_retry=op.retry))
        head, goal = _revision(store, revision), _revision(store, to)
        check_head(head, expected_head, repo_id=repo_id)
        now = {entry.path: entry for entry in store.list(head)}
        wanted = {entry.path: entry for entry in store.list(goal)}
        differing = [entry for path, entry in wanted.items() if now.get(path) != entry]
        removed = tuple(sorted(now.keys() - wanted.keys()))
        op.start(sum(entry.nbytes for entry in differing), goal.commit)
        if not differing and not removed:
            op.end(head.commit)
            return RolledBack(head.commit, store.url_of(head), (), (), 0, changed=False)
        staged = [_staged(store, goal, entry, revision, op) for entry in differing]
        title = message or f"Roll back to {goal.commit[:8]}" + ("" if to == goal.commit else f" ({to})")
        commit = store.commit(
            revision, parent=head, add=staged, remove=removed, message=title, publish_id=uuid.uuid4().hex
        )
        op.tell("commit", revision, sum(entry.nbytes for entry in differing), commit.commit)
        op.end(commit.commit)
    return RolledBack(
        commit=commit.commit,
        url=store.url_of(commit),
        restored=tuple(entry.path for entry in differing),
        removed=removed,
        sent_bytes=sum(item.nbytes_sent for item in staged),
        changed=True,
    )


def _revision(store: HubStore, name: str) -> Revision:
    check_revision(name)
    found = store.head(name)
    if found is None:
        raise NotFoundError(f"{store.repo_id} has no revision {name!r}", hint="see its branches, tags and commits")
    return found


def _staged(store: HubStore, at: Revision, entry: Entry, branch: str, op: Operation) -> Staged:
    if entry.sha256 is not None:
        op.tell("skipped", entry.path, entry.nbytes, "the Hub has it")
        return Staged(entry.path, entry.nbytes, entry.sha256)
    content = read_bytes(store, at, entry.path, 0, entry.nbytes)
    staged = store.stage(branch, entry.path, lambda: [content], nbytes=entry.nbytes)
    op.tell("sent", entry.path, staged.nbytes_sent)
    return staged
