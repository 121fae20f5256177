from __future__ import annotations

import json

import pytest

from hubshard.errors import FormatError
from hubshard.sources.model_config import config_with_dtype, stem_told


def test_every_dtype_of_a_config_and_its_parts_is_replaced() -> None:
    quantization = {"bnb_4bit_compute_dtype": "float16", "dtype": "uint8"}
    config = {
        "model_type": "größe",
        "dtype": "float32",
        "text_config": {"torch_dtype": "float32", "n": 1},
        "quantization_config": quantization,
    }
    changed = json.loads(config_with_dtype(json.dumps(config).encode(), "bfloat16"))
    assert changed == config | {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16", "n": 1}}
    assert list(changed) == list(config)


@pytest.mark.parametrize("raw", [b'{"a":1}', b'{ "dtype":"bfloat16" }', b'{"dtype": null}'])
def test_a_config_that_tells_no_other_dtype_stays_byte_by_byte(raw: bytes) -> None:
    assert config_with_dtype(raw, "bfloat16") == raw


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff"])
def test_what_is_no_config_is_refused_by_path(raw: bytes) -> None:
    with pytest.raises(FormatError, match=r"a/config\.json"):
        config_with_dtype(raw, "bfloat16", path="a/config.json")


@pytest.mark.parametrize(
    ("config", "stem"),
    [
        ({}, None),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "model"),
        ({"model_type": "clip_text_model"}, "model"),
        ({"_class_name": "UNet2DModel", "_diffusers_version": "0.42.1"}, "diffusion_pytorch_model"),
        ({"_class_name": "UNet2DModel"}, "diffusion_pytorch_model"),
        (  # as AutoencoderCosmos3Audio has it
            {"_class_name": "A", "_diffusers_version": "0.42.1", "model_type": "autoencoder_v2"},
            "diffusion_pytorch_model",
        ),
        ({"_class_name": "X", "model_type": "llama"}, None),
        ({"_class_name": "X", "_diffusers_version": "0.42.1", "architectures": ["LlamaForCausalLM"]}, None),
    ],
)
def test_a_config_tells_the_stem_unless_it_is_of_two_libraries(config: dict[str, object], stem: str | None) -> None:
    assert stem_told(config) == stem
