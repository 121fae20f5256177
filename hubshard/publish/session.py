"""One publish under way: stage everything, make the one commit, verify what the Hub holds."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hubshard.engine import run
from hubshard.errors import ConflictError, IntegrityError, StoreError
from hubshard.events import Operation
from hubshard.index import is_weight_file
from hubshard.protocols import Entry, Revision, Staged
from hubshard.publish.outgoing import OutFile, Outgoing
from hubshard.publish.scratch import FILES_AT_ONCE, Scratch
from hubshard.publish.sending import LARGE_FILE_BYTES, Sender
from hubshard.publish.staging import StagingBranch, publish_key, staging_branch
from hubshard.store.hub import HubStore

__all__ = ["Change", "Known", "Session"]

_STREAMS = 4
_STREAM_BYTES = 256 * 10**6  # what one upload stream may hold
_BUDGET_BYTES = _STREAM_BYTES + _STREAMS  # what a kill may cost: files under way are sent again from their start
_BATCH_SECONDS = 10.0
_COMMIT_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class Change:
    """What a commit will do to the tree that it builds on.

    Attributes:
        add: files that are new or differ.
        remove: weight files of the variant that the new index does not name.
    """

    add: tuple[Staged, ...]
    remove: tuple[str, ...]

    @property
    def paths(self) -> frozenset[str]:
        """Every path it touches."""
        return frozenset((*(staged.path for staged in self.add), *self.remove))


@dataclass(frozen=True, slots=True)
class Known:
    """What the Hub may hold already, by path.

    Attributes:
        tree: of the commit that the publish builds on.
        found: kept by earlier runs.
    """

    tree: Mapping[str, Entry]
    found: Mapping[str, Entry]


class Session:
    """The steps of one publish, in order: `stage`, `commit`, `verify`, `close`."""

    def __init__(
        self,
        store: HubStore,
        outgoing: Outgoing,
        revision: str,
        base: Revision,
        op: Operation,
        *,
        create_pr: bool = False,
        scratch: Scratch | None = None,
        ranks: int = 1,
        keep: Callable[[OutFile, Staged], None] | None = None,
    ) -> None:
        """Make ready for a publish; see `HubStore` for what the store does.

        Args:
            store: of the target.
            outgoing: what is to be published.
            revision: the branch.
            base: the commit to build on.
            op: is told.
            create_pr: open a pull request.
            scratch: for large files.
            ranks: of how many that publish together this is one: each has fewer files under way.
            keep: takes note of files that have become durable, instead of `Session.keep`.
        """
        self._store = store
        self._outgoing = outgoing
        self._revision = revision
        self._base = base
        self._op = op
        self._create_pr = create_pr
        self._key = publish_key(outgoing.plan, repo_id=store.repo_id, revision=revision)
        self._staging: StagingBranch | None = None
        streams = max(1, _STREAMS // ranks)
        self._streams = streams if scratch is None else min(streams, FILES_AT_ONCE)
        self._sender = Sender(partial(store.stage, revision, create_pr=create_pr), op, scratch, keep or self.keep)

    @property
    def repo_id(self) -> str:
        """The whole id of the repo."""
        return self._store.repo_id

    @property
    def base(self) -> Revision:
        """The commit that it builds on."""
        return self._base

    def stage(self, batch_bytes: int | None) -> Sequence[Staged]:
        """Make all content durable in the Hub, invisible to readers of the target.

        Args:
            batch_bytes: how much may wait for a commit on the staging branch; None for no such branch.
        """
        known = self.look(batch_bytes)
        return self.send(self._outgoing.all_files, known)

    def look(self, batch_bytes: int | None) -> Known:
        """Find out what the Hub may hold already, and from where a staging branch goes on.

        Args:
            batch_bytes: as in `stage`.
        """
        tree = _by_path(self._store.list(self._base))
        found: Mapping[str, Entry] = {}
        if batch_bytes is not None:
            self._staging = StagingBranch(
                self._store,
                staging_branch(self._revision, self._key),
                base=self._base,
                batch_bytes=batch_bytes,
                batch_seconds=_BATCH_SECONDS,
                on_retry=self._op.retry,
            )
            found = self._staging.found()
            if self._staging.is_there:
                detail = f"{len(found)} file(s) are there from an earlier run"
                self._op.tell(
                    "staging", self._staging.name, sum(entry.nbytes for entry in found.values()), detail=detail
                )
        return Known(tree, found)

    def send(self, files: Sequence[OutFile], known: Known) -> Sequence[Staged]:
        """Make the content of some files durable, unless it is; what the repo has one of its own of is left out."""
        for file in files:
            if file.default and file.path in known.tree:
                self._op.tell("skipped", file.path, file.nbytes, "the repo has one of its own")
        results = run(
            [file for file in files if not (file.default and file.path in known.tree)],
            cost=lambda file: min(file.nbytes, _STREAM_BYTES) + 1,
            work=lambda file: self._sender.send(file, known.tree.get(file.path), known.found.get(file.path)),
            budget_bytes=_BUDGET_BYTES,
            workers=self._streams,
        )
        return list(results)

    def keep(self, file: OutFile, staged: Staged) -> None:
        """Take note of a file that has become durable, on the staging branch where there is one."""
        is_large = file in self._outgoing.shards or file.nbytes >= LARGE_FILE_BYTES
        if self._staging is None or not is_large:
            return
        try:
            if self._staging.add(staged):
                self._op.tell("staging", self._staging.name, detail=f"keeps all that is finished, {staged.path} last")
        except StoreError as error:
            if not self._create_pr or error.retryable:
                raise  # who may only propose makes no branches
            detail = f"no staging branch can be made, so a run that is killed will start again: {error}"
            self._op.tell("warning", self._staging.name, detail=detail)

    def commit(
        self,
        staged: Sequence[Staged],
        title: str,
        *,
        overtaken: ConflictError | None,
        may_rebase: bool,
        tag: str | None,
    ) -> tuple[Revision, Change]:
        """Show everything in one commit; none where the tree is already as it should be.

        A branch that was moved by others meanwhile is taken as the new parent when they touched nothing of ours.

        Args:
            staged: what `stage` gave.
            title: first line of the message.
            overtaken: raised if there is anything to commit.
            may_rebase: whether another parent than the one first seen will do.
            tag: must not name another commit already.

        Raises:
            ConflictError: the branch was moved, and files of ours are among those that changed.
        """
        earlier = self._earlier_pull_request(staged) if self._create_pr else None
        if earlier is not None:
            return earlier, Change((), ())
        head = self._base
        for _ in range(_COMMIT_ATTEMPTS):
            change = self._change(staged, _by_path(self._store.list(head)))
            if not change.paths:
                self._check_tag(tag, head)
                if self._ensure_branch(head):
                    self._op.tell("commit", self._revision, detail=head.commit)
                return head, change
            if overtaken is not None:
                raise overtaken
            self._check_tag(tag, None)
            try:
                return self._commit_once(head, change, title), change
            except ConflictError as error:
                if not may_rebase:
                    raise
                head = self._rebased(head, staged, change, error)
        raise ConflictError(
            f"{self._revision} moved {_COMMIT_ATTEMPTS} times while we committed", hint="publish again when it is quiet"
        )

    def _earlier_pull_request(self, staged: Sequence[Staged]) -> Revision | None:
        """The open pull request that an earlier run of this publish has made."""
        found = self._store.pull_request_of(f"{self._key}-")
        if found is None or self._change(staged, _by_path(self._store.list(found))).paths:
            return None
        self._op.tell("skipped", found.branch, detail="an earlier run has opened it")
        return found

    def _change(self, staged: Iterable[Staged], tree: Mapping[str, Entry]) -> Change:
        plan = self._outgoing.plan
        kept = {plan.index_path, *(shard.path for shard in plan.shards)}
        stale = (path for path in tree if is_weight_file(path, variant=plan.variant) and path not in kept)
        return Change(tuple(s for s in staged if not s.is_same(tree.get(s.path))), tuple(sorted(stale)))

    def _check_tag(self, tag: str | None, at: Revision | None) -> None:
        there = self._store.tags().get(tag) if tag else None
        if there is not None and (at is None or there != at.commit):
            raise ConflictError(
                f"the tag {tag!r} is on commit {there} already", hint="choose another tag, or ask for it to be moved"
            )

    def _commit_once(self, head: Revision, change: Change, title: str) -> Revision:
        self._ensure_branch(head)
        commit = self._store.commit(
            head.branch if self._create_pr else self._revision,
            parent=Revision(self._revision, head.commit),
            add=change.add,
            remove=change.remove,
            message=title,
            publish_id=f"{self._key}-{uuid.uuid4().hex}",
            create_pr=self._create_pr,
        )
        self._op.tell("commit", commit.branch, sum(staged.nbytes for staged in change.add), detail=commit.commit)
        return commit

    def _ensure_branch(self, head: Revision) -> bool:
        """Make the branch where `head` is main's; whether it was made."""
        is_new = head.branch != self._revision and not self._create_pr
        if is_new:
            self._store.create_branch(self._revision, head)
        return is_new

    def _rebased(self, head: Revision, staged: Sequence[Staged], change: Change, error: ConflictError) -> Revision:
        # another parent will do if whoever moved the branch left our files alone, or made them what we wanted
        fresh = self._store.head(self._revision)
        if fresh is None or fresh.commit == head.commit:
            raise error
        before, now = _by_path(self._store.list(head)), _by_path(self._store.list(fresh))
        changed = {path for path in before.keys() | now.keys() if before.get(path) != now.get(path)}
        mine = change.paths | {file.path for file in self._outgoing.all_files}
        theirs = {path for path in changed if path in mine or is_weight_file(path, variant=self._outgoing.plan.variant)}
        if theirs and self._change(staged, now).paths:
            raise ConflictError(
                f"{error.message}; it changed {', '.join(sorted(theirs)[:10])}, which this publish changes too",
                hint="look at the new head, then publish again",
            ) from error
        self._op.retry(self._revision, f"rebased on {fresh.commit}: {error.message}", 0.0)
        return fresh

    def verify(self, at: Revision, staged: Iterable[Staged], change: Change) -> None:
        """Check that the Hub shows what was sent, size and hash, and no removed file.

        Raises:
            IntegrityError: it does not; names the files.
        """
        tree = _by_path(self._store.list(at))
        wrong = [s.path for s in staged if not s.is_same(tree.get(s.path))]
        wrong += [path for path in change.remove if path in tree]
        if wrong:
            raise IntegrityError(
                f"commit {at.commit} does not show what was published: {', '.join(wrong[:10])}",
                hint="was the branch changed right after? look at its history, and publish again",
            )
        self._op.tell("verify", at.branch, sum(entry.nbytes for entry in tree.values()), detail=at.commit)

    def close(self) -> None:
        """Drop the staging branch: its work is done."""
        if self._staging is not None and self._staging.drop():
            self._op.tell("staging", self._staging.name, detail="dropped")

    def tell_what_is_left(self) -> None:
        """Name the staging branch of a publish that failed."""
        if self._staging is not None and self._staging.is_there:
            detail = (
                "keeps what was finished: the same publish, run again, goes on from there; to give it up, abandon it"
            )
            self._op.tell("warning", self._staging.name, detail=detail)

    def is_ours(self, head: Revision) -> bool:
        """Whether a commit was made by a publish of the same plan to the same branch."""
        return (self._store.publish_id_of(head) or "").startswith(f"{self._key}-")


def _by_path(entries: Iterable[Entry]) -> dict[str, Entry]:
    return {entry.path: entry for entry in entries}
