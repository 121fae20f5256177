"""Ranks that should hold the same model, and may not: of what is whole on every rank one copy alone is stored.

A rank that holds other layers than the first (pipeline parallelism), or its own share of them in plain tensors under
the same names (tensor or expert parallelism by hand), would lose them without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from hubshard.errors import FormatError
from hubshard.messages import listed

__all__ = ["Replica", "check_replica", "samples_of"]

_MOST_SAMPLED = 64  # parameters
_SAMPLES = 16
_ALIKE = 0.1  # replicas may drift apart by rounding, on different devices
_MOST_UNLIKE = 0.1  # of the tensors: one whose numbers are rounding errors alone tells nothing
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(frozen=True, slots=True)
class Replica:
    """What a rank holds, in brief.

    Attributes:
        names: of the tensors and groups of each part, by its path.
        samples: some numbers of some parameters that are whole on this rank, by name.
    """

    names: Mapping[str, Sequence[str]]
    samples: Mapping[str, Sequence[float]]


def samples_of(params: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """Some numbers of some of the parameters that are no shares."""
    plain = [
        name
        for name, param in sorted(params.items())
        if not isinstance(param, DTensor) and param.dtype in _FLOATS and param.numel() and not param.is_meta
    ]
    chosen = plain[:: -(-len(plain) // _MOST_SAMPLED) or 1]
    return {name: _sample(params[name]) for name in chosen}


def _sample(param: torch.Tensor) -> list[float]:
    flat = param.detach().reshape(-1)
    sample: list[float] = flat[:: -(-flat.numel() // _SAMPLES)].double().tolist()
    return sample


def check_replica(mine: Replica, first: Replica) -> None:
    """Compare what this rank holds with what the first does.

    Raises:
        FormatError: they differ: names the tensor.
    """
    for path in sorted({*mine.names, *first.names}):
        ours, names = mine.names.get(path, ()), first.names.get(path, ())
        missing, more = ({*names} - {*ours}), ({*ours} - {*names})
        if missing or more:
            what = f"lacks {listed(sorted(missing), most=3)} of the first rank" if missing else ""
            what += " and " if missing and more else ""
            what += f"has {listed(sorted(more), most=3)}, which that lacks" if more else ""
            raise FormatError(
                f"{path}: it {what}",
                hint="ranks with different layers (pipeline parallelism) or optimizers are not one TrainState: give "
                "each stage a ResumeBranch of its own, with process_group=, branch= and local_dir=, as the "
                "documentation of TrainState shows",
            )
    unlike = [name for name, held in first.samples.items() if not _are_alike(mine.samples.get(name), held)]
    if len(unlike) > _MOST_UNLIKE * len(first.samples):
        raise FormatError(
            f"{unlike[0]}: a plain tensor that differs from that of the first rank, which alone would be stored",
            hint="begin with the same weights on all ranks; shares of a model must be DTensors (fully_shard, "
            "parallelize_module)",
        )


def _are_alike(ours: Sequence[float] | None, theirs: Sequence[float]) -> bool:
    if ours is None or len(ours) != len(theirs):
        return False
    one, two = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    size = float(two.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(one, two, rtol=_ALIKE, atol=_ALIKE * size, equal_nan=True)
