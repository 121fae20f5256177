"""Going on exactly where a run stopped.

Importing this package imports nothing more: listing, checking and promoting saved steps needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hubshard.resume.branch import ResumeBranch
    from hubshard.resume.data.loader import ResumableLoader
    from hubshard.resume.data.sampler import ResumableSampler
    from hubshard.resume.state.train_state import TrainState

__all__ = ["ResumableLoader", "ResumableSampler", "ResumeBranch", "TrainState"]

_HOME = {
    "ResumableLoader": "hubshard.resume.data.loader",
    "ResumableSampler": "hubshard.resume.data.sampler",
    "ResumeBranch": "hubshard.resume.branch",
    "TrainState": "hubshard.resume.state.train_state",
}
"""The module that each name comes from."""


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'hubshard.resume' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value
