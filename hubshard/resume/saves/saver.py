"""What goes on while the training does: one thread writes to the disk, another sends to the Hub."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from hubshard.errors import NotFoundError
from hubshard.events import Operation
from hubshard.resume.saves import at_exit
from hubshard.resume.saves.background import Background, named
from hubshard.resume.saves.disk_line import BranchLine, DiskLine
from hubshard.resume.saves.failures import merged
from hubshard.resume.saves.hub_branch import HubBranch
from hubshard.resume.saves.local_steps import LocalSteps
from hubshard.resume.saves.owed import OwedSteps
from hubshard.resume.saves.push_queue import PushQueue
from hubshard.resume.saves.saving import Written, push_step, write_step
from hubshard.resume.saves.sending import OutOfTimeError, check_time
from hubshard.steps.retention import Retention
from hubshard.steps.save_cost import SaveCost
from hubshard.steps.step import Step, step_folder

if TYPE_CHECKING:
    from hubshard.resume.saves.snapshot import Snapshot
    from hubshard.resume.team import Team

__all__ = ["Saver"]

_LOG = logging.getLogger("hubshard")
_PARTING_SECONDS = 3.0
_NOT_SENT = "step {} is on the disk, but did not reach the Hub"


class Saver:
    """Writes snapshots and pushes what was written; each step by all ranks, in the same order.

    Args:
        local: the folder.
        hub: the branch; None where there is none.
        write_team: all ranks, for the thread that writes.
        push_team: all ranks, for the thread that pushes.
        retention: which steps stay.
        max_file_bytes: bound per file.
        is_first_of_disk: see `RunFolder`.

    Attributes:
        line: which steps of the disk count.
    """

    def __init__(
        self,
        local: LocalSteps,
        hub: HubBranch | None,
        *,
        write_team: Team,
        push_team: Team,
        retention: Retention,
        max_file_bytes: int,
        is_first_of_disk: bool,
    ) -> None:
        self._local = local
        self.line = DiskLine(local)
        self._hub = hub
        self._write_team = write_team
        self._push_team = push_team
        self._retention = retention
        self._max_file_bytes = max_file_bytes
        self._is_first_of_disk = is_first_of_disk
        self._failed_writes: deque[Exception] = deque()
        self._failed_pushes: deque[Exception] = deque()
        self._writing = Background("hubshard-write", self._failed_writes.append)
        self._pushing = Background("hubshard-push", self._failed_pushes.append)
        self._queue = PushQueue(retention)
        self._owed = OwedSteps(local, self._queue, push_team)
        self._is_over = threading.Event()
        if hub is not None:
            hub.sleep = self._rest
        self.broken: frozenset[int] = frozenset()
        self.last_seconds = 0.0
        self._is_checked = False
        self._saved: frozenset[int] = frozenset()  # by this run, or about to be

    @property
    def is_writing(self) -> bool:
        """Whether the last snapshot is still needed."""
        return self._writing.is_busy

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, and nothing has failed that nobody was told of."""
        return not (self._writing.is_busy or self._pushing.is_busy or self._failed_writes or self._failed_pushes)

    @property
    def unsent(self) -> list[int]:
        """Steps on the disk that wait for the Hub, or are on their way to it."""
        return sorted({*self._queue.needed(), *self._owed.numbers})

    def wait_for_disk(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the last snapshot is on the disk, or has failed; False where that took too long."""
        return self._writing.wait(timeout_seconds)

    def wait_for_hub(self, timeout_seconds: float | None = None) -> bool:
        """Wait until what is on the disk is on the Hub too, or has failed; False where that took too long."""
        return self._pushing.wait(timeout_seconds)

    def give_up_pushing(self) -> None:
        """End the pushes that are under way: the time for them has run out. One that hangs is left behind."""
        self._is_over.set()

    def raise_error(self, *, of_pushes: bool = True) -> None:
        """Raise what failed since the last call, as one error: of a write rather than of a push.

        Args:
            of_pushes: whether a step that is on the disk, but not on the Hub, is one.
        """
        pushes = _drained(self._failed_pushes) if of_pushes else []
        error = merged([*pushes, *_drained(self._failed_writes)])
        if error is not None:
            raise error

    def write(self, snapshot: Snapshot, number: int, *, began: float, op: Operation) -> None:
        """Begin to write a snapshot, and to push it once it is written.

        Args:
            snapshot: stays as it is until it is written.
            number: of the step.
            began: when the save began, on the monotonic clock (seconds); until now the training stood still.
            op: the save, as it tells of itself.
        """
        stalled = time.monotonic() - began
        at_exit.watch(self)
        self._saved |= {number}
        if self._hub is not None:
            self._pushing.begin()
        self._writing.start(f"step {number} was not saved", lambda: self._write(snapshot, number, began, stalled, op))

    def go_on(self, passed_over: frozenset[int] | None) -> None:
        """The run goes on from what is saved, or from the start where nothing is; called by all ranks.

        Args:
            passed_over: steps that it does not go on from: they do not count among those that are kept, and the next
                save removes them. None to stay as it is.
        """
        if passed_over is None:
            return
        self.broken, self._is_checked = passed_over, True
        if self._hub is not None:
            self._hub.take()

    def check_branch(self, team: Team, *, has_time: bool) -> None:
        """See, before the first step is written, that a branch which the run has not restored is not another's.

        Where there is no time, or the Hub does not answer at once, the first push sees it.

        Args:
            team: all ranks, which call this.
            has_time: the same on all of them.

        Raises:
            ConflictError: it is.
        """
        hub = self._hub
        if hub is not None and has_time and not self._is_checked:
            if team.first(lambda: hub.claim_at_once(self._local.holds)):
                branch = team.first(lambda: hub.line)
                team.each(lambda: self.line.judge(branch))
            self._is_checked = True

    def roll_back(self, step: int, team: Team) -> list[int]:
        """Remove the steps after one from the branch, and from the disks; called by all ranks, while nothing is pushed.

        Returns:
            What was removed.

        Raises:
            NotFoundError: it is not saved.
            ConflictError: another run has saved to the branch meanwhile; or a disk holds newer steps, which are another
                run's as far as it tells.
        """
        hub = self._hub
        removed, branch = team.first(lambda: self._newer(step))
        team.each(lambda: self.line.judge(branch, wanted=step))
        rollbacks = team.first(lambda: None if hub is None or branch is None else hub.roll_back(step))
        team.each(lambda: self._remove_after(step, rollbacks))
        self.go_on(frozenset())
        return removed

    def _newer(self, step: int) -> tuple[list[int], BranchLine | None]:
        place = None if self._hub is None else self._hub.look()
        there = self._local.numbers() | ({*place.steps()} if place is not None else set())
        if step not in there:
            where = self._local.root if self._hub is None else self._hub.where
            raise NotFoundError(f"{where}: no step {step} is saved", hint="look at steps()")
        return sorted(number for number in there if number > step), None if self._hub is None else self._hub.line

    def _remove_after(self, step: int, rollbacks: tuple[str, ...] | None) -> None:
        self._owed.drop_after(step)
        if self._is_first_of_disk:
            self._local.remove_all([number for number in self._local.numbers() if number > step])
            if self._hub is not None and rollbacks is not None:
                self.line.follow(self._hub.where, rollbacks, step)

    def push_restored(self, step: Step, op: Operation, *, is_on_hub: bool) -> None:
        """Begin to push what the disks have, and the Hub has not; called by all ranks.

        That is the step that was restored, then those before it that stay for good. A step of which a rank has not its
        files is not pushed: the next save will be.

        Args:
            step: that was restored.
            op: tells of it.
            is_on_hub: whether the branch has the step.
        """
        hub = self._hub
        if hub is None:
            return
        self._owed.go_on(hub, step)
        written = None if is_on_hub else self._owed.as_written(step)
        if written is not None:
            self._start_push(hub, written, op)
        elif self._owed.numbers:
            self._pushing.start("what a run before has left was not sent", lambda: self._push_left(hub, op))

    def close(self, once_written: Callable[[], None]) -> None:
        """Let the threads end once all is done, without waiting for that: see `hubshard.resume.saves.settling`.

        Args:
            once_written: called once nothing is written to the disk any more: as a rule now.
        """
        at_exit.forget(self)
        self._is_over.set()
        self._push_team.close()
        if self._writing.is_busy:
            self._writing.start("the folder was not given back", once_written)
        else:
            self._write_team.close()
            once_written()
        if self._push_team.size > 1:  # torch ends the process badly under a thread that waits for another rank
            self._pushing.wait(_PARTING_SECONDS)
        self._writing.close()
        self._pushing.close()

    # On the threads

    def _rest(self, seconds: float) -> None:
        """Wait for the Hub, no longer than there is time for it."""
        self._is_over.wait(seconds)
        check_time(self._is_over)

    def _write(self, snapshot: Snapshot, number: int, began: float, stalled: float, op: Operation) -> None:
        try:
            written = write_step(
                snapshot,
                number,
                local=self._local,
                line=self.line,
                hub=self._hub,
                team=self._write_team,
                retention=self._retention,
                queue=self._queue,
                broken=self.broken - {number},
                max_file_bytes=self._max_file_bytes,
                is_first_of_disk=self._is_first_of_disk,
                on_merged=lambda raw: self._owes(number, raw),
                op=op,
            )
        except BaseException as error:
            _tell_failure(op, number, error)
            raise
        self.broken -= {number}  # it is whole from now on
        now = time.monotonic()
        self.last_seconds = now - began
        if written.step is not None:
            cost = SaveCost(stalled, self.last_seconds - stalled, 0.0, written.step.nbytes)
            written = replace(written, cost=cost, since=now)
        if self._hub is None:
            op.end(step_folder(number))
        else:
            self._start_push(self._hub, written, op)

    def _owes(self, number: int, raw: bytes) -> None:
        if self._hub is not None:
            self._owed.saved(self._hub.where, number, raw)

    def _start_push(self, hub: HubBranch, written: Written, op: Operation) -> None:
        self._queue.add(written.number)
        self._pushing.start(_NOT_SENT.format(written.number), lambda: self._push(hub, written, op))

    def _push(self, hub: HubBranch, written: Written, op: Operation) -> None:
        team, number = self._push_team, written.number
        hub.get_ready()
        at_exit.watch(self)  # before the session of the client is closed, which has just been imported
        files = () if written.step is None else tuple(written.step.file_of)
        is_due = self._queue.begin(number, files)
        if not team.first(lambda: is_due):  # rank 0 decides; the others' turns come and go with its own
            self._queue.end()
            op.tell("skipped", step_folder(number), detail="a newer save is sent instead")
            op.end()
            return
        try:
            self._push_one(hub, written, op)
            is_sent = True
        except OutOfTimeError as error:
            is_sent = False
            _tell_unsent(op, number, error)
        except BaseException as error:
            if self._is_over.is_set():  # nobody waits for it any more, and other ranks may be gone
                _tell_unsent(op, number, error)
                return
            self._owed.add(written)
            _tell_failure(op, number, error)
            raise
        finally:
            self._queue.end()
            self._remove_if_expired(number)
        if is_sent:
            self._push_owed(hub, op)
        op.end(step_folder(number))

    def _push_left(self, hub: HubBranch, op: Operation) -> None:
        hub.get_ready()
        at_exit.watch(self)
        self._push_owed(hub, op)
        op.end()

    def _remove_if_expired(self, number: int) -> None:
        """Remove a step from the disk that newer saves have left there, since it was being read for its push."""
        if self._is_over.is_set() or not self._is_first_of_disk:  # once it is over, the folder may be another run's
            return
        try:
            there = self._local.numbers() - self.broken
        except OSError:  # the next save cleans up, and says what comes in its way
            return
        if number in self._retention.expired(there, max(there, default=number)) and number not in self._queue.needed():
            self._local.drop(number)

    def _push_owed(self, hub: HubBranch, op: Operation) -> None:
        def on_error(written: Written, error: BaseException) -> None:
            if self._is_over.is_set():
                _tell_unsent(op, written.number, error)
            else:
                _tell_failure(op, written.number, error)
                self._failed_pushes.append(named(error, _NOT_SENT.format(written.number)))

        self._owed.push(lambda written: self._push_one(hub, written, op, is_late=True), on_error)

    def _push_one(self, hub: HubBranch, written: Written, op: Operation, *, is_late: bool = False) -> None:
        rollbacks = push_step(
            written,
            local=self._local,
            line=self.line,
            saved=self._saved,
            hub=hub,
            team=self._push_team,
            retention=self._retention,
            broken=self.broken - {written.number},
            op=op,
            is_over=self._is_over,
            is_late=is_late,
        )
        self._owed.sent(hub.where, written.number)
        if self._is_first_of_disk:
            self.line.meet(hub.where, rollbacks)


def _drained(queue: deque[Exception]) -> list[Exception]:
    return [queue.popleft() for _ in range(len(queue))]


def _tell_unsent(op: Operation, number: int, error: BaseException) -> None:
    _LOG.warning("step %d is on the disk, but not on the Hub: %s", number, error)
    op.tell("warning", step_folder(number), detail=str(error))


def _tell_failure(op: Operation, number: int, error: BaseException) -> None:
    _LOG.error("step %d: %s", number, error)
    op.tell("error", op.path, detail=f"{type(error).__name__}: {error}")
