"""Which of the saved steps are kept. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hubshard.errors import FormatError

__all__ = ["Retention"]


@dataclass(frozen=True, slots=True)
class Retention:
    """Which steps stay; a step stays for any one of the reasons.

    Attributes:
        keep: how many of the newest.
        keep_every: those whose number is a multiple of it; None for none.
        pinned: those by number.

    Raises:
        FormatError: fewer than one step would stay, or a number makes no sense.
    """

    keep: int
    keep_every: int | None = None
    pinned: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not _is_count(self.keep) or self.keep < 1:
            raise FormatError(f"keep={self.keep!r}: at least one step must stay", hint="give 1 or more")
        if self.keep_every is not None and (not _is_count(self.keep_every) or self.keep_every < 1):
            raise FormatError(f"keep_every={self.keep_every!r} is no number of steps", hint="give 1 or more, or None")
        wrong = [step for step in self.pinned if not _is_count(step)]
        if wrong:
            raise FormatError(f"pinned: {wrong[0]!r} is no number of a step", hint="count the steps from 0")

    def expired(self, steps: Collection[int], newest: int) -> list[int]:
        """The steps to delete once a step is saved, oldest first.

        Args:
            steps: those that there are; with or without `newest`.
            newest: the one that is saved. What is newer than it is left alone: it is not this run's.
        """
        there = sorted({*(step for step in steps if step <= newest), newest})
        return [step for step in there[: -self.keep] if not self._stays(step)]

    def _stays(self, step: int) -> bool:
        return step in self.pinned or (self.keep_every is not None and step % self.keep_every == 0)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
