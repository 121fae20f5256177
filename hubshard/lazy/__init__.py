"""Checkpoints whose tensors are read when they are needed, piece by piece, from disk or straight from the Hub."""

from __future__ import annotations

from hubshard.lazy.checkpoint import Checkpoint, LazyTensor
from hubshard.lazy.loading import LoadReport, load_into
from hubshard.lazy.matching import Mismatch
from hubshard.lazy.offload import Offloaded, offload
from hubshard.lazy.opening import open_checkpoint
from hubshard.lazy.pretrained import from_pretrained

__all__ = [
    "Checkpoint",
    "LazyTensor",
    "LoadReport",
    "Mismatch",
    "Offloaded",
    "from_pretrained",
    "load_into",
    "offload",
    "open_checkpoint",
]
