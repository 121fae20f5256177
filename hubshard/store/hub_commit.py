"""Commits on the Hub: the request, what is read from its answer, and the history that tells a lost answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from hubshard.errors import FormatError, StoreError
from hubshard.paths import check_store_path
from hubshard.protocols import Staged
from hubshard.store.commit import Made, publish_id_in, with_publish_id
from hubshard.store.hub_client import BUSY_STALLS, HubClient
from hubshard.target import check_text

__all__ = ["check_changes", "commit_body", "history_of", "made_of", "send_commit"]

_LOOK_BACK = 200


def check_changes(add: Sequence[Staged], remove: Sequence[str]) -> None:
    """Refuse paths that no repo takes, or that are added twice.

    Raises:
        FormatError: such a path.
    """
    seen: set[str] = set()
    for staged in add:
        if check_store_path(staged.path) in seen:
            raise FormatError(f"{staged.path} is added twice in one commit")
        seen.add(staged.path)
    for path in remove:
        check_store_path(path)


def commit_body(
    *, parent: str, add: Sequence[Staged], remove: Sequence[str], message: str, publish_id: str
) -> Iterator[bytes]:
    """The lines of the request: newline-delimited JSON, header first, as huggingface_hub 2.4 sends them."""
    title, _, description = check_text(message, "the message").strip().partition("\n")
    header = {"summary": title, "description": with_publish_id(description, publish_id), "parentCommit": parent}
    yield _line("header", header)
    for path in remove:
        yield _line("deletedFile", {"path": path})
    for staged in add:
        content = "" if staged.nbytes == 0 else staged.receipt.get("content")
        if content is not None:
            yield _line("file", {"content": content, "path": staged.path, "encoding": "base64"})
        else:
            large = {"path": staged.path, "algo": "sha256", "oid": staged.sha256, "size": staged.nbytes}
            yield _line("lfsFile", large)


def send_commit(client: HubClient, branch: str, body: bytes, *, create_pr: bool) -> tuple[str, int | None]:
    """Send a commit once; its id, and the number of the pull request where one was asked for.

    Raises:
        ConflictError: the parent is not the head.
        StoreError: refused, or (retryable) no answer.
    """
    response = client.send(
        "POST",
        client.api_url("commit", branch),
        f"commit to {branch!r}",
        needs="write" if not create_pr else "read",
        retry=False,
        headers={"Content-Type": "application/x-ndjson"},
        stalls=BUSY_STALLS,
        content=body,
        params={"create_pr": "1"} if create_pr else None,
    )
    try:
        answer = response.json()
        commit = str(answer["commitOid"])
        number = int(str(answer["pullRequestUrl"]).rstrip("/").rpartition("/")[2]) if create_pr else None
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{client.repo}: the answer to the commit cannot be read: {error}", retryable=True) from error
    return commit, number


def history_of(client: HubClient, revision: str, *, until: str | None, most: int = _LOOK_BACK) -> list[Made]:
    """The commits of a revision, newest first, to `until`, and `most` of them at most."""
    made = []
    for commit in client.pages(client.api_url("commits", revision), f"look at the history of {revision!r}", made_of):
        made.append(commit)
        if made[-1].commit == until or len(made) >= most:
            break
    return made


def made_of(item: Any) -> Made:
    """One commit of the Hub's list."""
    authors = ", ".join(str(author.get("user", "somebody")) for author in item.get("authors", ())) or "somebody"
    return Made(str(item["id"]), publish_id_in(str(item.get("message") or "")), authors, str(item.get("title", "")))


def _line(key: str, value: Any) -> bytes:
    return json.dumps({"key": key, "value": value}).encode() + b"\n"
