"""Which rollbacks of a branch a local folder has followed: it must not bring back what others have removed.

`hubshard resume rollback` cannot reach the disks of the run. Its steps after one that the branch was rolled back to are
passed over, until a save goes on from there, which removes them.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from hubshard.steps.rollbacks import Rollback

__all__ = ["SeenRollbacks"]

_LOG = logging.getLogger("hubshard")

NAME = ".rollbacks.json"


class SeenRollbacks:
    """The record, a file beside the steps: branch to the ids of its rollbacks that were followed.

    It is a help alone: where it cannot be read or written, the folder has nothing to do with any branch.

    Args:
        root: the folder of steps.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / NAME

    def last_valid_step(self, where: str, rollbacks: Sequence[Rollback]) -> int | None:
        """The step after which those of the folder are void; None where all count.

        Args:
            where: the repo and branch; one that the folder has never saved to says nothing of its steps.
            rollbacks: of the branch.
        """
        seen = self._table().get(where)
        if seen is None:
            return None
        return min((rollback.step for rollback in rollbacks if rollback.id not in seen), default=None)

    def follow(self, where: str, ids: Collection[str]) -> None:
        """A step is saved that goes on from the branch as these rollbacks left it."""
        table = self._table()
        seen = table.get(where, [])
        if where not in table or not {*ids} <= {*seen}:
            self._put(table | {where: [*seen, *sorted({*ids} - {*seen})]})

    def meet(self, where: str, ids: Collection[str]) -> None:
        """A step is on the branch: from now on its rollbacks hold here too, as far as the folder has not met it yet."""
        if where not in self._table():
            self.follow(where, ids)

    def _put(self, table: dict[str, list[str]]) -> None:
        part = self._path.with_name(f"{NAME}-{uuid.uuid4().hex}.part")
        try:
            part.write_text(json.dumps(table))
            part.replace(self._path)
        except OSError as error:  # the disk is full, say
            _LOG.warning(
                "%s cannot be written (%s): a later restore may bring back steps that were rolled back",
                self._path,
                error,
            )
            with suppress(OSError):
                part.unlink()

    def _table(self) -> dict[str, list[str]]:
        try:
            table = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        is_ours = isinstance(table, dict) and all(
            isinstance(ids, list) and all(type(one) is str for one in ids) for ids in table.values()
        )
        return table if is_ours else {}
