"""Steps that stay for good and have not reached the Hub, for the next start: a record beside the steps. No torch."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Collection
from pathlib import Path

from hubshard.disk import replace_file
from hubshard.errors import StoreError
from hubshard.jsonfile import read_json

__all__ = ["UnsentSteps"]

_LOG = logging.getLogger("hubshard")

NAME = ".unsent.json"
_MOST_BYTES = 2**24

_Row = tuple[int, str, bool]  # a step, the sha256 of its manifest, whether it is still to be sent


class UnsentSteps:
    """The record: branch to the steps of the disk that went on from each other, oldest first. Thread-safe.

    So steps that a rollback has voided, or that another run has left, are never sent. There is no record where nothing
    is to be sent; where it cannot be read or written, the next start sends the newest step alone.

    Args:
        root: the folder of steps.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / NAME
        self._lock = threading.Lock()
        self._rows: list[_Row] = []  # up to the newest step

    def go_on(self, where: str, step: int, sha256: str) -> dict[int, str]:
        """The run goes on from a step.

        Args:
            where: the repo and branch.
            step: its number.
            sha256: of its manifest.

        Returns:
            Those before it that are still to be sent, with the sha256 of their manifests.
        """
        with self._lock:
            rows = self._table().get(where, [])
            known = {row[:2]: position for position, row in enumerate(rows, start=1)}
            self._rows = rows[: known.get((step, sha256), 0)]
            return {number: digest for number, digest, is_owed in self._rows if is_owed and number != step}

    def saved(self, where: str, step: int, sha256: str, *, stays: bool, kept: Collection[int]) -> None:
        """A step is about to be shown on the disk. A row of one that never is does no harm.

        Args:
            where: the repo and branch that it goes to.
            step: its number.
            sha256: of its manifest.
            stays: whether it stays for good.
            kept: all steps that the disk shows by now: the run may have to go on from one of them yet.
        """
        with self._lock:
            before = [row for row in self._rows if row[0] < step and row[0] in kept]
            self._rows = [*before, (step, sha256, stays)]
            self._put(where)

    def sent(self, where: str, step: int) -> None:
        """A step has reached the Hub."""
        with self._lock:
            rows = [(number, digest, is_owed and number != step) for number, digest, is_owed in self._rows]
            if rows != self._rows:
                self._rows = rows
                self._put(where)

    def _put(self, where: str) -> None:
        try:
            if any(is_owed for _, _, is_owed in self._rows):
                replace_file(self._path, json.dumps({where: self._rows}).encode())
            else:
                self._path.unlink(missing_ok=True)
        except OSError as error:  # the disk is full, say
            _LOG.warning("%s cannot be written (%s): the next start sends the newest step alone", self._path, error)

    def _table(self) -> dict[str, list[_Row]]:
        try:
            table = read_json(self._path, what="record of steps to be sent", most_bytes=_MOST_BYTES)
            return {where: [_row(*row) for row in rows] for where, rows in table.items()}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (StoreError, TypeError, ValueError) as error:
            _LOG.warning("%s tells nothing (%s): the newest step alone is sent", self._path, error)
            return {}


def _row(step: int, sha256: str, is_owed: bool) -> _Row:  # noqa: FBT001  # as it stands in the record
    if (type(step), type(sha256), type(is_owed)) != (int, str, bool):
        raise TypeError("no number, sha256 and flag")
    return step, sha256, is_owed
