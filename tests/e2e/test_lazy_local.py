from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hubshard.errors import FormatError, NotFoundError
from hubshard.lazy import from_pretrained, load_into, open_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def llama(**kwargs: Any) -> Any:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, pad_token_id=3, **kwargs)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.top_k, model.generation_config.do_sample = 17, True
    return model


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    )


def bert() -> Any:
    shape = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 12}
    return transformers.BertModel(transformers.BertConfig(vocab_size=512, **shape))


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    )


def vit() -> Any:
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, **{k: v for k, v in SMALL.items() if k != "vocab_size"}
    )
    return transformers.ViTForImageClassification(config)


MAKERS: Mapping[str, Callable[[], Any]] = {
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "mixtral": mixtral,
    "bert": bert,
    "t5": t5,
    "vit": vit,
}


@pytest.fixture(params=list(MAKERS), scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, type[Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(7)
    model = MAKERS[request.param]().to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").exists()
    return folder, type(model)


def attributes(value: Any) -> Any:
    """Everything that an object holds, as plain values; modules by their names, objects by what they hold."""
    if isinstance(value, torch.nn.Module):
        plain = {k: v for k, v in vars(value).items() if k not in {"_parameters", "_buffers", "_modules"}}
        return type(value), attributes(plain), [(name, type(child)) for name, child in value.named_children()]
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.device, value.requires_grad, type(value)
    if isinstance(value, dict):
        return {key: attributes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [attributes(item) for item in value]
    if type(value).__module__.startswith("transformers") and hasattr(value, "__dict__"):
        return type(value), attributes(vars(value))
    return (
        value if isinstance(value, (str, int, float, bool, type(None), set, torch.dtype, torch.device)) else type(value)
    )


def assert_same_model(ours: Any, theirs: Any) -> None:
    names = list(theirs.state_dict())
    assert list(ours.state_dict()) == names
    for name in names:
        mine, other = ours.state_dict()[name], theirs.state_dict()[name]
        assert mine.dtype == other.dtype, name
        assert torch.equal(mine, other), name
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]  # what is tied is tied
    for (name, mine), (_, other) in zip(ours.named_modules(), theirs.named_modules(), strict=True):
        assert attributes(mine) == attributes(other), name
    for (name, mine), (_, other) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(mine, other), name
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert attributes(mine) == attributes(other), name


@pytest.mark.parametrize("dtype", ["auto", torch.float32, None])
def test_a_model_equals_that_of_transformers_attribute_by_attribute(saved: tuple[Path, type[Any]], dtype: Any) -> None:
    folder, cls = saved
    assert_same_model(from_pretrained(folder, dtype=dtype), cls.from_pretrained(folder, dtype=dtype))


def test_a_name_that_is_a_string_is_kept(saved: tuple[Path, type[Any]]) -> None:
    folder, cls = saved
    ours = from_pretrained(str(folder), model_class=cls)
    assert ours.name_or_path == ours.config.name_or_path == str(folder)
    assert not ours.training


def test_the_stored_dtype_is_taken_where_the_config_has_none(saved: tuple[Path, type[Any]], tmp_path: Path) -> None:
    folder, cls = saved
    copy = copy_of(folder, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    for some in (config, *(value for value in config.values() if isinstance(value, dict))):
        some.pop("dtype", None)
    (copy / "config.json").write_text(json.dumps(config))
    ours = from_pretrained(copy)
    assert ours.dtype == torch.bfloat16
    assert_same_model(ours, cls.from_pretrained(copy))


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "bert", "t5"])
def test_load_into_equals_transformers_where_names_are_the_modules_own(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    MAKERS[kind]().to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="100KB")
    theirs: Any = from_pretrained(tmp_path)
    wanted = theirs.state_dict()
    module = type(theirs)(theirs.config).float()
    load_into(module, tmp_path)
    for name, tensor in wanted.items():
        assert torch.equal(module.state_dict()[name], tensor.float()), name
    with torch.device("meta"):
        module = type(theirs)(theirs.config)
    load_into(module, tmp_path)
    for name, tensor in wanted.items():
        assert torch.equal(module.state_dict()[name], tensor), name


def copy_of(folder: Path, to: Path) -> Path:
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(7)
    llama().save_pretrained(folder, max_shard_size="200KB")
    return folder


def test_generation_settings_are_put_back(llama_folder: Path) -> None:
    ours = from_pretrained(llama_folder)
    assert (ours.generation_config.top_k, ours.generation_config.do_sample) == (17, True)
    given = transformers.GenerationConfig(top_k=5, do_sample=True)
    assert from_pretrained(llama_folder, generation_config=given).generation_config.top_k == 5


def test_generation_settings_come_from_the_config_where_there_are_no_others(llama_folder: Path, tmp_path: Path) -> None:
    copy = copy_of(llama_folder, tmp_path)
    (copy / "generation_config.json").unlink()
    assert_same_model(from_pretrained(copy), transformers.LlamaForCausalLM.from_pretrained(copy))


def test_an_auto_class_and_settings_of_the_config_are_taken(llama_folder: Path) -> None:
    auto = transformers.AutoModelForCausalLM
    assert_same_model(
        from_pretrained(llama_folder, model_class=auto, attention_dropout=0.25, use_cache=False),
        auto.from_pretrained(llama_folder, attention_dropout=0.25, use_cache=False),
    )
    pair: Any = from_pretrained(llama_folder, attention_dropout=0.25, output_loading_info=True)
    ours, info = pair
    assert ours.config.attention_dropout == 0.25
    assert not info["missing_keys"]


def test_a_headless_model_is_loaded_from_the_checkpoint_of_one_with_a_head(llama_folder: Path) -> None:
    cls = transformers.LlamaModel
    assert_same_model(from_pretrained(llama_folder, model_class=cls), cls.from_pretrained(llama_folder))


def test_a_variant_is_loaded(tmp_path: Path) -> None:
    llama().to(torch.float16).save_pretrained(tmp_path, variant="fp16", max_shard_size="200KB")
    with pytest.raises(NotFoundError):
        from_pretrained(tmp_path)
    assert_same_model(
        from_pretrained(tmp_path, variant="fp16"),
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, variant="fp16"),
    )


def test_layers_go_to_disk_without_a_second_copy(llama_folder: Path, tmp_path: Path) -> None:
    device_map = {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "lm_head": "cpu",
    }
    theirs = transformers.LlamaForCausalLM.from_pretrained(llama_folder)
    ours = from_pretrained(llama_folder, device_map=device_map, offload_folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
    assert ours.name_or_path == str(llama_folder)


def test_an_automatic_device_map_is_kept(llama_folder: Path) -> None:
    cls = transformers.LlamaForCausalLM
    ours, theirs = (
        from_pretrained(llama_folder, device_map="auto"),
        cls.from_pretrained(llama_folder, device_map="auto"),
    )
    assert_same_model(ours, theirs)


def test_an_index_that_lies_is_refused_before_a_model_is_built(llama_folder: Path, tmp_path: Path) -> None:
    copy = copy_of(llama_folder, tmp_path)
    path = copy / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = "model.norm.weight"
    index["weight_map"][name] = next(file for file in index["weight_map"].values() if file != index["weight_map"][name])
    path.write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"model\.norm\.weight"):
        from_pretrained(copy)


def test_a_checkpoint_that_transformers_cannot_read_for_its_index_alone_is_loaded(
    llama_folder: Path, tmp_path: Path
) -> None:
    copy = copy_of(llama_folder, tmp_path)
    path = copy / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": json.loads(path.read_text())["weight_map"]}))
    theirs = transformers.LlamaForCausalLM.from_pretrained(llama_folder)
    ours = from_pretrained(copy)
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in ours.state_dict().items())


def test_a_class_that_cannot_be_told_is_asked_for(llama_folder: Path, tmp_path: Path) -> None:
    copy = copy_of(llama_folder, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"architectures": ["OfTomorrow"]}))
    with pytest.raises(FormatError, match="OfTomorrow"):
        from_pretrained(copy)
    (copy / "config.json").write_text(json.dumps(config | {"architectures": None}))
    with pytest.raises(FormatError, match="no architecture"):
        from_pretrained(copy)
    (copy / "config.json").unlink()
    with pytest.raises(NotFoundError, match=r"has no config\.json"):
        from_pretrained(copy)


def test_code_of_the_model_runs_only_when_that_is_asked_for(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    copy = tmp_path / "model"
    copy.mkdir()
    copy_of(llama_folder, copy)
    (copy / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\nclass OwnModel(LlamaForCausalLM):\n    is_own = True\n"
    )
    config = json.loads((copy / "config.json").read_text())
    own = {"architectures": ["OwnModel"], "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnModel"}}
    (copy / "config.json").write_text(json.dumps(config | own))
    with pytest.raises(FormatError, match="OwnModel"):
        from_pretrained(copy)
    assert from_pretrained(copy, trust_remote_code=True).is_own
    auto = transformers.AutoModelForCausalLM
    assert from_pretrained(copy, model_class=auto, trust_remote_code=True).is_own


def test_an_open_checkpoint_is_used_and_stays_open(llama_folder: Path) -> None:
    with open_checkpoint(llama_folder) as checkpoint:
        ours = from_pretrained(checkpoint)
        assert checkpoint["model.norm.weight"][...].shape == (64,)
    assert_same_model(ours, transformers.LlamaForCausalLM.from_pretrained(str(llama_folder)))
