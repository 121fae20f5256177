from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import warm
from tests.old_torch import tensor_parallel

if TYPE_CHECKING:
    from tests.conftest import Hub

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

COUNTED = """
import json, sys
import torch, transformers
import torch.distributed as dist
from pathlib import Path
from hubshard.lazy import Checkpoint, from_pretrained, load_into, open_checkpoint
from hubshard.lazy.reading import LOCAL, REMOTE
from hubshard.store.hub import HubStore
from hubshard.store.local import LocalStore

class CountingStore:
    def __init__(self, inner):
        self.inner, self.reads = inner, []
    def head(self, branch):
        return self.inner.head(branch)
    def list(self, at):
        return self.inner.list(at)
    def read(self, at, path, start, stop, into):
        self.reads.append(stop - start)
        self.inner.read(at, path, start, stop, into)

folder, repo, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
store = CountingStore(HubStore(repo) if repo else LocalStore(folder))
checkpoint = Checkpoint.of_store(store, store.head("main"), policy=REMOTE if repo else LOCAL)
store.reads.clear()

def report(**found):
    (out / f"rank{rank}.out").write_text(json.dumps(found | {"bytes": sum(store.reads)}))
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path, max_shard_size="10MB")
    return path


UPLOAD = """
import sys
from huggingface_hub import HfApi
api = HfApi()
api.create_repo(sys.argv[2])
api.upload_folder(repo_id=sys.argv[2], folder_path=sys.argv[1])
"""


@dataclass(frozen=True)
class Place:
    """Where the ranks read the model."""

    folder: Path
    repo: str
    env: Mapping[str, str]


@pytest.fixture(scope="module", params=["disk", "hub"])
def place(request: pytest.FixtureRequest, folder: Path) -> Place:
    if request.param == "disk":
        return Place(folder, "", os.environ)
    hub: Hub = request.getfixturevalue("module_hub")
    hub.client(UPLOAD, folder, "user/llama")
    return Place(folder, "user/llama", hub.client_env())


def on_ranks(world: int, place: Place, code: str, tmp_path: Path) -> list[Any]:
    script = tmp_path / "rank.py"
    script.write_text(COUNTED + textwrap.dedent(code))
    argv = [script, place.folder, place.repo, tmp_path]
    env = {**place.env, "OMP_NUM_THREADS": "1"}
    done = warm.run(argv, imports="torch", ranks=world, env=env, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((tmp_path / f"rank{rank}.out").read_text()) for rank in range(world)]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_rank_reads_only_its_rows_of_distributed_parameters(place: Place, tmp_path: Path, world: int) -> None:
    code = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (world,))
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    share = 0
    for owner in module.modules():
        for name, p in list(owner.named_parameters(recurse=False)):
            placements = [Shard(0) if p.ndim == 2 else Replicate()]
            setattr(owner, name, torch.nn.Parameter(distribute_tensor(p.data, mesh, placements)))
            share += p.nbytes // (world if p.ndim == 2 else 1)
    told = load_into(module, checkpoint)
    whole = open_checkpoint(folder)
    for name, p in module.named_parameters():
        assert isinstance(p, DTensor), name
        assert torch.equal(p.full_tensor(), whole[name][...]), name
    report(share=share, told=told.bytes_read)
    """
    for found in on_ranks(world, place, code, tmp_path):
        assert found["share"] <= found["bytes"] <= 1.02 * found["share"]
        assert found["told"] == found["bytes"]


@tensor_parallel
@pytest.mark.parametrize("world", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_each_rank_of_a_tensor_parallel_model_reads_its_part(place: Place, tmp_path: Path, world: int) -> None:
    code = """
    from transformers.distributed import DistributedConfig
    model = from_pretrained(checkpoint, distributed_config=DistributedConfig(tp_plan="auto"))
    nbytes = sum(store.reads)
    whole = open_checkpoint(folder)
    bound = exact = 0
    for name, p in model.named_parameters():
        held = p.to_local() if hasattr(p, "to_local") else p
        exact += held.nbytes
        rows = held.shape[0] < p.shape[0] or held.shape == p.shape
        bound += held.nbytes if rows else p.nbytes
        full = p.full_tensor() if hasattr(p, "full_tensor") else p
        assert torch.equal(full, whole[name][...]), name
    logits = model(torch.arange(8).reshape(1, 8)).logits
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    report(read=nbytes, bound=bound, exact=exact, all=checkpoint.nbytes, logits=logits[0, -1, :16].tolist())
    """
    model = transformers.LlamaForCausalLM.from_pretrained(place.folder)
    with torch.no_grad():
        wanted = model(torch.arange(8).reshape(1, 8)).logits[0, -1, :16]
    for found in on_ranks(world, place, code, tmp_path):
        small_files = 64 * 1024
        assert found["exact"] < found["all"]
        assert found["exact"] <= found["read"] <= 1.02 * found["bound"] + small_files
        assert torch.allclose(torch.tensor(found["logits"]), wanted, atol=1e-4)


def test_each_stage_of_a_pipeline_reads_its_layers(place: Place, tmp_path: Path) -> None:
    code = """
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    layer = module.model.layers[rank]
    told = load_into(layer, checkpoint, prefix=f"model.layers.{rank}.")
    whole = open_checkpoint(folder)
    for name, p in layer.named_parameters():
        assert torch.equal(p, whole[f"model.layers.{rank}.{name}"][...]), name
    report(share=sum(p.nbytes for p in layer.parameters()))
    """
    for found in on_ranks(2, place, code, tmp_path):
        assert found["share"] <= found["bytes"] <= 1.02 * found["share"]


@pytest.mark.slow
def test_parts_of_parts_are_read_where_data_and_tensor_parallelism_meet(place: Place, tmp_path: Path) -> None:
    code = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        layer = transformers.LlamaForCausalLM(config).model.layers[0]
    plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    parallelize_module(layer, mesh["model"], plan)
    fully_shard(layer, mesh=mesh["data"])
    kinds = {type(placement).__name__ for p in layer.parameters() for placement in p.placements}
    load_into(layer, checkpoint, prefix="model.layers.0.")
    whole = open_checkpoint(folder)
    for name, p in layer.named_parameters():
        assert torch.equal(p.full_tensor(), whole["model.layers.0." + name][...]), name
    report(kinds=sorted(kinds), all=sum(p.nbytes for p in layer.parameters()))
    """
    for found in on_ranks(4, place, code, tmp_path):
        assert "_StridedShard" in found["kinds"]
        assert found["bytes"] <= found["all"]
