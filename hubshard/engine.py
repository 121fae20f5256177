"""Run a list of jobs in threads, never holding more bytes than a budget.

Standard library only; it knows nothing of tensors or stores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["run"]

T = TypeVar("T")
R = TypeVar("R")


def run(
    items: Iterable[T],
    *,
    cost: Callable[[T], int],
    work: Callable[[T], R],
    budget_bytes: int,
    workers: int,
) -> Iterator[R]:
    """Yield `work(item)` for each item, in the order of `items`, from several threads.

    Items are admitted in order. The bytes that are held, of running work and of results that were not taken or were
    taken last, never exceed the larger of `budget_bytes` and the largest single item. The first failure, in the order
    of `items`, is raised; what has not started by then never starts, and what runs is waited for. Closing the iterator
    does the same without an error.

    Args:
        items: taken lazily, from the calling thread.
        cost: bytes that an item holds from its admission until the caller has asked for the result after its own.
        work: called in a worker thread.
        budget_bytes: of all items held.
        workers: threads.
    """
    waiting = iter(items)
    admitted: deque[tuple[int, Future[R]]] = deque()
    held = 0
    upcoming = next(waiting, _END)
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="hubshard") as pool:
        try:
            while True:
                while not isinstance(upcoming, _End) and (not held or held + cost(upcoming) <= budget_bytes):
                    held += cost(upcoming)
                    admitted.append((cost(upcoming), pool.submit(work, upcoming)))
                    upcoming = next(waiting, _END)
                if not admitted:
                    return
                nbytes, future = admitted.popleft()
                yield future.result()
                held -= nbytes
        finally:
            for _, future in admitted:
                future.cancel()


class _End:
    pass


_END = _End()
