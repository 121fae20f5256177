"""The one commit that shows a publish, and what the Hub shows after it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hubshard.errors import ConflictError, HubshardError, IntegrityError, StoreError
from hubshard.events import Operation
from hubshard.protocols import Entry, Revision, Staged
from hubshard.publish.destination import Destination
from hubshard.publish.in_repo import check_tree, notes_on_tree
from hubshard.publish.outgoing import Outgoing
from hubshard.publish.preflight import check_one_meaning, check_tag

__all__ = ["Change", "FinalCommit"]

_COMMIT_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class Change:
    """What a commit will do to the tree that it builds on.

    Attributes:
        add: files that are new or differ.
        remove: weight files of the same folder, stem and variant that the new index does not name, and adapters
            that would hide the model.
    """

    add: tuple[Staged, ...]
    remove: tuple[str, ...]

    @property
    def paths(self) -> frozenset[str]:
        """Every path it touches."""
        return frozenset((*(staged.path for staged in self.add), *self.remove))


class FinalCommit:
    """Shows a publish whose content is durable: `commit`, then `verify`, then `tag`.

    Args:
        to: where it goes.
        outgoing: all that is to be published.
        op: is told.

    Attributes:
        may_be_shown: the commit was asked for, and not refused: it may be made, though no answer has come.
    """

    def __init__(self, to: Destination, outgoing: Outgoing, op: Operation) -> None:
        self.may_be_shown = False
        self._to = to
        self._outgoing = outgoing
        self._op = op

    @property
    def repo_id(self) -> str:
        """Where it goes."""
        return self._to.store.repo_id

    def is_ours(self, head: Revision) -> bool:
        """Whether a commit was made by a publish of the same plan to the same branch."""
        return (self._to.store.publish_id_of(head) or "").startswith(f"{self._to.key}-")

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
            tag: must not name another commit already, unless that is the new head and holds all of this.

        Raises:
            ConflictError: the branch was moved, and files of ours are among those that changed.
            FormatError: what is there now does not go together with ours.
        """
        earlier = self._earlier_pull_request(staged) if self._to.create_pr else None
        if earlier is not None:
            return earlier, Change((), ())
        head = self._to.base
        for _ in range(_COMMIT_ATTEMPTS):
            change = self._change(staged, self._to.tree(head))
            if not change.paths:
                self._check_tag(tag, head)
                if self._ensure_branch(head):
                    self._op.tell("commit", self._to.revision, detail=head.commit)
                return head, change
            if overtaken is not None:
                raise overtaken
            try:
                self._check_tag(tag, None)  # who makes the same publish may have made commit and tag meanwhile
                return self._commit_once(head, change, title), change
            except ConflictError as error:
                if not may_rebase:
                    raise
                head = self._rebased(head, staged, change, error)
        raise ConflictError(
            f"{self._to.revision} moved {_COMMIT_ATTEMPTS} times while we committed",
            hint="publish again when it is quiet",
        )

    def _earlier_pull_request(self, staged: Sequence[Staged]) -> Revision | None:
        """The open pull request that an earlier run of this publish has made."""
        found = self._to.store.pull_request_of(f"{self._to.key}-")
        if found is None or self._change(staged, self._to.tree(found)).paths:
            return None
        self._op.tell("skipped", found.branch, detail="an earlier run has opened it")
        return found

    def _change(self, staged: Iterable[Staged], tree: Mapping[str, Entry]) -> Change:
        ours = {file.path for file in self._outgoing.all_files}
        stale = (path for path in tree if self._outgoing.replaces(path) and path not in ours)
        return Change(tuple(s for s in staged if not s.is_same(tree.get(s.path))), tuple(sorted(stale)))

    def _check_tag(self, tag: str | None, at: Revision | None) -> None:
        if tag:
            check_tag(self._to.store, tag, at)

    def _commit_once(self, head: Revision, change: Change, title: str) -> Revision:
        self._ensure_branch(head)
        nbytes = sum(staged.nbytes for staged in change.add)
        self.may_be_shown = True
        self._op.tell("committing", self._to.revision, nbytes)
        try:
            commit = self._to.store.commit(
                head.branch if self._to.create_pr else self._to.revision,
                parent=Revision(self._to.revision, head.commit),
                add=change.add,
                remove=change.remove,
                message=title,
                publish_id=f"{self._to.key}-{uuid.uuid4().hex}",
                create_pr=self._to.create_pr,
            )
        except HubshardError as error:
            self.may_be_shown = isinstance(error, StoreError) and error.retryable
            raise
        self._op.tell("commit", commit.branch, nbytes, detail=commit.commit)
        return commit

    def _ensure_branch(self, head: Revision) -> bool:
        """Make the branch where `head` is main's; whether it was made."""
        is_new = head.branch != self._to.revision and not self._to.create_pr
        if is_new:
            self._to.store.create_branch(self._to.revision, head)
        return is_new

    def _rebased(self, head: Revision, staged: Sequence[Staged], change: Change, error: ConflictError) -> Revision:
        # another parent will do if whoever moved the branch left our files alone, or made them what we wanted
        fresh = self._to.store.head(self._to.revision)
        if fresh is None or fresh.commit == head.commit:
            raise error
        before, now = self._to.tree(head), self._to.tree(fresh)
        changed = {path for path in before.keys() | now.keys() if before.get(path) != now.get(path)}
        mine = change.paths | {file.path for file in self._outgoing.all_files}
        theirs = {path for path in changed if path in mine or self._outgoing.replaces(path)}
        if theirs and self._change(staged, now).paths:
            raise ConflictError(
                f"{error.message}; it changed {', '.join(sorted(theirs)[:10])}, which this publish changes too",
                hint="look at the new head, then publish again",
            ) from error
        self._check_anew(fresh, before, now)
        self._op.retry(self._to.revision, f"rebased on {fresh.commit}: {error.message}", 0.0)
        return fresh

    def _check_anew(self, head: Revision, before: Mapping[str, Entry], now: Mapping[str, Entry]) -> None:
        """What was asked of the first parent is asked of a new one too."""
        to = replace(self._to, base=head)
        check_tree(to, self._outgoing, now)
        said = notes_on_tree(self._to, self._outgoing, before)
        for note in notes_on_tree(to, self._outgoing, now):
            if note not in said:
                self._op.tell("warning", detail=note)

    def tag(self, name: str, at: Revision, message: str, *, move: bool) -> None:
        """Name the commit that shows it.

        Raises:
            FormatError: a branch of that name was made meanwhile.
            ConflictError: the tag was put on another commit meanwhile, and may not be moved.
        """
        try:
            check_one_meaning(name, self._to.store.branches())
            self._to.store.tag(name, at, message, move=move)
        except HubshardError as error:
            is_there = self._is_tagged(name, at) if isinstance(error, StoreError) and error.retryable else False
            if not is_there:
                lacks = "it only lacks the tag" if is_there is not None else "whether it has the tag cannot be said"
                error.add_hint(f"commit {at.commit} shows all of it; {lacks}")
                raise
        self._op.tell("tag", name, detail=at.commit)

    def _is_tagged(self, name: str, at: Revision) -> bool | None:
        """Whether a tag is there whose making may have been answered in vain; None where that cannot be said."""
        try:
            return self._to.store.tags().get(name) == at.commit
        except HubshardError:
            return None

    def verify(self, at: Revision, staged: Iterable[Staged], change: Change) -> None:
        """Check that the Hub shows what was sent, size and hash, and no removed file.

        Raises:
            IntegrityError: it does not; names the files.
        """
        tree = self._to.tree(at)
        wrong = [s.path for s in staged if not s.is_same(tree.get(s.path))]
        wrong += [path for path in change.remove if path in tree]
        if wrong:
            raise IntegrityError(
                f"commit {at.commit} does not show what was published: {', '.join(wrong[:10])}",
                hint="was the branch changed right after? look at its history, and publish again",
            )
        self._op.tell("verify", at.branch, sum(entry.nbytes for entry in tree.values()), detail=at.commit)
