"""The staging branch: where a publish keeps its finished shards, so that a run killed anywhere goes on, on any machine.

Its name depends on what is published and where (`staging_branch`), so that a second run finds what the first one left.
Shards lie in its folder `staged/` under their final names; a final commit never names them there, only the sha256 that
its own run computed.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Protocol

from hubshard.errors import ConflictError, NotFoundError
from hubshard.plan import ShardPlan
from hubshard.protocols import Entry, Revision, Staged, Store

__all__ = ["BranchingStore", "StagingBranch", "staging_branch"]

PREFIX = "hubshard/staging/"
_FOLDER = "staged/"
_ATTEMPTS = 5


class BranchingStore(Store, Protocol):
    """A store whose branches can be made and dropped."""

    def create_branch(self, name: str, at: Revision) -> Revision:
        """Make a branch that begins at `at`, or leave one that exists; its head."""

    def delete_branch(self, name: str) -> None:
        """Drop a branch; nothing happens where there is none."""


def staging_branch(plan: ShardPlan, *, repo_id: str, revision: str) -> str:
    """Name of the branch on which this plan is staged for this target."""
    key = hashlib.sha256(f"{repo_id}\n{revision}\n{plan.variant}\n".encode())
    for shard in plan.shards:
        key.update(f"{shard.path}\n".encode() + shard.header)
    return PREFIX + key.hexdigest()[:16]


class StagingBranch:
    """Finished shards of one publish, committed to a branch that no reader looks at.

    Thread-safe. Commits when `batch_bytes` have gathered or the oldest has waited `batch_seconds`, so that little is
    lost and few commits are made.
    """

    def __init__(
        self, store: BranchingStore, name: str, *, base: Revision, batch_bytes: int, batch_seconds: float
    ) -> None:
        self.name = name
        self._store = store
        self._base = base
        self._batch_bytes = batch_bytes
        self._batch_seconds = batch_seconds
        self._lock = threading.Lock()
        self._waiting: list[Staged] = []
        self._since = 0.0

    def found(self) -> Mapping[str, Entry]:
        """What earlier runs left, by final path."""
        head = self._store.head(self.name)
        if head is None:
            return {}
        entries = self._store.list(head)
        return {e.path.removeprefix(_FOLDER): e for e in entries if e.path.startswith(_FOLDER)}

    def add(self, staged: Staged) -> None:
        """Take a finished shard; commits it, now or with the next ones."""
        with self._lock:
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting.append(staged)
            waited = time.monotonic() - self._since
            if sum(s.nbytes for s in self._waiting) >= self._batch_bytes or waited >= self._batch_seconds:
                self._flush()

    def drop(self) -> None:
        """Remove the branch: its work is done."""
        self._store.delete_branch(self.name)

    def _flush(self) -> None:
        batch = [Staged(_FOLDER + s.path, s.nbytes, s.sha256, s.receipt) for s in self._waiting]
        title = f"Stage {', '.join(s.path for s in self._waiting)}"
        for attempt in range(1, _ATTEMPTS + 1):
            # another run of the same publish may move the branch too, or drop it when it is done
            try:
                self._store.commit(
                    self.name, parent=self._head(), add=batch, remove=(), message=title, publish_id=uuid.uuid4().hex
                )
            except (ConflictError, NotFoundError):
                if attempt == _ATTEMPTS:
                    raise
            else:
                self._waiting.clear()
                return

    def _head(self) -> Revision:
        return self._store.head(self.name) or self._store.create_branch(self.name, self._base)
