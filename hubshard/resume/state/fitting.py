"""Whether an object can take a state that was saved, seen before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hubshard.errors import FormatError
from hubshard.resume.state.tree import tensor_names

__all__ = ["check_fits"]

_BEGIN_ANEW = "go on with what the run was begun with; or restore into a TrainState without it, and begin it anew"


def check_fits(path: str, stateful: Any, value: Any) -> None:
    """Refuse a saved state that the object would refuse, or could not go on with.

    Asks `check_state_dict` of the object, where it has one and the state has no tensors.

    Args:
        path: what it is called in errors.
        stateful: has `state_dict` and `load_state_dict`.
        value: the state; see `tree`.

    Raises:
        FormatError: it does not fit.
    """
    check = getattr(stateful, "check_state_dict", None)
    if check is not None and not any(tensor_names(value)):
        try:
            check(value)
        except FormatError as error:
            raise FormatError(f"{path}: {error.message}", hint=error.hint) from error
    problem = _problem(stateful, value) if isinstance(value, Mapping) else None
    if problem is not None:
        raise FormatError(f"{path}: {problem}", hint=_BEGIN_ANEW)


def _problem(stateful: Any, value: Mapping[str, Any]) -> str | None:
    if isinstance(stateful, torch.amp.GradScaler) and stateful.is_enabled() and not value:
        return "it is enabled, and was not when the step was saved"
    if isinstance(stateful, LRScheduler):
        # names with an underscore come and go with the version of torch
        lacking = sorted(key for key in stateful.state_dict().keys() - value.keys() if not key.startswith("_"))
        if lacking:
            return f"it is a {type(stateful).__name__}, and the step was saved from one without {', '.join(lacking)}"
    return None
