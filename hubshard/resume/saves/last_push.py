"""The newest step of a local folder that has been on the Hub: if the branch has only older ones, it was rolled back.

`hubshard resume rollback` cannot reach the disks of the run. Without this record the next restore would take the newest
step from there, as one that had not reached the Hub yet, and undo the rollback.
"""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from pathlib import Path

__all__ = ["LastPush"]

NAME = ".pushed.json"


class LastPush:
    """The record, a file beside the steps: branch to number.

    It is a help alone: where it cannot be read or written, nothing was ever pushed.

    Args:
        root: the folder of steps.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / NAME

    def step(self, where: str) -> int:
        """The newest that has been on a branch, or -1.

        Args:
            where: the repo and branch.
        """
        return self._table().get(where, -1)

    def note(self, where: str, step: int) -> None:
        """A step is on a branch."""
        self._put(self._table() | {where: step})

    def forget(self, step: int) -> None:
        """A step is saved: what was pushed of this number and of later ones is of a past that was left."""
        table = self._table()
        kept = {where: number for where, number in table.items() if number < step}
        if kept != table:
            self._put(kept)

    def _put(self, table: dict[str, int]) -> None:
        part = self._path.with_name(f"{NAME}-{uuid.uuid4().hex}.part")
        try:
            part.write_text(json.dumps(table))
            part.replace(self._path)
        except OSError:  # the disk is full
            with suppress(OSError):
                part.unlink()

    def _table(self) -> dict[str, int]:
        try:
            table = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        is_ours = isinstance(table, dict) and all(type(number) is int for number in table.values())
        return table if is_ours else {}
