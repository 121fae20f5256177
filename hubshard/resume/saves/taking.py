"""Taking snapshots on all ranks: planned once, and again only where the layout of the state changes on any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from hubshard.resume.saves.plans import Offer, RankPlan, offer_of, share_out
from hubshard.resume.saves.snapshot import LiveState, Snapshot, SnapshotBuffer
from hubshard.resume.state.replicas import check_replica
from hubshard.resume.team import Team

__all__ = ["SnapshotTaker", "check_replicas"]


class SnapshotTaker:
    """Takes one snapshot after the other into the same memory.

    Args:
        team: all ranks; a snapshot costs one exchange of three flags.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._buffer = SnapshotBuffer()
        self._plan: RankPlan | None = None
        self._signature: object = None

    def take(self, state: Any, *, check: Callable[[], None], is_busy: Callable[[], bool]) -> Snapshot | None:
        """Copy what this rank has to save of a state.

        Args:
            state: of this rank; see `snapshot.tree_of`.
            check: raises what speaks against it.
            is_busy: whether the last snapshot is still needed here.

        Returns:
            None where any rank is busy.

        Raises:
            Exception: what speaks against it on any rank; nothing was taken.
        """
        live: list[LiveState] = []

        def look() -> None:
            check()
            live.append(LiveState(state, is_first=self._team.is_first))

        error = _error_of(look)
        has_changed = not live or self._plan is None or live[0].signature != self._signature
        is_wrong, changed, busy = self._team.any_of([error is not None, has_changed, is_busy()])
        if is_wrong:
            self._team.each(lambda: _raise(error))
        if busy:
            return None
        if changed or self._plan is None:
            self._plan = None
            check_replicas(state, self._team)
            self._plan = self._planned(live[0])
            self._signature = live[0].signature
        return self._buffer.take(live[0], self._plan)

    def _planned(self, live: LiveState) -> RankPlan:
        plans: list[SavePlan] = []

        def offer() -> Offer:
            plans.append(live.plan())
            return offer_of(plans[0])

        share = self._team.share_out(offer, share_out)
        return RankPlan.of(plans[0], share)


def check_replicas(state: Any, team: Team, *, compares_values: bool = True) -> None:
    """Refuse ranks that do not hold the same, where the state can tell.

    Args:
        state: of this rank.
        team: all ranks.
        compares_values: whether the values must be alike; before a restore the names alone.

    Raises:
        FormatError: names the first rank, and the tensor.
    """
    replica = getattr(state, "replica", None)
    if replica is None or team.size == 1:
        return
    first = team.first(replica)
    if not compares_values:
        first = replace(first, samples={})
    team.each(lambda: check_replica(replica(), first))


def _error_of(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as error:  # noqa: BLE001  # it is raised, on all ranks
        return error
    return None


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
