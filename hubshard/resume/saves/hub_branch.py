"""The branch of a run on the Hub, as the run knows it: whoever else saves there is found out. No torch."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from hubshard.errors import ConflictError, NotFoundError
from hubshard.events import OnRetry, ignore_retry
from hubshard.protocols import Revision, Staged
from hubshard.steps.places import BranchPlace
from hubshard.steps.retention import Retention
from hubshard.steps.save_cost import SaveCost
from hubshard.steps.step import MANIFEST_NAME, Step, step_folder
from hubshard.steps.writing import check_newest, commit_step
from hubshard.store.patience import Patience

if TYPE_CHECKING:
    from hubshard.store.hub import HubStore
    from hubshard.store.hub_client import Token

__all__ = ["HubBranch"]

_LOG = logging.getLogger("hubshard")
_MOST_REBASES = 5


class HubBranch:
    """One branch of a repo. What the run last saw there is what it builds on.

    Ranks other than 0 use it to read and to stage; only rank 0 looks and commits.

    Args:
        repo_id: "org/name".
        branch: of the repo; made by the first save.
        token: of the Hub.
        endpoint: the Hub's URL.
        on_warning: is told, once, that everybody may read the repo.
    """

    def __init__(
        self, repo_id: str, branch: str, *, token: Token, endpoint: str | None, on_warning: Callable[[str], None]
    ) -> None:
        self.repo_id = repo_id
        self.branch = branch
        self._token = token
        self._endpoint = endpoint
        self._on_warning = on_warning
        self._is_open = False
        self._looked = False
        self._place: BranchPlace | None = None
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
        from hubshard.store.hub import HubStore  # noqa: PLC0415  # the client is slow to import, and not always needed

        patience = Patience(max_retries=self.max_retries, on_retry=self._retried, sleep=self._sleep)
        return HubStore(self.repo_id, token=self._token, endpoint=self._endpoint, patience=patience)

    @property
    def is_known(self) -> bool:
        """Whether the branch was looked at."""
        return self._looked

    @property
    def place(self) -> BranchPlace | None:
        """The branch as it was when it was last looked at, or after the last save; None where there was none."""
        return self._place

    def look(self) -> BranchPlace | None:
        """Look at the branch: this is what the next save builds on.

        A repo that is not there is made, private.
        """
        self._open()
        head = self.store.head(self.branch)
        self._remember(head)
        return self._place

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
    ) -> Revision:
        """Show a step, and remove those past the retention in the same commit.

        Args:
            step: what is shown.
            raw: its manifest.
            staged: its files.
            cost: of the save, for the message of the commit.
            retention: which of the others stay.
            broken: newer steps that the restore had to pass over: they go.

        Raises:
            ConflictError: another run has saved to the branch since this one looked.
        """
        if not self._looked:
            self.look()
        for _ in range(_MOST_REBASES):
            try:
                revision = self._commit(step, raw, staged, cost, retention, broken)
            except ConflictError:
                if not self._only_lost_steps():
                    raise
                _LOG.info("%s: steps were removed meanwhile; step %d goes on top of that", self.where, step.step)
            else:
                self._remember(revision)
                return revision
        raise ConflictError(f"{self.where} moves all the time", hint="look who else writes to it")

    def remove(self, steps: Collection[int], *, message: str) -> Revision | None:
        """Remove steps from the branch as it was last looked at, in one commit; None where there are none.

        Raises:
            ConflictError: the branch has moved since.
        """
        place = self._place
        paths = [] if place is None else [path for step in sorted(steps) for path in place.files(step)]
        if place is None or not paths:
            return None
        revision = self.store.commit(
            self.branch,
            parent=place.at,
            add=[],
            remove=paths,
            message=message,
            publish_id=uuid.uuid4().hex,
        )
        self._remember(revision)
        return revision

    def _sleep(self, seconds: float) -> None:
        self.sleep(seconds)

    def _retried(self, what: str, cause: str, wait_seconds: float) -> None:
        self.on_retry(what, cause, wait_seconds)  # that of the operation which is under way

    def _commit(
        self,
        step: Step,
        raw: bytes,
        staged: Sequence[Staged],
        cost: SaveCost | None,
        retention: Retention,
        broken: Collection[int],
    ) -> Revision:
        place = self._place
        there: Collection[int] = () if place is None else place.steps()
        remove: list[str] = []
        if place is not None:
            dropped = {*broken} & {*there} - {step.step}
            check_newest(place, step.step, branch=self.branch, ignored=dropped)
            dropped |= {*retention.expired([number for number in there if number not in dropped], step.step)}
            kept = {*(file.path for file in staged), f"{step_folder(step.step)}/{MANIFEST_NAME}"}
            gone = [path for number in sorted({*dropped, step.step}) for path in place.files(number)]
            remove = [path for path in gone if path not in kept]
        parent = None if place is None else place.at
        return commit_step(
            self.store, self.branch, parent=parent, step=step, raw=raw, staged=staged, remove=remove, cost=cost
        )

    def _only_lost_steps(self) -> bool:
        """Whether all that happened to the branch is that steps were removed, as pruning does; then look anew."""
        before = self._place
        head = self.store.head(self.branch)
        if before is None or head is None or head == before.at:
            return False
        now = BranchPlace(self.store, head, self.where)
        if not now.is_part_of(before):
            return False
        self._place = now
        return True

    def _remember(self, head: Revision | None) -> None:
        self._place = None if head is None else BranchPlace(self.store, head, self.where)
        self._looked = True

    def _open(self) -> None:
        if self._is_open:
            return
        try:
            is_private = self.store.is_private()
        except NotFoundError:
            self.store.create_repo(private=True)
            _LOG.warning("%s was not there: it is made, private", self.repo_id)
            is_private = True
        if not is_private:
            self._on_warning(
                f"{self.repo_id} is public: everybody may read the optimizer state and whatever else is saved there; "
                "resume_repo_id= takes a private repo beside it"
            )
        self._is_open = True
