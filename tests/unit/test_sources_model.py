from __future__ import annotations

import importlib
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from hubshard.errors import FormatError
from hubshard.sources.model import ModelParts, parts_of
from hubshard.sources.state_dict import StateDictSource

if TYPE_CHECKING:
    from pathlib import Path

    import torch
else:
    torch = pytest.importorskip("torch")

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=1, **options)
    return transformers.LlamaForCausalLM(config)


def mixtral() -> Any:
    config = transformers.MixtralConfig(**TEXT, num_key_value_heads=1, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def bert(cls: str) -> Any:
    return getattr(transformers, cls)(transformers.BertConfig(**TEXT))


def t5() -> Any:
    config = transformers.T5Config(vocab_size=64, d_model=16, d_ff=32, d_kv=8, num_layers=2, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> Any:
    size = {key: value for key, value in TEXT.items() if key != "vocab_size"}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**size, image_size=32, patch_size=8))


def reloaded(tmp_path: Path) -> Any:
    mixtral().save_pretrained(tmp_path / "first")
    return transformers.MixtralForCausalLM.from_pretrained(tmp_path / "first")


MODELS = {
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "llama, bfloat16": lambda: llama().to(torch.bfloat16),
    "mixtral, whose experts are fused": mixtral,
    "bert": lambda: bert("BertModel"),
    "bert with a tied head": lambda: bert("BertForMaskedLM"),
    "t5, tied three times": t5,
    "vit": vit,
}


def stored(parts: ModelParts) -> dict[str, Any]:
    source = StateDictSource(parts.state_dict, keep=parts.keep)
    return {spec.name: (spec.dtype, spec.shape, bytes(source.read(spec.name, spec.box))) for spec in source.specs()}


def saved(model: Any, folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What `save_pretrained` writes: tensors, and the other files."""
    model.save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"}
    return stored(ModelParts(safetensors_torch.load_file(folder / "model.safetensors"))), files


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_very_tensors_and_files_that_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    parts = parts_of(model)
    tensors, files = saved(model, tmp_path)
    assert stored(parts) == tensors
    assert parts.files == files
    assert parts.total_parameters == model.num_parameters()


def test_a_model_that_was_loaded_gives_back_what_it_was_loaded_from(tmp_path: Path) -> None:
    model = reloaded(tmp_path)
    first = safetensors_torch.load_file(tmp_path / "first" / "model.safetensors")
    assert stored(parts_of(model)) == stored(ModelParts(first))


def test_tied_names_are_recorded_under_the_name_that_transformers_keeps() -> None:
    parts = parts_of(llama(tie_word_embeddings=True))
    aliases = StateDictSource(parts.state_dict, keep=parts.keep).aliases()
    assert aliases == {"lm_head.weight": "model.embed_tokens.weight"}


def test_taking_a_model_apart_leaves_it_as_it_was() -> None:
    model = llama(tie_word_embeddings=True)
    before = (model.config.to_dict(), list(model.state_dict()), model.generation_config.to_dict())
    parts_of(model)
    assert (model.config.to_dict(), list(model.state_dict()), model.generation_config.to_dict()) == before


def test_ignored_keys_and_own_tags_are_respected() -> None:
    model = llama()
    model._keys_to_ignore_on_save = ["lm_head.weight"]
    model.add_model_tags("tiny")
    parts = parts_of(model)
    assert "lm_head.weight" not in parts.state_dict
    assert b'- "tiny"' in parts.default_files["README.md"]


def test_a_custom_model_takes_its_code_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "custom_tiny.py").write_text(
        "import torch\nfrom transformers import PretrainedConfig, PreTrainedModel\nfrom .custom_part import SIZE\n"
        "class TinyConfig(PretrainedConfig):\n    model_type = 'custom-tiny'\n"
        "class Tiny(PreTrainedModel):\n    config_class = TinyConfig\n"
        "    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.layer = torch.nn.Linear(SIZE, SIZE)\n        self.post_init()\n"
    )
    (tmp_path / "custom_part.py").write_text("SIZE = 3\n")
    (tmp_path / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path.parent)
    module = importlib.import_module(f"{tmp_path.name}.custom_tiny")
    module.TinyConfig.register_for_auto_class()
    module.Tiny.register_for_auto_class("AutoModel")
    model = module.Tiny(module.TinyConfig())
    parts = parts_of(model)
    assert {"custom_tiny.py", "custom_part.py", "config.json"} <= parts.files.keys()
    (tmp_path / "out").mkdir()
    assert parts.files == saved(model, tmp_path / "out")[1]
    for name in (f"{tmp_path.name}.custom_tiny", f"{tmp_path.name}.custom_part", tmp_path.name):
        sys.modules.pop(name, None)


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


def test_wrappers_of_torch_are_taken_off() -> None:
    layer = torch.nn.Linear(2, 3)
    parallel = torch.nn.DataParallel(layer)
    for wrapped in (compiled(layer), parallel, compiled(parallel), torch.nn.DataParallel(compiled(layer))):
        assert stored(parts_of(wrapped)) == stored(ModelParts(layer.state_dict()))
    model = llama()
    assert parts_of(compiled(model)).files == parts_of(model).files


def test_a_compiled_submodule_leaves_no_mark_on_names() -> None:
    module = torch.nn.Sequential(compiled(torch.nn.Linear(2, 3)), torch.nn.Linear(3, 1))
    assert list(parts_of(module).state_dict) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_plain_module_has_tensors_a_card_and_no_files() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    parts = parts_of(module)
    assert set(parts.state_dict) == set(module.state_dict())
    assert parts.files == {}
    assert parts.total_parameters == 2 * 3 + 3 + 3 + 3
    assert parts.default_files["README.md"].startswith(b'---\nlibrary_name: "pytorch"\n---\n')


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


def test_a_tokenizer_goes_along_with_its_files(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert parts_of(tokenizer()).files == files
    parts = parts_of(llama(), tokenizer())
    assert parts.files == {**files, **parts_of(llama()).files}


def test_companions_that_disagree_about_a_file_are_refused() -> None:
    with pytest.raises(FormatError, match=r"config\.json.*BertConfig"):
        parts_of(llama(), transformers.BertConfig())


@pytest.mark.parametrize("thing", [3, "org/model", [1.0], object()])
def test_what_is_no_model_is_refused(thing: object) -> None:
    with pytest.raises(FormatError, match=type(thing).__name__):
        parts_of(thing)


def test_a_model_among_the_companions_is_refused() -> None:
    with pytest.raises(FormatError, match="LlamaForCausalLM"):
        parts_of(llama(), llama())


def test_a_model_on_the_meta_device_is_refused_by_tensor_name() -> None:
    with torch.device("meta"):
        model = llama()
    with pytest.raises(FormatError, match=r"model\.embed_tokens\.weight"):
        parts_of(model)


def test_a_loaded_adapter_is_refused_with_the_way_out() -> None:
    model = llama()
    model._hf_peft_config_loaded = True
    with pytest.raises(FormatError, match="PEFT adapter") as caught:
        parts_of(model)
    assert "merge" in (caught.value.hint or "")


def test_the_config_tells_the_dtype_that_the_weights_will_be_cast_to() -> None:
    model = llama()
    assert json.loads(parts_of(model).files["config.json"])["dtype"] == "float32"
    assert json.loads(parts_of(model, dtype="bf16").files["config.json"])["dtype"] == "bfloat16"
    assert model.config.dtype != "bfloat16"


def test_fused_experts_are_taken_apart_without_a_copy() -> None:
    model = mixtral()
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    parts = parts_of(model)
    assert len(parts.state_dict) > len(model.state_dict())
    assert {tensor.untyped_storage().data_ptr() for tensor in parts.state_dict.values()} == own


class Quantizer:
    """What transformers asks of a quantizer when it saves."""

    quantization_config = transformers.GPTQConfig(bits=4)

    def __init__(self, *, serializable: bool) -> None:
        self.serializable = serializable

    def is_serializable(self) -> bool:
        return self.serializable

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        state_dict = dict(model.state_dict())
        name = "model.layers.0.mlp.down_proj"
        del state_dict[f"{name}.weight"]
        packed = {f"{name}.qweight": torch.zeros(4, 16, dtype=torch.int32), f"{name}.scales": torch.ones(1, 16)}
        return state_dict | packed, {"format": "pt", "layout": "v2"}


def test_a_quantized_model_gives_packed_tensors_metadata_and_its_logical_size() -> None:
    model = llama()
    expected = sum(tensor.numel() for tensor in model.state_dict().values())
    model.hf_quantizer = Quantizer(serializable=True)
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    parts = parts_of(model)
    assert "model.layers.0.mlp.down_proj.qweight" in parts.state_dict
    assert parts.metadata == {"layout": "v2"}
    assert parts.total_parameters == expected


def test_a_quantized_model_that_cannot_be_saved_is_refused() -> None:
    model = llama()
    model.hf_quantizer = Quantizer(serializable=False)
    with pytest.raises(FormatError, match="quantized with gptq"):
        parts_of(model)


def test_a_model_split_by_tensor_parallelism_is_refused() -> None:
    model = llama()
    model._tp_size = 2
    with pytest.raises(FormatError, match="2 ranks"):
        parts_of(model)


@pytest.mark.parametrize("on_disk", [True, False])
def test_placeholders_of_group_offloading_are_refused_and_tensors_that_it_moved_are_not(
    tmp_path: Path, on_disk: bool
) -> None:
    hooks = pytest.importorskip("diffusers.hooks")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    cpu, folder = torch.device("cpu"), str(tmp_path) if on_disk else None
    hooks.apply_group_offloading(
        model, onload_device=cpu, offload_device=cpu, offload_type="leaf_level", offload_to_disk_path=folder
    )
    if not on_disk:
        assert len(parts_of(model).state_dict) == 2
        return
    with pytest.raises(FormatError, match="group offloading keeps the tensors of '0' on disk") as caught:
        parts_of(model)
    assert "offload_to_disk_path" in str(caught.value.hint)


def test_a_state_that_is_no_tensor_is_refused_by_name() -> None:
    class Odd(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a": 1}

    model = llama()
    model.lm_head = Odd(16, 64)
    with pytest.raises(FormatError, match=r"lm_head\._extra_state"):
        parts_of(model)


def test_parameters_that_zero_3_holds_in_parts_are_refused() -> None:
    module = torch.nn.Linear(2, 3)
    module.weight.ds_tensor = torch.zeros(1)  # type: ignore[attr-defined]
    with pytest.raises(FormatError, match=r"ZeRO-3 holds 'weight'"):
        parts_of(module)


def test_a_module_that_has_not_run_yet_is_refused_by_name() -> None:
    with pytest.raises(FormatError, match=r"'0.weight', '0.bias' is not initialised yet"):
        parts_of(torch.nn.Sequential(torch.nn.LazyLinear(3)))
