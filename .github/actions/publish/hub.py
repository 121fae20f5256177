"""The Hub as the action sees it: where branches and tags are, moving them, closing a pull request."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx
from runner import ActionError, quietly

__all__ = ["Hub", "is_transient"]

T = TypeVar("T")

_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0)


class Hub:
    """One repo. What may pass, as a busy server or a lost connection, is tried again.

    Args:
        repo_id: "org/name".
    """

    def __init__(self, repo_id: str) -> None:
        self.repo_id = repo_id
        self._api = HfApi()

    def branches(self) -> dict[str, str] | None:
        """Branch → commit; None where there is no such repo."""
        return self._refs("branches")

    def tags(self) -> dict[str, str]:
        """Tag → commit."""
        return self._refs("tags") or {}

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch, tag or commit names, or None."""

        def look() -> str | None:
            try:
                return self._api.repo_info(self.repo_id, revision=revision).sha
            except (RevisionNotFoundError, RepositoryNotFoundError):
                return None

        return _insist(f"look up {revision} of {self.repo_id}", look)

    def parents(self, revision: str) -> list[tuple[str, str]]:
        """Commit and title of a revision, then of the one before it."""

        def look() -> list[tuple[str, str]]:
            commits = self._api.list_repo_commits(self.repo_id, revision=revision)
            return [(commit.commit_id, commit.title) for commit in commits[:2]]

        return _insist(f"read the history of {self.repo_id}", look)

    def files(self, revision: str) -> list[dict[str, Any]]:
        """Every file of a revision: path, size (bytes), and its SHA-256 where the Hub has one, or its git blob id."""

        def look() -> list[dict[str, Any]]:
            entries = self._api.list_repo_tree(self.repo_id, recursive=True, revision=revision)
            return [_described(entry) for entry in entries if hasattr(entry, "size")]

        return _insist(f"list the files of {self.repo_id}", look)

    def create_branch(self, name: str, at: str) -> None:
        """Make a branch."""

        def make() -> None:
            try:
                self._api.create_branch(self.repo_id, branch=name, revision=at)
            except HfHubHTTPError as error:  # made by an attempt whose answer was lost
                if error.response.status_code != 409 or (self.branches() or {}).get(name) != at:
                    raise

        _insist(f"create the branch {name} of {self.repo_id}", make)

    def delete_branch(self, name: str) -> None:
        """Delete a branch; one that is gone is fine."""

        def delete() -> None:
            with suppress(RevisionNotFoundError):
                self._api.delete_branch(self.repo_id, branch=name)

        _insist(f"delete the branch {name} of {self.repo_id}", delete)

    def tag(self, name: str, at: str, *, move: bool) -> None:
        """Have a tag name a commit.

        Raises:
            ActionError: it names another one, and may not be moved.
        """

        def place() -> None:
            there = self.tags().get(name)
            if there == at:
                return
            if there is not None and not move:
                raise ActionError(f"the tag {name} is on {there} already: choose another, or set the input move-tag")
            if there is not None:
                self._api.delete_tag(self.repo_id, tag=name)
            self._api.create_tag(self.repo_id, tag=name, revision=at)

        _insist(f"tag {self.repo_id}", place)

    def open_pulls(self) -> set[int]:
        """Numbers of the open pull requests."""

        def look() -> set[int]:
            try:
                found = self._api.get_repo_discussions(
                    self.repo_id, discussion_type="pull_request", discussion_status="open"
                )
                return {pull.num for pull in found}
            except RepositoryNotFoundError:
                return set()

        return _insist(f"list the pull requests of {self.repo_id}", look)

    def close_pull(self, number: int, why: str) -> None:
        """Close a pull request, saying why; one that is closed is fine."""

        def close() -> None:
            if number in self.open_pulls():
                self._api.change_discussion_status(self.repo_id, number, new_status="closed", comment=why)

        _insist(f"close the pull request {number} of {self.repo_id}", close)

    def _refs(self, kind: str) -> dict[str, str] | None:
        def look() -> dict[str, str] | None:
            try:
                refs = self._api.list_repo_refs(self.repo_id)
            except RepositoryNotFoundError:
                return None
            return {ref.name: ref.target_commit for ref in getattr(refs, kind)}

        return _insist(f"list the {kind} of {self.repo_id}", look)


def is_transient(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status in {408, 425, 429} or status >= 500


def _described(entry: Any) -> dict[str, Any]:
    large = getattr(entry, "lfs", None)
    digest = {"sha256": large.sha256} if large else {"git_blob": entry.blob_id}
    return {"path": entry.path, "size": entry.size, **digest}


def _insist(what: str, act: Callable[[], T]) -> T:
    """Try, and again after errors that may pass.

    Args:
        what: is done, after "cannot".
        act: does it; safe to be called again when it failed.

    Raises:
        ActionError: it cannot be done; with the Hub's own words.
    """
    for pause_seconds in (*_PAUSES_SECONDS, None):
        try:
            return act()
        except HfHubHTTPError as error:
            words = " ".join(str(error.server_message or error).split())
            told = ActionError(f"cannot {what}: {words} ({error.response.status_code})")
            if pause_seconds is None or not is_transient(error.response.status_code):
                raise told from error
        except httpx.HTTPError as error:
            told = ActionError(f"cannot {what}: {_where()} cannot be reached: {error}")
            if pause_seconds is None:
                raise told from error
        except HFValidationError as error:
            raise ActionError(f"cannot {what}: {' '.join(str(error).split())}") from error
        except OSError as error:  # the client is told to stay offline
            raise ActionError(f"cannot {what}: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ActionError(
                f"cannot {what}: {_where()} answers with something else than a Hub would: does HF_ENDPOINT name a Hub?"
            ) from error
        with quietly():
            print(f"Retry: {told} (in {pause_seconds:.0f} s)", flush=True)
        time.sleep(pause_seconds)
    raise AssertionError("unreachable: the last attempt raises or returns")


def _where() -> str:
    return os.environ.get("HF_ENDPOINT", "the Hub")
