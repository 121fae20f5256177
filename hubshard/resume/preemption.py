"""Being told to go: signals and notices, and the step after which all ranks stop. No torch."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from hubshard.errors import FormatError
from hubshard.resume.agreement import StepAgreement
from hubshard.resume.arguments import Grace, Notice, checked_grace, checked_notice, checked_signals
from hubshard.steps.intervals import format_seconds

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DEFAULT_SIGNALS", "NOTICE_EXIT_CODE", "Preemption"]

_LOG = logging.getLogger("hubshard")

DEFAULT_SIGNALS: tuple[int, ...] = tuple(
    int(getattr(signal, name)) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)
)
"""What clouds and schedulers send; Windows has no SIGUSR1."""

NOTICE_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: start me again later."""

_POLL_SECONDS = 1.0

_Handler = Callable[[int, FrameType | None], Any] | int | None


class Preemption:
    """Learns that the job must end, and has all ranks stop after the same step.

    Signal handlers only take a note; the work is done where the training asks. Whatever handled a signal before is
    called after ours, except the defaults, which would end the process at once (SIG_DFL, and Python's own for SIGINT).
    A further signal changes nothing. `notice` is called in a thread of its own, once a second; where it fails, that is
    said once.

    A process that was forked from this one, such as a worker of a data loader, ends on SIGTERM as if we were not there,
    since this is how workers are ended; the other signals do nothing to it. So a scheduler that signals every process
    of a job, rather than the ranks alone, should send SIGUSR1: SIGTERM takes the data loader away from the step.

    A context manager: handlers are set at its beginning, and those from before are put back at its end.

    Args:
        signals: that mean the end is near.
        notice: asked whether it is; None for nobody to ask.
        grace_seconds: seconds from a signal until the process is killed, or a duration such as "2m".
        agreement: with the other ranks; None where there are none.
        poll_seconds: between two calls of `notice`.

    Raises:
        FormatError: an argument makes no sense.
    """

    def __init__(
        self,
        *,
        signals: Sequence[int] = DEFAULT_SIGNALS,
        notice: Notice | None = None,
        grace_seconds: Grace = 30.0,
        agreement: StepAgreement | None = None,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        self._signals = checked_signals(signals)
        self._notice = checked_notice(notice)
        self._grace_seconds = checked_grace(grace_seconds)
        self._agreement = agreement or StepAgreement(None, name="stop", world_size=1)
        self._poll_seconds = poll_seconds
        self._previous: dict[int, _Handler] = {}
        self._pid = os.getpid()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._heard: tuple[int, float] | None = None  # exit code, deadline
        self._stop: tuple[int, int] | None = None  # step, exit code
        self._asked = -1

    def __enter__(self) -> Self:
        """Begin to listen.

        Raises:
            FormatError: signals are to be handled, and this is not the main thread, or one cannot be handled.
        """
        self._pid = os.getpid()
        self._install()
        if self._notice is not None:
            self._ending.clear()
            self._thread = threading.Thread(
                target=self._poll, args=(self._notice,), name="hubshard-notice", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Listen no longer."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(timeout=self._poll_seconds)  # it may hang in `notice`, and is a daemon
            self._thread = None
        self._restore()

    # What the training asks

    def should_stop(self, step: int) -> bool:
        """Whether to stop after this step; the same on all ranks, which must all ask after each step.

        Args:
            step: number of the step that has just ended; greater from call to call.

        Returns:
            Once True it stays so. One process stops at once; several, after the step in whose course all have learnt
            of it: the next one (on GPUs, the one after that).
        """
        if self._stop is None and step != self._asked:
            self._asked = step
            heard = self._heard
            proposal = None if heard is None else {"exit_code": heard[0], "seconds": heard[1] - time.monotonic()}
            agreed = self._agreement.at_end_of(step, proposal)
            if agreed is not None:
                self._hear(int(agreed["exit_code"]), float(agreed["seconds"]))
                self._stop = step, int(agreed["exit_code"])
                _LOG.warning(
                    "stopping after step %d: %s, %s left",
                    step,
                    _cause(self._stop[1]),
                    format_seconds(self.seconds_left),
                )
        return self._stop is not None

    def stop_now(self) -> None:
        """Take the last step that was asked about as the one to stop after, if a signal was heard."""
        if self._stop is None and self._heard is not None:
            self._stop = self._asked, self._heard[0]

    @property
    def stop_step(self) -> int | None:
        """The step after which all ranks stop; None where they do not."""
        return None if self._stop is None else self._stop[0]

    @property
    def is_heard(self) -> bool:
        """Whether this rank was told, though the others may not know yet."""
        return self._heard is not None

    @property
    def seconds_left(self) -> float:
        """Until the process is killed, as far as this rank knows; infinite where it is not to be, and never negative.

        What another rank was told reaches this one up to a step later, and is not corrected for that.
        """
        return float("inf") if self._heard is None else max(0.0, self._heard[1] - time.monotonic())

    @property
    def exit_code(self) -> int:
        """What to end the process with: 128 + the signal's number, 75 for a notice, 0 where it is not to stop."""
        return 0 if self._stop is None else self._stop[1]

    # How it is told

    def _hear(self, exit_code: int, seconds: float) -> None:
        """Take a note; the earliest deadline counts, and the first cause."""
        deadline = time.monotonic() + seconds
        if self._heard is None:
            self._heard = exit_code, deadline
        elif deadline < self._heard[1]:
            self._heard = self._heard[0], deadline

    def _install(self) -> None:
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise FormatError(
                f"signals can be handled by the main thread alone, and this is {threading.current_thread().name!r}",
                hint="set it up in the main thread, or give signals=() and a notice",
            )
        for number in dict.fromkeys(self._signals):
            try:
                self._previous[number] = signal.getsignal(number)
                signal.signal(number, self._on_signal)
            except (OSError, ValueError) as error:
                self._previous.pop(number, None)
                self._restore()
                raise FormatError(
                    f"signal {number} cannot be handled: {error}", hint="choose others, such as SIGTERM"
                ) from error

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            if signal.getsignal(number) == self._on_signal:  # else somebody came after us: theirs stays
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number, signal.SIG_DFL)
        if os.getpid() == self._pid:
            self._hear(128 + number, self._grace_seconds)
        elif number == signal.SIGTERM and previous in {None, signal.SIG_DFL}:  # how workers are ended
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _poll(self, notice: Notice) -> None:
        said = False
        while not self._ending.wait(self._poll_seconds):
            try:
                seconds = _seconds_until(notice(), self._grace_seconds)
            except Exception as error:  # noqa: BLE001  # it is the user's; the training goes on without it
                if not said:
                    _LOG.warning("the preemption notice cannot be had, and is asked for again: %r", error)
                said = True
                continue
            if seconds is not None:
                self._hear(NOTICE_EXIT_CODE, seconds)
                return


def _seconds_until(answer: bool | float | None, grace_seconds: float) -> float | None:  # noqa: FBT001  # see `Notice`
    if answer is None or answer is False:
        return None
    return grace_seconds if answer is True else float(answer)


def _cause(exit_code: int) -> str:
    if exit_code == NOTICE_EXIT_CODE:
        return "this machine is about to go"
    try:
        return f"{signal.Signals(exit_code - 128).name} arrived"
    except ValueError:
        return f"signal {exit_code - 128} arrived"
