"""The torch dtypes of the safetensors codes. Imports torch when it is called, not before."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from hubshard.errors import FormatError
from hubshard.sources.dtypes import TORCH_CODES
from hubshard.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["code_of", "torch_dtype", "torch_shape"]


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """The torch dtype of a stored tensor.

    Raises:
        FormatError: the installed torch has none.
    """
    dtype = _table().get(spec.dtype)
    if dtype is None:
        raise FormatError(
            f"tensor {spec.name!r} has dtype {spec.dtype}, which this torch does not have",
            hint="read its bytes with .read(box)",
        )
    return dtype


def torch_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape that torch gives a stored tensor: two packed F4 elements are one of `float4_e2m1fn_x2`."""
    return (*spec.shape[:-1], spec.shape[-1] // 2) if spec.dtype == "F4" and spec.shape else spec.shape


def code_of(dtype: torch.dtype) -> str | None:
    """The safetensors code of a torch dtype, or None where the format has none."""
    return next((code for code, known in _table().items() if known == dtype), None)


@cache
def _table() -> dict[str, torch.dtype]:
    import torch  # noqa: PLC0415  # slow, and optional

    return {code: getattr(torch, name) for name, code in TORCH_CODES.items() if hasattr(torch, name)}
