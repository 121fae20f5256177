from __future__ import annotations

from typing import Any

import pytest

from hubshard.sources.packed import logical_parameters
from hubshard.tensors import TensorSpec


def spec(name: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


BNB = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
MLX = {"quantization": {"group_size": 64, "bits": 4, "l.0": {"group_size": 64, "bits": 8}}}
PACKED = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}

# each stands for a linear layer of 128 inputs and 64 outputs, and an F16 norm of 128
CASES: dict[str, tuple[list[TensorSpec], dict[str, Any]]] = {
    "bitsandbytes, 4 bits": (
        [
            spec("l.weight", "U8", 4096, 1),
            spec("l.weight.absmax", "U8", 128),
            spec("l.weight.quant_map", "F32", 16),
            spec("l.weight.quant_state.bitsandbytes__nf4", "U8", 80),
        ],
        BNB,
    ),
    "bitsandbytes, 4 bits in wide elements": (
        [spec("l.weight", "BF16", 2048, 1), spec("l.weight.absmax", "F32", 128)],
        BNB,
    ),
    "bitsandbytes, 8 bits": (
        [spec("l.weight", "I8", 64, 128), spec("l.SCB", "F32", 64), spec("l.weight_format", "U8")],
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
    ),
    "GPTQ, 4 bits": (
        [
            spec("l.qweight", "I32", 16, 64),
            spec("l.qzeros", "I32", 1, 8),
            spec("l.scales", "F16", 1, 64),
            spec("l.g_idx", "I32", 128),
        ],
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    ),
    "GPTQ, 3 bits": (
        [spec("l.qweight", "I32", 12, 64), spec("l.scales", "F16", 1, 64)],
        {"quantization_config": {"quant_method": "gptq", "bits": 3}},
    ),
    "AWQ": (
        [spec("l.qweight", "I32", 128, 8), spec("l.qzeros", "I32", 1, 8), spec("l.scales", "F16", 1, 64)],
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
    ),
    "compressed-tensors": (
        [
            spec("l.weight_packed", "I32", 64, 16),
            spec("l.weight_scale", "BF16", 64, 1),
            spec("l.weight_shape", "I64", 2),
        ],
        {"quantization_config": {"quant_method": "compressed-tensors"} | PACKED},
    ),
    "compressed-tensors, not packed, of a text config": (
        [spec("l.weight", "F8_E4M3", 64, 128), spec("l.weight_scale", "BF16", 64, 1)],
        {
            "text_config": {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
                }
            }
        },
    ),
    "MXFP4": (
        [spec("l_blocks", "U8", 64, 4, 16), spec("l_scales", "U8", 64, 4)],
        {"quantization_config": {"quant_method": "mxfp4"}},
    ),
    "FP8 in blocks": (
        [spec("l.weight", "F8_E4M3", 64, 128), spec("l.weight_scale_inv", "F32", 1, 1)],
        {"quantization_config": {"quant_method": "fp8"}},
    ),
    "MLX": (
        [spec("l.1.weight", "U32", 64, 16), spec("l.1.scales", "F16", 64, 2), spec("l.1.biases", "F16", 64, 2)],
        MLX,
    ),
    "MLX, a layer with a width of its own": (
        [spec("l.0.weight", "U32", 64, 32), spec("l.0.scales", "F16", 64, 2), spec("l.0.biases", "F16", 64, 2)],
        MLX,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_packed_weights_count_what_they_stand_for(case: str) -> None:
    specs, config = CASES[case]
    norm = spec("norm.weight", "F16", 128)
    assert logical_parameters([*specs, norm], config) == 64 * 128 + 128


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": None},
        {"quantization_config": {"quant_method": "of tomorrow"}},
        {"quantization_config": {"quant_method": "gptq"}},
        {"quantization_config": {"quant_method": "gptq", "bits": "four"}},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
            }
        },
    ],
)
def test_no_count_is_given_where_the_config_does_not_tell(config: dict[str, Any]) -> None:
    assert logical_parameters([spec("l.qweight", "I32", 16, 64)], config) is None


def test_scales_of_another_kind_are_parameters() -> None:
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert logical_parameters([spec("norm.scales", "F32", 10)], config) == 10
