"""Who has saved to a branch last, for people. No torch."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from hubshard.errors import HubshardError
from hubshard.protocols import Revision
from hubshard.steps.save_cost import run_in, step_in

if TYPE_CHECKING:
    from hubshard.store.hub_storage import HubStorage

__all__ = ["last_save"]

_MOST_COMMITS = 100  # of a history that are looked at


def last_save(storage: HubStorage, at: Revision) -> str:
    """The newest commit that shows a step: which step, when, by which run; as far as the Hub tells.

    Args:
        storage: of the repo.
        at: where the branch is.
    """
    try:
        changes = list(islice(storage.history(at.commit), _MOST_COMMITS))
    except HubshardError:
        changes = []
    for change in changes:
        step = step_in(change.title)
        if step is not None:
            run = run_in(change.message)
            when = "" if change.date is None else f" on {change.date:%Y-%m-%d %H:%M:%S} UTC"
            who = "" if run is None else f" by run {run}"
            return f"step {step} was saved{when}{who} (commit {change.commit[:12]})"
    return f"the branch is at commit {at.commit[:12]}"
