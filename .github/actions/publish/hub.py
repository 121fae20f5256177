"""The Hub as the action sees it: where branches and tags are, moving them, closing a pull request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import httpx
from runner import ActionError

__all__ = ["Hub"]


class Hub:
    """One repo.

    Args:
        repo_id: "org/name".
    """

    def __init__(self, repo_id: str) -> None:
        self.repo_id = repo_id
        self._api = HfApi()

    def branches(self) -> dict[str, str] | None:
        """Branch → commit; None where there is no such repo."""
        with _told(f"list the branches of {self.repo_id}"):
            try:
                refs = self._api.list_repo_refs(self.repo_id)
            except RepositoryNotFoundError:
                return None
            return {ref.name: ref.target_commit for ref in refs.branches}

    def tags(self) -> dict[str, str]:
        """Tag → commit."""
        with _told(f"list the tags of {self.repo_id}"):
            try:
                refs = self._api.list_repo_refs(self.repo_id)
            except RepositoryNotFoundError:
                return {}
            return {ref.name: ref.target_commit for ref in refs.tags}

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch, tag or commit names, or None."""
        with _told(f"look up {revision} of {self.repo_id}"):
            try:
                return self._api.repo_info(self.repo_id, revision=revision).sha
            except (RevisionNotFoundError, RepositoryNotFoundError):
                return None

    def parents(self, revision: str) -> list[tuple[str, str]]:
        """Commit and title of a revision, then of the one before it."""
        with _told(f"read the history of {self.repo_id}"):
            commits = self._api.list_repo_commits(self.repo_id, revision=revision)
            return [(commit.commit_id, commit.title) for commit in commits[:2]]

    def files(self, revision: str) -> list[dict[str, Any]]:
        """Every file of a revision: path, size (bytes), and its SHA-256 where the Hub has one, or its git blob id."""
        with _told(f"list the files of {self.repo_id}"):
            entries = self._api.list_repo_tree(self.repo_id, recursive=True, revision=revision)
            return [_described(entry) for entry in entries if hasattr(entry, "size")]

    def create_branch(self, name: str, at: str) -> None:
        """Make a branch."""
        with _told(f"create the branch {name} of {self.repo_id}"):
            self._api.create_branch(self.repo_id, branch=name, revision=at)

    def delete_branch(self, name: str) -> None:
        """Delete a branch."""
        with _told(f"delete the branch {name} of {self.repo_id}"):
            self._api.delete_branch(self.repo_id, branch=name)

    def tag(self, name: str, at: str, *, move: bool) -> None:
        """Have a tag name a commit.

        Raises:
            ActionError: it names another one, and may not be moved.
        """
        there = self.tags().get(name)
        if there == at:
            return
        if there is not None and not move:
            raise ActionError(f"the tag {name} is on {there} already: choose another, or set the input move-tag")
        with _told(f"tag {self.repo_id}"):
            if there is not None:
                self._api.delete_tag(self.repo_id, tag=name)
            self._api.create_tag(self.repo_id, tag=name, revision=at)

    def open_pulls(self) -> set[int]:
        """Numbers of the open pull requests."""
        with _told(f"list the pull requests of {self.repo_id}"):
            try:
                found = self._api.get_repo_discussions(
                    self.repo_id, discussion_type="pull_request", discussion_status="open"
                )
                return {pull.num for pull in found}
            except RepositoryNotFoundError:
                return set()

    def close_pull(self, number: int, why: str) -> None:
        """Close a pull request, saying why."""
        with _told(f"close the pull request {number} of {self.repo_id}"):
            self._api.change_discussion_status(self.repo_id, number, new_status="closed", comment=why)


def _described(entry: Any) -> dict[str, Any]:
    large = getattr(entry, "lfs", None)
    digest = {"sha256": large.sha256} if large else {"git_blob": entry.blob_id}
    return {"path": entry.path, "size": entry.size, **digest}


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except HfHubHTTPError as error:
        words = error.server_message or str(error)
        raise ActionError(f"cannot {what}: {' '.join(words.split())} ({error.response.status_code})") from error
    except httpx.HTTPError as error:
        where = os.environ.get("HF_ENDPOINT", "the Hub")
        raise ActionError(f"cannot {what}: {where} cannot be reached: {error}") from error
