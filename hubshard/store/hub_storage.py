"""What a repo on the Hub keeps: its refs and their histories, its large files, and giving both up for good.

Deleting a file in a commit frees nothing: older commits name it still. Storage is freed when the history is squashed,
and then the large files that nothing names any more are deleted, by a request of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from hubshard.errors import NotFoundError, StoreError
from hubshard.store.hub_client import BUSY_STALLS, PATHS_PER_REQUEST, HubClient, Token
from hubshard.store.hub_errors import status_of
from hubshard.store.patience import Patience

__all__ = ["Change", "HubStorage", "StoredFile"]

_FILES_PER_REQUEST = 1000


@dataclass(frozen=True, slots=True)
class Change:
    """A commit, as histories show it.

    Attributes:
        commit: its id.
        title: for people.
        message: the rest of what was said of it; "" where the Hub shows the title alone.
        date: when it was made; None where the Hub does not say.
    """

    commit: str
    title: str
    message: str
    date: datetime | None


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A large file that the repo keeps, whether a commit names it or not.

    Attributes:
        sha256: of its content: what deletions name.
        ids: every id that the Hub gives it, that one included.
        path: a path that it has or had; "" where the Hub does not know.
        nbytes: its size (bytes).
    """

    sha256: str
    ids: frozenset[str]
    path: str
    nbytes: int


class HubStorage:
    """The storage of one repo.

    Args:
        repo_id: "org/name".
        token: see `HubStore`.
        endpoint: the Hub's URL; None for that of huggingface_hub.
        patience: with a bad line.
    """

    def __init__(
        self, repo_id: str, *, token: Token = None, endpoint: str | None = None, patience: Patience | None = None
    ) -> None:
        self._client = HubClient(repo_id, repo_type="model", token=token, endpoint=endpoint, patience=patience)

    def refs(self) -> Mapping[str, str]:
        """Every ref by its full name, "refs/heads/main", and its commit: branches, tags, pull requests, conversions."""

        def found(answer: Any) -> dict[str, str]:
            kinds = ("branches", "tags", "converts", "pullRequests")
            return {str(ref["ref"]): str(ref["targetCommit"]) for kind in kinds for ref in answer.get(kind) or []}

        return self._client.ask(
            "GET", self._client.api_url("refs"), "list branches and tags", found, params={"include_prs": "1"}
        )

    def history(self, revision: str) -> Iterator[Change]:
        """The commits that lead to a revision, newest first."""
        what = f"look at the history of {revision!r}"
        yield from self._client.pages(self._client.api_url("commits", revision), what, _change_of)

    def large_files(self, commit: str) -> frozenset[str]:
        """The sha256 of every large file of a commit."""
        url, what = self._client.api_url("tree", commit), f"list the files at {commit[:12]}"
        found = self._client.pages(url, what, lambda item: str((item.get("lfs") or {}).get("oid", "")), recursive=True)
        return frozenset(found) - {""}

    def last_changes(self, commit: str, paths: Sequence[str]) -> Mapping[str, Change]:
        """The commit that last changed each path, where the Hub says."""
        url, what = self._client.api_url("paths-info", commit), f"look at files at {commit[:12]}"
        found: dict[str, Change] = {}
        for start in range(0, len(paths), PATHS_PER_REQUEST):
            body = {"paths": list(paths[start : start + PATHS_PER_REQUEST]), "expand": True}
            items = self._client.ask(
                "POST", url, what, lambda answer: [_last_change_of(item) for item in answer], json=body
            )
            found |= {path: change for path, change in items if change is not None}
        return found

    def stored_files(self) -> Iterator[StoredFile]:
        """All large files that the repo keeps."""
        yield from self._client.pages(self._client.api_url("lfs-files"), "list the stored files", _stored_of)

    def delete_files(self, sha256s: Collection[str]) -> Iterator[int]:
        """Delete large files for good, in batches; how many each had. Commits that name one cannot be read any more.

        Raises:
            NotFoundError: the repo does not keep one of them: of its batch, none was deleted.
            StoreError: the token may not, or tried again in vain.
        """
        url, left = self._client.api_url("lfs-files", "batch"), iter(sorted(sha256s))
        while batch := list(islice(left, _FILES_PER_REQUEST)):
            self._delete(url, batch)
            yield len(batch)

    def _delete(self, url: str, sha256s: Sequence[str]) -> None:
        try:
            self._client.send(
                "POST",
                url,
                "delete stored files",
                needs="write",
                stalls=BUSY_STALLS,
                json={"deletions": {"sha": sha256s, "rewriteHistory": False}},
            )
        except StoreError as error:
            if status_of(error) == 404:  # of the file, not of the repo
                raise NotFoundError(error.message) from error
            raise

    def squash(self, branch: str, message: str) -> None:
        """Make the head of a branch its only commit; its files stay as they are.

        Raises:
            NotFoundError: no such branch.
            StoreError: the token may not, or tried again in vain.
        """
        self._client.send(
            "POST",
            self._client.api_url("super-squash", branch),
            f"squash the history of {branch!r}",
            needs="write",
            stalls=BUSY_STALLS,
            json={"message": message},
        )


def _change_of(item: Any) -> Change:
    title, message = str(item.get("title", "")), str(item.get("message") or "")
    return Change(str(item["id"]), title, message, _date_of(item.get("date")))


def _last_change_of(item: Any) -> tuple[str, Change | None]:
    last = item.get("lastCommit")
    return str(item["path"]), None if last is None else _change_of(last)


def _stored_of(item: Any) -> StoredFile:
    sha256 = str(item["fileOid"])
    ids = frozenset({sha256, str(item.get("oid") or sha256)})
    return StoredFile(sha256, ids, str(item.get("filename") or ""), int(item["size"]))


def _date_of(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None
