"""Bringing what is to be published to its repo: stage, commit once, verify, tag."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from hubshard.errors import ConflictError, FormatError, HubshardError, NotFoundError, StoreError
from hubshard.events import OnEvent, Operation, ignore, operation
from hubshard.messages import counted
from hubshard.plan import ShardPlan
from hubshard.protocols import Revision, Staged
from hubshard.publish.destination import Destination
from hubshard.publish.final_commit import FinalCommit
from hubshard.publish.in_repo import check_tree, notes_on_tree
from hubshard.publish.outgoing import Outgoing
from hubshard.publish.preflight import (
    PULL_REQUEST,
    base_of,
    card_warnings,
    check_new_tag,
    check_one_meaning,
    found_base,
    tell_of_new_repo,
)
from hubshard.publish.scratch import Scratch, scratch_in
from hubshard.publish.sending import LARGE_FILE_BYTES
from hubshard.publish.staging import publish_key
from hubshard.publish.upload import Upload
from hubshard.sizes import parse_size
from hubshard.store.commit import check_head
from hubshard.store.hub import HubStore
from hubshard.store.hub_client import Token
from hubshard.store.patience import Patience
from hubshard.target import check_commit, check_ref_name, check_text

__all__ = ["Collect", "Delivery", "Published", "Together", "Work", "deliver"]

_LOG = logging.getLogger("hubshard")

Collect = Callable[[Patience], Outgoing]
"""Finds out what is to be published; nothing was written yet."""


@dataclass(frozen=True)
class Published:
    """What a publish did.

    Attributes:
        commit: the commit that shows it, or None after a dry run.
        url: of that commit, or None.
        pr_url: of the pull request, where one was asked for.
        tag: the tag that names it, or None.
        plans: which tensor is in which shard: one plan for each folder that holds a checkpoint, mostly one in all.
        changed: False where the repo already held all of it.
        total_bytes: bytes of all files.
        sent_bytes: bytes of content that crossed the network, those of failed attempts included.
        skipped_bytes: bytes of files that were not sent, since the Hub held them.
        deduplicated_bytes: bytes of files that were sent which did not cross the network: the Hub knew them, or they
            went compressed.
        retries: of requests, files and commits.
        seconds: that it took.
        deleted: files that the commit removed.
        rank_bytes: where several ranks published together, the bytes of the files that each of them saw to.
    """

    commit: str | None
    url: str | None
    pr_url: str | None
    tag: str | None
    plans: tuple[ShardPlan, ...] = field(repr=False)  # of every tensor: too long to print
    changed: bool
    total_bytes: int
    sent_bytes: int = 0
    skipped_bytes: int = 0
    deduplicated_bytes: int = 0
    retries: int = 0
    seconds: float = 0.0
    deleted: tuple[str, ...] = ()
    rank_bytes: tuple[int, ...] = ()

    @property
    def shards(self) -> int:
        """How many weight files it has."""
        return sum(len(plan.shards) for plan in self.plans)

    @property
    def facts(self) -> dict[str, Any]:
        """All but the plans, as plain data: for other ranks, which have the plans."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "plans"}


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Where to, and how; see `push_to_hub` for each.

    Raises:
        FormatError: what cannot be done as asked, such as a tag on a pull request.
    """

    repo_id: str
    revision: str
    tag: str | None
    move_tag: bool
    private: bool | None
    create_pr: bool
    expected_head: str | None
    message: str | None
    staging: Literal["branch", "none"]
    staging_batch_size: int | str
    scratch: str | Path | None
    streams: int | None
    dry_run: bool
    token: Token
    endpoint: str | None
    max_retries: int
    stall_seconds: float
    on_event: OnEvent

    def __post_init__(self) -> None:
        parse_size(self.staging_batch_size)
        if self.streams is not None and self.streams < 1:
            raise FormatError(f"{self.streams} streams send nothing", hint="streams is how many files go at once")
        if self.create_pr and self.tag:
            raise FormatError(
                "a pull request cannot be tagged: it has no commit on the branch yet", hint="tag it after the merge"
            )
        if self.tag is not None:
            check_ref_name(self.tag, "tag")
            check_one_meaning(self.tag, {"main", self.revision})
        if not PULL_REQUEST.fullmatch(self.revision):
            check_ref_name(self.revision, "branch")
        if self.expected_head is not None:
            check_commit(self.expected_head)
        if self.message is not None:
            check_text(self.message, "the message")

    @property
    def batch_bytes(self) -> int | None:
        """How much may wait for a commit on the staging branch; None for no such branch."""
        return parse_size(self.staging_batch_size) if self.staging == "branch" else None


class Together(Protocol):
    """How the processes of a job that publish together share the work; rank 0 leads."""

    @property
    def leads(self) -> bool:
        """Whether this is the process that makes the commit."""

    @property
    def size(self) -> int:
        """How many of them send files."""

    def agree(self, what: str) -> None:
        """See that all ranks publish the same.

        Args:
            what: is the same on all ranks that do.
        """

    def stage(self, upload: Upload, outgoing: Outgoing, batch_bytes: int | None) -> Sequence[Staged]:
        """Make all content durable, with the help of the others. Called by the rank that leads."""

    def follow(self, to: Delivery, outgoing: Outgoing, work: Work) -> Published:
        """Help to make the content durable, until it is published. Called by the other ranks."""

    def published(self, done: Published) -> Published:
        """Tell the others; what all ranks did together. Called by the rank that leads."""


@dataclass(frozen=True, slots=True)
class Work:
    """One delivery under way: who is told, how bad lines are borne, and where scratch files go, if anywhere."""

    op: Operation
    patience: Patience
    scratch: Scratch | None


def deliver(to: Delivery, collect: Collect, together: Together | None = None) -> Published:
    """Publish, in one commit that readers see whole or not at all.

    Args:
        to: where, and how.
        collect: finds out what.
        together: the ranks that share the work, all of which call this; None for this process alone.

    Raises:
        HubshardError: see `push_to_hub`.
    """
    with operation("publish", to.repo_id, to.on_event) as op, ExitStack() as stack:
        patience = Patience(to.max_retries, to.stall_seconds, op.retry)
        outgoing = collect(patience)
        for note in outgoing.notes:
            if to.on_event is ignore and (together is None or together.leads):
                _LOG.warning(note)
            op.tell("warning", detail=note)
        op.start(outgoing.nbytes, to.revision)
        if together is not None and (together.size > 1 or not to.dry_run):
            together.agree(_same(to, outgoing))
        if to.dry_run:
            _rehearse(to, outgoing, Work(op, patience, None))
            op.end("a dry run")
            return Published(None, None, None, None, outgoing.plans, changed=False, total_bytes=outgoing.nbytes)
        disk = None if to.scratch is None else stack.enter_context(_scratch(Path(to.scratch), outgoing))
        work = Work(op, patience, disk)
        if together is not None and not together.leads:
            return together.follow(to, outgoing, work)
        return _deliver(to, outgoing, work, together)


def _same(to: Delivery, outgoing: Outgoing) -> str:
    """What is the same on all ranks that publish the same."""
    key = publish_key(outgoing.plans, repo_id=to.repo_id, revision=to.revision)
    where = HubStore(to.repo_id, endpoint=to.endpoint).url_of(Revision(to.revision, to.revision))
    asked = f"tag {to.tag}, pull request: {to.create_pr}, dry run: {to.dry_run}, plan {key}"
    nbytes = sum(shard.nbytes for shard in outgoing.shards)
    return f"{counted(len(outgoing.shards), 'shard')} of {nbytes} bytes to {where} ({asked})"


def _deliver(to: Delivery, outgoing: Outgoing, work: Work, together: Together | None) -> Published:
    store = _store_of(to, outgoing, work)
    base, is_new = base_of(store, to)
    at = _destination(to, outgoing, store, base)
    if to.tag and not to.move_tag:
        check_new_tag(at, to.tag, outgoing)
    ranks = 1 if together is None else together.size
    upload = Upload(at, outgoing, work.op, scratch=work.scratch, streams=to.streams, ranks=ranks)
    final = FinalCommit(at, outgoing, work.op)
    overtaken = _check_head(final, base, to.expected_head)
    commit = None
    try:
        staged = upload.stage(to.batch_bytes) if together is None else together.stage(upload, outgoing, to.batch_bytes)
        title, tag = to.message or outgoing.usual_title, None if to.move_tag else to.tag
        commit, change = final.commit(staged, title, overtaken=overtaken, may_rebase=to.expected_head is None, tag=tag)
        final.verify(commit, staged, change)
        if to.tag:
            final.tag(to.tag, commit, title, move=to.move_tag)
    except HubshardError as error:
        if not _is_gone(store, error):
            upload.tell_what_is_left()
            if is_new and not final.may_be_shown:
                tell_of_new_repo(error, store)
        raise
    upload.close()
    totals = work.op.end(commit.commit)
    done = Published(
        commit=commit.commit,
        url=store.url_of(commit),
        pr_url=store.url_of(commit) if to.create_pr and commit != base else None,
        tag=to.tag,
        plans=outgoing.plans,
        changed=commit != base,
        total_bytes=outgoing.nbytes,
        sent_bytes=totals.sent_bytes,
        skipped_bytes=totals.skipped_bytes,
        deduplicated_bytes=totals.deduplicated_bytes,
        retries=totals.retries,
        seconds=totals.seconds,
        deleted=change.remove,
    )
    return done if together is None else together.published(done)


def _is_gone(store: HubStore, error: HubshardError) -> bool:
    """Whether the repo was deleted meanwhile, with all that was in it."""
    with suppress(HubshardError):
        return isinstance(error, NotFoundError) and not store.repo_exists()
    return False


def _rehearse(to: Delivery, outgoing: Outgoing, work: Work) -> None:
    """Raise what a publish would raise before it sends anything; nothing is written."""
    store, warn = _store_of(to, outgoing, work), partial(work.op.tell, "warning")
    base = found_base(store, to)
    if base is None:
        warn(detail=f"{to.repo_id} does not exist, or the token may not see it: a publish would make it")
        return
    at = _destination(to, outgoing, store, base)
    if to.tag and not to.move_tag and check_new_tag(at, to.tag, outgoing):
        warn(detail=f"the tag {to.tag!r} is on {base.commit} already: it is refused if this publish changes a byte")
    check_head(base, to.expected_head, repo_id=to.repo_id)
    tree = at.tree()
    for note in notes_on_tree(at, outgoing, tree):
        warn(detail=note)
    try:
        check_tree(at, outgoing, tree)
    except (StoreError, NotFoundError) as error:  # a plan needs no rights, and to ask what a repo ignores does
        if isinstance(error, StoreError) and error.retryable:
            raise
        warn(detail=f"whether the repo takes all files cannot be said: {error}")


def _store_of(to: Delivery, outgoing: Outgoing, work: Work) -> HubStore:
    """The repo, asked whether its Hub takes the model card."""
    store = HubStore(to.repo_id, token=to.token, endpoint=to.endpoint, patience=work.patience)
    for note in card_warnings(store, outgoing):
        work.op.tell("warning", "README.md", detail=note)
    return store


def _destination(to: Delivery, outgoing: Outgoing, store: HubStore, base: Revision) -> Destination:
    key = publish_key(outgoing.plans, repo_id=store.repo_id, revision=to.revision)
    return Destination(store, to.revision, base, to.create_pr, key)


def _scratch(folder: Path, outgoing: Outgoing) -> AbstractContextManager[Scratch]:
    large = (file.nbytes for file in outgoing.all_files if file.nbytes >= LARGE_FILE_BYTES)
    return scratch_in(folder.expanduser(), large)


def _check_head(final: FinalCommit, head: Revision, expected: str | None) -> ConflictError | None:
    """Refuse a branch that is not where it should be, at once; a commit of this very publish may be there already.

    Returns:
        What to raise if the head turns out to differ from what is published.
    """
    try:
        check_head(head, expected, repo_id=final.repo_id)
    except ConflictError as error:
        if not final.is_ours(head):
            raise
        return error
    return None
