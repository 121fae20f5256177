"""The commit rule: one commit or none, also when the answer is lost.

A commit names its parent and carries a publish id. After a failure the branch is looked at: if a commit since the
parent carries our id, we had succeeded; if the head is still the parent, we try again; else somebody else was first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hubshard.errors import ConflictError, StoreError
from hubshard.messages import counted
from hubshard.protocols import Revision
from hubshard.store.patience import Patience, Waits

__all__ = ["Made", "check_head", "commit_by_rule", "publish_id_in", "with_publish_id"]

_TRAILER = "Hubshard-Publish-Id: "
_WAITS = Waits(longest_seconds=30.0)  # by then all content is there: to give up now would be a pity
_PATIENCE = Patience()


@dataclass(frozen=True, slots=True)
class Made:
    """A commit in the history of a branch.

    Attributes:
        commit: its id.
        publish_id: ours, where it carries one.
        author: for people.
        title: for people.
    """

    commit: str
    publish_id: str | None
    author: str
    title: str


def with_publish_id(description: str, publish_id: str) -> str:
    """The rest of a commit message, with the publish id as its last line (a git trailer)."""
    if not publish_id or any(char.isspace() for char in publish_id):
        raise ValueError(f"{publish_id!r} is no publish id: it must be one word")
    return f"{description.rstrip()}\n\n{_TRAILER}{publish_id}".lstrip()


def publish_id_in(message: str) -> str | None:
    """The publish id that a commit message carries in its last trailer, or None."""
    found = [line for line in message.splitlines() if line.startswith(_TRAILER)]
    return found[-1].removeprefix(_TRAILER).strip() or None if found else None


def check_head(head: Revision, expected: str | None, *, repo_id: str | None = None) -> None:
    """Refuse a branch that is not where the caller believes it to be.

    Args:
        head: where it is.
        expected: a commit, in full or its first 7 or more digits; None for wherever it is.
        repo_id: where the branch shows a model, so that `hubshard diff` tells what was changed.

    Raises:
        ConflictError: it is elsewhere.
    """
    if expected is not None and not (len(expected) >= 7 and head.commit.startswith(expected)):
        command = f": hubshard diff {repo_id}@{expected} {repo_id}@{head.commit}" if repo_id else ""
        raise ConflictError(
            f"{head.branch} is at {head.commit}, not at {expected}", hint=f"look at what was changed{command}"
        )


def commit_by_rule(
    send: Callable[[], str],
    history: Callable[[], Sequence[Made]],
    *,
    branch: str,
    parent: str | None,
    publish_id: str,
    patience: Patience = _PATIENCE,
) -> str:
    """Send a commit until it is known to be made, or known not to be; its id.

    Args:
        send: one attempt; the new commit's id. It raises ConflictError where the store says that the parent is not the
            head, StoreError that is retryable where it may have been made or may be later; all else is final.
        history: commits of the branch, newest first, at least those since `parent`; empty where there is no branch.
        branch: for messages.
        parent: the commit that ours builds on; None where there must be no branch yet.
        publish_id: what ours carries.
        patience: with failures.

    Raises:
        ConflictError: another commit is there.
        StoreError: the attempts are used up.
    """
    attempts = patience.max_retries + 1
    for attempt in range(1, attempts + 1):
        try:
            return send()
        except (ConflictError, StoreError) as error:
            if isinstance(error, StoreError) and not error.retryable:
                raise
            failure = error
        try:
            made = _ours(history(), branch=branch, parent=parent, publish_id=publish_id)
        except StoreError as error:  # the look failed as well; the next attempt is guarded by its parent
            if not error.retryable:
                raise
            made, failure = None, error
        if made is not None:
            return made
        if attempt < attempts:
            patience.pause(branch, failure, attempt, _WAITS)
    message = f"gave up after {counted(attempts, 'attempt')} to commit to {branch!r}: {failure}"
    raise StoreError(message, hint="nothing was changed as far as we know; run it again", retryable=True) from failure


def _ours(history: Sequence[Made], *, branch: str, parent: str | None, publish_id: str) -> str | None:
    for made in history:
        if made.publish_id == publish_id:
            return made.commit
    if (history[0].commit if history else None) == parent:
        return None
    raise _conflict(history, branch=branch, parent=parent)


def _conflict(history: Sequence[Made], *, branch: str, parent: str | None) -> ConflictError:
    if not history:
        return ConflictError(
            f"the branch {branch!r} is gone", hint="look whether somebody deleted it, then run it again"
        )
    hint = "look at what they changed, then run it again on the new head"
    if parent is None:
        return ConflictError(f"the branch {branch!r} exists already, at {history[0].commit[:12]}", hint=hint)
    ids = [made.commit for made in history]
    newer = history[: ids.index(parent)] if parent in ids else history[:1]
    by = "; ".join(f"{made.commit[:12]} by {made.author}: {made.title!r}" for made in newer[:3])
    more = f" and {len(newer) - 3} more" if len(newer) > 3 else ""
    return ConflictError(f"the branch {branch!r} moved on from {parent[:12]}: {by}{more}", hint=hint)
