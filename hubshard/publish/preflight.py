"""What can be refused is refused before a byte is sent, and, as far as that goes, before a repo is made."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from hubshard.errors import ConflictError, FormatError, HubshardError, NotFoundError
from hubshard.protocols import Entry, Revision
from hubshard.publish.destination import Destination
from hubshard.publish.outgoing import Outgoing
from hubshard.store.hub import HubStore

__all__ = [
    "PULL_REQUEST",
    "base_of",
    "card_warnings",
    "check_new_tag",
    "check_one_meaning",
    "check_tag",
    "found_base",
    "tell_of_new_repo",
]

PULL_REQUEST = re.compile(r"refs/pr/[1-9][0-9]*")
_CARD = "README.md"
_LARGEST_CARD_BYTES = 2**20


class _Asked(Protocol):
    # of a Delivery
    @property
    def revision(self) -> str: ...
    @property
    def tag(self) -> str | None: ...
    @property
    def private(self) -> bool | None: ...
    @property
    def expected_head(self) -> str | None: ...


def card_warnings(store: HubStore, outgoing: Outgoing) -> Sequence[str]:
    """What the Hub finds odd in the model card. It refuses commits for what is wrong in one.

    Raises:
        FormatError: something is wrong.
    """
    for file in outgoing.files:
        if file.path == _CARD and not file.default and file.nbytes <= _LARGEST_CARD_BYTES:
            return store.check_card(file.content().decode(errors="replace"))
    return ()


def base_of(store: HubStore, to: _Asked) -> tuple[Revision, bool]:
    """The commit to build on, and whether the repo was made for that.

    Raises:
        HubshardError: see `found_base`.
    """
    head = found_base(store, to)
    if head is not None:
        return head, False
    store.create_repo(private=to.private, exist_ok=True)
    return _start_of(store, to, store.head(to.revision)), True


def found_base(store: HubStore, to: _Asked) -> Revision | None:
    """The commit to build on; None where the repo does not exist. Nothing is written.

    Raises:
        FormatError: the repo has the other visibility, what is named is no branch, or a name means a branch and a tag.
        NotFoundError: no such pull request.
        ConflictError: a repo that does not exist is expected to be somewhere.
    """
    is_pull_request = bool(PULL_REQUEST.fullmatch(to.revision))
    if not store.repo_exists():
        if is_pull_request:
            raise _no_pull_request(store, to)
        if to.expected_head is not None:
            raise ConflictError(
                f"{store.repo_id} does not exist, so {to.revision} is not at {to.expected_head}",
                hint="check its name; leave out the expected head to have it made",
            )
        return None
    if to.private is not None and store.is_private() != to.private:
        now, wanted = ("public", "private") if to.private else ("private", "public")
        raise FormatError(
            f"{store.repo_id} is {now}, and should be {wanted}", hint="change its visibility in the settings first"
        )
    head = store.head(to.revision)
    if head is None and is_pull_request:
        raise _no_pull_request(store, to)
    branches = store.branches()
    if not is_pull_request:
        _check_branch(store, to.revision, branches, is_there=head is not None)
    if to.tag is not None:
        check_one_meaning(to.tag, branches)
    return _start_of(store, to, head)


def _start_of(store: HubStore, to: _Asked, head: Revision | None) -> Revision:
    start = head or store.head("main")
    if start is None:
        raise NotFoundError(f"{store.repo_id} has no branch main to start {to.revision!r} from")
    return start


def _no_pull_request(store: HubStore, to: _Asked) -> NotFoundError:
    return NotFoundError(f"{store.repo_id} has no pull request {to.revision}", hint="open one with `create_pr`")


def _check_branch(store: HubStore, revision: str, branches: Container[str], *, is_there: bool) -> None:
    if is_there and revision not in branches:
        raise FormatError(
            f"{store.repo_id}: {revision!r} is a tag or a commit, and only branches move", hint="name a branch"
        )
    if is_there and revision in store.tags():
        raise FormatError(
            f"{store.repo_id}: {revision!r} is a branch and a tag, so that it means two revisions",
            hint="delete the one or the other, or publish to another branch",
        )


def check_one_meaning(tag: str, branches: Container[str]) -> None:
    """Refuse a tag that would be a branch too: whoever asked for that name would get the one or the other.

    Raises:
        FormatError: there is such a branch.
    """
    if tag in branches:
        raise FormatError(
            f"{tag!r} is the name of a branch: as a tag too it would mean two revisions", hint="choose another tag"
        )


def check_tag(store: HubStore, tag: str, base: Revision | None) -> bool:
    """Refuse a tag that is on another commit than `base`: only what that holds already could have it.

    Returns:
        Whether it is on that one.

    Raises:
        ConflictError: it is.
    """
    there = store.tags().get(tag)
    if there is not None and (base is None or there != base.commit):
        raise ConflictError(
            f"the tag {tag!r} is on commit {there} already",
            hint="choose another tag, or move this one with --move-tag (in Python, move_tag=True)",
        )
    return there is not None


def check_new_tag(to: Destination, tag: str, outgoing: Outgoing) -> bool:
    """Refuse a tag that is on another commit than the base, or on that where it surely will not do.

    Returns:
        Whether it is on the base: it will do if nothing changes, which the hashes alone can tell.

    Raises:
        ConflictError: it is.
    """
    is_there = check_tag(to.store, tag, to.base)
    if is_there and _must_differ(outgoing, to.tree()):
        check_tag(to.store, tag, None)
    return is_there


def _must_differ(outgoing: Outgoing, tree: Mapping[str, Entry]) -> bool:
    """Whether files come, go, or have other sizes."""
    ours = {file.path for file in outgoing.all_files}
    if any(outgoing.replaces(path) and path not in ours for path in tree):
        return True
    return any(
        (there := tree.get(file.path)) is None or (there.nbytes != file.nbytes and not file.default)
        for file in outgoing.all_files
    )


def tell_of_new_repo(error: HubshardError, store: HubStore) -> None:
    """Say in the hint of an error that the repo which was made for a publish is there, without it."""
    error.add_hint(f"{store.repo_id} was made for this publish, and shows nothing of it")
