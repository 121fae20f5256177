"""The floating dtypes that weights are cast between, by every name that people write."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hubshard.errors import FormatError

__all__ = ["CASTABLE", "TORCH_CODES", "parse_float_dtype"]

CASTABLE: Mapping[str, str] = MappingProxyType(
    {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
)
"""The codes that are cast from and to, with their torch names. Narrower floats mean nothing without their scales."""
TORCH_CODES: Mapping[str, str] = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "int16": "I16",
        "int32": "I32",
        "int64": "I64",
        "uint16": "U16",
        "uint32": "U32",
        "uint64": "U64",
        "float16": "F16",
        "bfloat16": "BF16",
        "float32": "F32",
        "float64": "F64",
        "complex64": "C64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2": "F8_E5M2",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e8m0fnu": "F8_E8M0",
        "float4_e2m1fn_x2": "F4",
    }
)
"""The code of each torch dtype that can be stored, by its torch name; an older torch lacks some."""
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
