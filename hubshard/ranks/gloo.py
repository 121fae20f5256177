"""Connections of our own between ranks: gloo backends that no process group of the training knows of.

`torch.distributed.new_group` must be called by every rank of the job, or names the group after the number of those that
this process holds: ranks that hold different numbers never meet. A backend is found by a name that its ranks agree on,
and concerns nobody else; threads that use it never meet the collectives of the training.

Imports torch: import this module only where a process group is at hand.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hubshard.errors import StoreError
from hubshard.messages import one_line

__all__ = ["gloo_backend", "reason_of", "set_limit", "shared_store"]

_MOST_CHARACTERS = 200
_TAKES_LIMITS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)  # once it is connected


def shared_store(prefix: str) -> Any:
    """The store of the default process group, which all ranks see; its keys get a prefix."""
    return distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())  # noqa: SLF001  # the only door


def gloo_backend(name: str, rank: int, size: int, *, meet_seconds: float, limit_seconds: float) -> Any:
    """Connect some ranks; called by all of them.

    The connections end, and whoever waits for this rank gets an error, when nothing refers to the backend any more. Its
    own `abort` and `shutdown` do neither.

    Args:
        name: under which the ranks find each other: the same on all, and never used before in the job.
        rank: of this process among them, from 0.
        size: how many there are.
        meet_seconds: for which the others are waited for.
        limit_seconds: for which an operation may last; then all that is under way fails, here and elsewhere.

    Returns:
        A `torch.distributed.ProcessGroupGloo`.

    Raises:
        StoreError: some rank has not come, or is gone.
    """
    try:
        store = shared_store(name)
        if not _TAKES_LIMITS:  # the limit must be there from the beginning: what is left to wait for has come
            store.set(f"here/{rank}", "")
            store.wait([f"here/{other}" for other in range(size)], timedelta(seconds=meet_seconds))
        seconds = meet_seconds if _TAKES_LIMITS else limit_seconds
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))
    except RuntimeError as error:  # what torch.distributed raises
        raise StoreError(
            f"rank {rank} cannot connect to the other {size - 1}: {reason_of(error)}",
            hint="see what became of them; then start again",
        ) from error
    set_limit(backend, limit_seconds)
    return backend


def set_limit(backend: Any, limit_seconds: float) -> None:
    """Set for how long the next operations of a backend may last.

    Before 2.9, torch takes it and does not heed it: the limit stays that of `gloo_backend`.
    """
    backend._set_default_timeout(timedelta(seconds=limit_seconds))  # noqa: SLF001  # as torch itself does


def reason_of(error: BaseException) -> str:
    """The first sentence of what gloo says, without the place in its source."""
    return one_line(re.sub(r"^\[[^\]]*\] ", "", str(error))).partition(". ")[0][:_MOST_CHARACTERS]
