"""What older versions of torch, down to 2.6, cannot do: marks for tests. Imports torch."""

from __future__ import annotations

from inspect import signature

import pytest

torch = pytest.importorskip("torch")
tensor = pytest.importorskip("torch.distributed.tensor")

__all__ = ["fsdp2_on_cpu", "gloo_limits", "tensor_parallel"]

fsdp2_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason=f"FSDP2 of torch {torch.__version__} trains on GPUs alone"
)
gloo_limits = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9),
    reason=f"gloo of torch {torch.__version__} takes no other limit of time once it is connected",
)
tensor_parallel = pytest.mark.skipif(
    "src_data_rank" not in signature(tensor.distribute_tensor).parameters,
    reason=f"transformers' tensor parallelism needs torch 2.7; this is {torch.__version__}",
)
