"""Finding the step to restore and reading it: all ranks the same one, each what it needs from where it has it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan

from hubshard.errors import (
    ConflictError,
    FormatError,
    HubshardError,
    IncompleteError,
    IntegrityError,
    NotFoundError,
    StoreError,
)
from hubshard.events import Operation
from hubshard.protocols import Revision
from hubshard.resume.dcp.hub_reader import HubReader
from hubshard.resume.dcp.planners import LoadPlanner
from hubshard.resume.dcp.torch_items import metadata_of
from hubshard.resume.saves.disk_line import BranchLine, DiskLine
from hubshard.resume.saves.hub_branch import HubBranch
from hubshard.resume.saves.local_steps import LocalSteps
from hubshard.resume.saves.snapshot import is_stateful, tree_of
from hubshard.resume.saves.step_files import open_files
from hubshard.resume.saves.taking import check_replicas
from hubshard.resume.team import Team
from hubshard.steps.places import BranchPlace, OpenStep
from hubshard.steps.step import Step, step_folder
from hubshard.steps.step_json import NewerVersionError

__all__ = ["Restored", "Restorer", "passing_over"]

_LOG = logging.getLogger("hubshard")
_BROKEN = (IncompleteError, IntegrityError, FormatError, NotFoundError)
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore came to.

    Attributes:
        step: that was restored; None where there is none yet.
        nbytes: that this rank read.
        newer: the newest that is not, where an older one was asked for; else None.
        is_on_hub: whether the branch has the step.
    """

    step: Step | None
    nbytes: int
    newer: int | None
    is_on_hub: bool


@dataclass(frozen=True, slots=True)
class _Candidate:
    # a step that rank 0 found whole, as it tells the others
    step: Step
    sha256: str
    at: Revision | None  # of the branch, where that has it
    use_disk: bool


@dataclass(frozen=True, slots=True)
class _Ready:
    # what a rank says of a candidate: why it cannot read it, and whether it would read from its disk
    problem: HubshardError | None
    uses_disk: bool


def passing_over(op: Operation) -> Callable[[int, str], None]:
    """Says that a step is passed over, and why."""

    def tell(step: int, why: str) -> None:
        _LOG.warning("step %d is passed over: %s", step, why)
        op.tell("warning", step_folder(step), detail=why)

    return tell


class Restorer:
    """Restores once.

    Args:
        local: the steps on the disk of this rank.
        hub: the branch; None where there is none.
        line: which steps of the disk count.
        team: all ranks.
        on_warning: is told of each step that is passed over, and why.

    Attributes:
        passed_over: steps that are broken, or void, once it is known that one, or none, can be restored; else None.
    """

    def __init__(
        self,
        local: LocalSteps,
        hub: HubBranch | None,
        line: DiskLine,
        team: Team,
        *,
        on_warning: Callable[[int, str], None],
    ) -> None:
        self._local = local
        self._hub = hub
        self._line = line
        self._team = team
        self._on_warning = on_warning
        self._is_touched = False
        self.passed_over: frozenset[int] | None = None
        # of rank 0, which decides
        self._place: BranchPlace | None = None
        self._there: set[int] = set()
        self._passed: dict[int, HubshardError] = {}
        self._problem: HubshardError | None = None
        self._any_disk = False

    def restore(self, state: Any, step: int | None) -> Restored:
        """Restore a step, or with None the newest that every rank can read.

        Raises:
            FormatError: the ranks hold different things under one name; or the step does not fit the state, or was
                written by a later version of hubshard; or a disk cannot tell which of its steps were rolled back.
            ConflictError: a disk holds newer steps than the branch, which are another run's as far as it tells.
            NotFoundError: no such step.
            IntegrityError: it is broken, as are all older ones.
            StoreError: the Hub or the disk cannot be read.
        """
        team = self._team
        check_replicas(state, team, compares_values=False)
        branch = team.first(self._look)
        void = team.each(lambda: self._judge(branch, step))[0]
        candidates = self._candidates(step, void) if team.is_first else iter(())
        while (candidate := team.first(lambda: next(candidates, None))) is not None:
            reading = _Reading(state, candidate, self._local, self._hub, is_first=team.is_first)
            said = team.each(reading.prepare)
            self._any_disk = any(ready.uses_disk for ready in said)
            self._problem = next((ready.problem for ready in said if ready.problem is not None), None)
            if self._problem is None:
                self._is_touched = True
                self._problem = next((problem for problem in team.each(reading.read) if problem is not None), None)
            if self._problem is None:
                team.each(reading.finish)
                passed, newest = team.first(lambda: (frozenset(self._passed), max(self._there - self._passed.keys())))
                newer = newest if newest > candidate.step.step else None
                self.passed_over = passed
                return Restored(candidate.step, reading.nbytes, newer, candidate.at is not None)
        if step is None:
            self.passed_over = team.first(lambda: frozenset(self._passed))
        return team.first(lambda: self._nothing(step))

    # Rank 0 looks for a step

    def _look(self) -> BranchLine | None:
        try:
            self._place = None if self._hub is None else self._hub.look()
        except StoreError as error:
            newest = max(self._local.numbers(), default=None)
            if newest is None or not error.retryable:
                raise
            raise StoreError(
                f"{error.message}; the newest step on the disk is {newest}, the branch may have a newer one",
                hint="wait for the Hub; or go on from the disk alone, with repo_id=None",
                retryable=True,
            ) from error
        return None if self._hub is None else self._hub.line

    def _candidates(self, wanted: int | None, void: Mapping[int, str]) -> Iterator[_Candidate]:
        place = self._place
        on_hub = set() if place is None else set(place.steps())
        on_disk, unfinished = self._local.numbers(), self._local.unfinished()
        there = self._there = on_hub | on_disk
        for number in sorted(void, reverse=True):
            self._problem = IntegrityError(void[number], hint="name it with step=")
            self._pass_over(number)
        if wanted is not None and wanted not in there:
            listed = f"there are {', '.join(map(str, sorted(there)[-_MOST_NAMED:]))}" if there else "there are none"
            raise NotFoundError(f"no step {wanted} is saved; {listed}", hint="look at the branch and the folder")
        numbers = sorted((there | unfinished.keys()) - void.keys(), reverse=True)
        for number in numbers if wanted is None else [wanted]:
            self._problem = None
            if number in there:
                yield from self._copies(number, place if number in on_hub else None, is_on_disk=number in on_disk)
                self._pass_over(number)
            else:
                self._on_warning(number, unfinished[number])

    def _copies(self, number: int, place: BranchPlace | None, *, is_on_disk: bool) -> Iterator[_Candidate]:
        """The step as the disks have it, with the branch for what they lack; then as the branch has it alone."""
        disk = self._tried(lambda: self._local.manifest(number)) if is_on_disk else None
        hub = None if place is None else self._tried(lambda: _facts(place.open(number)))
        if disk is not None and hub is not None and disk[1] != hub[1]:
            self._problem = IntegrityError("the disk holds another save of this number than the branch")
            disk = None
        if hub is not None and is_on_disk and disk is None and self._problem is not None:
            self._on_warning(number, f"{self._problem.message}; it is read from the branch")
        found = hub or disk
        if found is None:
            return
        at = None if hub is None or place is None else place.at
        yield _Candidate(*found, at=at, use_disk=True)
        if at is not None and self._any_disk:
            yield _Candidate(*found, at=at, use_disk=False)

    def _judge(self, branch: BranchLine | None, wanted: int | None) -> dict[int, str]:
        try:
            return self._line.judge(branch, wanted=wanted)
        except ConflictError as error:
            if self._hub is None:
                raise
            raise ConflictError(f"{error.message}; {self._hub.last_save()}", hint=error.hint) from None

    def _tried(self, look: Callable[[], tuple[Step, str]]) -> tuple[Step, str] | None:
        try:
            return look()
        except NewerVersionError:  # it may be whole: to go on from an older one would give it up
            raise
        except _BROKEN as error:
            self._problem = error
            return None

    def _pass_over(self, number: int) -> None:
        problem = self._problem or IncompleteError(f"step {number} is nowhere whole")
        self._passed[number] = problem
        self._on_warning(number, problem.message)

    def _nothing(self, wanted: int | None) -> Restored:
        if not self._passed:
            return Restored(None, 0, None, is_on_hub=False)
        problem = self._passed[max(self._passed) if wanted is None else wanted]
        if self._is_touched:
            raise IntegrityError(
                f"{problem.message}; {'no older step can be read' if wanted is None else 'it was asked for'}, and the "
                "state is partly overwritten",
                hint="do not train on: begin with a new state, and restore another step or none",
            ) from problem
        raise problem


def _facts(opened: OpenStep) -> tuple[Step, str]:
    return opened.step, opened.sha256


class _Reading:
    """A candidate, being read into the state of this rank."""

    def __init__(
        self, state: Any, candidate: _Candidate, local: LocalSteps, hub: HubBranch | None, *, is_first: bool
    ) -> None:
        self._state = state
        self._candidate = candidate
        self._local = local
        self._hub = hub
        self._is_first = is_first
        self._reader = HubReader(None, local_dir=local.root)
        self._planner = LoadPlanner()
        self._plan = LoadPlan([])
        self._tree: dict[str, Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that were read."""
        return self._reader.nbytes_read

    def prepare(self) -> _Ready:
        """Get ready without touching the state.

        Raises:
            FormatError: the state is not such as the step holds.
        """
        step = self._candidate.step
        at, use_disk = self._candidate.at, self._candidate.use_disk
        present = self._local.present(step) if use_disk else frozenset()
        store = None if self._hub is None or at is None else self._hub.store
        where = str(self._local.folder(step.step)) if store is None or self._hub is None else self._hub.where
        try:
            folder = open_files(step, self._local.folder(step.step), present, store=store, at=at, where=where)
        except FormatError as error:  # what lies on the disk beside the files is broken too
            return _Ready(error, uses_disk=True)
        self._reader.opened = OpenStep(folder, step, self._candidate.sha256, ())
        needed = self._planned(step, where)
        lacking = sorted(needed - present) if store is None else []
        problem = IncompleteError(f"{where}: missing: {', '.join(lacking[:_MOST_NAMED])}") if lacking else None
        return _Ready(problem, uses_disk=bool(needed & present))

    def read(self) -> HubshardError | None:
        """Fill the tensors of the state; a broken file is told."""
        try:
            self._reader.read_data(self._plan, self._planner).wait()
        except (IntegrityError, NotFoundError) as error:  # damaged, or removed since we looked
            return error
        except StoreError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EIO:
                raise
            return IntegrityError(f"{error.message}: the disk has lost it")
        return None

    def finish(self) -> None:
        """Hand the state what was read."""
        if not isinstance(self._state, Mapping):
            self._state.load_state_dict(self._tree)
            return
        for key, item in list(self._state.items()):
            if is_stateful(item):
                item.load_state_dict(self._tree[key])
            else:
                self._state[key] = self._tree[key]  # type: ignore[index]  # such as dcp.load takes

    def _planned(self, step: Step, where: str) -> frozenset[str]:
        prepare = getattr(self._state, "prepare_load", None)
        self._tree = tree_of(self._state) if prepare is None else prepare(step)
        try:
            self._planner.set_up_planner(self._tree, metadata_of(step), self._is_first)
            self._plan = self._planner.finish_plan(self._planner.create_local_plan())
            return frozenset(self._reader.check(self._plan, self._planner))
        except HubshardError:
            raise
        except (RuntimeError, ValueError) as error:
            raise FormatError(
                f"{where}: step {step.step} does not fit the state: {error}",
                hint="build the model and the optimizer as they were when it was saved",
            ) from error
