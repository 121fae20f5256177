"""The generators of this process, seeded for one sample at a time and put back as they were.

What a dataset draws for a sample then depends on (seed, epoch, index) alone: not on the worker, on what was drawn
before, nor on whether the run was interrupted. These are the generators that draw where none is named: Python's
`random`, NumPy's `numpy.random.*` functions and torch's for the CPU. A generator that the dataset holds itself is its
own affair.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

from hubshard.resume.data.data_order import Seeds

__all__ = ["kept_generators", "seed_generators"]


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put the generators back at the end, whatever is drawn within."""
    import torch  # noqa: PLC0415  # slow, and optional

    numpy = _numpy()
    python_state, torch_state = random.getstate(), torch.default_generator.get_state()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def seed_generators(seeds: Seeds) -> None:
    """Seed the generators of Python, NumPy (where it is installed) and torch (for the CPU)."""
    import torch  # noqa: PLC0415  # slow, and optional

    random.seed(seeds.python)
    torch.default_generator.manual_seed(seeds.torch)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seeds.numpy)


@cache
def _numpy() -> ModuleType | None:
    try:
        import numpy as np  # noqa: PLC0415  # slow, and optional
    except ModuleNotFoundError:
        return None
    return np
