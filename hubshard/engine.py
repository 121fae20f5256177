"""Run a list of jobs in threads, never holding more bytes than a budget.

Standard library only; it knows nothing of tensors or stores.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

__all__ = ["Turn", "run", "run_overlapping"]

T = TypeVar("T")
R = TypeVar("R")

_AHEAD_PER_WORKER = 64  # items in flight at most, however little they cost: items stay lazy, and the queue short


@dataclass(frozen=True, slots=True)
class Turn:
    """What the work on one item may say and ask, from any thread.

    Attributes:
        ends: says that the item is ending: it holds no bytes any more, and the next one may begin.
        await_others: returns once the items have ended that were ending when this one was admitted: until then it is
            early. Raises as `check` does.
        check: raises CancelledError where the result is not wanted any more: an item before it has failed, or whoever
            takes the results has left. Work that never asks goes on to its end.
    """

    ends: Callable[[], None]
    await_others: Callable[[], None]
    check: Callable[[], None]


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
    return run_overlapping(
        items, cost=cost, work=lambda item, _: work(item), budget_bytes=budget_bytes, workers=workers, endings=0
    )


def run_overlapping(
    items: Iterable[T],
    *,
    cost: Callable[[T], int],
    work: Callable[[T, Turn], R],
    budget_bytes: int,
    workers: int,
    endings: int,
) -> Iterator[R]:
    """As `run`, for work that ends with a wait: the next item may begin meanwhile.

    Args:
        items: as in `run`.
        cost: as in `run`.
        work: called in a worker thread with an item and its turn.
        budget_bytes: as in `run`.
        workers: threads, besides those of items that are ending.
        endings: how many items may be ending at once; others that would go on as before until one of them has ended.
    """
    jobs = _Jobs(budget_bytes, endings)

    def do(job: _Job, item: T) -> R:
        jobs.start(job)
        try:
            result = work(item, jobs.turn(job))
        except BaseException:
            jobs.end(job, has_failed=True)
            raise
        jobs.end(job)
        return result

    numbered = enumerate(items)
    admitted: deque[tuple[_Job, Future[R]]] = deque()
    upcoming = _next(numbered, cost)
    with ThreadPoolExecutor(max_workers=workers + endings, thread_name_prefix="hubshard") as pool:
        try:
            while True:
                while upcoming and len(admitted) < _AHEAD_PER_WORKER * workers and jobs.admit(upcoming[0]):
                    admitted.append((upcoming[0], pool.submit(do, *upcoming)))
                    upcoming = _next(numbered, cost)
                if not admitted:
                    return
                if jobs.has_ended(admitted[0][0]):
                    yield admitted[0][1].result()
                    jobs.release(admitted.popleft()[0])
        finally:
            # no local name may keep a future: it holds its result, or an error whose traceback holds this frame
            while admitted:
                admitted.popleft()[1].cancel()
            jobs.stop()


def _next(numbered: Iterator[tuple[int, T]], cost: Callable[[T], int]) -> tuple[_Job, T] | None:
    for number, item in numbered:
        nbytes = cost(item)
        if nbytes < 0:
            raise ValueError(f"an item cannot hold {nbytes} bytes")
        return _Job(number, nbytes), item
    return None


@dataclass(slots=True, eq=False)
class _Job:
    # one item on its way
    number: int
    nbytes: int  # that it holds
    others: tuple[_Job, ...] = ()  # that were ending when it was admitted
    has_ended: bool = False


class _Jobs:
    # What is held, which jobs may start, and how many run. The pool alone would not do: an interrupt may hit the main
    # thread while it starts a worker, which the pool then neither knows nor waits for.

    def __init__(self, budget_bytes: int, endings: int) -> None:
        self._changed = threading.Condition()
        self._budget_bytes = budget_bytes
        self._held_bytes = 0
        self._endings = endings
        self._would_end: deque[_Job] = deque()
        self._ending: list[_Job] = []
        self._has_more_room = False
        self._running = 0
        self._last: float = math.inf

    def admit(self, job: _Job) -> bool:
        with self._changed:
            is_over = self._held_bytes > 0 and self._held_bytes + job.nbytes > self._budget_bytes
            if is_over or self._last < math.inf:
                return False
            self._held_bytes += job.nbytes
            job.others = tuple(self._ending)
            return True

    def turn(self, job: _Job) -> Turn:
        return Turn(partial(self.ease, job), partial(self.await_others, job), partial(self.check, job))

    def release(self, job: _Job) -> None:
        with self._changed:
            self._held_bytes -= job.nbytes

    def has_ended(self, job: _Job) -> bool:
        # or, before it has, that there is more room for others
        with self._changed:
            self._changed.wait_for(lambda: job.has_ended or self._has_more_room)
            self._has_more_room = False
            return job.has_ended

    def start(self, job: _Job) -> None:
        with self._changed:
            self.check(job)
            self._running += 1

    def check(self, job: _Job) -> None:
        if job.number > self._last:
            raise CancelledError

    def ease(self, job: _Job) -> None:
        with self._changed:
            self._would_end.append(job)
            self._ease_next()

    def await_others(self, job: _Job) -> None:
        with self._changed:
            self._changed.wait_for(lambda: job.number > self._last or all(other.has_ended for other in job.others))
            job.others = ()
            self.check(job)

    def end(self, job: _Job, *, has_failed: bool = False) -> None:
        # items before the failed one may still start: theirs may be the first failure
        with self._changed:
            job.has_ended, job.others = True, ()
            self._running -= 1
            if has_failed:
                self._last = min(self._last, job.number)
            if job in self._ending:
                self._ending.remove(job)
                self._ease_next()
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._last = -1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._running == 0)

    def _ease_next(self) -> None:
        while self._would_end and len(self._ending) < self._endings:
            job = self._would_end.popleft()
            if not (job in self._ending or job.has_ended):
                self._ending.append(job)
                self._held_bytes -= job.nbytes
                job.nbytes = 0
                self._has_more_room = True
                self._changed.notify_all()
