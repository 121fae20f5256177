"""How long a bad line is borne, and who is told of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hubshard.errors import StoreError
from hubshard.events import OnRetry, ignore_retry
from hubshard.store.commit import BusyError

__all__ = ["Patience"]

T = TypeVar("T")

_LONGEST_WAIT_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a bad line is borne.

    Attributes:
        max_retries: of one request, piece or commit, after its first try.
        stall_seconds: of silence that are a failure where bytes should come in; a server that has to work for its
            answer gets a multiple of it.
        on_retry: is told of each retry.
    """

    max_retries: int = 5
    stall_seconds: float = 30.0
    on_retry: OnRetry = ignore_retry

    def insist(self, attempt: Callable[[], T], what: str, *, retry: bool = True) -> T:
        """Try, and again (up to 8 s apart, or when the server says) after errors that may pass.

        Args:
            attempt: raises StoreError, retryable where another try may help.
            what: for whoever is told.
            retry: False for one try.
        """
        retries = self.max_retries if retry else 0
        for number in range(retries + 1):
            try:
                return attempt()
            except StoreError as error:
                if not error.retryable or number == retries:
                    raise
                self.pause(what, error, min(2.0**number, _LONGEST_WAIT_SECONDS))
        raise AssertionError("unreachable: the last attempt raises or returns")

    def pause(self, what: str, error: StoreError, wait_seconds: float) -> None:
        """Say that another try follows, and wait: as long as the server says, else `wait_seconds`."""
        wait_seconds = error.wait_seconds if isinstance(error, BusyError) else wait_seconds
        self.on_retry(what, error.message, wait_seconds)
        time.sleep(wait_seconds)
