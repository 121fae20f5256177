"""The errors of hubshard, grouped by what the caller does next.

HubshardError
├── ConflictError        the branch moved: look at the new head, then decide
├── NotFoundError        (FileNotFoundError) a repo, revision, file or tensor that is not there: correct the name
├── IntegrityError       bytes differ from what was promised: never load them
├── FormatError          (ValueError) the input is not what it should be: correct the input
│   └── UnsafeFormatError    reading it would run code: convert it first
├── StoreError           (OSError) the store failed or refused: the message says whether trying again helps
└── IncompleteError      a checkpoint without its last file: step back to an older one
"""

from __future__ import annotations

import sys

__all__ = [
    "ConflictError",
    "FormatError",
    "HubshardError",
    "IncompleteError",
    "IntegrityError",
    "NotFoundError",
    "StoreError",
    "UnsafeFormatError",
]


class HubshardError(Exception):
    """Base of every error that hubshard raises on purpose.

    Attributes:
        hint: one line that says what to do about it, or None.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint: str | None = None
        if hint is not None:
            self.add_hint(hint)

    def __str__(self) -> str:
        return self.message

    def add_hint(self, hint: str) -> None:
        """Say one more thing to do about it. A traceback shows it too, where Python has notes (3.11 and newer)."""
        self.hint = hint if self.hint is None else f"{self.hint}; {hint}"
        if sys.version_info >= (3, 11):
            self.add_note(f"Hint: {hint}")

    def add_place(self, place: str, *, known_by: str) -> None:
        """Say where it happened.

        Args:
            place: put before the message; "" is none.
            known_by: unless the message begins with this.
        """
        if place and not self.message.startswith(known_by):
            self.message = f"{place}: {self.message}"


class ConflictError(HubshardError):
    """Somebody else moved the branch between our look and our commit."""


class NotFoundError(HubshardError, FileNotFoundError):
    """A repo, revision, file or tensor that does not exist, or that the token may not see."""


class IntegrityError(HubshardError):
    """Bytes are not those that the manifest, index or hash promised."""


class FormatError(HubshardError, ValueError):
    """An input that cannot be read, or a request that cannot be met, as it stands."""


class UnsafeFormatError(FormatError):
    """An input whose reading would run code that it carries."""


class StoreError(HubshardError, OSError):
    """A store that failed, refused or ran full.

    Attributes:
        retryable: True where the same call may succeed later.
    """

    def __init__(self, message: str, *, hint: str | None = None, retryable: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.retryable = retryable


class IncompleteError(HubshardError):
    """A checkpoint whose last file, the one that makes it whole, was never written."""
