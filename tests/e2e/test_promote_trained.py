"""A run of FSDP2, on one rank and on two, whose step is promoted and loaded by plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hubshard.promotion import promote
from tests import warm
from tests.faults.models import new_repo
from tests.old_torch import fsdp2_on_cpu

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("transformers")
pytest.importorskip("starlette")

TRAIN = """
import sys
from pathlib import Path
import torch, transformers
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from hubshard.dcp import HubWriter, SavePlanner

repo, out = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(4)
config = transformers.LlamaConfig(
    vocab_size=384, hidden_size=96, intermediate_size=200, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=len(sys.argv) > 3,
)
model = transformers.LlamaForCausalLM(config)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(2):
    tokens = torch.randint(0, 384, (2, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.save(state | {"step": 2}, storage_writer=HubWriter(repo, step=2, max_file_size="300kB"), planner=SavePlanner())
full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    torch.save(full, out / "trained.pt")
    config.dtype = torch.float32
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(out)
dist.destroy_process_group()
"""

LOAD = """
import sys, torch, transformers
from pathlib import Path
expected = torch.load(Path(sys.argv[2]) / "trained.pt", weights_only=True)
model, info = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(info.values()), info
found = model.state_dict()
assert found.keys() == expected.keys()
assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
print(len(found))
"""


@fsdp2_on_cpu
@pytest.mark.parametrize(
    ("world", "options"),
    [pytest.param(1, [], marks=pytest.mark.slow), (2, []), pytest.param(2, ["tied"], marks=pytest.mark.slow)],
)
def test_a_sharded_run_is_promoted_and_loaded_by_plain_transformers_bit_by_bit(
    module_hub: Hub, tmp_path: Path, world: int, options: list[str]
) -> None:
    repo, script = new_repo(module_hub), tmp_path / "train.py"
    script.write_text(TRAIN)
    env = {**module_hub.client_env(), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    trained = warm.run([script, repo.repo_id, tmp_path, *options], imports="torch", ranks=world, env=env, timeout=280)
    assert trained.returncode == 0, trained.stdout[-2000:] + trained.stderr[-4000:]
    repo.put_files({"config.json": (tmp_path / "config.json").read_bytes()})
    done = promote(repo.repo_id, token="hf_test", endpoint=repo.url, max_shard_size="500kB")
    assert done.shards > 1
    loaded = module_hub.client(LOAD, repo.repo_id, tmp_path, home=tmp_path / "elsewhere")
    assert int(loaded.splitlines()[-1]) == 3 * 9 + 3
