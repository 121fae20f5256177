"""Publish and resume models on the Hugging Face Hub: sharded, atomic, resumable, checked.

Importing this package is light: what needs a client, torch or transformers is imported when its name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hubshard.errors import (
    ConflictError,
    FormatError,
    HubshardError,
    IncompleteError,
    IntegrityError,
    NotFoundError,
    StoreError,
    UnsafeFormatError,
)
from hubshard.events import Event, OnEvent

if TYPE_CHECKING:
    pass

__all__ = [
    "ConflictError",
    "Event",
    "FormatError",
    "HubshardError",
    "IncompleteError",
    "IntegrityError",
    "NotFoundError",
    "OnEvent",
    "StoreError",
    "UnsafeFormatError",
    "__version__",
]

__version__ = "0.1.0"

_HOME: dict[str, str] = {}
"""The module that each late name comes from."""


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'hubshard' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
