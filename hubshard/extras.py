"""Optional packages: which extra of ours brings one, and what is said where it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType

from hubshard.errors import FormatError

__all__ = ["EXTRAS", "MissingPackageError", "needing", "to_install"]

EXTRAS = MappingProxyType(
    {"torch": "torch", "numpy": "torch", "transformers": "transformers", "accelerate": "transformers"}
)
"""The extra that brings a package."""


class MissingPackageError(FormatError, ModuleNotFoundError):
    """An optional package that is not installed: also for those who import what they can do without."""


def to_install(extra: str) -> str:
    """The command that brings an extra; its quotes are those that every shell has, cmd.exe too."""
    return f'pip install "hubshard[{extra}]"'


@contextmanager
def needing(what: str, *, otherwise: str | None = None) -> Iterator[None]:
    """Around what imports an optional package, or as its decorator.

    Args:
        what: needs it; for people.
        otherwise: what does without.

    Raises:
        MissingPackageError: it is not installed; names the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        hint = to_install(EXTRAS[package])
        raise MissingPackageError(
            f"{what} needs {package}, which is not installed", hint=f"{hint}; {otherwise}" if otherwise else hint
        ) from error
