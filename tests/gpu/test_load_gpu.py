"""Loading onto a CUDA device: right, by page-locked memory, and with little memory of the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hubshard.lazy import load_into, offload, open_checkpoint
from hubshard.lazy.placing import TensorTarget
from hubshard.lazy.reading import FileReader, execute
from hubshard.lazy.staging import PinnedStaging

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
nn = torch.nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


class Net(nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 1024)
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.relu(block(x)) + x
        return x


@pytest.fixture
def net() -> Any:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def folder(net: Any, tmp_path: Path) -> Path:
    state = net.state_dict()
    names = list(state)
    weight_map: dict[str, str] = {}
    for number in range(2):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        safetensors_torch.save_file({name: state[name] for name in names[number::2]}, tmp_path / file)
        weight_map |= dict.fromkeys(names[number::2], file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float64"])
@pytest.mark.parametrize("start", ["meta", "cpu", "cuda"])
def test_a_module_is_loaded_onto_the_device(net: Any, folder: Path, start: str, dtype: str | None) -> None:
    with torch.device(start):
        module = Net()
    for _ in range(3):
        load_into(module, folder, device_map="cuda", dtype=dtype)
        for name, tensor in module.state_dict().items():
            assert tensor.is_cuda, name
            assert torch.equal(tensor.cpu(), net.state_dict()[name].to(tensor.dtype)), name


def test_boxes_of_any_cut_arrive_through_pinned_memory(net: Any, folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        reader = checkpoint.reader
        assert isinstance(reader, FileReader)
        device = torch.device("cuda", torch.cuda.current_device())
        staging = PinnedStaging(device, 2**20)
        pinned = FileReader(reader.store, reader.at, reader.manifest, reader.policy, staging)
        spec = checkpoint.specs["embed.weight"]
        for box in list(spec.box.blocks(bits=spec.bits, max_bytes=777 * 4096))[:9]:
            target = torch.empty(box.shape, device=device, dtype=torch.float16)
            execute(pinned.jobs({spec.name: box}, {spec.name: TensorTarget(target, spec, box)}), reader.policy)
            staging.finish()
            part = net.embed.weight[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
            assert torch.equal(target.cpu(), part.half())


def test_layers_stream_onto_the_device_within_the_budget(net: Any, folder: Path) -> None:
    tokens = torch.arange(64, device="cuda")
    wanted = net.cuda()(tokens)
    module = Net().eval()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    budget = 5000 * 1024 * 4 + 2 * 1024 * 1025 * 4
    with torch.inference_mode(), offload(module, folder, budget=budget, device="cuda") as offloaded:
        for _ in range(3):
            assert torch.equal(module(tokens), wanted)
        assert offloaded.peak_bytes <= budget
        assert torch.cuda.max_memory_allocated() - before <= budget + 32 * 2**20
