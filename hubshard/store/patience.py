"""How long a bad line is borne, and who is told of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hubshard.errors import StoreError
from hubshard.events import OnRetry, ignore_retry
from hubshard.store.commit import BusyError

__all__ = ["NoConnectionError", "Patience"]

T = TypeVar("T")

_LONGEST_WAIT_SECONDS = 8.0
# with a server that this process has never had an answer from: a wrong address, no network, or one that just starts
_STRANGER_WAITS_SECONDS = (0.5, 1.0, 2.0)
_STRANGER_SECONDS = 30.0


class NoConnectionError(StoreError):
    """Nobody took the connection: no server listens there, its name is unknown, or there is no network."""


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

    def insist(self, attempt: Callable[[], T], what: str, *, retry: bool = True, is_known: bool = True) -> T:
        """Try, and again (up to 8 s apart, or when the server says) after errors that may pass.

        A server that takes no connection is waited for as long as that only where it is known to be one: otherwise
        there are 3 more tries in 3.5 s, and none after 30 s.

        Args:
            attempt: raises StoreError, retryable where another try may help.
            what: for whoever is told.
            retry: False for one try.
            is_known: whether the server has ever answered.
        """
        retries, began = self.max_retries if retry else 0, time.monotonic()
        for number in range(retries + 1):
            try:
                return attempt()
            except StoreError as error:
                is_strange = not is_known and isinstance(error, NoConnectionError)
                if not error.retryable or number == retries or (is_strange and _is_vain(number, began)):
                    raise
                wait_seconds = _STRANGER_WAITS_SECONDS[number] if is_strange else 2.0**number
                self.pause(what, error, min(wait_seconds, _LONGEST_WAIT_SECONDS))
        raise AssertionError("unreachable: the last attempt raises or returns")

    def pause(self, what: str, error: StoreError, wait_seconds: float) -> None:
        """Say that another try follows, and wait: as long as the server says, else `wait_seconds`."""
        wait_seconds = error.wait_seconds if isinstance(error, BusyError) else wait_seconds
        self.on_retry(what, error.message, wait_seconds)
        time.sleep(wait_seconds)


def _is_vain(number: int, began: float) -> bool:
    return number >= len(_STRANGER_WAITS_SECONDS) or time.monotonic() - began > _STRANGER_SECONDS
