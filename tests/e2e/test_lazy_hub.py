from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hubshard.hubserver import Settings

if TYPE_CHECKING:
    from tests.conftest import Hub, StartHub

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

UPLOAD = """
import sys
from huggingface_hub import HfApi
api = HfApi()
api.create_repo(sys.argv[2])
api.upload_folder(repo_id=sys.argv[2], folder_path=sys.argv[1])
"""
MEBI = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.top_k, model.generation_config.do_sample = 17, True
    model.save_pretrained(path, max_shard_size="8MB")
    return path


@pytest.fixture(scope="module")
def repo(module_hub: Hub, folder: Path) -> str:
    module_hub.client(UPLOAD, folder, "user/llama")
    return "user/llama"


def weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def sent(hub: Hub) -> int:
    counts = hub.counters("models/user/llama")
    return int(counts["resolve_sent"] + counts["xet_sent"])


def counted(hub: Hub, home: Path, code: str, *arguments: str | Path) -> tuple[Any, int]:
    """What the code printed as JSON, and the bytes that the Hub sent for it."""
    before = sent(hub)
    found = json.loads(hub.client(code, *arguments, home=home).splitlines()[-1])
    return found, sent(hub) - before


def test_opening_moves_the_index_and_the_headers(module_hub: Hub, repo: str, folder: Path, tmp_path: Path) -> None:
    code = """
    import json, sys
    from hubshard.lazy import open_checkpoint
    with open_checkpoint(sys.argv[1]) as checkpoint:
        print(json.dumps({name: lazy.get_shape() for name, lazy in checkpoint.items()}))
    """
    shapes, nbytes = counted(module_hub, tmp_path, code, f"hf://{repo}@main")
    assert shapes["lm_head.weight"] == [2048, 512]
    assert len(shapes) == 3 * 9 + 3
    shards = len(list(folder.glob("*.safetensors")))
    assert nbytes <= (folder / "model.safetensors.index.json").stat().st_size + shards * 16 * 1024


def test_rows_of_a_remote_tensor_cost_their_bytes(module_hub: Hub, repo: str, folder: Path, tmp_path: Path) -> None:
    code = """
    import json, sys, torch
    from hubshard.lazy import open_checkpoint
    with open_checkpoint(sys.argv[1]) as remote, open_checkpoint(sys.argv[2]) as local:
        rows = remote["model.embed_tokens.weight"][512:1536]
        print(json.dumps([torch.equal(rows, local["model.embed_tokens.weight"][512:1536]), rows.nbytes]))
    """
    (equal, nbytes), moved = counted(module_hub, tmp_path, code, repo, folder)
    assert equal
    shards = len(list(folder.glob("*.safetensors")))
    small = (folder / "model.safetensors.index.json").stat().st_size + shards * 16 * 1024
    assert nbytes <= moved <= 1.02 * nbytes + small


def test_one_layer_of_a_remote_model_costs_its_size(module_hub: Hub, repo: str, folder: Path, tmp_path: Path) -> None:
    code = """
    import json, sys, torch, transformers
    from hubshard.lazy import load_into, open_checkpoint
    with torch.device("meta"):
        layer = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(sys.argv[2])).model.layers[1]
    report = load_into(layer, sys.argv[1], prefix="model.layers.1.")
    local = open_checkpoint(sys.argv[2])
    equal = all(torch.equal(p, local["model.layers.1." + name][...]) for name, p in layer.named_parameters())
    print(json.dumps([equal, sum(p.nbytes for p in layer.parameters()), report.bytes_read]))
    """
    (equal, nbytes, told), moved = counted(module_hub, tmp_path, code, repo, folder)
    assert equal
    shards = len(list(folder.glob("*.safetensors")))
    small = (folder / "model.safetensors.index.json").stat().st_size + shards * 16 * 1024
    assert nbytes <= told <= 1.02 * nbytes
    assert moved <= told + small


LOAD = """
import json, sys, torch, transformers
from pathlib import Path
import hubshard.lazy
from huggingface_hub import constants
def state(model):
    generation = model.generation_config.to_dict()
    config = model.config.to_dict()
    return [model.name_or_path, model.config.name_or_path, type(model).__name__, str(model.dtype), generation, config]
ours = hubshard.lazy.from_pretrained(sys.argv[1])
cached = sum(f.stat().st_size for f in Path(constants.HF_HUB_CACHE).rglob("*") if f.is_file())
theirs = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1])
equal = all(torch.equal(t, theirs.state_dict()[name]) for name, t in ours.state_dict().items())
print(json.dumps([equal, state(ours) == state(theirs), cached, state(ours)[0]]))
"""


def test_a_remote_model_equals_that_of_transformers_and_leaves_no_files(
    module_hub: Hub, repo: str, tmp_path: Path
) -> None:
    (equal, same, cached, name), _ = counted(module_hub, tmp_path, LOAD, repo)
    assert equal
    assert same
    assert cached == 0
    assert name == repo


def test_a_headless_remote_model_does_not_fetch_the_head(
    module_hub: Hub, repo: str, folder: Path, tmp_path: Path
) -> None:
    code = """
    import json, sys, transformers, hubshard.lazy
    model = hubshard.lazy.from_pretrained(sys.argv[1], model_class=transformers.LlamaModel)
    print(json.dumps(sum(p.nbytes for p in model.parameters())))
    """
    nbytes, moved = counted(module_hub, tmp_path, code, repo)
    assert nbytes < weights(folder) - 2048 * 512 * 4 + MEBI
    assert moved <= 1.02 * nbytes + MEBI // 4


def test_a_model_in_the_cache_is_not_fetched_again_and_opens_without_a_network(
    module_hub: Hub, repo: str, tmp_path: Path
) -> None:
    fetch = "import sys, huggingface_hub; huggingface_hub.snapshot_download(sys.argv[1])"
    module_hub.client(fetch, repo, home=tmp_path)
    code = """
    import json, sys, hubshard.lazy
    checkpoint = hubshard.lazy.open_checkpoint(sys.argv[1])
    model = hubshard.lazy.from_pretrained(sys.argv[1])
    print(json.dumps([str(checkpoint.root), model.name_or_path]))
    """
    (root, name), moved = counted(module_hub, tmp_path, code, repo)
    assert root.startswith(str(tmp_path))
    assert name == repo
    assert moved == 0
    offline = module_hub.client(code, repo, home=tmp_path, env={"HF_HUB_OFFLINE": "1"})
    assert json.loads(offline.splitlines()[-1]) == [root, name]


def test_a_cached_model_is_not_shown_to_those_whom_the_hub_refuses(start_hub: StartHub, tmp_path: Path) -> None:
    hub = start_hub(Settings(tokens={"hf_owner": "org", "hf_left": "guest:read"}))
    code = """
    import sys, hubshard
    from hubshard.errors import HubshardError
    told = []
    try:
        with hubshard.open_checkpoint("org/secret", endpoint=sys.argv[1], on_event=told.append) as checkpoint:
            print(len(checkpoint), [event.kind for event in told if event.kind != "retry"])
    except HubshardError as error:
        print(type(error).__name__)
    """
    make = """
    import sys, numpy, hubshard
    from safetensors.numpy import save_file
    save_file({"a": numpy.ones(2, numpy.float32)}, sys.argv[1] + "/model.safetensors")
    open(sys.argv[1] + "/config.json", "w").write("{}")
    hubshard.push_to_hub(sys.argv[1], "org/secret", private=True)
    hubshard.pull("org/secret")
    """
    (tmp_path / "model").mkdir()
    home = tmp_path / "home"
    hub.client(make, str(tmp_path / "model"), home=home, token="hf_owner")
    assert hub.client(code, hub.url, home=home, token="hf_owner").split() == ["1", "[]"]
    assert hub.client(code, hub.url, home=home, token="hf_left").strip() == "NotFoundError"
    assert hub.client(code, hub.url, home=home, token="hf_wrong").strip() in {"NotFoundError", "StoreError"}
    offline = hub.client(code, hub.url, home=home, token="hf_owner", env={"HF_HUB_OFFLINE": "1"})
    assert offline.split() == ["1", "['warning']"]


def test_half_a_model_in_the_cache_is_not_used(module_hub: Hub, repo: str, tmp_path: Path) -> None:
    fetch = """
    import sys, huggingface_hub
    huggingface_hub.snapshot_download(sys.argv[1], allow_patterns=["*.json", "model-00001-*"])
    """
    module_hub.client(fetch, repo, home=tmp_path)
    code = """
    import json, sys, hubshard.lazy
    print(json.dumps(str(hubshard.lazy.open_checkpoint(sys.argv[1]).root)))
    """
    root, _ = counted(module_hub, tmp_path, code, repo)
    assert root == "None"


@pytest.mark.parametrize("source", ["user/nothing", "user/llama@no-such-branch"])
def test_what_the_hub_does_not_have_is_not_found(module_hub: Hub, repo: str, tmp_path: Path, source: str) -> None:
    code = """
    import sys, hubshard.lazy
    from hubshard.errors import NotFoundError
    try:
        hubshard.lazy.open_checkpoint(sys.argv[1])
    except NotFoundError as error:
        print(error)
    """
    assert source.partition("@")[2] or source in module_hub.client(code, source, home=tmp_path)
