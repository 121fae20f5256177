"""What goes wrong in a request, with the status, code and text that the Hub's clients branch on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ApiError",
    "bad_request",
    "conflict",
    "entry_not_found",
    "forbidden",
    "repo_not_found",
    "revision_not_found",
    "unprocessable",
]


class ApiError(Exception):
    """A request that is refused.

    Attributes:
        status: the HTTP status.
        message: one line for the user; sent in the body and as `X-Error-Message`.
        code: the `X-Error-Code`, or None.
        headers: further headers of the answer.
        extra: further fields of the JSON body.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})


def bad_request(message: str) -> ApiError:
    """400."""
    return ApiError(400, message)


def forbidden(message: str) -> ApiError:
    """403: known, but not allowed."""
    return ApiError(403, message)


def conflict(message: str, **extra: Any) -> ApiError:
    """409, with further fields of the body (clients read the `url` of an existing repo)."""
    return ApiError(409, message, extra=extra)


def unprocessable(message: str) -> ApiError:
    """422: well formed, and wrong."""
    return ApiError(422, message)


def repo_not_found(*, anonymous: bool = False) -> ApiError:
    """A repo that is not there, or that the caller may not see: both look the same."""
    if anonymous:
        return ApiError(401, "Invalid username or password.", code="RepoNotFound")
    return ApiError(404, "Repository not found", code="RepoNotFound")


def revision_not_found(revision: str) -> ApiError:
    """A branch, tag or commit that is not there."""
    return ApiError(404, f"Invalid rev id: {revision}", code="RevisionNotFound")


def entry_not_found(path: str, commit: str) -> ApiError:
    """A path that is not there; clients remember its absence under the commit that the answer names."""
    return ApiError(404, f"Entry not found: {path}", code="EntryNotFound", headers={"X-Repo-Commit": commit})
