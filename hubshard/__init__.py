"""Publish and resume models on the Hugging Face Hub: sharded, atomic, resumable, checked.

Importing this package is light: what needs a client, torch or transformers is imported when its name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hubshard.errors import (
    ConflictError,
    FormatError,
    HubshardError,
    IncompleteError,
    IntegrityError,
    NotFoundError,
    StoreError,
    UnsafeFormatError,
)
from hubshard.events import Event, OnEvent
from hubshard.extras import needing

if TYPE_CHECKING:
    from hubshard import dcp as dcp
    from hubshard.fetch import pull
    from hubshard.history import RolledBack, rollback
    from hubshard.integrations.mixin import ShardedHubMixin
    from hubshard.lazy import (
        Checkpoint,
        LazyTensor,
        LoadReport,
        Offloaded,
        from_pretrained,
        load_into,
        offload,
        open_checkpoint,
    )
    from hubshard.promotion import Promoted, promote
    from hubshard.publish import Published, push_to_hub
    from hubshard.report import Difference, Problem, Verification, diff, verify
    from hubshard.resume import ResumableLoader, ResumableSampler, ResumeBranch, TrainState
    from hubshard.steps.branch import StepBranch

__all__ = [
    "Checkpoint",
    "ConflictError",
    "Difference",
    "Event",
    "FormatError",
    "HubshardError",
    "IncompleteError",
    "IntegrityError",
    "LazyTensor",
    "LoadReport",
    "NotFoundError",
    "Offloaded",
    "OnEvent",
    "Problem",
    "Promoted",
    "Published",
    "ResumableLoader",
    "ResumableSampler",
    "ResumeBranch",
    "RolledBack",
    "ShardedHubMixin",
    "StepBranch",
    "StoreError",
    "TrainState",
    "UnsafeFormatError",
    "Verification",
    "__version__",
    "diff",
    "from_pretrained",
    "load_into",
    "offload",
    "open_checkpoint",
    "promote",
    "pull",
    "push_to_hub",
    "rollback",
    "verify",
]

__version__ = "0.1.0"

_HOME = {
    "Checkpoint": "hubshard.lazy",
    "Difference": "hubshard.report",
    "LazyTensor": "hubshard.lazy",
    "LoadReport": "hubshard.lazy",
    "Offloaded": "hubshard.lazy",
    "Problem": "hubshard.report",
    "Promoted": "hubshard.promotion",
    "Published": "hubshard.publish",
    "ResumableLoader": "hubshard.resume",
    "ResumableSampler": "hubshard.resume",
    "ResumeBranch": "hubshard.resume",
    "RolledBack": "hubshard.history",
    "ShardedHubMixin": "hubshard.integrations.mixin",
    "StepBranch": "hubshard.steps.branch",
    "TrainState": "hubshard.resume",
    "Verification": "hubshard.report",
    "diff": "hubshard.report",
    "from_pretrained": "hubshard.lazy",
    "load_into": "hubshard.lazy",
    "offload": "hubshard.lazy",
    "open_checkpoint": "hubshard.lazy",
    "promote": "hubshard.promotion",
    "pull": "hubshard.fetch",
    "push_to_hub": "hubshard.publish",
    "rollback": "hubshard.history",
    "verify": "hubshard.report",
}
"""The module that each late name comes from."""
_MODULES = {"dcp"}
"""Late names that are modules. They need torch, and so `import *` leaves them out."""


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None and name not in _MODULES:
        raise AttributeError(f"module 'hubshard' has no attribute {name!r}")
    with needing(f"hubshard.{name}"):
        value: object = import_module(f"hubshard.{name}") if home is None else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
