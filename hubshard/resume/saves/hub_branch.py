"""The branch of a run on the Hub, as the run knows it: whoever else saves there is found out. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hubshard.errors import (
    ConflictError,
    FormatError,
    HubshardError,
    IncompleteError,
    IntegrityError,
    NotFoundError,
    StoreError,
)
from hubshard.events import OnRetry, ignore_retry
from hubshard.protocols import Revision, Staged
from hubshard.resume.saves.disk_line import BranchLine
from hubshard.resume.saves.last_save import last_save
from hubshard.steps.places import BranchPlace, OpenStep
from hubshard.steps.retention import Retention
from hubshard.steps.save_cost import SaveCost
from hubshard.steps.step import MANIFEST_NAME, Step, step_folder
from hubshard.steps.writing import check_newest, commit_rollback, commit_step
from hubshard.store.patience import Patience

if TYPE_CHECKING:
    from hubshard.store.hub import HubStore
    from hubshard.store.hub_client import Token
    from hubshard.store.hub_storage import HubStorage

__all__ = ["HubBranch"]

_LOG = logging.getLogger("hubshard")
_MOST_REBASES = 5
_RUN_DIGITS = 12
_GLANCE_SECONDS = 5.0  # of silence: the training waits meanwhile


class HubBranch:
    """One branch of a repo. What the run last saw there is what it builds on.

    Ranks other than 0 use it to read and to stage; only rank 0 looks and commits.

    Args:
        repo_id: "org/name".
        branch: of the repo; made by the first save.
        token: of the Hub.
        endpoint: the Hub's URL.
        run: a word of no other run, for the messages of commits.
        on_warning: is told, once, that everybody may read the repo.

    Attributes:
        on_retry: is told of each further try.
        sleep: waits until then (seconds).
    """

    def __init__(
        self,
        repo_id: str,
        branch: str,
        *,
        token: Token,
        endpoint: str | None,
        run: str,
        on_warning: Callable[[str], None],
    ) -> None:
        self.repo_id = repo_id
        self.branch = branch
        self._token = token
        self._endpoint = endpoint
        self._on_warning = on_warning
        self._is_open = False
        self._is_taken = False
        self._place: BranchPlace | None = None
        self._rollbacks: tuple[str, ...] = ()
        self._run = run[:_RUN_DIGITS]
        self.max_retries = Patience().max_retries
        self.on_retry: OnRetry = ignore_retry
        self.sleep: Callable[[float], None] = time.sleep

    @property
    def where(self) -> str:
        """For people."""
        return f"{self.repo_id}@{self.branch}"

    @cached_property
    def store(self) -> HubStore:
        """The repo."""
        return self._store(Patience(max_retries=self.max_retries, on_retry=self._retried, sleep=self._sleep))

    def get_ready(self) -> None:
        """Import what is slow to import."""
        _ = self.store

    @property
    def rollbacks(self) -> tuple[str, ...] | None:
        """The ids of the rollbacks that what the run saves goes on from.

        None where it has not taken the branch, or found nothing there: another run may be the first to save.
        """
        place = self._place
        holds = self._rollbacks or (place is not None and place.steps())
        return self._rollbacks if self._is_taken and holds else None

    @property
    def line(self) -> BranchLine | None:
        """What the branch tells the disks, as it was last looked at."""
        return None if self._place is None else BranchLine.of(self._place, self.where)

    def last_save(self) -> str:
        """Who has saved last, for people."""
        head = self.store.head(self.branch)
        return "there is no branch" if head is None else last_save(self._storage(), head)

    def look(self) -> BranchPlace | None:
        """Look at the branch: this is what the next save builds on.

        A repo that is not there is made, private.

        Raises:
            FormatError: what tells the rollbacks of the branch is damaged.
        """
        return self._look(self.store)

    def take(self) -> None:
        """The run goes on from the branch as it was last looked at: from now on it may save there."""
        self._is_taken = True

    def claim(self, is_own: Callable[[OpenStep], bool]) -> None:
        """Take the branch for a run that has not gone on from it: it must be empty, or its own from before.

        Args:
            is_own: whether the run knows a step as its own.

        Raises:
            ConflictError: somebody else has saved there; says who and when.
        """
        if not self._is_taken:
            place = self.look()
            self._take_if_own(place, _newest(place), is_own)

    def claim_at_once(self, is_own: Callable[[OpenStep], bool]) -> bool:
        """As `claim`, where there is a branch and the Hub answers at once; else the first commit will see.

        Returns:
            Whether the Hub has answered.
        """
        if self._is_taken:
            return True
        store = self._store(Patience(max_retries=0, stall_seconds=_GLANCE_SECONDS))
        try:
            if store.head(self.branch) is None:
                return True
            place = self._look(store)
            newest = _newest(place)
        except NotFoundError:
            return True
        except StoreError:
            return False
        self._take_if_own(place, newest, is_own)
        return True

    def peek(self) -> Collection[int]:
        """The steps on the branch now; nothing is remembered."""
        try:
            head = self.store.head(self.branch)
        except NotFoundError:
            return []
        return [] if head is None else BranchPlace(self.store, head, self.where).steps()

    def commit(
        self,
        step: Step,
        raw: bytes,
        staged: Sequence[Staged],
        *,
        cost: SaveCost | None,
        retention: Retention,
        broken: Collection[int],
        is_late: bool = False,
    ) -> Revision:
        """Show a step, and remove those past the retention in the same commit.

        Args:
            step: what is shown.
            raw: its manifest.
            staged: its files.
            cost: of the save, for the message of the commit.
            retention: which of the others stay.
            broken: steps that the restore had to pass over: they do not count, and go.
            is_late: whether the branch may hold newer ones of this run.

        Raises:
            ConflictError: another run has saved to the branch since this one looked, or somebody has rolled it back.
        """
        for _ in range(_MOST_REBASES):
            try:
                revision = commit_step(
                    self.store,
                    self.branch,
                    parent=None if self._place is None else self._place.at,
                    step=step,
                    raw=raw,
                    staged=staged,
                    remove=self._needless(step, staged, retention, broken, is_late=is_late),
                    cost=cost,
                    run=self._run,
                )
            except ConflictError as error:
                if not self._only_lost_steps():
                    raise self._refused(error) from None  # the answer of the Hub says no more
                _LOG.info("%s: steps were removed meanwhile; step %d goes on top of that", self.where, step.step)
            else:
                self._remember(revision)
                return revision
        raise ConflictError(f"{self.where} moves all the time", hint="look who else writes to it")

    def roll_back(self, step: int) -> tuple[str, ...]:
        """Remove the steps after one from the branch as it was last looked at; the run goes on from it.

        Returns:
            The ids of the rollbacks of the branch.

        Raises:
            ConflictError: the branch has moved since.
        """
        if self._place is not None:
            revision, rollback = commit_rollback(self.store, self.branch, self._place, step)
            self._remember(revision)
            self._rollbacks += (rollback,)
        self.take()
        return self._rollbacks

    def _sleep(self, seconds: float) -> None:
        self.sleep(seconds)

    def _retried(self, what: str, cause: str, wait_seconds: float) -> None:
        self.on_retry(what, cause, wait_seconds)  # that of the operation which is under way

    def _needless(
        self, step: Step, staged: Sequence[Staged], retention: Retention, broken: Collection[int], *, is_late: bool
    ) -> list[str]:
        """The files that the commit of a step removes.

        Raises:
            ConflictError: there is a newer step.
        """
        place = self._place
        if place is None:
            return []
        there = place.steps()
        dropped = {*broken} & {*there} - {step.step}
        if not is_late:
            check_newest(place, step.step, branch=self.branch, ignored=dropped)
        left = {*there, step.step} - dropped
        dropped |= {*retention.expired(left, max(left))} - {step.step}
        kept = {*(file.path for file in staged), f"{step_folder(step.step)}/{MANIFEST_NAME}"}
        gone = [path for number in sorted({*dropped, step.step}) for path in place.files(number)]
        return [path for path in gone if path not in kept]

    def _look(self, store: HubStore) -> BranchPlace | None:
        self._open(store)
        self._remember(store.head(self.branch))
        self._rollbacks = () if self._place is None else tuple(one.id for one in self._place.rollbacks)
        return self._place

    def _take_if_own(
        self, place: BranchPlace | None, newest: _Newest | None, is_own: Callable[[OpenStep], bool]
    ) -> None:
        if place is not None and newest is not None and not _is_own(newest.opened, is_own):
            raise ConflictError(
                f"{self.where} holds step {newest.number} already, which this run has not restored: "
                + last_save(self._storage(), place.at),
                hint="call restore(state) before the first save, to go on from it; or rollback(step), to go on from an "
                "older one; or save to a branch of its own, with branch=",
            )
        self.take()

    def _refused(self, error: ConflictError) -> ConflictError:
        """The same, with who is there."""
        try:
            head = self.store.head(self.branch)
        except HubshardError:
            head = None
        told = "" if head is None else f"; {last_save(self._storage(), head)}; this is run {self._run}"
        return ConflictError(
            error.message + told,
            hint="start it again, it restores what is there; or give each run a branch of its own, with branch=",
        )

    def _only_lost_steps(self) -> bool:
        """Whether all that happened to the branch is that steps were pruned; then look anew."""
        before = self._place
        head = self.store.head(self.branch)
        if before is None or head is None or head == before.at:
            return False
        now = BranchPlace(self.store, head, self.where)
        if not now.is_part_of(before) or now.rollbacks != before.rollbacks:
            return False
        self._place = now
        return True

    def _remember(self, head: Revision | None) -> None:
        self._place = None if head is None else BranchPlace(self.store, head, self.where)

    def _store(self, patience: Patience) -> HubStore:
        from hubshard.store.hub import HubStore  # noqa: PLC0415  # the client is slow to import, and not always needed

        return HubStore(self.repo_id, token=self._token, endpoint=self._endpoint, patience=patience)

    def _storage(self) -> HubStorage:
        from hubshard.store.hub_storage import HubStorage  # noqa: PLC0415  # as above

        patience = Patience(max_retries=self.max_retries, sleep=self._sleep)
        return HubStorage(self.repo_id, token=self._token, endpoint=self._endpoint, patience=patience)

    def _open(self, store: HubStore) -> None:
        if self._is_open:
            return
        try:
            is_private = store.is_private()
        except NotFoundError:
            store.create_repo(private=True)
            _LOG.warning("%s was not there: it is made, private", self.repo_id)
            is_private = True
        if not is_private:
            self._on_warning(
                f"{self.repo_id} is public: everybody may read the optimizer state and whatever else is saved there; "
                "resume_repo_id= takes a private repo beside it"
            )
        self._is_open = True


@dataclass(frozen=True, slots=True)
class _Newest:
    # the newest step of a branch; None where it is broken, and nobody goes on from it
    number: int
    opened: OpenStep | None


def _newest(place: BranchPlace | None) -> _Newest | None:
    number = None if place is None else max(place.steps(), default=None)
    if place is None or number is None:
        return None
    try:
        return _Newest(number, place.open(number))
    except (FormatError, IncompleteError, IntegrityError, NotFoundError):
        return _Newest(number, None)


def _is_own(opened: OpenStep | None, is_own: Callable[[OpenStep], bool]) -> bool:
    try:
        return opened is not None and is_own(opened)
    except (FormatError, IncompleteError, IntegrityError, NotFoundError):  # what the disk has of it is broken
        return False
