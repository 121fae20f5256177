"""The ranks of a run, and how they act together: what fails on one of them fails on all, with the same error."""

from __future__ import annotations

import copy
import os
import pickle
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hubshard.errors import FormatError, HubshardError
from hubshard.resume.agreement import StepAgreement

__all__ = ["Team", "teams_of"]

T = TypeVar("T")
R = TypeVar("R")

_LONGEST = timedelta(days=2)  # an upload may take its time, and a rank that died closes its connections at once


class Team:
    """Some ranks that exchange small objects, over a gloo group of their own; without a group one rank alone.

    Every method is called by all ranks, in the same order, and by one thread at a time.

    Args:
        group: of all of them.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._first = 0 if group is None else dist.get_global_rank(group, 0)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0

    def each(self, work: Callable[[], T]) -> list[T]:
        """Every rank works; what each of them found, by rank.

        Raises:
            Exception: that of the first rank on which it failed.
        """
        mine = _outcome(work)
        if self._group is None:
            return _value([mine])
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, _portable(mine), group=self._group)
        outcomes[self.rank] = mine
        return _value(outcomes)

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Which of some flags are up on any rank; the fastest thing to ask, since the training may wait for it."""
        if self._group is None:
            return list(flags)
        raised = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in raised.tolist()]

    def first(self, work: Callable[[], T]) -> T:
        """Rank 0 works; all get what it found.

        Raises:
            Exception: it failed there.
        """
        return cast("T", self._spread(_outcome(work) if self.is_first else None))

    def join(self, work: Callable[[], T], join: Callable[[list[T]], R]) -> R:
        """Every rank works, rank 0 joins what they found, all get that.

        Raises:
            Exception: that of the first rank on which it failed, or of `join`.
        """
        outcomes = self._gathered(work)
        return cast("R", self._spread(None if outcomes is None else _outcome(lambda: join(_value(outcomes)))))

    def share_out(self, work: Callable[[], T], share: Callable[[list[T]], Sequence[R]]) -> R:
        """Every rank works, rank 0 makes a share for each out of what they found, each gets its own.

        Raises:
            Exception: that of the first rank on which it failed, or of `share`.
        """
        outcomes = self._gathered(work)
        shares: list[Any] | None = None
        if outcomes is not None:
            made = _outcome(lambda: share(_value(outcomes)))
            is_made = not isinstance(made, _Failure)
            shares = list(cast("Sequence[R]", made)) if is_made else [made] * self.size
        if self._group is None:
            return cast("R", _value(shares or [])[0])
        own: list[Any] = [None]
        sent = None if shares is None else [_portable(item) for item in shares]
        dist.scatter_object_list(own, sent, src=self._first, group=self._group)
        return cast("R", _value(shares[:1] if shares is not None else own)[0])

    def agreements(self) -> Callable[[str], StepAgreement]:
        """Makes agreements of the ranks on steps, under names that nobody else uses."""
        key = self.first(lambda: uuid.uuid4().hex)
        store = None if self._group is None else distributed_c10d._get_default_store()  # noqa: SLF001  # no other door

        def make(name: str) -> StepAgreement:
            return StepAgreement(store, name=f"hubshard/{key}/{name}", world_size=self.size)

        return make

    def close(self) -> None:
        """Give the group back."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _gathered(self, work: Callable[[], T]) -> list[Any] | None:
        mine = _outcome(work)
        if self._group is None:
            return [mine]
        outcomes: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(_portable(mine), outcomes, dst=self._first, group=self._group)
        if outcomes is not None:
            outcomes[0] = mine
        return outcomes

    def _spread(self, outcome: Any) -> Any:
        if self._group is None:
            return _value([outcome])[0]
        held = [_portable(outcome)]
        dist.broadcast_object_list(held, src=self._first, group=self._group)
        return _value([outcome] if self.is_first else held)[0]


def teams_of(group: dist.ProcessGroup | None, *, count: int) -> list[Team]:
    """Several teams of the same ranks, so that several threads may act with the others at once.

    Must be called by the main thread of all of them: the groups of a process are made in the same order everywhere.

    Args:
        group: the ranks; None for all.
        count: of teams.

    Raises:
        FormatError: several processes were started, and their process group does not exist yet.
    """
    if not dist.is_available() or not dist.is_initialized():
        started = os.environ.get("WORLD_SIZE", "1")  # set by torchrun
        if started != "1":
            raise FormatError(
                f"{started} processes were started (WORLD_SIZE), and the process group does not exist yet: each of "
                "them would save a state of its own",
                hint="Call torch.distributed.init_process_group() first.",
            )
        return [Team(None) for _ in range(count)]
    if dist.get_world_size(group) == 1:
        return [Team(None) for _ in range(count)]
    ranks = None if group is None else dist.get_process_group_ranks(group)
    return [
        Team(
            dist.new_group(ranks, timeout=_LONGEST, backend="gloo", use_local_synchronization=ranks is not None),
        )
        for _ in range(count)
    ]


# What came out of the work of a rank


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _outcome(work: Callable[[], T]) -> T | _Failure:
    try:
        return work()
    except BaseException as error:  # noqa: BLE001  # the others wait: they are told, and then it is raised
        return _Failure(error)


def _portable(outcome: Any) -> Any:
    """An outcome that can be sent: an error that cannot be is told in words."""
    if not isinstance(outcome, _Failure):
        return outcome
    try:
        pickle.loads(pickle.dumps(outcome.error))  # noqa: S301  # our own, of just now
    except Exception:  # noqa: BLE001  # whatever a foreign error does when it is copied
        return _Failure(HubshardError(f"{type(outcome.error).__name__}: {outcome.error}"))
    return outcome


def _value(outcomes: Sequence[Any]) -> list[Any]:
    failed: Mapping[int, BaseException] = {
        rank: outcome.error for rank, outcome in enumerate(outcomes) if isinstance(outcome, _Failure)
    }
    if not failed:
        return list(outcomes)
    rank, error = next(iter(failed.items()))
    if rank and isinstance(error, HubshardError):
        told = copy.copy(error)
        told.message = f"rank {rank}: {error.message}"
        raise told from error
    raise error
