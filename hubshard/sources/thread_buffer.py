"""Memory that a thread uses again and again, for pieces that are done with before the next is asked for.

Imports torch: import this module only where a torch tensor is at hand.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["ThreadBuffer"]


class ThreadBuffer:
    """A buffer per thread, as large as the largest piece that it was asked for."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def of(self, nbytes: int) -> torch.Tensor:
        """`nbytes` of the buffer of this thread, as uint8; what it held before is gone."""
        held: torch.Tensor | None = getattr(self._of_thread, "held", None)
        if held is None or held.numel() < nbytes:
            self._of_thread.held = held = None  # given back before more is taken
            self._of_thread.held = held = torch.empty(nbytes, dtype=torch.uint8)
        return held[:nbytes]
