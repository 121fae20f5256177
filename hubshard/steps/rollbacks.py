"""The rollbacks of a branch of steps, told by a file beside them, so that the disks of the run follow. No torch.

A newer step on a disk than on the branch says nothing by itself: its push may have failed, the branch may be a mirror
that lags, the newest step of the branch may have been broken and pruned. `rollbacks.json` tells, also once the history
is squashed: `{"format": "hubshard-rollbacks", "rollbacks": [[ID, STEP], ...], "version": 1}`, oldest first.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hubshard.errors import FormatError
from hubshard.header import decode_json
from hubshard.protocols import Staged
from hubshard.steps.step import checked_number

if TYPE_CHECKING:
    from hubshard.protocols import Store

__all__ = ["ROLLBACKS_NAME", "Rollback", "decode_rollbacks", "encode_rollbacks", "stage_rollback"]

ROLLBACKS_NAME = "rollbacks.json"
_FORMAT = "hubshard-rollbacks"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Rollback:
    """One rollback.

    Attributes:
        id: of no other.
        step: that was the newest after it.
    """

    id: str
    step: int


def encode_rollbacks(rollbacks: Sequence[Rollback]) -> bytes:
    """The bytes of `rollbacks.json`."""
    rows = [[rollback.id, rollback.step] for rollback in rollbacks]
    return json.dumps({"format": _FORMAT, "rollbacks": rows, "version": _VERSION}).encode() + b"\n"


def decode_rollbacks(raw: bytes, *, path: str) -> tuple[Rollback, ...]:
    """Read `rollbacks.json`.

    Args:
        raw: its bytes.
        path: named in errors.

    Raises:
        FormatError: damaged, or of a later version.
    """
    with suppress(FormatError, TypeError):  # no JSON, or a row that is none
        table = decode_json(raw, path=path, what="list of rollbacks")
        if table.get("format") == _FORMAT and table.get("version") == _VERSION:
            return tuple(_rollback(*row) for row in table.get("rollbacks"))  # type: ignore[union-attr]
    raise FormatError(
        f"{path}: this does not tell the rollbacks of the branch: it is damaged, or of a later version",
        hint="update hubshard; or delete the file, if no disk of the run holds steps that were rolled back",
    )


def _rollback(known_as: object, step: object) -> Rollback:
    if type(known_as) is not str or type(step) is not int:
        raise TypeError
    return Rollback(known_as, checked_number(step))


def stage_rollback(store: Store, branch: str, before: Sequence[Rollback], step: int) -> tuple[Staged, Rollback]:
    """A further rollback, for the commit that removes the steps after `step`; and what it is known by."""
    new = Rollback(uuid.uuid4().hex, step)
    raw = encode_rollbacks([*before, new])
    return store.stage(branch, ROLLBACKS_NAME, lambda: [raw], nbytes=len(raw)), new
