"""The rollbacks of a branch of steps, told by a file beside them, so that the disks of the run follow. No torch.

A newer step on a disk than on the branch says nothing by itself: its push may have failed, the branch may be a mirror
that lags, the newest step of the branch may have been broken and pruned. `rollbacks.json` tells, also once the history
is squashed: `{"format": "hubshard-rollbacks", "rollbacks": [[ID, STEP], ...], "version": 1}`, oldest first.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hubshard.errors import FormatError
from hubshard.protocols import Staged

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
    try:
        table = json.loads(raw)
        if table["format"] == _FORMAT and table["version"] == _VERSION:
            rollbacks = [Rollback(*row) for row in table["rollbacks"]]
            if all(type(one.id) is str and type(one.step) is int for one in rollbacks):
                return tuple(rollbacks)
    except (ValueError, TypeError, KeyError):
        pass
    raise FormatError(
        f"{path}: this does not tell the rollbacks of the branch: it is damaged, or of a later version",
        hint="update hubshard; or delete the file, if no disk of the run holds steps that were rolled back",
    )


def stage_rollback(store: Store, branch: str, before: Sequence[Rollback], step: int) -> tuple[Staged, Rollback]:
    """A further rollback, for the commit that removes the steps after `step`; and what it is known by."""
    new = Rollback(uuid.uuid4().hex, step)
    raw = encode_rollbacks([*before, new])
    return store.stage(branch, ROLLBACKS_NAME, lambda: [raw], nbytes=len(raw)), new
