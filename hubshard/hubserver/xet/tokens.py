"""Short-lived Xet tokens and signed URLs: what they allow is written in them and signed by the server."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from hubshard.errors import FormatError
from hubshard.hubserver import jwt

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Scope", "XetToken", "XorbGrant", "open_grant", "open_token", "sign_grant", "sign_token"]

Scope = Literal["read", "write"]

# The purpose of a signature: keeps a token of one kind from passing as one of another.
_TOKEN = "xet"  # noqa: S105  (no secret)
_GRANT = "xorb"


@dataclass(frozen=True, slots=True)
class XetToken:
    """What a Xet token allows.

    Attributes:
        repo_id: the repo's number in the database.
        repo: its name in counters, `models/ns/name`.
        user: who asked for it, or None for an anonymous reader.
        scope: "write" includes "read".
        exp: until when, in seconds since the epoch.
    """

    repo_id: int
    repo: str
    user: str | None
    scope: Scope
    exp: int


@dataclass(frozen=True, slots=True)
class XorbGrant:
    """What a signed URL allows.

    Attributes:
        xorb: the hash of a xorb, as in URLs.
        start: first byte of the serialized xorb that may be read.
        stop: one past the last one.
        repo: for whom the bytes count, `models/ns/name`.
        exp: until when, in seconds since the epoch.
    """

    xorb: str
    start: int
    stop: int
    repo: str
    exp: int


def sign_token(token: XetToken, secret: bytes) -> str:
    """The text form of a token."""
    return jwt.encode({"use": _TOKEN, **asdict(token)}, secret)


def open_token(text: str, secret: bytes) -> XetToken:
    """The token behind a text that `sign_token` made.

    Raises:
        FormatError: not signed by this server as a Xet token, or expired.
    """
    return XetToken(**_open(text, secret, _TOKEN))


def sign_grant(grant: XorbGrant, secret: bytes) -> str:
    """The text form of a grant, for the query of a URL."""
    return jwt.encode({"use": _GRANT, **asdict(grant)}, secret)


def open_grant(text: str, secret: bytes) -> XorbGrant:
    """The grant behind a text that `sign_grant` made.

    Raises:
        FormatError: not signed by this server as a grant, or expired.
    """
    return XorbGrant(**_open(text, secret, _GRANT))


def _open(text: str, secret: bytes, use: str) -> Mapping[str, Any]:
    try:
        claims = jwt.decode(text, secret)
    except jwt.JwtError as error:
        raise FormatError(f"{error}; ask the Hub for a new one") from error
    if claims.pop("use", None) != use:
        raise FormatError(f"the token was not made for this use ({use})")
    return claims
