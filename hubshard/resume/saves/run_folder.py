"""The local folder of a run: which of the ranks share it, and that no other run saves there. No torch."""

from __future__ import annotations

import logging
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hubshard.disk import refused
from hubshard.steps.folder_lock import FolderLock, make_folder

if TYPE_CHECKING:
    from hubshard.resume.team import Team

__all__ = ["RunFolder"]

_LOG = logging.getLogger("hubshard")
_LEFTOVER_SECONDS = 24 * 3600


class RunFolder:
    """The folder, as this rank sees it; made by all ranks.

    Args:
        root: the folder; it is made.
        team: all ranks.

    Attributes:
        run: a word of this run and no other.
        is_first_of_disk: whether this is the lowest of the ranks that share the folder: it writes the manifest there.
    """

    def __init__(self, root: Path, team: Team) -> None:
        self._root = root
        self._team = team
        self.run: str = team.first(lambda: uuid.uuid4().hex)
        team.each(lambda: make_folder(root))
        self.is_first_of_disk = team.size == 1 or _is_first_of_disk(root, team, self.run)
        self._lock = FolderLock(root, self.run)
        self._is_held = False

    def hold(self) -> None:
        """Keep other runs from saving there; called by all ranks.

        Raises:
            FormatError: it is no folder any more.
            StoreError: the disk refuses.
            ConflictError: another run saves there.
        """
        if not self._is_held:
            self._team.each(lambda: self._lock.acquire() if self.is_first_of_disk else None)
            self._is_held = True

    def look(self) -> None:
        """Say where another run saves there."""
        holder = self._lock.holder() if self.is_first_of_disk else None
        if holder is not None:
            _LOG.warning("%s is in use: %s saves there, so this run cannot", self._root, holder)

    def check(self) -> None:
        """See that the folder is still held, and take it again where it was removed under the run.

        Raises:
            FormatError: it is no folder any more.
            StoreError: the disk refuses.
            ConflictError: another run saves there.
        """
        if self._is_held and self.is_first_of_disk and not self._lock.is_there():
            _LOG.warning("%s was removed while the run was saving there: steps may be lost", self._root)
            self._lock.leave()
            self._lock.acquire()

    def release(self) -> None:
        """Let other runs save there."""
        self._lock.release()


def _is_first_of_disk(root: Path, team: Team, run: str) -> bool:
    """Each leaves a mark there and looks for those of the others. A mark is empty, so that a full disk takes it."""
    mark = f".here-{run}-"
    own = root / f"{mark}{team.rank:05d}"

    def leave() -> None:
        with refused(own):
            own.touch()

    def look() -> str:
        with refused(root):
            _remove_leftovers(root, own, but=mark)
            return min(path.name for path in root.glob(f"{mark}*"))

    try:
        team.each(leave)
        lowest = team.each(look)[team.rank]
    finally:
        with suppress(OSError):
            own.unlink()
    return lowest == own.name


def _remove_leftovers(root: Path, own: Path, *, but: str) -> None:
    """Remove marks of runs that were killed just then; by the clock of the disk, which may be another machine's."""
    now = own.stat().st_mtime
    for path in root.glob(".here-*"):
        with suppress(OSError):
            if not path.name.startswith(but) and now - path.stat().st_mtime > _LEFTOVER_SECONDS:
                path.unlink()
