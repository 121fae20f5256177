"""Which rollbacks of a branch a local folder has followed: the record of it, a file beside the steps. No torch."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Collection
from pathlib import Path

from hubshard.disk import replace_file
from hubshard.errors import FormatError, StoreError
from hubshard.jsonfile import read_json

__all__ = ["SeenRollbacks"]

_LOG = logging.getLogger("hubshard")

NAME = ".rollbacks.json"
_MOST_BYTES = 2**24


class SeenRollbacks:
    """The record: branch to the ids of its rollbacks that were followed. It has no branch whose steps it never held.

    Args:
        root: the folder of steps.

    Attributes:
        path: of the record.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / NAME

    def of(self, where: str) -> frozenset[str] | None:
        """The ids for a branch; None where the folder has nothing to do with it, as far as the record tells.

        Raises:
            FormatError: it is damaged, and tells nothing.
            StoreError: the disk refuses to read it.
        """
        seen = self._table().get(where)
        return None if seen is None else frozenset(seen)

    def branches(self) -> list[str]:
        """The branches whose steps the folder has held; none where the record is damaged."""
        try:
            return sorted(self._table())
        except FormatError:
            return []

    def add(self, where: str, ids: Collection[str]) -> None:
        """Make it durable that these were followed. Where the record was damaged, it is written anew."""
        try:
            table = self._table()
        except FormatError:
            table = {}
        except StoreError as error:
            self._warn(error)
            return
        seen = table.get(where, [])
        if where not in table or not {*ids} <= {*seen}:
            self._put(table | {where: [*seen, *sorted({*ids} - {*seen})]})

    def _put(self, table: dict[str, list[str]]) -> None:
        try:
            if self.path.is_dir() and not self.path.is_symlink():
                self.path.rename(self.path.with_name(f"not-a-record-{uuid.uuid4().hex[:8]}"))
            replace_file(self.path, json.dumps(table).encode())
        except OSError as error:  # the disk is full, say
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        _LOG.warning(
            "%s cannot be written (%s): until it is, a restore may pass over steps that have not reached the Hub, or "
            "refuse to take the folder for that of the branch",
            self.path,
            error,
        )

    def _table(self) -> dict[str, list[str]]:
        try:
            table = read_json(self.path, what="record of rollbacks", most_bytes=_MOST_BYTES)
        except FileNotFoundError:
            return {}
        if all(isinstance(ids, list) and all(type(one) is str for one in ids) for ids in table.values()):
            return table
        raise FormatError(f"{self.path}: this is no record of rollbacks", hint="it is damaged")
