"""Work beside the training: one job after the other in one thread, and what went wrong with them. No torch."""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from hubshard.errors import HubshardError

__all__ = ["Background", "named"]

_NICE = 10


class Background:
    """One thread. A job that fails does not stop those after it; its error is kept until somebody asks.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_be_nice)
        self._lock = threading.Lock()
        self._jobs: deque[Future[None]] = deque()
        self._errors: deque[Exception] = deque()

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Do some work once what was given before is done.

        Args:
            what: for the error, such as "step 10 was not saved".
            work: what to do.
        """
        with self._lock:
            self._jobs = deque(job for job in self._jobs if not job.done())
            self._jobs.append(self._pool.submit(self._do, what, work))

    @property
    def is_busy(self) -> bool:
        """Whether work is under way."""
        with self._lock:
            return any(not job.done() for job in self._jobs)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until all is done; False where that took too long."""
        with self._lock:
            jobs = list(self._jobs)
        return not wait_for(jobs, timeout_seconds).not_done

    def take_error(self) -> Exception | None:
        """The oldest error that nobody took yet."""
        return self._errors.popleft() if self._errors else None

    def close(self) -> None:
        """Wait until all is done, and end the thread."""
        self._pool.shutdown(wait=True)

    def _do(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # it is raised where the training can see it
            self._errors.append(named(error, what))


def named(error: Exception, what: str) -> Exception:
    """An error that says what failed: of the same kind where it is one of ours."""
    if isinstance(error, HubshardError):
        told = copy.copy(error)
        told.message = f"{what}: {error.message}"
    else:
        told = HubshardError(f"{what}: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def _be_nice() -> None:
    """Give way to the training, where a thread has a priority of its own (Linux)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
