"""`push_to_hub`: plan, stage, commit once, verify, tag."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hubshard.errors import ConflictError, FormatError, HubshardError, NotFoundError
from hubshard.events import OnEvent, ignore, operation
from hubshard.index import check_variant
from hubshard.plan import ShardPlan
from hubshard.protocols import Revision
from hubshard.publish.outgoing import Layout, Outgoing, from_memory, from_store
from hubshard.publish.scratch import Scratch, scratch_in
from hubshard.publish.sending import LARGE_FILE_BYTES
from hubshard.publish.session import Session
from hubshard.sizes import parse_size
from hubshard.sources.dtypes import parse_float_dtype
from hubshard.store.commit import check_head
from hubshard.store.hub import HubStore
from hubshard.store.hub_client import Token
from hubshard.store.opening import open_target
from hubshard.store.patience import Patience
from hubshard.target import check_ref_name

__all__ = ["Published", "push_to_hub"]

_LOG = logging.getLogger("hubshard")
_PULL_REQUEST = re.compile(r"refs/pr/[1-9][0-9]*")


@dataclass(frozen=True)
class Published:
    """What a publish did.

    Attributes:
        commit: the commit that shows it, or None after a dry run.
        url: of that commit, or None.
        pr_url: of the pull request, where one was asked for.
        tag: the tag that names it, or None.
        plan: which tensor is in which shard.
        changed: False where the repo already held all of it.
        total_bytes: bytes of all files.
        sent_bytes: bytes of content that crossed the network, those of failed attempts included.
        skipped_bytes: bytes of files that were not sent, since the Hub held them.
        deduplicated_bytes: bytes of files that were sent which did not cross the network: the Hub knew them, or they
            went compressed.
        retries: of requests, files and commits.
        seconds: that it took.
        deleted: files that the commit removed.
    """

    commit: str | None
    url: str | None
    pr_url: str | None
    tag: str | None
    plan: ShardPlan
    changed: bool
    total_bytes: int
    sent_bytes: int = 0
    skipped_bytes: int = 0
    deduplicated_bytes: int = 0
    retries: int = 0
    seconds: float = 0.0
    deleted: tuple[str, ...] = ()

    @property
    def shards(self) -> int:
        """How many weight files it has."""
        return len(self.plan.shards)


def push_to_hub(
    source: Any,
    repo_id: str,
    *,
    revision: str = "main",
    max_shard_size: int | str = "5GB",
    variant: str | None = None,
    dtype: Any = None,
    tag: str | None = None,
    move_tag: bool = False,
    private: bool | None = None,
    create_pr: bool = False,
    expected_head: str | None = None,
    message: str | None = None,
    companions: Sequence[object] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    staging: Literal["branch", "none"] = "branch",
    staging_batch_size: int | str = "256MB",
    scratch: str | Path | None = None,
    dry_run: bool = False,
    token: Token = None,
    endpoint: str | None = None,
    max_retries: int = 5,
    stall_seconds: float = 30.0,
    on_event: OnEvent = ignore,
) -> Published:
    """Publish a model to a Hub repo, in one commit that readers see whole or not at all.

    Tensors are streamed; no shard file is written. What a killed run had finished is found again by content, on any
    machine. The commit also removes the weight files of the same variant that the new index does not name.

    Args:
        source: a directory or file of safetensors, `org/name[@revision]` of another repo, a state dict, an
            `nn.Module`, a transformers model, or a `Source`.
        repo_id: "org/name"; made if it does not exist.
        revision: branch to publish to; made from main if it does not exist.
        max_shard_size: bound per shard, header included: bytes, or as in "5GB", "512MiB".
        variant: as in `model.fp16.safetensors`; other variants in the repo are left alone.
        dtype: cast floating tensors to it, such as "bfloat16"; needs torch.
        tag: made on the new commit.
        move_tag: whether an existing tag may be moved.
        private: visibility of a repo that is made; refused where an existing one differs.
        create_pr: open a pull request rather than move the branch.
        expected_head: commit that the branch must be at, in full or its first 7 or more digits.
        message: title of the commit.
        companions: tokenizers, processors: whatever has `save_pretrained`, to go along with a model in memory.
        include: patterns of a directory's files that go along, all by default.
        exclude: patterns of files that stay.
        staging: "branch" keeps finished shards on a staging branch, so that a killed run goes on anywhere; "none" shows
            nothing of them until the end.
        staging_batch_size: how much may wait for a commit on that branch.
        scratch: a folder through which each large file goes, two at a time, for sources that are expensive to read
            twice where Xet is off; None to stream.
        dry_run: plan and check only.
        token: as in huggingface_hub, its login by default; or a function that is asked before each request, for tokens
            that expire while a publish runs.
        endpoint: of the Hub; HF_ENDPOINT by default.
        max_retries: of one request or commit, after its first try.
        stall_seconds: of silence that are a failure where bytes should come; where the server has to work, a multiple.
        on_event: is told of every step.

    Raises:
        FormatError: something in the source that cannot be published; nothing was written.
        ConflictError: the branch or tag is not where it should be; nothing is shown.
        IntegrityError: the Hub does not hold what was sent.
        StoreError: the Hub refused, or failed again and again.
    """
    check_variant(variant)
    layout = Layout(parse_size(max_shard_size), variant, None if dtype is None else parse_float_dtype(dtype))
    batch_bytes = parse_size(staging_batch_size)
    if create_pr and tag:
        raise FormatError(
            "a pull request cannot be tagged: it has no commit on the branch yet", hint="tag it after the merge"
        )
    if tag is not None:
        check_ref_name(tag, "tag")
    if not _PULL_REQUEST.fullmatch(revision):
        check_ref_name(revision, "branch")
    with operation("publish", repo_id, on_event) as op, ExitStack() as stack:
        patience = Patience(max_retries, stall_seconds, op.retry)
        outgoing = _collect(source, layout, companions, include, exclude, token, endpoint, patience)
        for note in outgoing.notes:
            if on_event is ignore:
                _LOG.warning(note)
            op.tell("warning", detail=note)
        op.start(outgoing.nbytes, revision)
        if dry_run:
            op.end("a dry run")
            return Published(None, None, None, None, outgoing.plan, changed=False, total_bytes=outgoing.nbytes)
        disk = None if scratch is None else stack.enter_context(_scratch(Path(scratch), outgoing))
        store = HubStore(repo_id, token=token, endpoint=endpoint, patience=patience)
        base = _base(store, revision, private=private)
        session = Session(store, outgoing, revision, base, op, create_pr=create_pr, scratch=disk)
        overtaken = _check_head(session, base, expected_head)
        title = message or f"Publish {len(outgoing.plan.shards)} shard(s) with hubshard"
        try:
            staged = session.stage(batch_bytes if staging == "branch" else None)
            commit, change = session.commit(
                staged, title, overtaken=overtaken, may_rebase=expected_head is None, tag=None if move_tag else tag
            )
            session.verify(commit, staged, change)
            if tag:
                store.tag(tag, commit, title, exist_ok=True, move=move_tag)
                op.tell("tag", tag, detail=commit.commit)
        except HubshardError:
            session.tell_what_is_left()
            raise
        session.close()
        totals = op.end(commit.commit)
        return Published(
            commit=commit.commit,
            url=store.url_of(commit),
            pr_url=store.url_of(commit) if create_pr and commit != base else None,
            tag=tag,
            plan=outgoing.plan,
            changed=commit != base,
            total_bytes=outgoing.nbytes,
            sent_bytes=totals.sent_bytes,
            skipped_bytes=totals.skipped_bytes,
            deduplicated_bytes=totals.deduplicated_bytes,
            retries=totals.retries,
            seconds=totals.seconds,
            deleted=change.remove,
        )


def _scratch(folder: Path, outgoing: Outgoing) -> AbstractContextManager[Scratch]:
    large = (file.nbytes for file in outgoing.all_files if file.nbytes >= LARGE_FILE_BYTES)
    return scratch_in(folder.expanduser(), large)


def _collect(
    source: Any,
    layout: Layout,
    companions: Sequence[object],
    include: Sequence[str],
    exclude: Sequence[str],
    token: Token,
    endpoint: str | None,
    patience: Patience,
) -> Outgoing:
    if not isinstance(source, str | Path):
        return from_memory(source, layout, companions=companions)
    opened = open_target(source, token=token, endpoint=endpoint, patience=patience)
    return from_store(opened, layout, include=include, exclude=exclude)


def _check_head(session: Session, head: Revision, expected: str | None) -> ConflictError | None:
    """Refuse a branch that is not where it should be, at once; a commit of this very publish may be there already.

    Returns:
        What to raise if the head turns out to differ from what is published.
    """
    try:
        check_head(head, expected)
    except ConflictError as error:
        if not session.is_ours(head):
            raise
        return error
    return None


def _base(store: HubStore, revision: str, *, private: bool | None) -> Revision:
    if not store.repo_exists():
        store.create_repo(private=private, exist_ok=True)
    elif private is not None and store.is_private() != private:
        now, wanted = ("public", "private") if private else ("private", "public")
        raise FormatError(
            f"{store.repo_id} is {now}, and should be {wanted}", hint="change its visibility in the settings first"
        )
    head = store.head(revision)
    is_pull_request = bool(_PULL_REQUEST.fullmatch(revision))
    if head is None and is_pull_request:
        raise NotFoundError(f"{store.repo_id} has no pull request {revision}", hint="open one with `create_pr`")
    if head is not None and not is_pull_request and revision != "main" and revision not in store.branches():
        raise FormatError(
            f"{store.repo_id}: {revision!r} is a tag or a commit, and only branches move", hint="name a branch"
        )
    head = head or store.head("main")
    if head is None:
        raise NotFoundError(f"{store.repo_id} has no branch main to start {revision!r} from")
    return head
