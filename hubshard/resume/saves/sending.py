"""Sending the files of a step from the disk to the Hub, and telling of it. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event

from hubshard.errors import StoreError
from hubshard.events import Gathered, Operation
from hubshard.protocols import Staged
from hubshard.resume.saves.hub_branch import HubBranch
from hubshard.steps.step import StepFile
from hubshard.store.content import blocks_of

__all__ = ["OutOfTimeError", "Sending", "check_time"]


class OutOfTimeError(StoreError):
    """The process is about to be ended, before all was sent."""


def check_time(is_over: Event) -> None:
    """Give up where the time has run out.

    Raises:
        OutOfTimeError: it has.
    """
    if is_over.is_set():
        raise OutOfTimeError("there was no time to send it before the process ends", retryable=True)


class Sending:
    """Makes files durable on the Hub, one after the other; what is there already is not sent again.

    Args:
        hub: the branch.
        op: is told.
        is_over: set where the time for it has run out.
    """

    def __init__(self, hub: HubBranch, op: Operation, is_over: Event) -> None:
        self._hub = hub
        self._op = op
        self._is_over = is_over

    def stage(self, path: Path, file: StepFile) -> Staged:
        """Send a file.

        Raises:
            IntegrityError: it is not as it was written.
            StoreError: refused, tried again in vain, or the time has run out.
        """
        target = f"{path.parent.name}/{path.name}"
        told_bytes = 0

        def tell(nbytes: int) -> None:
            nonlocal told_bytes
            told_bytes += nbytes
            self._op.tell("sent", target, nbytes)

        sent = Gathered(tell)

        def on_sent(nbytes: int) -> None:
            check_time(self._is_over)
            sent.add(nbytes)

        staged = self._hub.store.stage(
            self._hub.branch,
            target,
            partial(self._blocks, path),
            nbytes=file.nbytes,
            sha256=file.sha256,
            on_sent=on_sent,
        )
        sent.add(max(0, staged.nbytes_sent - told_bytes))
        sent.flush()
        if not staged.nbytes_sent:
            self._op.tell("skipped", target, staged.nbytes, "the Hub has it")
        elif staged.nbytes > staged.nbytes_sent:
            self._op.tell("deduplicated", target, staged.nbytes - staged.nbytes_sent)
        self._op.tell("staged", target, staged.nbytes)
        return staged

    def _blocks(self, path: Path) -> Iterator[memoryview]:
        for block in blocks_of(path):
            check_time(self._is_over)
            yield block
