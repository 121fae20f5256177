"""The content of a publish on its way into the store: durable at the end, and not shown yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hubshard.engine import run_overlapping
from hubshard.errors import HubshardError, StoreError
from hubshard.events import Operation
from hubshard.messages import counted
from hubshard.protocols import Entry, Staged
from hubshard.publish.destination import Destination
from hubshard.publish.in_repo import check_tree, notes_on_tree
from hubshard.publish.outgoing import OutFile, Outgoing
from hubshard.publish.scratch import FILES_AT_ONCE, Scratch
from hubshard.publish.sending import LARGE_FILE_BYTES, Sender
from hubshard.publish.staging import StagingBranch, staging_branch

__all__ = ["Known", "Upload"]

_STREAMS = 4
_STREAM_BYTES = 256 * 10**6  # what one upload stream may hold
_COST_BYTES = _STREAM_BYTES + 1  # of a file under way: a small one counts too
_BATCH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Known:
    """What the Hub may hold already, by path.

    Attributes:
        tree: of the commit that the publish builds on.
        found: kept by earlier runs.
    """

    tree: Mapping[str, Entry]
    found: Mapping[str, Entry]


class Upload:
    """Makes the content of one publish durable: `look`, then `send`, or both as `stage`; then `close`.

    Args:
        to: where it goes.
        outgoing: all that is to be published.
        op: is told.
        scratch: for large files.
        streams: files under way at once; None for as many as a kill may cost one shard of 256 MB, at most 4 by all
            ranks.
        ranks: of how many that publish together this is one.
        keep: takes note of files that have become durable, instead of `Upload.keep`.
    """

    def __init__(
        self,
        to: Destination,
        outgoing: Outgoing,
        op: Operation,
        *,
        scratch: Scratch | None = None,
        streams: int | None = None,
        ranks: int = 1,
        keep: Callable[[OutFile, Staged], None] | None = None,
    ) -> None:
        self.to = to
        self._outgoing = outgoing
        self._op = op
        self._staging: StagingBranch | None = None
        at_once = streams or max(1, _STREAMS // ranks)
        self._ranks = ranks
        self._streams = at_once if scratch is None else min(at_once, FILES_AT_ONCE)
        self._budget_bytes = _COST_BYTES * streams if streams else _STREAM_BYTES + _STREAMS
        self._least_bytes = self._budget_bytes // self._streams
        self._endings = 1 if scratch is None else 0  # a scratch file is there to the end
        stage = partial(to.store.stage, to.revision, create_pr=to.create_pr)
        self._sender = Sender(stage, op, scratch, keep or self.keep)

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
        tree = self.to.tree()
        check_tree(self.to, self._outgoing, tree)
        for note in notes_on_tree(self.to, self._outgoing, tree):
            self._op.tell("warning", detail=note)
        found: Mapping[str, Entry] = {}
        if batch_bytes is not None:
            self._staging = StagingBranch(
                self.to.store,
                staging_branch(self.to.revision, self.to.key),
                base=self.to.base,
                batch_bytes=batch_bytes,
                batch_seconds=_BATCH_SECONDS,
                on_retry=self._op.retry,
            )
            found = self._staging.found()
            if self._staging.is_there:
                detail = f"{counted(len(found), 'file')} from an earlier run"
                self._op.tell(
                    "staging", self._staging.name, sum(entry.nbytes for entry in found.values()), detail=detail
                )
        return Known(tree, found)

    def send(self, files: Sequence[OutFile], known: Known) -> Sequence[Staged]:
        """Make the content of some files durable, unless it is; what the repo has one of its own of is left out."""
        for file in files:
            if file.default and file.path in known.tree:
                self._op.tell("skipped", file.path, file.nbytes, "the repo has one of its own")
        results = run_overlapping(
            [file for file in files if not (file.default and file.path in known.tree)],
            cost=lambda file: self._cost(file.nbytes),
            work=lambda file, turn: self._sender.send(
                file, known.tree.get(file.path), known.found.get(file.path), turn
            ),
            budget_bytes=self._budget_bytes,
            workers=self._streams,
            endings=self._endings,
        )
        return list(results)

    def keep(self, file: OutFile, staged: Staged) -> None:
        """Take note of a file that has become durable, on the staging branch where there is one."""
        is_large = file in self._outgoing.shards or file.nbytes >= LARGE_FILE_BYTES
        if self._staging is None or not is_large:
            return
        try:
            others = self._ranks * max(1, min(self._streams, self._budget_bytes // self._cost(staged.nbytes)))
            if self._staging.add(staged, others=others):
                self._op.tell("staging", self._staging.name, detail=f"keeps all that is finished, {staged.path} last")
        except StoreError as error:
            if not self.to.create_pr or error.retryable:
                raise  # who may only propose makes no branches
            detail = f"no staging branch can be made, so a run that is killed will start again: {error}"
            self._op.tell("warning", self._staging.name, detail=detail)

    def _cost(self, nbytes: int) -> int:
        """Of a file of that size, of the budget."""
        return max(min(nbytes, _STREAM_BYTES) + 1, self._least_bytes)

    def close(self) -> None:
        """Drop the staging branch: its work is done. If the Hub refuses, a warning says so: the publish is done."""
        if self._staging is None:
            return
        try:
            if self._staging.drop():
                self._op.tell("staging", self._staging.name, detail="dropped")
        except HubshardError as error:
            self._op.tell("warning", self._staging.name, detail=f"is of no use any more, and was not dropped: {error}")

    def tell_what_is_left(self) -> None:
        """Name the staging branch of a publish that failed."""
        if self._staging is not None and self._staging.is_there:
            detail = (
                "keeps what was finished: the same publish, run again, goes on from there; to give it up, abandon it"
            )
            self._op.tell("warning", self._staging.name, detail=detail)
