"""Steps that stay for good and are owed to the Hub: their push failed, or a run before was ended first. No torch."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from hubshard.errors import FormatError, IntegrityError, StoreError
from hubshard.resume.saves.hub_branch import HubBranch
from hubshard.resume.saves.local_steps import LocalSteps
from hubshard.resume.saves.push_queue import PushQueue
from hubshard.resume.saves.saving import Written
from hubshard.resume.saves.unsent import UnsentSteps
from hubshard.steps.step import Step
from hubshard.steps.step_json import encode_step

if TYPE_CHECKING:
    from hubshard.resume.team import Team

__all__ = ["OwedSteps"]

_LOG = logging.getLogger("hubshard")


class OwedSteps:
    """Those of a run; of the thread that pushes, and of that which trains while nothing is pushed.

    Args:
        local: the folder.
        queue: which steps stay, and which wait.
        team: all ranks, for the thread that pushes.
    """

    def __init__(self, local: LocalSteps, queue: PushQueue, team: Team) -> None:
        self._local = local
        self._queue = queue
        self._team = team
        self._record = UnsentSteps(local.root)
        self._steps: list[Written] = []  # oldest first

    @property
    def numbers(self) -> list[int]:
        """Their numbers, oldest first."""
        return [written.number for written in self._steps]

    def add(self, written: Written) -> None:
        """Its push failed: it is owed, if it stays."""
        if self._queue.stays(written.number):
            self._steps = [*self._steps, written]

    def drop_after(self, step: int) -> None:
        """The run was rolled back."""
        self._steps = [written for written in self._steps if written.number <= step]

    def saved(self, where: str, number: int, raw: bytes) -> None:
        """A step with this manifest is about to be shown on the disk, and goes to a branch; called on rank 0."""
        digest = hashlib.sha256(raw).hexdigest()
        with suppress(OSError):  # the folder cannot be looked at: the next start sends the newest step alone
            self._record.saved(where, number, digest, stays=self._queue.stays(number), kept=self._local.numbers())

    def sent(self, where: str, step: int) -> None:
        """A step has reached the Hub."""
        if self._team.is_first:
            self._record.sent(where, step)

    def go_on(self, hub: HubBranch, step: Step) -> None:
        """The run goes on from a step: those before it are owed that stay, as far as the record of the disk tells."""
        before = [self.as_written(one) for one in self._team.first(lambda: self._before(hub, step))]
        self._steps = [written for written in before if written is not None]

    def as_written(self, step: Step) -> Written | None:
        """A step on the disks as this rank pushes it; None where a rank cannot. Called by all ranks.

        Each takes the files that it wrote, or that one of more ranks did which are no more.
        """
        team, present = self._team, self._local.present(step)
        mine = [file for file in step.files if int(file.name.split("-")[1]) % team.size == team.rank]
        if team.any_of([any(file.name not in present for file in mine)])[0]:
            return None
        return Written(step.step, mine, step if team.is_first else None, encode_step(step) if team.is_first else b"")

    def push(self, push: Callable[[Written], None], on_error: Callable[[Written, BaseException], None]) -> None:
        """Push what is owed, newest first: one at least, and all where nothing else waits. What fails stays owed.

        Args:
            push: pushes one.
            on_error: is told of the one that failed.
        """
        is_free = True
        while self._steps and is_free:
            written = self._steps[-1]
            try:
                self._push(written, push)
                is_free = self._team.first(lambda: not self._queue.is_waiting)
            except BaseException as error:  # noqa: BLE001  # what was pushed before has reached the Hub all the same
                on_error(written, error)
                return
            finally:
                self._queue.end()
            self._steps = self._steps[:-1]

    def _push(self, written: Written, push: Callable[[Written], None]) -> None:
        folder = self._local.folder(written.number)
        if self._team.any_of([not all((folder / file.name).is_file() for file in written.files)])[0]:
            _LOG.warning("step %d is not on the disk any more, and was never sent to the Hub", written.number)
            return
        self._queue.again(written.number, () if written.step is None else tuple(written.step.file_of))
        push(written)

    def _before(self, hub: HubBranch, step: Step) -> list[Step]:
        owed = self._record.go_on(hub.where, step.step, hashlib.sha256(encode_step(step)).hexdigest())
        on_hub = {} if hub.line is None else hub.line.files
        found = []
        for number, sha256 in owed.items():
            if number not in on_hub and self._queue.stays(number):
                with suppress(FormatError, IntegrityError, StoreError):  # it is broken, or gone
                    one, digest = self._local.manifest(number)
                    found += [one] if digest == sha256 else []
        return found
