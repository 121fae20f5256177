"""The staging branch: where a publish keeps its finished shards, so that a run killed anywhere goes on, on any machine.

Its name is `hubshard/staging/<target branch>/<key>`, where the key depends on the repo, the target and the shard plan,
so that a second run finds what the first one left. Shards lie in its folder `staged/` under their final names; a
final commit never names them there, only the sha256 that its own run computed.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Protocol

from hubshard.errors import ConflictError, HubshardError, NotFoundError, StoreError
from hubshard.events import Event, OnEvent, OnRetry, ignore, ignore_retry
from hubshard.messages import counted
from hubshard.plan import ShardPlan
from hubshard.protocols import Entry, Revision, Staged, Store
from hubshard.store.hub import HubStore
from hubshard.store.hub_client import Token
from hubshard.store.patience import Patience, Waits

__all__ = ["BranchingStore", "StagingBranch", "abandon", "publish_key", "staging_branch", "staging_branches"]

_PREFIX = "hubshard/staging/"
_FOLDER = "staged/"
_RETRIES = 4
_WAITS = Waits(first_seconds=0.5, longest_seconds=2.0, at_random=True)


class BranchingStore(Store, Protocol):
    """A store whose branches can be made and dropped."""

    def create_branch(self, name: str, at: Revision) -> Revision:
        """Make a branch that begins at `at`, or leave one that exists; its head."""

    def delete_branch(self, name: str) -> None:
        """Drop a branch; nothing happens where there is none."""


def publish_key(plans: Iterable[ShardPlan], *, repo_id: str, revision: str) -> str:
    """What all publishes of these plans to this target have in common, whatever the content: 16 hex digits."""
    key = hashlib.sha256(f"{repo_id}\n{revision}\n".encode())
    for plan in plans:
        key.update(f"{plan.variant}\n".encode())
        for shard in plan.shards:
            key.update(f"{shard.path}\n".encode() + shard.header)
    return key.hexdigest()[:16]


def staging_branch(revision: str, key: str) -> str:
    """Name of the branch on which a publish with this key, to the branch `revision`, is staged."""
    return f"{_PREFIX}{revision}/{key}"


def staging_branches(
    repo_id: str, *, revision: str | None = None, token: Token = None, endpoint: str | None = None
) -> tuple[str, ...]:
    """The staging branches of a repo: of publishes that run now, or were killed, or failed.

    Args:
        repo_id: "org/name".
        revision: only those of publishes to this branch.
        token: as in huggingface_hub; its login by default.
        endpoint: of the Hub; HF_ENDPOINT by default.

    Raises:
        NotFoundError: no such repo.
        StoreError: the Hub refused or failed.
    """
    return _of_target(HubStore(repo_id, token=token, endpoint=endpoint).branches(), revision)


def abandon(
    repo_id: str,
    *,
    revision: str | None = None,
    token: Token = None,
    endpoint: str | None = None,
    on_event: OnEvent = ignore,
) -> tuple[str, ...]:
    """Drop staging branches: what killed or failed publishes had finished is given up, and sent again by the next one.

    A publish that still runs is not harmed; it makes its branch anew.

    Args:
        repo_id: "org/name".
        revision: only those of publishes to this branch.
        token: as in huggingface_hub, with write access; its login by default.
        endpoint: of the Hub; HF_ENDPOINT by default.
        on_event: is told of each branch that was dropped, and how many bytes of finished files it kept.

    Returns:
        The names of the branches that were dropped.

    Raises:
        NotFoundError: no such repo.
        StoreError: the Hub refused or failed.
    """
    store = HubStore(repo_id, token=token, endpoint=endpoint)
    names = _of_target(store.branches(), revision)
    for name in names:
        head = store.head(name)
        kept = [] if head is None else [entry.nbytes for entry in store.list(head) if entry.path.startswith(_FOLDER)]
        store.delete_branch(name)
        on_event(Event("abandon", "staging", name, sum(kept), f"dropped, with {counted(len(kept), 'finished file')}"))
    return names


def _of_target(branches: Iterable[str], revision: str | None) -> tuple[str, ...]:
    found = sorted(name for name in branches if name.startswith(_PREFIX))
    if revision is None:
        return tuple(found)
    return tuple(name for name in found if name.rpartition("/")[0] == f"{_PREFIX}{revision}")


class StagingBranch:
    """Finished shards of one publish, committed to a branch that no reader looks at.

    Thread-safe. Commits when what waits and the shards on their way, taken to be like the last, make more than
    `batch_bytes`, or the oldest has waited `batch_seconds`: few commits are made, and all that a kill may cost is no
    more than a batch, or what was on its way.

    Attributes:
        name: of the branch.
    """

    def __init__(
        self,
        store: BranchingStore,
        name: str,
        *,
        base: Revision,
        batch_bytes: int,
        batch_seconds: float,
        on_retry: OnRetry = ignore_retry,
    ) -> None:
        self.name = name
        self._patience = Patience(_RETRIES, on_retry=on_retry)
        self._store = store
        self._base = base
        self._batch_bytes = batch_bytes
        self._batch_seconds = batch_seconds
        self._is_there = False
        self._is_refused = False
        self._lock = threading.Lock()
        self._waiting: list[Staged] = []
        self._since = 0.0

    @property
    def is_there(self) -> bool:
        """Whether the branch exists, as far as this run has seen."""
        return self._is_there

    def found(self) -> Mapping[str, Entry]:
        """What earlier runs left, by final path."""
        head = self._store.head(self.name)
        if head is None:
            return {}
        try:
            entries = self._store.list(head)
        except NotFoundError:  # dropped since we looked, by another run of the same publish
            return {}
        self._is_there = True
        return {e.path.removeprefix(_FOLDER): e for e in entries if e.path.startswith(_FOLDER)}

    def add(self, staged: Staged, *, others: int = 1) -> bool:
        """Take a finished shard; commits it, now or with the next ones. Whether a commit was made.

        Args:
            staged: the shard.
            others: how many such shards may be on their way now.

        Raises:
            StoreError: the store refuses, or fails again and again. After a refusal further calls do nothing.
        """
        with self._lock:
            if self._is_refused:
                return False
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting.append(staged)
            waited = time.monotonic() - self._since
            at_stake = sum(s.nbytes for s in self._waiting) + others * staged.nbytes
            is_due = at_stake > self._batch_bytes or waited >= self._batch_seconds
            return is_due and self._flush()

    def drop(self) -> bool:
        """Remove the branch, its work done; whether there was one."""
        if self._is_there:
            self._store.delete_branch(self.name)
        return self._is_there

    def _flush(self) -> bool:
        try:
            self._patience.insist(self._commit, self.name, waits=_WAITS, again=_got_in_the_way)
        except StoreError as error:
            self._is_refused = not error.retryable
            raise
        self._is_there = True
        self._waiting.clear()
        return True

    def _commit(self) -> Revision:
        batch = [Staged(_FOLDER + s.path, s.nbytes, s.sha256, s.receipt) for s in self._waiting]
        title = f"Stage {', '.join(s.path for s in self._waiting)}"
        return self._store.commit(
            self.name, parent=self._head(), add=batch, remove=(), message=title, publish_id=uuid.uuid4().hex
        )

    def _head(self) -> Revision:
        return self._store.head(self.name) or self._store.create_branch(self.name, self._base)


def _got_in_the_way(error: HubshardError) -> bool:
    """Whether another run of the same publish moved the branch meanwhile, or dropped it when it was done."""
    return isinstance(error, ConflictError | NotFoundError)
