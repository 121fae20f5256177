"""A copy of a state, of which `dcp.async_save` saves while the training goes on."""

from __future__ import annotations

import copy
from typing import Any

import torch

__all__ = ["copy_in_memory"]


def copy_in_memory(state: Any) -> Any:
    """The same tree with a copy of each tensor, in main memory, and of whatever else may change."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: copy_in_memory(item) for key, item in state.items()}
    if type(state) in {list, tuple}:
        return type(state)(copy_in_memory(item) for item in state)
    return copy.deepcopy(state)
