"""Ranks as threads of one process, with a store in memory: for what needs several of them, and no training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from hubshard.errors import HubshardError

__all__ = ["job_of_one", "on_ranks"]


@contextmanager
def job_of_one() -> Iterator[None]:
    """A process group of this process alone, whose store the threads share."""
    dist: Any = import_module("torch.distributed")  # its types do not name all that it exports
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_ranks(
    size: int, act: Callable[[int], Any], *, caught: tuple[type[Exception], ...] = (HubshardError,)
) -> list[Any]:
    """What some ranks come to, each in a thread: what it returned, or the error where it is of those `caught`."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = act(rank)
        except caught as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
