"""Arguments of a run that are seen to be wrong at once, rather than hours later. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta

from hubshard.errors import FormatError
from hubshard.steps.intervals import seconds_of
from hubshard.target import check_ref_name, check_repo_id

__all__ = ["Grace", "Notice", "checked_grace", "checked_notice", "checked_pinned", "checked_repo", "checked_signals"]

Grace = float | str | timedelta
"""Seconds, or a duration such as "2m" or a timedelta."""

Notice = Callable[[], bool | float | None]
"""Whether this machine is about to go: False or None for no, True for yes, a number for in so many seconds."""

_MAIN = "main"


def checked_repo(repo_id: str | None, resume_repo_id: str | None, branch: str) -> str | None:
    """The repo that steps go to; None for none.

    Raises:
        FormatError: it or the branch has no valid name, or the branch is main and the repo is not one for steps alone.
    """
    for name, value in (("repo_id", repo_id), ("resume_repo_id", resume_repo_id), ("branch", branch)):
        if not isinstance(value, str) and (value is not None or name == "branch"):
            raise FormatError(f"{name}={value!r} is no text", hint="give org/name, and a branch such as resume")
    check_ref_name(branch, "branch")
    for given in (repo_id, resume_repo_id):
        if given is not None:
            check_repo_id(given)
    if branch == _MAIN and repo_id is not None and resume_repo_id in {None, repo_id}:
        raise FormatError(
            f"branch={_MAIN!r} of {repo_id} would mix the steps of the run with the model: who loads it gets both",
            hint='give another branch, such as "resume", or with resume_repo_id= a repo for the steps alone',
        )
    return resume_repo_id or repo_id


def checked_grace(grace: Grace) -> float:
    """Seconds from a signal to the end of the process.

    Raises:
        FormatError: it is no duration, or negative.
    """
    if grace == 0 and type(grace) in {int, float}:
        return 0.0
    try:
        return math.inf if grace == math.inf else seconds_of(grace)
    except FormatError as error:
        hint = "give seconds, or a duration such as 90s or 2m"
        raise FormatError(f"grace_seconds={grace!r}: {error.message}", hint=hint) from error


def checked_signals(signals: Iterable[int]) -> tuple[int, ...]:
    """Numbers of signals.

    Raises:
        FormatError: one is no number.
    """
    hint = "give a list such as [signal.SIGTERM, signal.SIGUSR1], or () for none"
    if not _is_list(signals):
        raise FormatError(f"signals={signals!r} is no list of signals", hint=hint)
    numbers = tuple(signals)
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool):
            raise FormatError(f"signals: {number!r} is no signal", hint=hint)
    return numbers


def checked_pinned(pinned: Collection[int]) -> frozenset[int]:
    """Steps that stay; `Retention` looks at the numbers.

    Raises:
        FormatError: it is no collection.
    """
    if not _is_list(pinned):
        raise FormatError(f"pinned={pinned!r} is no list of steps", hint="give a list such as [1000, 2000]")
    return frozenset(pinned)


def checked_notice(notice: Notice | None) -> Notice | None:
    """What is asked for the end of the machine.

    Raises:
        FormatError: it cannot be called.
    """
    if notice is not None and not callable(notice):
        raise FormatError(f"notice={notice!r} cannot be called", hint="give a function; see Preemption")
    return notice


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)
