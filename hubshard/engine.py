"""Run a list of jobs in threads, never holding more bytes than a budget.

Standard library only; it knows nothing of tensors or stores.
"""

from __future__ import annotations

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
    failed: list[int] = []

    def work_unless_failed(number: int, item: T) -> R:
        if any(other < number for other in failed):
            raise CancelledError
        try:
            return work(item)
        except BaseException:
            failed.append(number)
            raise

    numbered = enumerate(items)
    admitted: deque[tuple[int, Future[R]]] = deque()
    held = 0
    upcoming = _next(numbered, cost)
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="hubshard") as pool:
        try:
            while True:
                while upcoming and not failed and len(admitted) < _AHEAD_PER_WORKER * workers:
                    number, item, nbytes = upcoming
                    if held and held + nbytes > budget_bytes:
                        break
                    held += nbytes
                    admitted.append((nbytes, pool.submit(work_unless_failed, number, item)))
                    del item
                    upcoming = _next(numbered, cost)
                if not admitted:
                    return
                yield admitted[0][1].result()
                held -= admitted.popleft()[0]
        finally:
            # no local name may keep a future: it holds its result, or an error whose traceback holds this frame
            while admitted:
                admitted.popleft()[1].cancel()


def _next(numbered: Iterator[tuple[int, T]], cost: Callable[[T], int]) -> tuple[int, T, int] | None:
    for number, item in numbered:
        nbytes = cost(item)
        if nbytes < 0:
            raise ValueError(f"an item cannot hold {nbytes} bytes")
        return number, item, nbytes
    return None
