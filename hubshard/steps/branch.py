"""The steps on a branch of the Hub, for whoever looks after them: what there is, is it whole, what may go. No torch."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hubshard.errors import FormatError, IncompleteError, IntegrityError
from hubshard.events import OnEvent, Operation, ignore, operation
from hubshard.messages import counted
from hubshard.steps.branch_look import BranchLook, StepProblem, StepSummary, named
from hubshard.steps.freeing import Freed
from hubshard.steps.places import OpenStep
from hubshard.steps.pulling import pull_step
from hubshard.steps.retention import Retention
from hubshard.steps.save_cost import PastSave
from hubshard.steps.step import MANIFEST_NAME, step_folder
from hubshard.store.patience import Patience

if TYPE_CHECKING:
    from hubshard.store.hub_client import Token

__all__ = ["Pruned", "StepBranch", "StepCheck"]


@dataclass(frozen=True, slots=True)
class StepCheck:
    """A step whose every byte was read.

    Attributes:
        step: its number.
        files: how many were read.
        nbytes: of them (bytes).
        problems: none where all is well.
    """

    step: int
    files: int
    nbytes: int
    problems: tuple[StepProblem, ...]


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was removed from a branch, or would be.

    Attributes:
        kept: steps that stay.
        removed: steps that go.
        broken: of those that stay: steps that cannot be restored.
        nbytes: of the files of the removed ones (bytes); their history holds them still, unless it is squashed.
        commit: the head afterwards.
        freed: storage given back; None where the history was left.
    """

    kept: tuple[int, ...]
    removed: tuple[int, ...]
    broken: tuple[int, ...]
    nbytes: int
    commit: str
    freed: Freed | None


class StepBranch:
    """The steps on a branch. Each call looks at the branch anew.

    Args:
        repo_id: "org/name".
        branch: of the repo.
        token: of the Hub; see `HubStore`.
        endpoint: the Hub's URL; None for huggingface_hub's.
        on_event: is told of each step of what takes long; see `hubshard.events`.
    """

    def __init__(
        self,
        repo_id: str,
        branch: str = "resume",
        *,
        token: Token = None,
        endpoint: str | None = None,
        on_event: OnEvent = ignore,
    ) -> None:
        self.repo_id = repo_id
        self.branch = branch
        self._token = token
        self._endpoint = endpoint
        self._on_event = on_event

    @property
    def where(self) -> str:
        """For people."""
        return f"{self.repo_id}@{self.branch}"

    # What there is

    def steps(self) -> list[StepSummary]:
        """All steps, oldest first, whole or not.

        Raises:
            NotFoundError: no such repo or branch.
        """
        with operation("look", self.where, self._on_event) as op:
            return self._look(op).summaries()

    def past_saves(self) -> list[PastSave]:
        """What the history tells of the last saves, oldest first; those of steps that were removed since too.

        Of the newest 200 commits; nothing of what a squash has dropped. No file is read.

        Raises:
            NotFoundError: no such repo or branch.
        """
        with operation("look", self.where, self._on_event) as op:
            return self._look(op).past_saves()

    def show(self, step: int | None = None) -> OpenStep:
        """What is in a step: its tensors, scalars and files.

        Args:
            step: its number; None for the newest that is whole.

        Raises:
            NotFoundError: no such repo, branch or step.
            IncompleteError, IntegrityError, FormatError: it is not whole, and why.
        """
        with operation("look", self.where, self._on_event) as op:
            return self._look(op).open(step)

    def verify(self, step: int | None = None) -> StepCheck:
        """Read every byte of a step: sizes, the sha256 of every file and of each of its blocks.

        Args:
            step: its number; None for the newest on the branch, whole or not.

        Raises:
            NotFoundError: no such repo, branch or step.
        """
        with operation("verify", self.where, self._on_event) as op:
            look = self._look(op)
            number = look.newest() if step is None else step
            try:
                opened = look.place.open(number)
            except (IncompleteError, IntegrityError, FormatError) as error:
                op.end(step_folder(number))
                return StepCheck(number, 0, 0, (StepProblem(step_folder(number), error.message),))
            op.start(opened.step.nbytes, f"step {number}")
            problems = look.problems(opened)
            op.end(step_folder(number))
        return StepCheck(number, len(opened.step.files), opened.step.nbytes, tuple(problems))

    def pull(self, step: int | None, local_dir: str | os.PathLike[str]) -> Path:
        """Bring a step to a local folder, where `ResumeBranch` and `hubshard.dcp.HubReader` find it.

        Goes on where a pull before it was killed; each byte is checked; until all are there, the folder holds no step.

        Args:
            step: its number; None for the newest that is whole.
            local_dir: holds a folder per step; made where it is not there.

        Returns:
            The folder of the step.

        Raises:
            NotFoundError: no such repo, branch or step.
            ConflictError: `local_dir` holds another step of this number.
            IntegrityError: bytes are not as they were saved.
            StoreError: there is no room, or the Hub cannot be reached.
        """
        with operation("pull", self.where, self._on_event) as op:
            look = self._look(op)
            opened = look.open(step)
            number = opened.step.step
            entry = look.place.entries(number)[MANIFEST_NAME]
            raw = b"".join(map(bytes, look.stream(number, MANIFEST_NAME, 0, entry.nbytes)))
            folder = pull_step(opened, raw, partial(look.stream, number), Path(local_dir), op=op)
            op.end(str(folder))
        return folder

    # What may go

    def prune(
        self,
        *,
        keep: int = 3,
        keep_every: int | None = None,
        pinned: Collection[int] = (),
        remove_broken: bool = False,
        squash: bool = False,
        dry_run: bool = False,
    ) -> Pruned:
        """Remove the steps past a retention, in one commit; free storage where the history is, or becomes, squashed.

        What an earlier call was killed before freeing is freed by the next. A run that saves meanwhile goes on.

        Args:
            keep: how many of the newest stay.
            keep_every: steps whose number is a multiple of it stay too; None for none.
            pinned: steps that stay too.
            remove_broken: remove those that cannot be restored too; they do not count among those that are kept. What a
                later version of hubshard wrote stays.
            squash: see `squash`.
            dry_run: say what would be done.

        Raises:
            NotFoundError: no such repo or branch.
            ConflictError: the branch moved meanwhile: nothing was removed.
            FormatError: a number makes no sense; or, with `squash`: the branch holds more than steps.
        """
        retention = Retention(keep, keep_every, frozenset(pinned))
        with operation("prune", self.where, self._on_event) as op:
            look = self._look(op)
            if squash:
                look.check_only_steps()
            summaries = look.summaries()
            whole = [found.step for found in summaries if found.problem is None]
            broken = {found.step for found in summaries} - {*whole}
            gone = {*retention.expired(whole, max(whole))} if whole else set()
            gone |= broken - {found.step for found in summaries if found.is_newer} if remove_broken else set()
            op.start(0, f"{counted(len(summaries), 'step')}, {len(gone)} past the retention")
            must_free = squash or look.was_squashed()
            if not dry_run:
                look.remove(gone, f"Prune {named(gone)}")
            freed = look.free(gone, squash=squash, dry_run=dry_run) if must_free else None
            kept = {found.step for found in summaries} - gone
            op.end(look.at.commit)
        return Pruned(
            kept=tuple(sorted(kept)),
            removed=tuple(sorted(gone)),
            broken=tuple(sorted(broken & kept)),
            nbytes=sum(found.nbytes for found in summaries if found.step in gone),
            commit=look.at.commit,
            freed=freed,
        )

    def squash(self, *, dry_run: bool = False) -> Freed:
        """Drop the history of the branch, and delete for good the files of steps that nothing names any more.

        The steps on the branch stay as they are, and so does whatever another branch, a tag or a pull request names
        anywhere in its history. A run that saves meanwhile goes on. Not to be undone.

        Args:
            dry_run: say what would be deleted.

        Raises:
            NotFoundError: no such repo or branch.
            FormatError: the branch holds more than steps, whose history is worth something.
            ConflictError: the branches and tags change all the time.
            IntegrityError: a save that was going on lost a file.
        """
        with operation("squash", self.where, self._on_event) as op:
            look = self._look(op)
            look.check_only_steps()
            op.start(0, counted(len(look.place.steps()), "step"))
            freed = look.free((), squash=True, dry_run=dry_run)
            op.end(look.at.commit)
        return freed

    def rollback(self, step: int, *, dry_run: bool = False) -> tuple[int, ...]:
        """Remove all steps after one, in one commit, so that the next restore gives that one.

        The disks of the run follow, also where the branch holds none: what they hold after it is passed over. A run
        that saves just now is refused.

        Args:
            step: its number; it must be whole.
            dry_run: say what would be removed.

        Returns:
            The steps that were removed, oldest first.

        Raises:
            NotFoundError: no such repo, branch or step.
            IncompleteError, IntegrityError, FormatError: the step is not whole: nothing was removed.
            ConflictError: the branch moved meanwhile: nothing was removed.
        """
        with operation("rollback", self.where, self._on_event) as op:
            look = self._look(op)
            look.place.open(step)
            newer = tuple(sorted(number for number in look.place.steps() if number > step))
            op.start(0, f"to step {step}")
            if not dry_run:
                look.roll_back(step)
            op.end(look.at.commit)
        return newer

    def _look(self, op: Operation) -> BranchLook:
        from hubshard.store.hub import HubStore  # noqa: PLC0415  # the client is slow to import, and not always needed
        from hubshard.store.hub_storage import HubStorage  # noqa: PLC0415

        patience = Patience(on_retry=op.retry)
        store = HubStore(self.repo_id, token=self._token, endpoint=self._endpoint, patience=patience)
        storage = HubStorage(self.repo_id, token=self._token, endpoint=self._endpoint, patience=patience)
        return BranchLook(store, storage, self.branch, op)
