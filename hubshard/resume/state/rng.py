"""The random generators of a process: Python's, NumPy's, and torch's for the CPU and for every device.

A state is one uint8 tensor that holds canonical JSON, filled up with spaces to whole blocks of 4096 bytes so that its
size stays the same from step to step:

- "python": the 625 words of `random.getstate()`, "gauss": its third item;
- "numpy": `numpy.random.get_state(legacy=False)` with arrays as (dtype, bytes), or null where NumPy was not in use;
- "torch": of the CPU; "devices": kind of device to one state for each of them.
"""

from __future__ import annotations

import hashlib
import logging
import random
import struct
import sys
from collections.abc import Mapping
from typing import Any

import torch

from hubshard.resume.data.data_order import Seeds
from hubshard.resume.data.sample_rng import seed_generators
from hubshard.steps.canonical import decode, encode

__all__ = ["generators_state", "initial_seed", "rank_seeds", "restore_generators", "seed_rank"]

_LOG = logging.getLogger("hubshard")
_BLOCK_BYTES = 4096
_WORDS = struct.Struct("<625I")
_PYTHON_VERSION = 3  # of the tuple that random.getstate() gives


def generators_state() -> torch.Tensor:
    """The state of all generators of this process."""
    _, words, gauss = random.getstate()
    state = {
        "python": _WORDS.pack(*words),
        "gauss": gauss,
        "numpy": _numpy_state(),
        "torch": _raw(torch.default_generator.get_state()),
        "devices": _device_states(),
    }
    raw = encode(state, path="the state of the random generators")
    return _tensor(raw.ljust(-(-len(raw) // _BLOCK_BYTES) * _BLOCK_BYTES))


def restore_generators(state: torch.Tensor) -> None:
    """Put all generators of this process into a state.

    Raises:
        FormatError: it is damaged.
    """
    found = decode(_raw(state).rstrip(b" "), path="the state of the random generators")
    random.setstate((_PYTHON_VERSION, _WORDS.unpack(found["python"]), found["gauss"]))
    if found["numpy"] is not None:
        _restore_numpy(found["numpy"])
    torch.default_generator.set_state(_tensor(found["torch"]))
    for kind, states in found["devices"].items():
        _restore_devices(kind, states)


def initial_seed() -> int:
    """The seed that torch's generator for the CPU was given last."""
    return torch.initial_seed()


def rank_seeds(seed: int, rank: int, step: int) -> Seeds:
    """The seeds of a rank where it has no state to go on with: SHA-256 of ``hubshard rank {seed} {rank} {step}``."""
    digest = hashlib.sha256(f"hubshard rank {seed} {rank} {step}".encode()).digest()
    python, torch_seed, numpy = (int.from_bytes(digest[at : at + 8], "little") for at in (0, 8, 16))
    return Seeds(python, numpy & 0xFFFFFFFF, torch_seed >> 1)


def seed_rank(seed: int, rank: int, step: int) -> None:
    """Seed all generators of this process from (seed, rank, step)."""
    seeds = rank_seeds(seed, rank, step)
    seed_generators(seeds)
    torch.manual_seed(seeds.torch)  # of every device too


def _raw(state: torch.Tensor) -> bytes:
    return bytes(state.cpu().numpy()) if sys.modules.get("numpy") else bytes(state.tolist())


def _tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


# NumPy


def _numpy_state() -> object:
    numpy = sys.modules.get("numpy")  # who has not imported it has drawn nothing from it
    return None if numpy is None else _from_arrays(numpy.random.get_state(legacy=False))


def _from_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_arrays(item) for key, item in value.items()}
    if hasattr(value, "tobytes") and hasattr(value, "dtype") and value.ndim:
        return (value.dtype.str, value.tobytes())
    return value.item() if hasattr(value, "item") else value


def _restore_numpy(state: Mapping[str, Any]) -> None:
    try:
        import numpy as np  # noqa: PLC0415  # slow, and optional
    except ModuleNotFoundError:
        _LOG.warning("NumPy is not installed here: its generator, which was in use, is not restored")
        return

    def to_arrays(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: to_arrays(item) for key, item in value.items()}
        return np.frombuffer(value[1], dtype=value[0]) if isinstance(value, tuple) else value

    np.random.set_state(to_arrays(state))


# Devices


def _device_states() -> dict[str, list[bytes]]:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return {}
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        return {"mps": [_raw(module.get_rng_state())]}
    if not getattr(module, "is_initialized", lambda: True)():
        return {}  # nothing was drawn there yet
    return {device.type: [_raw(module.get_rng_state(number)) for number in range(module.device_count())]}


def _restore_devices(kind: str, states: list[bytes]) -> None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module: Any = None if device is None or device.type != kind else torch.get_device_module(device)
    count = 0 if module is None else 1 if kind == "mps" else module.device_count()
    if count != len(states):
        _LOG.warning("the state holds the generators of %d %s devices; there are %d here", len(states), kind, count)
    for number, state in enumerate(states[:count]):
        if kind == "mps":
            module.set_rng_state(_tensor(state))
        else:
            module.set_rng_state(_tensor(state), number)
