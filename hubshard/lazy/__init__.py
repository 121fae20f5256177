"""Checkpoints whose tensors are read when they are needed, piece by piece, from disk or straight from the Hub."""

from __future__ import annotations

from hubshard.lazy.checkpoint import Checkpoint, LazyTensor
from hubshard.lazy.loading import LoadReport, load_into
from hubshard.lazy.matching import Mismatch
from hubshard.lazy.opening import open_checkpoint

__all__ = ["Checkpoint", "LazyTensor", "LoadReport", "Mismatch", "load_into", "open_checkpoint"]
