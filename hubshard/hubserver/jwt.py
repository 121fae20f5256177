"""Signed claims: JSON Web Tokens with HMAC-SHA256 (RFC 7515, RFC 7519), for tokens and for signed URLs."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["JwtError", "decode", "encode"]

_CLOCK_SKEW_SECONDS = 60.0


class JwtError(ValueError):
    """A token that is malformed, forged or expired; the message says which."""


def encode(claims: Mapping[str, Any], secret: bytes) -> str:
    """Sign claims; an `exp` claim (seconds since the epoch) bounds their life."""
    head = _to_text(json.dumps({"alg": "HS256", "typ": "JWT"}, separators=(",", ":")).encode())
    body = _to_text(json.dumps(claims, separators=(",", ":"), sort_keys=True).encode())
    return f"{head}.{body}.{_to_text(_signature(f'{head}.{body}', secret))}"


def decode(token: str, secret: bytes) -> dict[str, Any]:
    """Check a token and give back its claims.

    Raises:
        JwtError: it is malformed, not signed with this secret, expired, or not valid yet.
    """
    try:
        head, body, signature = token.split(".")
        header, claims = json.loads(_to_bytes(head)), json.loads(_to_bytes(body))
        found = _to_bytes(signature)
    except (ValueError, binascii.Error) as error:
        raise JwtError("the token is malformed") from error
    if not isinstance(header, dict) or header.get("alg") != "HS256" or not isinstance(claims, dict):
        raise JwtError("the token is not signed with HS256")
    if not hmac.compare_digest(found, _signature(f"{head}.{body}", secret)):
        raise JwtError("the signature of the token is wrong")
    _check_times(claims)
    return claims


def _check_times(claims: Mapping[str, Any]) -> None:
    now = time.time()
    expires, starts = claims.get("exp"), claims.get("nbf")
    if expires is not None and not (isinstance(expires, int | float) and now < expires):
        raise JwtError("the token has expired")
    if starts is not None and not (isinstance(starts, int | float) and now > starts - _CLOCK_SKEW_SECONDS):
        raise JwtError("the token is not valid yet")


def _signature(text: str, secret: bytes) -> bytes:
    return hmac.new(secret, text.encode(), hashlib.sha256).digest()


def _to_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _to_bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
