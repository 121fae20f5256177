"""Who is asking, and what they may do."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hubshard.errors import FormatError
from hubshard.hubserver import jwt
from hubshard.hubserver.errors import ApiError, forbidden, repo_not_found

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hubshard.hubserver.repos import Repo

__all__ = ["ADMIN_NAME", "ISSUED_PREFIX", "Accounts", "Principal", "require_read", "require_write"]

ADMIN_NAME = "hubshard"
"""The user that everybody is while a server has no tokens."""

ISSUED_PREFIX = "hf_jwt_"
"""How tokens begin that the server itself issued for a limited time."""

_ROLES = ("admin", "write", "read")
_TOKEN = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of one request.

    Attributes:
        name: the user, or None for somebody without a token.
        role: `admin`, `write`, `read`, or `repo` for a token that may write to one repo only.
        repo: that repo, `models/ns/name` in lower case; None for the other roles.
        organizations: organisations that the user belongs to, in lower case.
    """

    name: str | None
    role: str
    repo: str | None = None
    organizations: frozenset[str] = frozenset()

    def owns(self, namespace: str) -> bool:
        """Whether the namespace is the user's own, or that of an organisation of theirs."""
        if self.role == "admin":
            return True
        wanted = namespace.lower()
        return self.name is not None and (wanted == self.name.lower() or wanted in self.organizations)

    def may_read(self, repo: Repo) -> bool:
        """Public repos are everybody's; private ones their owners'."""
        if not repo.private:
            return True
        if self.role == "repo":
            return self.repo == repo.key.lower()
        return self.owns(repo.namespace)

    def why_not_write(self, repo: Repo) -> str | None:
        """None where the caller may write, else the reason why not, naming the missing permission."""
        if self.name is None:
            return f"a token is needed to write to {repo.key}"
        if self.role == "repo":
            if self.repo == repo.key.lower():
                return None
            return f"this token may write to {self.repo} only; writing to {repo.key} needs the role 'write'"
        if self.role == "read":
            return f"this token has the role 'read'; writing to {repo.key} needs the role 'write'"
        if self.owns(repo.namespace):
            return None
        return f"{self.name} may not write to the namespace {repo.namespace}: pass `create_pr=1` to open a pull request"


def require_read(principal: Principal, repo: Repo) -> None:
    """Refuse, as if the repo did not exist, who may not see it.

    Raises:
        ApiError: 404 (401 without a token), code RepoNotFound.
    """
    if not principal.may_read(repo):
        raise repo_not_found(anonymous=principal.name is None)


def require_write(principal: Principal, repo: Repo, *, contribute: bool = False) -> None:
    """Refuse who may not write.

    Args:
        principal: the caller.
        repo: the repo.
        contribute: the write is for a pull request, which everybody with a token that writes may open.

    Raises:
        ApiError: RepoNotFound for who may not even read, 401 without a token, else 403 with the reason.
    """
    require_read(principal, repo)
    reason = principal.why_not_write(repo)
    if reason is None or (contribute and principal.role in {"write", "admin"} and principal.name):
        return
    if principal.name is None:
        raise ApiError(401, f"Invalid username or password: {reason}")
    raise forbidden(f"Forbidden: {reason}")


class Accounts:
    """The users of a server and their tokens.

    Args:
        tokens: token → `user`, `user:read`, `user:write`, `user:admin` or `user:repo:[type/]ns/name`
            (type: models, datasets, spaces). None or empty: there are no users, and everybody is an administrator.
        organizations: organisation → its members, separated by commas.
        secret: checks the tokens that the server issued itself.

    Raises:
        FormatError: a role that does not exist, or a token that no client can send.
    """

    def __init__(
        self, tokens: Mapping[str, str] | None, organizations: Mapping[str, str] | None, secret: bytes
    ) -> None:
        self._secret = secret
        self._members = {
            name.lower(): {member.strip().lower() for member in members.split(",")}
            for name, members in (organizations or {}).items()
        }
        for token, spec in (tokens or {}).items():
            if not _TOKEN.fullmatch(token):  # an empty one is most often a variable that is not set
                raise FormatError(
                    f"the token of {spec.partition(':')[0]!r} is empty, or holds a space or another character that no "
                    "client can send"
                )
        self._tokens = {token: self._parse(spec) for token, spec in (tokens or {}).items()}

    @property
    def is_open(self) -> bool:
        """Whether the server has no tokens, so that everybody is an administrator."""
        return not self._tokens

    def principal(self, authorization: str | None) -> Principal:
        """Who sent this `Authorization` header.

        Raises:
            ApiError: 401: the token is unknown or has expired.
        """
        token = _bearer(authorization)
        if token is not None and token.startswith(ISSUED_PREFIX):
            return self._issued(token)
        if self.is_open:
            return Principal(ADMIN_NAME, "admin")
        if token is None:
            return Principal(None, "read")
        found = self._tokens.get(token)
        if found is None:
            raise ApiError(401, "Invalid credentials in Authorization header")
        return found

    def issue(self, user: str, repo: str, *, seconds: int) -> str:
        """A token that may write to one repo (`models/ns/name`) for so many seconds."""
        claims = {"use": "access", "sub": user, "repo": repo.lower(), "exp": int(time.time()) + seconds}
        return ISSUED_PREFIX + jwt.encode(claims, self._secret)

    def organizations_of(self, user: str) -> list[str]:
        """Organisations that a user belongs to."""
        return sorted(name for name, members in self._members.items() if user.lower() in members)

    def _issued(self, token: str) -> Principal:
        try:
            claims = jwt.decode(token.removeprefix(ISSUED_PREFIX), self._secret)
        except jwt.JwtError as error:
            raise ApiError(401, f"Invalid credentials in Authorization header: {error}") from error
        if claims.get("use") != "access":
            raise ApiError(401, "Invalid credentials in Authorization header")
        return Principal(claims["sub"], "repo", repo=claims["repo"])

    def _parse(self, spec: str) -> Principal:
        user, _, role = spec.partition(":")
        organizations = frozenset(self.organizations_of(user))
        kind, _, repo = role.partition(":")
        if kind == "repo" and repo.count("/") in (1, 2):
            key = repo if repo.count("/") == 2 else f"models/{repo}"
            return Principal(user, "repo", repo=key.lower(), organizations=organizations)
        if not user or (role or "write") not in _ROLES:
            raise FormatError(
                f"{spec!r} is not a user of the Hub: user, user:read, user:write, user:admin or user:repo:ns/name"
            )
        return Principal(user, role or "write", organizations=organizations)


def _bearer(authorization: str | None) -> str | None:
    kind, _, token = (authorization or "").partition(" ")
    return token.strip() or None if kind.lower() == "bearer" else None
