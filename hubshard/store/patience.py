"""How long a bad line is borne, and who is told of it: every retry of the project waits and speaks by this."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hubshard.errors import HubshardError, StoreError
from hubshard.events import OnRetry, ignore_retry

__all__ = ["BusyError", "NoConnectionError", "Patience", "Waits", "may_pass"]

T = TypeVar("T")


class BusyError(StoreError):
    """A store that said when to come back.

    Attributes:
        wait_seconds: seconds from now.
    """

    def __init__(self, message: str, *, wait_seconds: float, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, retryable=True)
        self.wait_seconds = wait_seconds


class NoConnectionError(StoreError):
    """Nobody took the connection: no server listens there, its name is unknown, or there is no network."""


@dataclass(frozen=True, slots=True)
class Waits:
    """How long to wait before each further try, where the store does not say.

    Attributes:
        first_seconds: before the second try; doubled from one to the next.
        longest_seconds: where the doubling ends.
        at_random: wait a random part of that, so that two who got in each other's way do not do so again.
    """

    first_seconds: float = 1.0
    longest_seconds: float = 8.0
    at_random: bool = False

    def before(self, retry: int) -> float:
        """Seconds before the further try number `retry`, from 1."""
        seconds = min(self.first_seconds * 2.0 ** (retry - 1), self.longest_seconds)
        return random.uniform(0, seconds) if self.at_random else seconds  # noqa: S311  to be out of step


_WAITS = Waits()
# with a server that this process has never had an answer from: a wrong address, no network, or one that just starts
_STRANGER_WAITS = Waits(first_seconds=0.5, longest_seconds=2.0)
_STRANGER_RETRIES = 3
_STRANGER_SECONDS = 30.0
_LONGEST_SECONDS = 3600.0  # the windows of the Hub's rate limits are of five minutes


def may_pass(error: HubshardError) -> bool:
    """Whether the same call may succeed later."""
    return isinstance(error, StoreError) and error.retryable


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a bad line is borne.

    Attributes:
        max_retries: of one request, piece or commit, after its first try.
        stall_seconds: of silence that are a failure where bytes should come in; a server that has to work for its
            answer gets a multiple of it.
        on_retry: is told of each retry.
        sleep: waits for so many seconds; what it raises ends the tries.
    """

    max_retries: int = 5
    stall_seconds: float = 30.0
    on_retry: OnRetry = ignore_retry
    sleep: Callable[[float], None] = time.sleep

    def insist(
        self,
        attempt: Callable[[], T],
        what: str,
        *,
        most: int | None = None,
        waits: Waits = _WAITS,
        again: Callable[[HubshardError], bool] = may_pass,
        is_known: bool = True,
    ) -> T:
        """Try, and try again after errors that may pass.

        A server that takes no connection is waited for as long as that only where it is known to be one: otherwise
        there are 3 more tries in 3.5 s, and none after 30 s. One that says when to come back is
        obeyed, unless it asks for more than an hour.

        Args:
            attempt: raises an error of ours where it fails.
            what: for whoever is told.
            most: further tries, where fewer than `max_retries` make sense; 0 for one try in all.
            waits: before them.
            again: whether another try may help after an error.
            is_known: whether the server has ever answered.
        """
        retries = self.max_retries if most is None else min(most, self.max_retries)
        began = time.monotonic()
        for retry in range(1, retries + 1):
            try:
                return attempt()
            except HubshardError as error:
                is_strange = not is_known and isinstance(error, NoConnectionError)
                if not again(error) or (is_strange and _is_vain(retry, began)):
                    raise
                self.pause(what, error, retry, _STRANGER_WAITS if is_strange else waits)
        return attempt()

    def pause(self, what: str, error: HubshardError, retry: int, waits: Waits = _WAITS) -> None:
        """Say that the further try number `retry` (from 1) follows, and wait for it, as the store or `waits` says.

        Raises:
            BusyError: the error itself, where the store asks for more than an hour.
        """
        wait_seconds = error.wait_seconds if isinstance(error, BusyError) else waits.before(retry)
        if wait_seconds > _LONGEST_SECONDS:
            raise error
        self.on_retry(what, error.message, wait_seconds)
        self.sleep(wait_seconds)


def _is_vain(retry: int, began: float) -> bool:
    return retry > _STRANGER_RETRIES or time.monotonic() - began > _STRANGER_SECONDS
