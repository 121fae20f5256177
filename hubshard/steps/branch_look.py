"""A branch of steps as it was at one look, and what is done to it. No torch."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from hubshard.engine import run
from hubshard.errors import FormatError, IncompleteError, IntegrityError, NotFoundError
from hubshard.events import Gathered, Operation
from hubshard.messages import listed
from hubshard.protocols import Buffer, Revision
from hubshard.steps.checking import FileCheck
from hubshard.steps.freeing import Freed, free_storage, unneeded_files
from hubshard.steps.places import BranchPlace, OpenStep, find_step, no_branch
from hubshard.steps.rollbacks import ROLLBACKS_NAME
from hubshard.steps.save_cost import PastSave, cost_in, step_in, step_title
from hubshard.steps.step import MANIFEST_NAME, StepFile, step_folder, step_number
from hubshard.steps.step_json import NewerVersionError
from hubshard.steps.writing import commit_rollback

if TYPE_CHECKING:
    from hubshard.store.hub import HubStore
    from hubshard.store.hub_storage import HubStorage

__all__ = ["BranchLook", "StepProblem", "StepSummary", "named"]

_WORKERS = 8
_SQUASHED = "Squash the history of the steps"
_MOST_COMMITS = 200  # of a history that are looked at
_OF_THE_REPO = {".gitattributes", "README.md", ROLLBACKS_NAME}


@dataclass(frozen=True, slots=True)
class StepSummary:
    """A step at a glance.

    Attributes:
        step: its number.
        world_size: ranks that saved it; None where the manifest cannot be read.
        nbytes: of its files, as the branch has them (bytes).
        files: how many, the manifest left out.
        problem: why it cannot be restored; None where it is whole, as far as sizes and the Hub's hashes tell.
        saved_at: when its commit was made; None where the Hub does not say, or the history was squashed since.
        is_newer: whether the problem is that a later version of hubshard wrote it: it may be whole.
    """

    step: int
    world_size: int | None
    nbytes: int
    files: int
    problem: str | None
    saved_at: datetime | None
    is_newer: bool = False


@dataclass(frozen=True, slots=True)
class StepProblem:
    """A file that is not as it was saved.

    Attributes:
        path: of the file in the repo, or of the folder of the step.
        what: in a sentence.
    """

    path: str
    what: str


class BranchLook:
    """The branch as it was when a call looked at it, and what the call does to it."""

    def __init__(self, store: HubStore, storage: HubStorage, branch: str, op: Operation) -> None:
        self._store = store
        self._storage = storage
        self._branch = branch
        self._op = op
        self.at = self._head()
        self.place = BranchPlace(store, self.at, op.path)

    def _head(self) -> Revision:
        head = self._store.head(self._branch)
        if head is None:
            raise no_branch(self._store.repo_id, self._branch)
        return head

    def open(self, step: int | None) -> OpenStep:
        """A step, or the newest that is whole."""
        return find_step([self.place], step) if step is None else self.place.open(step)

    def newest(self) -> int:
        """The newest step, whole or not."""
        steps = self.place.steps()
        if not steps:
            raise NotFoundError(f"{self._op.path}: no step is saved there yet")
        return max(steps)

    def stream(self, step: int, name: str, start: int, stop: int) -> Iterator[Buffer]:
        """The bytes of a file of a step, as they arrive."""
        return self._store.stream(self.at, f"{step_folder(step)}/{name}", start, stop)

    def summaries(self) -> list[StepSummary]:
        """All steps, oldest first."""
        steps = sorted(self.place.steps())
        manifests = {step: f"{step_folder(step)}/{MANIFEST_NAME}" for step in steps}
        changes = self._storage.last_changes(self.at.commit, list(manifests.values()))
        made = {step: changes.get(path) for step, path in manifests.items()}
        saved = {
            step: change.date
            for step, change in made.items()
            if change is not None and change.title == step_title(step)
        }
        work = partial(self._summary, saved=saved)
        return list(run(steps, cost=lambda _: 1, work=work, budget_bytes=len(steps) + 1, workers=_WORKERS))

    def _summary(self, step: int, *, saved: Mapping[int, datetime | None]) -> StepSummary:
        entries = self.place.entries(step)
        names, nbytes = entries.keys() - {MANIFEST_NAME}, sum(entry.nbytes for entry in entries.values())
        is_newer = False
        try:
            world_size, problem = self.place.glance(step).world_size, None
        except (NotFoundError, IncompleteError, IntegrityError, FormatError) as error:
            world_size, problem, is_newer = None, error.message, isinstance(error, NewerVersionError)
        return StepSummary(step, world_size, nbytes, len(names), problem, saved.get(step), is_newer)

    def past_saves(self) -> list[PastSave]:
        """The saves of which the newest commits tell, oldest first."""
        changes = list(islice(self._storage.history(self.at.commit), _MOST_COMMITS))
        steps = [(step_in(change.title), change) for change in reversed(changes)]
        return [PastSave(step, change.date, cost_in(change.message)) for step, change in steps if step is not None]

    def problems(self, opened: OpenStep) -> list[StepProblem]:
        """Read every file of a step."""
        files = opened.step.files
        work = partial(self._problem, opened.step.step)
        found = run(files, cost=lambda _: 1, work=work, budget_bytes=_WORKERS, workers=_WORKERS)
        return [problem for problem in found if problem is not None]

    def _problem(self, step: int, file: StepFile) -> StepProblem | None:
        path, check = f"{step_folder(step)}/{file.name}", FileCheck(file)
        told = Gathered(lambda nbytes: self._op.tell("received", path, nbytes))
        try:
            for data in self.stream(step, file.name, 0, file.nbytes):
                check.add(data)
                told.add(memoryview(data).nbytes)
        except (IntegrityError, NotFoundError) as error:
            return StepProblem(path, error.message)
        told.flush()
        problem = check.problem()
        if problem is not None:
            return StepProblem(path, problem)
        self._op.tell("verify", path, file.nbytes)
        return None

    def remove(self, steps: Collection[int], message: str) -> None:
        """Remove steps in one commit; none where there are none.

        Args:
            steps: that go.
            message: of the commit.
        """
        paths = [path for step in sorted(steps) for path in self.place.files(step)]
        if not paths:
            return
        self.at = self._store.commit(
            self._branch, parent=self.at, add=[], remove=paths, message=message, publish_id=uuid.uuid4().hex
        )
        self._tell_removed(steps)

    def roll_back(self, step: int) -> None:
        """Remove the steps after one; see `commit_rollback`."""
        self.at, _ = commit_rollback(self._store, self._branch, self.place, step)
        self._tell_removed([number for number in self.place.steps() if number > step])

    def _tell_removed(self, steps: Collection[int]) -> None:
        for step in sorted(steps):
            self._op.tell(
                "removed", step_folder(step), sum(entry.nbytes for entry in self.place.entries(step).values())
            )
        self._op.tell("commit", self._branch, 0, self.at.commit)

    def check_only_steps(self) -> None:
        """Refuse to drop the history of anything but steps, or of none."""
        if not self.place.steps():
            raise FormatError(f"{self._op.path} holds no step: its history is not dropped", hint="name their branch")
        others = [
            entry.path
            for entry in self._store.list(self.at)
            if step_number(entry.path.partition("/")[0]) is None and entry.path not in _OF_THE_REPO
        ]
        if others:
            raise FormatError(
                f"{self._op.path} holds more than steps ({listed(others, most=3)}): its history is not dropped",
                hint="keep the steps on a branch of their own",
            )

    def was_squashed(self) -> bool:
        """Whether the history begins with a squash of ours, as far as it is looked at."""
        last = deque(islice(self._storage.history(self.at.commit), _MOST_COMMITS + 1), maxlen=1)
        return bool(last) and last[0].title == _SQUASHED

    def free(self, gone: Collection[int], *, squash: bool, dry_run: bool) -> Freed:
        """Drop the history where that is wanted, and delete what nothing names then."""
        ref = f"refs/heads/{self._branch}"
        if dry_run:
            folders = {step_folder(step) for step in gone}
            entries = [entry for entry in self._store.list(self.at) if entry.path.partition("/")[0] not in folders]
            kept = frozenset(entry.sha256 for entry in entries if entry.sha256 is not None)
            unneeded = unneeded_files(self._storage, self._storage.refs(), op=self._op, instead={ref: kept})
            return Freed(len(unneeded), sum(file.nbytes for file in unneeded))
        if squash and len(list(islice(self._storage.history(self.at.commit), 2))) > 1:
            self._storage.squash(self._branch, _SQUASHED)
            self.at = self._head()
            self._op.tell("squash", self._branch, 0, self.at.commit)
        return free_storage(self._storage, ref=ref, op=self._op)


def named(steps: Collection[int]) -> str:
    """Steps in a title."""
    return f"step{'s' if len(steps) > 1 else ''} {listed([str(step) for step in sorted(steps)])}"
