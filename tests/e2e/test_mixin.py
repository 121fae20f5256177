from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hubshard.errors import FormatError

if TYPE_CHECKING:
    from tests.conftest import Hub

torch = pytest.importorskip("torch")

from hubshard.integrations.mixin import ShardedHubMixin  # noqa: E402  # after the check for torch


class Net(torch.nn.Module, ShardedHubMixin):  # type: ignore[misc,name-defined]
    def __init__(self, width: int, *, depth: int = 2, tied: bool = False, **rest: Any) -> None:
        super().__init__()
        self.rest = rest
        self.embed = torch.nn.Embedding(100, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        self.head = torch.nn.Linear(width, 100, bias=False)
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_module_comes_back_with_its_arguments_and_weights(tmp_path: Path, tied: bool) -> None:
    net = Net(64, depth=3, tied=tied, colour="blue")
    net.save_pretrained(tmp_path / "net", max_shard_size="30KB")
    assert (tmp_path / "net" / "model.safetensors.index.json").exists()
    back = Net.from_pretrained(tmp_path / "net")
    assert len(back.layers) == 3
    assert back.rest == {"colour": "blue"}
    assert not back.training
    assert (back.head.weight is back.embed.weight) == tied
    assert torch.equal(back.scale, net.scale)
    for name, tensor in net.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_saving_again_leaves_no_shard_of_before_and_all_other_files(tmp_path: Path) -> None:
    Net(64).save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "notes.txt").write_text("mine")
    net = Net(64)
    net.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "notes.txt",
    ]
    assert torch.equal(Net.from_pretrained(tmp_path).embed.weight, net.embed.weight)


def test_a_dtype_is_cast_when_it_is_saved_and_when_it_is_loaded(tmp_path: Path) -> None:
    net = Net(64)
    net.save_pretrained(tmp_path, dtype="bfloat16", variant="bf16")
    stored = Net.from_pretrained(tmp_path, variant="bf16")
    assert torch.equal(stored.embed.weight, net.embed.weight.bfloat16())
    assert Net.from_pretrained(tmp_path, variant="bf16", dtype=torch.float32).embed.weight.dtype == torch.float32


def test_an_argument_that_is_no_json_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="colour"):
        Net(64, colour=object()).save_pretrained(tmp_path / "net")
    assert not (tmp_path / "net").exists()


def test_arguments_go_before_the_config(tmp_path: Path) -> None:
    Net(64, depth=2).save_pretrained(tmp_path)
    with pytest.raises(FormatError, match=r"layers\.2\.weight"):
        Net.from_pretrained(tmp_path, depth=3)
    assert len(Net.from_pretrained(tmp_path, depth=3, strict=False).layers) == 3


def test_what_huggingface_hubs_mixin_wrote_is_read_and_the_other_way_round(tmp_path: Path) -> None:
    from huggingface_hub import PyTorchModelHubMixin

    class Other(torch.nn.Module, PyTorchModelHubMixin):  # type: ignore[misc,name-defined]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(100, width)

    class Ours(torch.nn.Module, ShardedHubMixin):  # type: ignore[misc,name-defined]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(100, width)

    other = Other(width=16)
    other.save_pretrained(tmp_path / "other")
    ours = Ours.from_pretrained(tmp_path / "other")
    assert torch.equal(ours.embed.weight, other.embed.weight)
    ours.save_pretrained(tmp_path / "ours")
    assert torch.equal(Other.from_pretrained(tmp_path / "ours").embed.weight, other.embed.weight)


def test_a_module_goes_to_the_hub_and_comes_back(hub: Hub, tmp_path: Path) -> None:
    code = """
    import json, sys, torch
    from hubshard.integrations.mixin import ShardedHubMixin
    class Net(torch.nn.Module, ShardedHubMixin):
        def __init__(self, width, depth=2):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
    net = Net(64, depth=5)
    published = net.push_to_hub("user/net", max_shard_size="40KB")
    back = Net.from_pretrained("user/net")
    equal = all(torch.equal(t, back.state_dict()[name]) for name, t in net.state_dict().items())
    print(json.dumps([published.shards, equal, len(back.layers)]))
    """
    shards, equal, depth = json.loads(hub.client(code, home=tmp_path).splitlines()[-1])
    assert shards > 1
    assert equal
    assert depth == 5
