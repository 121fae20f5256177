"""Which processes publish together: those that a model is split over, those that hold replicas of it, or one alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from hubshard.publish.delivery import Together
from hubshard.publish.meeting import meet
from hubshard.publish.ranks import Shares
from hubshard.publish.replicas import Replicas
from hubshard.sources.model import Whole

if TYPE_CHECKING:
    from hubshard.ranks.group import Job

__all__ = ["sharing"]

_SILENT_STALLS = 4.0  # of a line, before a rank counts as gone
_LATE_STALLS = 10.0  # before one counts as not coming


class _Closing(Protocol):
    def give_up(self, error: BaseException) -> None: ...

    def close(self) -> None: ...


@contextmanager
def sharing(source: Any, process_group: Any, *, stall_seconds: float) -> Iterator[tuple[Together | None, Whole | None]]:
    """The ranks that publish a source together, and what makes its state dict whole; None for what is not needed.

    Args:
        source: as in `push_to_hub`.
        process_group: the ranks; None for all of the default process group, if there is one, False for this one alone.
        stall_seconds: a multiple of it is how long other ranks are waited for.

    Raises:
        FormatError: the model is split over several ranks, and not all of them have called.
    """
    job = None if process_group is False else _job(process_group)
    if job is None:
        yield None, None
        return
    from hubshard.ranks.group import RankGroup  # noqa: PLC0415  # imports torch
    from hubshard.sources.distributed import Alone, DistributedTensors, is_distributed  # noqa: PLC0415  # imports torch

    size, limit_seconds, wait_seconds = len(job.members), _SILENT_STALLS * stall_seconds, _LATE_STALLS * stall_seconds
    if not is_distributed(source):
        made = Replicas(job.store, job.rank, limit_seconds=limit_seconds, wait_seconds=wait_seconds)
        replicas = made if size > 1 else None
        with _closing(replicas):
            yield replicas, None
    elif size == 1:
        yield None, DistributedTensors(Alone(), job.members).whole
    else:
        call = meet(job.store, job.rank, size, limit_seconds=wait_seconds)
        group = RankGroup(job, call, limit_seconds=limit_seconds)
        with _closing(group):
            yield Shares(group), DistributedTensors(group, job.members).whole


def _job(process_group: Any) -> Job | None:
    if sys.modules.get("torch") is None:  # then there is no process group
        return None
    from hubshard.ranks.group import job_of  # noqa: PLC0415  # imports torch

    return job_of(process_group)


@contextmanager
def _closing(ranks: _Closing | None) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if ranks is not None:
            ranks.give_up(error)
        raise
    finally:
        if ranks is not None:
            ranks.close()
