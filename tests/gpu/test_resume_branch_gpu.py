"""ResumeBranch with a CUDA device: a page-locked copy that the training cannot change any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hubshard import ResumeBranch

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


def _state(seed: int) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return {
        "large": torch.randn(3000, 1000, device="cuda", generator=generator),
        "column": torch.randn(300, 200, device="cuda", generator=generator).t(),
        "half": torch.randn(77, device="cuda", generator=generator).bfloat16(),
        "host": torch.full((5,), float(seed)),
    }


def test_what_lies_on_a_gpu_is_copied_into_page_locked_memory_that_is_used_again(tmp_path: Path) -> None:
    state = _state(1)
    with ResumeBranch(None, local_dir=tmp_path, signals=()) as branch:
        addresses = set()
        for step in (1, 2, 3):
            for name, tensor in _state(step).items():
                state[name].copy_(tensor)
            branch.save(state, step)
            for tensor in state.values():
                tensor.zero_()
            memory = branch._taker._buffer._memory
            assert memory.is_pinned()
            addresses.add(memory.data_ptr())
        assert len(addresses) == 1
        for step in (1, 2, 3):
            found = _state(0)
            assert branch.restore(found, step=step) == step
            assert all(torch.equal(found[name], tensor) for name, tensor in _state(step).items())
