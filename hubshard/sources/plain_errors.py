"""Errors as JSON values, so that one rank can tell another of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hubshard import errors
from hubshard.errors import HubshardError, StoreError

__all__ = ["error_of", "plain_error"]


def plain_error(error: BaseException, rank: int) -> dict[str, Any]:
    """An error of a rank, in JSON values."""
    if isinstance(error, HubshardError):
        message = error.message if error.message.startswith("rank ") else f"rank {rank}: {error.message}"
        return {"type": type(error).__name__, "message": message, "hint": error.hint}
    return {"type": "", "message": f"rank {rank}: {type(error).__name__}: {error}", "hint": None}


def error_of(plain: Mapping[str, Any]) -> HubshardError:
    """What `plain_error` made, as an error of the same type; errors that are not ours become `StoreError`."""
    made = getattr(errors, plain["type"]) if plain["type"] in errors.__all__ else StoreError
    error: HubshardError = made(plain["message"], hint=plain["hint"])
    return error
