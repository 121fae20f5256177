"""From a request's path to the repo, checked: who may see it, who may write to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.convertors import Convertor, register_url_convertor

from hubshard.hubserver import repos
from hubshard.hubserver.auth import require_read, require_write
from hubshard.hubserver.errors import ApiError, repo_not_found

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Mapping

    from hubshard.hubserver.auth import Principal
    from hubshard.hubserver.repos import Repo

__all__ = ["REPO_PATH", "repo_by_key", "repo_for_write", "repo_of", "require_contents"]

REPO_PATH = "/api/{kind:repokind}/{namespace}/{name}"
"""How the paths of a repo's API routes begin."""


class _KindConvertor(Convertor[str]):
    regex = "models|datasets|spaces"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("repokind", _KindConvertor())


def repo_of(connection: sqlite3.Connection, principal: Principal, params: Mapping[str, str]) -> Repo:
    """The repo that the path parameters `kind`, `namespace` and `name` (unquoted) name, for reading.

    Raises:
        ApiError: RepoNotFound: it does not exist, or the caller may not see it.
    """
    kind = repos.TYPES[params.get("kind", "models")]
    found = repos.find(connection, kind, params["namespace"], params["name"])
    if found is None:
        raise repo_not_found(anonymous=principal.name is None)
    require_read(principal, found)
    return found


def repo_for_write(
    connection: sqlite3.Connection, principal: Principal, params: Mapping[str, str], *, contribute: bool = False
) -> Repo:
    """As `repo_of`, for writing; `contribute` is for what everybody may do in a pull request of theirs.

    Raises:
        ApiError: as `repo_of`, and 401 or 403 with the reason.
    """
    found = repo_of(connection, principal, params)
    require_write(principal, found, contribute=contribute)
    return found


def require_contents(connection: sqlite3.Connection, principal: Principal, repo: Repo) -> None:
    """Refuse the files of a gated repo to who neither owns it nor was granted access.

    Raises:
        ApiError: 403 (401 without a token), code GatedRepo.
    """
    if repo.gated is None or principal.why_not_write(repo) is None or principal.owns(repo.namespace):
        return
    found = connection.execute(
        "SELECT 1 FROM grants WHERE repo_id = ? AND user = ?", (repo.id, principal.name or "")
    ).fetchone()
    if found is None:
        raise ApiError(
            401 if principal.name is None else 403,
            f"Access to {repo.type} {repo.full_name} is restricted and you are not in the authorized list.",
            code="GatedRepo",
        )


def repo_by_key(connection: sqlite3.Connection, key: str) -> Repo | None:
    """The repo that a key such as `models/ns/name` names."""
    kind, namespace, name = key.split("/")
    return repos.find(connection, repos.TYPES[kind], namespace, name)
