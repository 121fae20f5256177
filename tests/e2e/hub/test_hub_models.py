"""Models on a Hub: what huggingface_hub and transformers do with weights and cards."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import huggingface_hub
import pytest
from huggingface_hub import (
    EvalResult,
    HfApi,
    ModelCard,
    ModelCardData,
)
from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError
from safetensors.numpy import save

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.hub.conftest import Client

np = pytest.importorskip("numpy")


@pytest.fixture
def sharded(client: Client) -> str:
    """A repo of three shards and an index."""
    repo = client.repo()
    files: dict[str, bytes | str] = {}
    weight_map: dict[str, str] = {}
    for number in range(3):
        name = f"model-{number + 1:05}-of-00003.safetensors"
        tensors = {
            f"layer.{number}.weight": np.full((8, 4), number, np.float32),
            f"layer.{number}.bias": np.ones(8, np.float16),
        }
        files[name] = save(tensors, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 3 * (8 * 4 * 4 + 8 * 2)}, "weight_map": weight_map}
    client.commit(repo, {**files, "model.safetensors.index.json": json.dumps(index)})
    return repo


@pytest.mark.skipif(
    not hasattr(HfApi, "get_sharded_safetensors_metadata"), reason="this huggingface_hub reads no such headers"
)
def test_headers_of_a_sharded_repo_are_read(client: Client, sharded: str) -> None:
    found = client.api.get_safetensors_metadata(sharded)
    assert (found.sharded, len(found.files_metadata)) == (True, 3)
    assert found.parameter_count == {"F32": 96, "F16": 24}
    tensor = found.files_metadata["model-00002-of-00003.safetensors"].tensors["layer.1.weight"]
    assert (tensor.dtype, list(tensor.shape), tensor.parameter_count) == ("F32", [8, 4], 32)
    assert found.metadata == {"total_size": 432}
    assert found.weight_map["layer.2.bias"] == "model-00003-of-00003.safetensors"
    at_once = client.api.get_sharded_safetensors_metadata(sharded)
    assert at_once.files_metadata == found.files_metadata
    assert at_once.parameter_count == found.parameter_count


def test_the_header_of_one_file_is_read_in_a_range(client: Client) -> None:
    repo = client.repo()
    many = {f"a.rather.long.name.of.tensor.{number}": np.zeros(2, np.float32) for number in range(3000)}
    client.commit(repo, {"model.safetensors": save(many), "broken.safetensors": b"\xff" * 100})
    client.hub.reset_counters()
    found = client.api.parse_safetensors_file_metadata(repo, "model.safetensors")
    assert len(found.tensors) == 3000
    assert client.hub.counters()["requests"]["resolve"] == 2
    assert client.api.get_safetensors_metadata(repo).sharded is False
    with pytest.raises(SafetensorsParsingError):
        client.api.parse_safetensors_file_metadata(repo, "broken.safetensors")
    with pytest.raises(NotASafetensorsRepoError):
        client.api.get_safetensors_metadata(client.repo())


def test_a_card_is_pushed_read_and_changed(client: Client) -> None:
    repo = client.repo()
    result = EvalResult(
        task_type="text-generation", dataset_type="d", dataset_name="D", metric_type="acc", metric_value=0.5
    )
    data = ModelCardData(license="mit", library_name="hubshard", tags=["a", "b"], model_name="M", eval_results=[result])
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n# M\n")
    client.commit(repo, {"README.md": str(card)})
    info = client.api.model_info(repo)
    assert isinstance(info.card_data, ModelCardData)
    assert (info.card_data.license, info.library_name, info.tags) == ("mit", "hubshard", ["a", "b"])
    assert info.card_data.eval_results == [result]
    again = ModelCard(client.read(repo, "README.md").decode())
    again.data["license"] = "apache-2.0"
    client.commit(repo, {"README.md": str(again)})
    changed = client.api.model_info(repo, expand=["cardData"])
    assert isinstance(changed.card_data, ModelCardData)
    assert changed.card_data.license == "apache-2.0"


TRANSFORMERS = """
    import torch
    from huggingface_hub import HfApi, ModelCard, constants, metadata_update
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    def load(repo, **options):
        return AutoModelForCausalLM.from_pretrained(repo, **options).state_dict()

    def equal(one, other):
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

    api = HfApi()
    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=128)
    for way in ("xet", "lfs"):
        constants.HF_HUB_DISABLE_XET = way == "lfs"
        repo, model = f"hubshard/llama-{way}", LlamaForCausalLM(LlamaConfig(**size))
        model.push_to_hub(repo, max_shard_size="40KB")
        assert equal(load(repo), model.state_dict())
        with torch.no_grad():
            model.model.norm.weight.fill_(2)
        model.push_to_hub(repo, create_pr=True, max_shard_size="40KB")
        assert not equal(load(repo), model.state_dict())
        assert equal(load(repo, revision="refs/pr/1"), model.state_dict())
        api.merge_pull_request(repo, 1)
        api.create_tag(repo, tag="v1")
        assert equal(load(repo, revision="v1"), model.state_dict())
        assert AutoConfig.from_pretrained(repo).hidden_size == 32
    metadata_update(repo, {"license": "mit"})
    assert ModelCard.load(repo).data.license == "mit"
"""
TORCH = """
    import torch
    from pathlib import Path
    from huggingface_hub import HfApi, PyTorchModelHubMixin, load_torch_model, save_torch_model, snapshot_download

    class Net(torch.nn.Module, PyTorchModelHubMixin, license="mit", tags=["mixed"]):
        def __init__(self, width: int = 4):
            super().__init__()
            self.linear, self.other = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    net = Net(width=64)
    net.push_to_hub("hubshard/mixin", private=True)
    back = Net.from_pretrained("hubshard/mixin")
    assert torch.equal(back.linear.weight, net.linear.weight)
    Path("up").mkdir()
    save_torch_model(net, "up", max_shard_size="20KB")
    api = HfApi()
    api.create_repo("hubshard/sharded")
    api.upload_folder(repo_id="hubshard/sharded", folder_path="up")
    load_torch_model(empty := Net(width=64), snapshot_download("hubshard/sharded"))
    assert all(torch.equal(tensor, empty.state_dict()[name]) for name, tensor in net.state_dict().items())
"""


@pytest.mark.skipif(
    huggingface_hub.__version__.startswith("2.0."), reason="huggingface_hub 2.0 lets the public Hub alone check a card"
)
def test_transformers_pushes_proposes_and_loads(client: Client, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    client.hub.client(TRANSFORMERS, home=tmp_path / "home")
    for way, other in (("xet", "lfs"), ("lfs", "xet")):
        repo = f"hubshard/llama-{way}"
        shards = [path for path in client.files(repo) if path.endswith(".safetensors")]
        assert len(shards) > 1
        assert client.large(repo, *shards) == set(shards)
        counted = client.hub.counters(f"models/{repo}")
        assert (counted[f"{way}_received"] > 0, counted[f"{other}_received"]) == (True, 0)


def test_huggingface_hub_saves_and_loads_torch_models(client: Client, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    client.hub.client(TORCH, home=tmp_path / "home", cwd=tmp_path)
    info = client.api.model_info("hubshard/mixin")
    assert info.private
    assert isinstance(info.card_data, ModelCardData)
    assert (info.card_data.license, info.library_name) == ("mit", None)
    assert client.files("hubshard/mixin") == {"README.md", "config.json", "model.safetensors"}
    assert "model.safetensors.index.json" in client.files("hubshard/sharded")
