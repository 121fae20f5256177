"""The floating dtypes that weights are cast between, by every name that people write."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hubshard.errors import FormatError

__all__ = ["CASTABLE", "parse_float_dtype"]

CASTABLE: Mapping[str, str] = MappingProxyType(
    {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
)
"""The codes that are cast from and to, with their torch names. Narrower floats mean nothing without their scales."""
_NAMES = {name: code for code, long in CASTABLE.items() for name in (code.lower(), long)}
_NAMES |= {"fp64": "F64", "fp32": "F32", "fp16": "F16", "half": "F16", "float": "F32", "double": "F64"}


def parse_float_dtype(dtype: object) -> str:
    """The safetensors code of a floating dtype: "bf16", "bfloat16", "BF16", "torch.bfloat16", `torch.bfloat16`.

    Raises:
        FormatError: none that weights may be cast to.
    """
    code = _NAMES.get(str(dtype).removeprefix("torch.").lower())
    if code is None:
        raise FormatError(
            f"weights cannot be cast to the dtype {dtype!r}",
            hint=f"choose one of {', '.join(CASTABLE.values())}",
        )
    return code
