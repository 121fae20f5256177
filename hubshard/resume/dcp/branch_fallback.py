"""The branch in place of a local folder whose copy of a step is damaged. No torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hubshard.errors import HubshardError, IntegrityError
from hubshard.steps.places import OpenStep
from hubshard.steps.reading import StepFolder

__all__ = ["BranchFallback"]

_LOG = logging.getLogger("hubshard")


class BranchFallback:
    """Looks for the step on the branch when it is first needed, and says so. Thread-safe; see `StepFolder.fallback`.

    Args:
        look: the step on the branch.
        sha256: of the manifest of the local one: the branch may hold another save of this number.
    """

    def __init__(self, look: Callable[[], OpenStep], sha256: str) -> None:
        self._look = look
        self._sha256 = sha256
        self._lock = threading.Lock()
        self._found: OpenStep | None = None

    def __call__(self, error: HubshardError) -> StepFolder:
        """Where the same step lies on the branch.

        Args:
            error: what is wrong with the local one.

        Raises:
            IntegrityError: the branch does not hold it, or cannot be reached.
        """
        with self._lock:
            if self._found is None:
                self._found = self._same(error)
                _LOG.warning("%s; what is damaged is read from %s", error.message, self._found.folder.where)
            return self._found.folder

    def _same(self, error: HubshardError) -> OpenStep:
        try:
            found = self._look()
            why = "" if found.sha256 == self._sha256 else "the branch holds another save of this number"
        except HubshardError as problem:
            why = problem.message
        if why:
            hint = "restore an older step; or remove the folder of this one, and take what the branch has"
            raise IntegrityError(f"{error.message}; nor can it be read from the branch: {why}", hint=hint) from error
        return found
