"""Run a list of jobs in threads, never holding more bytes than a budget.

Standard library only; it knows nothing of tensors or stores.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["run"]

T = TypeVar("T")
R = TypeVar("R")

_AHEAD_PER_WORKER = 64  # items in flight at most, however little they cost: items stay lazy, and the queue short


def run(
    items: Iterable[T],
    *,
    cost: Callable[[T], int],
    work: Callable[[T], R],
    budget_bytes: int,
    workers: int,
) -> Iterator[R]:
    """Yield `work(item)` for each item, in the order of `items`, from several threads.

    Items are admitted and started in order. The bytes that are held, of running work and of results that were not taken
    or were taken last, never exceed the larger of `budget_bytes` and the largest single item. Once an item has failed,
    none after it is started, and what runs is waited for; the results before it are still given, then the first failure
    in the order of `items` is raised. Closing the iterator stops in the same way, without an error.

    Args:
        items: taken lazily, from the calling thread, one ahead of what is admitted.
        cost: bytes that an item holds from its admission until the caller has asked for the result after its own.
        work: called in a worker thread.
        budget_bytes: of all items held.
        workers: threads.
    """
    jobs = _Jobs()

    def job(number: int, item: T) -> R:
        jobs.start(number)
        try:
            result = work(item)
        except BaseException:
            jobs.end(failed=number)
            raise
        jobs.end()
        return result

    numbered = enumerate(items)
    admitted: deque[tuple[int, Future[R]]] = deque()
    held = 0
    upcoming = _next(numbered, cost)
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="hubshard") as pool:
        try:
            while True:
                while upcoming and not jobs.stopped and len(admitted) < _AHEAD_PER_WORKER * workers:
                    number, item, nbytes = upcoming
                    if held and held + nbytes > budget_bytes:
                        break
                    held += nbytes
                    admitted.append((nbytes, pool.submit(job, number, item)))
                    upcoming = _next(numbered, cost)
                if not admitted:
                    return
                yield admitted[0][1].result()
                held -= admitted.popleft()[0]
        finally:
            # no local name may keep a future: it holds its result, or an error whose traceback holds this frame
            while admitted:
                admitted.popleft()[1].cancel()
            jobs.stop()


def _next(numbered: Iterator[tuple[int, T]], cost: Callable[[T], int]) -> tuple[int, T, int] | None:
    for number, item in numbered:
        nbytes = cost(item)
        if nbytes < 0:
            raise ValueError(f"an item cannot hold {nbytes} bytes")
        return number, item, nbytes
    return None


class _Jobs:
    # Which jobs may start, and how many run. The pool alone would not do: an interrupt may hit the main thread while
    # it starts a worker, which the pool then neither knows nor waits for.

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._last: float = math.inf

    @property
    def stopped(self) -> bool:
        return self._last < math.inf

    def start(self, number: int) -> None:
        with self._changed:
            if number > self._last:
                raise CancelledError
            self._running += 1

    def end(self, *, failed: int | None = None) -> None:
        # items before the failed one may still start: theirs may be the first failure
        with self._changed:
            self._running -= 1
            if failed is not None:
                self._last = min(self._last, failed)
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._last = -1
            self._changed.wait_for(lambda: self._running == 0)
