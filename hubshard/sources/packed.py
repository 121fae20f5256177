"""How many parameters packed weights stand for: quantised checkpoints hold several in one stored element.

Pure, and from names, dtypes, shapes and config alone. Layouts: bitsandbytes
(https://huggingface.co/docs/transformers/quantization/bitsandbytes), GPTQ, AWQ, compressed-tensors, MXFP4, block-wise
FP8 and MLX, each as transformers or its own library writes it.

Limits: padding that a packer adds is counted; compressed-tensors groups of different widths, and methods that are not
listed here, give no count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hubshard.tensors import TensorSpec

__all__ = ["logical_parameters"]

_Count = Callable[[TensorSpec, Mapping[str, TensorSpec]], "int | None"]


def logical_parameters(specs: Iterable[TensorSpec], config: Mapping[str, Any]) -> int | None:
    """Parameters that the tensors stand for; scales, zero points and other companions are not counted.

    Args:
        specs: all stored tensors.
        config: the model's `config.json`; `quantization_config` is read, or `quantization` of MLX.

    Returns:
        The count, or None where the config tells of no quantisation, or of one whose layout is not known here.
    """
    count = _method(config)
    if count is None:
        return None
    table = {spec.name: spec for spec in specs}
    total = 0
    for spec in table.values():
        parameters = count(spec, table)
        total += spec.numel if parameters is None else parameters
    return total


def _method(config: Mapping[str, Any]) -> _Count | None:
    quantization = _quantization(config)
    if quantization is None:
        return None
    make = _METHODS.get(str(quantization.get("quant_method", "mlx")).lower())
    return make(quantization) if make else None


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    places = [place for place in (config, config.get("text_config")) if isinstance(place, Mapping)]
    found = [place.get(key) for place in places for key in ("quantization_config", "quantization")]
    return next((each for each in found if isinstance(each, Mapping)), None)


def _without(companions: Iterable[str]) -> _Count:
    names = frozenset(companions)

    def count(spec: TensorSpec, _: Mapping[str, TensorSpec]) -> int | None:
        return 0 if spec.name.rpartition(".")[2] in names else None

    return count


def _bitsandbytes(spec: TensorSpec, table: Mapping[str, TensorSpec]) -> int | None:
    # 4 bits: "x.weight" holds pairs, in elements of any width; "x.weight.absmax" and others describe it
    if f"{spec.name}.absmax" in table:
        return spec.numel * spec.bits // 4
    owner, marker, _ = spec.name.rpartition(".weight.")
    if marker and f"{owner}.weight.absmax" in table:
        return 0
    return 0 if spec.name.endswith((".SCB", ".weight_format")) else None


def _packed_ints(quantization: Mapping[str, Any]) -> _Count | None:
    bits = quantization.get("bits", quantization.get("w_bit"))
    if type(bits) is not int or bits <= 0:
        return None
    companions = _without({"qzeros", "scales", "g_idx"})

    def count(spec: TensorSpec, table: Mapping[str, TensorSpec]) -> int | None:
        owner, _, last = spec.name.rpartition(".")
        if last == "qweight":
            return spec.numel * spec.bits // bits
        return companions(spec, table) if f"{owner}.qweight" in table else None

    return count


def _compressed_tensors(quantization: Mapping[str, Any]) -> _Count | None:
    groups = quantization.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    widths = {each.get("num_bits") for each in weights if isinstance(each, Mapping)}
    if len(widths) != 1:
        return None
    (bits,) = widths
    if type(bits) is not int:
        return None
    scales = {f"{side}_{what}" for side in ("weight", "input", "output") for what in ("scale", "global_scale")}
    companions = _without(
        scales | {"weight_zero_point", "input_zero_point", "output_zero_point", "weight_shape", "weight_g_idx"}
    )

    def count(spec: TensorSpec, table: Mapping[str, TensorSpec]) -> int | None:
        if spec.name.endswith(".weight_packed"):
            return spec.numel * spec.bits // bits
        return companions(spec, table)

    return count


def _mxfp4(spec: TensorSpec, table: Mapping[str, TensorSpec]) -> int | None:
    if spec.name.endswith("_blocks"):
        return spec.numel * 2
    return 0 if spec.name.endswith("_scales") and f"{spec.name.removesuffix('_scales')}_blocks" in table else None


def _mlx(quantization: Mapping[str, Any]) -> _Count | None:
    if type(quantization.get("bits")) is not int:
        return None

    def count(spec: TensorSpec, table: Mapping[str, TensorSpec]) -> int | None:
        owner, _, last = spec.name.rpartition(".")
        if f"{owner}.scales" not in table:
            return None
        if last != "weight":
            return 0 if last in {"scales", "biases"} else None
        own = quantization.get(owner)  # a layer may have a width of its own
        bits = own.get("bits") if isinstance(own, Mapping) else quantization["bits"]
        return spec.numel * spec.bits // bits if type(bits) is int else None

    return count


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], _Count | None]] = {
    "bitsandbytes": lambda _: _bitsandbytes,
    "gptq": _packed_ints,
    "awq": _packed_ints,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": lambda _: _mxfp4,
    "fp8": lambda _: _without({"weight_scale_inv", "weight_scale", "input_scale", "activation_scale"}),
    "mlx": _mlx,  # writes no method
}
