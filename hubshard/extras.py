"""Optional packages: which extra of ours brings one, and what is said where it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType

from hubshard.errors import FormatError

__all__ = ["EXTRAS", "needing"]

EXTRAS = MappingProxyType(
    {"torch": "torch", "numpy": "torch", "transformers": "transformers", "accelerate": "transformers"}
)
"""The extra that brings a package."""


@contextmanager
def needing(what: str, *, otherwise: str | None = None) -> Iterator[None]:
    """Around what imports an optional package, or as its decorator.

    Args:
        what: needs it; for people.
        otherwise: what does without.

    Raises:
        FormatError: it is not installed; names the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        hint = f"pip install 'hubshard[{EXTRAS[package]}]'"
        raise FormatError(
            f"{what} needs {package}, which is not installed", hint=f"{hint}; {otherwise}" if otherwise else hint
        ) from error
