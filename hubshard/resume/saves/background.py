"""Work beside the training: one job after the other in one thread, and what went wrong with them. No torch.

The thread is a daemon: whoever must not leave before a job is done waits for it, and whoever has no more time leaves
one behind that hangs, as an interpreter would not that joins its threads when it ends.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from hubshard.disk import hint_for
from hubshard.errors import HubshardError

__all__ = ["Background", "named"]

_NICE = 10

_Jobs = SimpleQueue[Callable[[], None] | None]


class Background:
    """One thread. A job that fails does not stop those after it.

    Args:
        name: of the thread.
        on_error: is told of each job that failed, on the thread.
    """

    def __init__(self, name: str, on_error: Callable[[Exception], None]) -> None:
        self._name = name
        self._on_error = on_error
        self._jobs: _Jobs = SimpleQueue()
        self._changed = threading.Condition()
        self._left = 0
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def begin(self) -> None:
        """Begin the thread, for work that will come: once the interpreter ends, no thread can be begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work_off, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Do some work once what was given before is done.

        Args:
            what: for the error, such as "step 10 was not saved".
            work: what to do.
        """
        self.begin()
        with self._changed:
            self._left += 1
        self._jobs.put(lambda: self._do(what, work))

    @property
    def is_busy(self) -> bool:
        """Whether work is under way."""
        return self._left > 0

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until all is done; False where that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._left, timeout_seconds)

    def close(self) -> None:
        """Let the thread end once all is done, without waiting for that."""
        self._jobs.put(None)

    def _do(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # it is raised where the training can see it
            self._on_error(named(error, what))
        finally:
            with self._changed:
                self._left -= 1
                self._changed.notify_all()


def named(error: BaseException, what: str) -> Exception:
    """An error that says what failed: of the same kind where it is one of ours."""
    if isinstance(error, HubshardError):
        told = copy.copy(error)
        told.message = f"{what}: {error.message}"
    else:
        told = HubshardError(f"{what}: {type(error).__name__}: {error}", hint=hint_for(error))
    told.__cause__ = error
    return told


def _work_off(jobs: _Jobs) -> None:
    """All jobs until the end of them; holds none that is done, and nothing of who gave them."""
    if sys.platform == "linux":  # give way to the training, where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    while (job := jobs.get()) is not None:
        job()
        del job
