"""How long a run waits for what is under way in the background: a signal and Ctrl-C shorten it. No torch."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from hubshard.resume.preemption import Preemption
from hubshard.resume.saves.settling import INTERRUPTED_SECONDS, give_up, settle

if TYPE_CHECKING:
    from hubshard.resume.saves.saver import Saver

__all__ = ["Ending"]

_LAST_SECONDS = 5.0  # of the time until the process is killed: for the interpreter to end


class Ending:
    """Waits for a saver, in the midst of a run or at its end.

    Args:
        saver: writes and pushes.
        preemption: knows until when the process lives.
    """

    def __init__(self, saver: Saver, preemption: Preemption) -> None:
        self._saver = saver
        self._preemption = preemption
        self._interrupted_until: float | None = None

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C ends the run."""
        return self._interrupted_until is not None

    def interrupt(self) -> None:
        """Ctrl-C has come: the Hub gets a moment from now on."""
        self._interrupted_until = time.monotonic() + INTERRUPTED_SECONDS

    def pause(self) -> None:
        """Wait for all, and where a signal comes meanwhile, for the disk alone: the training has to hear of it."""
        if self._preemption.stop_step is not None:
            self._to_the_end()
        else:
            settle(self._saver, lambda: 0.0 if self._preemption.is_heard else math.inf)

    def finish(self) -> None:
        """Wait for all, for the Hub as long as there is time; nothing but pushes that hang is under way then.

        Raises:
            KeyboardInterrupt: Ctrl-C came: the first time, all was waited for all the same, the Hub for a moment.
        """
        try:
            self._to_the_end()
        except KeyboardInterrupt:
            if self.is_interrupted:
                raise
            self.interrupt()
            self._to_the_end()
            raise

    def _to_the_end(self) -> None:
        if not settle(self._saver, self._hub_seconds, says_at_once=self.is_interrupted):
            give_up(self._saver)
            self._preemption.stop_now()

    def _hub_seconds(self) -> float:
        end = math.inf if self._interrupted_until is None else self._interrupted_until
        return min(end - time.monotonic(), self._preemption.seconds_left - _LAST_SECONDS)
