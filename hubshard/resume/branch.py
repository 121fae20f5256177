"""`ResumeBranch`: the state of a training run, saved while it goes on, and found again by whoever goes on with it.

Imports torch where one is made, not before.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hubshard.errors import ConflictError, FormatError
from hubshard.events import Event, OnEvent, Operation, ignore, operation
from hubshard.resume.arguments import Grace, Notice, checked_pinned, checked_repo
from hubshard.resume.cadence import Cadence, Every
from hubshard.resume.ending import Ending
from hubshard.resume.preemption import DEFAULT_SIGNALS, Preemption
from hubshard.resume.ranks import check_process
from hubshard.resume.saves.hub_branch import HubBranch
from hubshard.resume.saves.local_steps import LocalSteps
from hubshard.resume.saves.run_folder import RunFolder
from hubshard.resume.saves.saver import Saver
from hubshard.sizes import parse_size
from hubshard.steps.retention import Retention
from hubshard.steps.step import checked_number, step_folder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self

    from hubshard.store.hub_client import Token

__all__ = ["ResumeBranch"]

_LOG = logging.getLogger("hubshard")


class ResumeBranch:
    """Saves the state of a run to a local folder and a branch of the Hub, and restores it: a context manager.

    ::

        with ResumeBranch("org/run", local_dir="checkpoints", every=500) as branch:
            step = branch.restore(state) or 0
            while step < steps:
                step += 1
                train(state)
                if branch.should_save(step):
                    branch.save(state, step)
                if branch.should_stop(step):
                    break

    `save` copies the state of this rank into memory that it keeps, and returns. A thread writes the copy to the local
    folder and makes it durable; another sends it to the Hub, where one commit by rank 0 shows the step, tells in its
    message what the save cost, and removes the steps past the retention. A slow Hub holds up neither the training nor
    the saves to the disk: of the steps that wait for it, the newest is sent, and those that stay for good.

    What fails in the background is raised by the next `save` (which first sets out on the new step), `should_save` (in
    a run of one process), `wait` or `close`. The local step is not lost by a push that failed: the next save pushes on,
    and those that stay for good follow it, also after the next start. Once the run is to stop, such a push is only
    logged. A program that ends without `close` waits all the same; where a save fails then, it ends with status 1 at
    once, and `atexit` handlers from before the import of this class are skipped.

    All ranks make it, and call its methods, at the same places of the program; only `steps` may be called by one alone.

    Memory: one copy of what this rank writes, and some 64 MB.

    Args:
        repo_id: the repo, "org/name"; made, private, where it is not there. None to save to `local_dir` alone.
        branch: of the repo; made by the first save. main only in a `resume_repo_id`.
        local_dir: folder that holds a folder per step, on a disk of each machine or one that all share. One run at a
            time saves there.
        keep: how many of the newest steps stay, here and there.
        keep_every: steps whose number is a multiple of it stay too.
        pinned: steps that stay too.
        every: how often to save: steps, a duration such as "30m", "auto" (needs `mtbf_seconds`), or None for whenever
            `save` is called.
        mtbf_seconds: mean time between failures of the job.
        busy: what `save` does while the one before is being written to the disk: "wait", or "skip" this one.
        resume_repo_id: a repo beside `repo_id` for the steps, for runs whose repo is public.
        max_file_size: bound per file, such as "5GB" or a number of bytes.
        grace_seconds: seconds from a signal until the process is killed, or a duration such as "2m".
        signals: that announce the end of this machine.
        notice: asked for the end of this machine; see `Preemption`.
        process_group: the ranks of the run; None for all.
        token: of the Hub; see `HubStore`.
        endpoint: the Hub's URL; None for huggingface_hub's.
        on_event: is told of each step of a save or restore, from several threads; see `hubshard.events`.

    Raises:
        FormatError: an argument makes no sense, or several processes were started without a process group.
    """

    def __init__(
        self,
        repo_id: str | None,
        *,
        branch: str = "resume",
        local_dir: str | os.PathLike[str],
        keep: int = 3,
        keep_every: int | None = None,
        pinned: Collection[int] = (),
        every: Every = None,
        mtbf_seconds: float | None = None,
        busy: str = "wait",
        resume_repo_id: str | None = None,
        max_file_size: int | str = "5GB",
        grace_seconds: Grace = 30.0,
        signals: Sequence[int] = DEFAULT_SIGNALS,
        notice: Notice | None = None,
        process_group: ProcessGroup | None = None,
        token: Token = None,
        endpoint: str | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        from hubshard.resume.saves.taking import SnapshotTaker  # noqa: PLC0415  # it imports torch
        from hubshard.resume.team import teams_of  # noqa: PLC0415  # it imports torch

        if busy not in {"wait", "skip"}:
            raise FormatError(f"busy={busy!r}", hint='give "wait" or "skip"')
        self._skips = busy == "skip"
        repo_id = checked_repo(repo_id, resume_repo_id, branch)
        retained, max_file_bytes = Retention(keep, keep_every, checked_pinned(pinned)), parse_size(max_file_size)
        self._on_event = on_event or ignore
        self._local = LocalSteps(Path(local_dir).expanduser().absolute())
        self._control, write_team, push_team = teams_of(process_group, count=3)
        self._taker = SnapshotTaker(self._control)
        self._path = repo_id or str(local_dir)
        agreement = self._control.agreements()
        self._cadence = Cadence(every, mtbf_seconds=mtbf_seconds, rank=self._control.rank, agreement=agreement("save"))
        self._preemption = Preemption(
            signals=signals, notice=notice, grace_seconds=grace_seconds, agreement=agreement("stop")
        )
        self._folder = RunFolder(self._local.root, self._control)
        hub = partial(HubBranch, token=token, endpoint=endpoint, run=self._folder.run, on_warning=self._warn_of_repo)
        self._hub = None if repo_id is None else hub(repo_id, branch)
        self._is_to_save = every is not None
        self._saver = Saver(
            self._local,
            self._hub,
            write_team=write_team,
            push_team=push_team,
            retention=retained,
            max_file_bytes=max_file_bytes,
            is_first_of_disk=self._folder.is_first_of_disk,
        )
        self._ending = Ending(self._saver, self._preemption)
        self._pid = os.getpid()
        self._newest: int | None = None
        self._restored: int | None = None
        self._is_deaf = bool(signals) or notice is not None
        self._is_listening = False
        self._is_well = False
        self._is_closed = False

    def __enter__(self) -> Self:
        """Begin to listen to signals."""
        self._preemption.__enter__()
        self._is_listening, self._is_deaf = True, False
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """See `close`; ranks leave together. Where the training failed, what failed here is logged."""
        self._is_well = kind is None or (issubclass(kind, SystemExit) and self._preemption.stop_step is not None)
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._ending.interrupt()
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except Exception:  # noqa: BLE001  # the first error is what the caller must see
            _LOG.exception("while the training was ended by another error")

    # What the training calls

    def restore(self, state: Any, *, step: int | None = None) -> int | None:
        """Fill a state with the newest step that every rank can read, from the disk or the Hub.

        Where both hold a step, files of the disk are read first; where they hold different ones of the same number, the
        Hub's is taken. Broken steps are passed over, and said. Each rank reads what it needs. That the step fits the
        state is seen before the state is touched; every byte is checked while it is read, and one that is wrong leads
        to an older step, which is then read completely.

        Args:
            state: a `TrainState`, or a dict such as `dcp.load` takes.
            step: its number; None for the newest.

        Returns:
            The step, or None where nothing was saved yet.

        Raises:
            NotFoundError: no such step.
            FormatError: the step does not fit the state, or was written by a later version of hubshard.
            IntegrityError: it is broken, as are all older ones; says whether the state was partly overwritten.
            StoreError: the Hub cannot be reached.
            ConflictError: another run saves to the folder (where `every` is None, that is only logged); or the folder
                holds newer steps than the branch, and nothing says that they are of the run that has saved there.
        """
        from hubshard.resume.restoring import Restorer, passing_over  # noqa: PLC0415  # it imports torch

        self._check_open()
        self._tell_ranks(state)
        step = None if step is None else checked_number(step)
        self.wait()
        if self._is_to_save:
            self._folder.hold()
        else:
            self._folder.look()
        with operation("restore", self._path, self._on_event) as op:
            told = passing_over(op)
            restorer = Restorer(self._local, self._hub, self._saver.line, self._control, on_warning=told)
            try:
                found = restorer.restore(state, step)
            finally:
                self._saver.go_on(restorer.passed_over)
            number = None if found.step is None else found.step.step
            op.start(found.nbytes, "nothing is saved" if number is None else f"step {number}")
            op.tell("received", self._path, found.nbytes)
            op.end("" if number is None else step_folder(number))
        self._newest, self._restored = None, number
        if found.newer is not None and self._control.is_first:
            _LOG.warning("step %d is newer: call rollback(%d) before the next save", found.newer, number)
        if found.step is not None:
            push = Operation("save", self._path, self._on_event)
            self._saver.push_restored(found.step, push, is_on_hub=found.is_on_hub)
        return number

    def save(self, state: Any, step: int) -> bool:
        """Save a state; returns once it is copied, and the training may change it again.

        Args:
            state: a `TrainState`, or a dict such as `dcp.save` takes; what is no tensor must be JSON-able.
            step: its number.

        Returns:
            False where it was skipped, since the one before is still being written.

        Raises:
            FormatError: something cannot be stored: names its path; or `local_dir` is no folder any more: nothing was
                saved. Or this was closed.
            StoreError: the disk refuses the folder, or what is there: nothing was saved.
            ConflictError: there is a newer step; or another run saves to the folder; or the branch holds steps that are
                not of this run, which has restored none of them: nothing was saved.
            Exception: what failed in the background since the last call; this step is on its way nevertheless.
        """
        self._check_open()
        self._tell_ranks(state)
        step = checked_number(step)
        self._folder.hold()
        self._saver.check_branch(self._control, has_time=self._preemption.stop_step is None)
        began = time.monotonic()
        op = Operation("save", self._path, self._on_event)
        if self._preemption.stop_step is not None or not self._skips:  # the last save is not skipped
            self._saver.wait_for_disk()
        snapshot = self._taker.take(state, check=lambda: self._check_number(step), is_busy=self._is_busy)
        if snapshot is None:
            _LOG.warning("step %d is not saved: the one before is still being written", step)
            op.tell("skipped", step_folder(step), detail="the save before is still being written")
            return False
        op.start(snapshot.plan.nbytes, f"step {step}")
        self._newest = step
        stall_seconds = time.monotonic() - began
        self._cadence.saved(step, stall_seconds, max(self._saver.last_seconds, stall_seconds))
        self._saver.write(snapshot, step, began=began, op=op)
        self._raise_error()
        return True

    def should_save(self, step: int) -> bool:
        """Whether to save after this step; the same on all ranks, which must all ask after each step.

        Args:
            step: number of the step that has just ended.

        Raises:
            Exception: in a run of one process, what failed in the background; unless this step is to be saved, which
                raises it after that.
        """
        is_due = self._cadence.due(step)
        if self.should_stop(step) or is_due:
            return True
        if self._control.size == 1:
            self._raise_error()
        return False

    def should_stop(self, step: int) -> bool:
        """Whether all ranks stop after this step, because this machine, or another of the run, is about to go.

        `should_save` says then that this step is to be saved.

        Args:
            step: number of the step that has just ended.
        """
        if self._is_deaf:
            _LOG.warning("no signal is heard: a ResumeBranch hears them within its `with` block alone")
            self._is_deaf = False
        return self._preemption.should_stop(step)

    @property
    def exit_code(self) -> int:
        """What to end the process with: 128 plus the signal's number, 75 for a notice, 0 where it is not to stop."""
        return self._preemption.exit_code

    def wait(self) -> None:
        """Wait until what was saved is on the disk and on the Hub; the latter as long as no signal comes.

        Raises:
            Exception: what failed in the background.
        """
        check_process(self._pid)
        self._ending.pause()
        self._raise_error()

    def steps(self) -> list[int]:
        """The steps that are saved, on this disk or the Hub, oldest first."""
        found = set(self._local.numbers())
        if self._hub is not None:
            found |= set(self._hub.peek())
        return sorted(found)

    def rollback(self, step: int) -> list[int]:
        """Remove all steps after one from the branch, in one commit, and from the disk; then `restore` gives that one.

        Returns:
            The steps that were removed.

        Raises:
            NotFoundError: it is not saved.
            ConflictError: another run has saved to the branch meanwhile.
        """
        self.wait()
        step = checked_number(step)
        self._folder.hold()
        with operation("rollback", self._path, self._on_event) as op:
            op.start(0, f"to step {step}")
            removed = self._saver.roll_back(step, self._control)
            op.end(step_folder(step))
        self._newest = None
        return removed

    def close(self) -> None:
        """Wait as `wait` does, and give back threads and signal handlers. Again is fine; a forked process only leaves.

        A signal shortens it to the grace, Ctrl-C to 10 s for the Hub; another Ctrl-C leaves at once.

        Raises:
            Exception: what failed in the background.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        try:
            self._ending.finish()
            if self._is_well:
                self._control.part(self._preemption.seconds_left)
        finally:
            self._saver.close(self._folder.release)
            if self._is_listening:
                self._preemption.__exit__(None, None, None)
            self._control.close()
        self._raise_error()

    # How

    def _check_open(self) -> None:
        check_process(self._pid)
        if self._is_closed:
            raise FormatError("this ResumeBranch is closed", hint="use it within its `with` block, or make another")

    def _tell_ranks(self, state: Any) -> None:
        tell = getattr(state, "among", None)
        if tell is not None:
            tell(self._control.rank, self._control.size)

    def _raise_error(self) -> None:
        # once the run is to stop, a push that failed was said, and must not change what the process ends with
        self._saver.raise_error(of_pushes=self._preemption.stop_step is None)

    def _is_busy(self) -> bool:
        return self._saver.is_writing

    def _check_number(self, step: int) -> None:
        self._folder.check()
        if self._newest is None:
            self._newest = max(self._local.numbers() - self._saver.broken, default=-1)
        if step < self._newest:
            back = "to the step that you go on from" if self._restored is None else f"with rollback({self._restored})"
            raise ConflictError(
                f"step {self._newest} is saved already, newer than {step}",
                hint=f"restore that and go on from there; or first roll back, {back}",
            )

    def _warn_of_repo(self, sentence: str) -> None:
        _LOG.warning(sentence)
        self._on_event(Event("save", "warning", self._path, detail=sentence))
