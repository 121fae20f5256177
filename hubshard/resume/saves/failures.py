"""Several things that failed in the background, told as one. No torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from hubshard.errors import HubshardError

__all__ = ["merged"]

_MOST_TOLD = 3


def merged(errors: Sequence[Exception]) -> Exception | None:
    """The last of some errors, which tells of the others; None where there are none."""
    if len(errors) < 2:
        return errors[0] if errors else None
    *others, last = errors
    told = [str(error) for error in reversed(others)]
    told[_MOST_TOLD:] = [f"and {len(told) - _MOST_TOLD} more"] if len(told) > _MOST_TOLD else []
    error = copy.copy(last) if isinstance(last, HubshardError) else HubshardError(str(last))
    error.message = f"{last}. Also failed: {'; '.join(told)}"
    error.__cause__ = last.__cause__
    return error
