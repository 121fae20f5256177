"""Tensors that are pages of files: whoever writes to one changes nobody else's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hubshard.lazy import load_into, offload, open_checkpoint
from hubshard.plan import plan_shards
from hubshard.shardfile import stream_shard
from hubshard.sources.state_dict import StateDictSource

torch = pytest.importorskip("torch")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of three layers, none of which ends with a page."""
    torch.manual_seed(0)
    source = StateDictSource(model().state_dict())
    (shard,) = plan_shards(source.specs(), max_shard_bytes=10**9).shards
    (tmp_path / shard.path).write_bytes(b"".join(map(bytes, stream_shard(shard, source, max_read_bytes=2**20))))
    return tmp_path


def model(device: str = "cpu") -> Any:
    with torch.device(device):
        return torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(3)))


def values(module: Any) -> list[Any]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def is_same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_two_modules_from_one_open_checkpoint_share_no_memory(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        one, other = model("meta"), model("meta")
        assert load_into(one, checkpoint).bytes_mapped > 0
        assert load_into(other, checkpoint).bytes_mapped > 0
        before = values(other)
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.zero_()
        assert is_same(values(other), before)
        assert torch.equal(checkpoint["0.weight"][:], before[0])


def test_what_is_written_to_a_tensor_is_not_read_again(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        first = checkpoint["1.weight"][:]
        kept = first.clone()
        first.zero_()
        again = checkpoint["1.weight"][:]
        assert torch.equal(again, kept)
        again.fill_(1)
        assert not first.any()
        assert torch.equal(checkpoint["1.weight"][...], kept)


def test_two_parameters_of_one_stored_tensor_have_pages_of_their_own(folder: Path) -> None:
    with torch.device("meta"):
        pair = torch.nn.ModuleDict({"a": torch.nn.Linear(50, 50, bias=False), "b": torch.nn.Linear(50, 50, bias=False)})
    with open_checkpoint(folder) as checkpoint:
        load_into(pair["a"], checkpoint, prefix="0.", strict=False)
        load_into(pair["b"], checkpoint, prefix="0.", strict=False)
        kept = pair["b"].weight.detach().clone()
        with torch.no_grad():
            pair["a"].weight.zero_()
        assert torch.equal(pair["b"].weight, kept)
        assert kept.any()


def test_a_module_that_is_trained_is_not_reset_by_one_that_is_offloaded_to_the_same_checkpoint(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        policy, reference = model("meta"), model("meta")
        load_into(policy, checkpoint)
        expected = values(policy)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1)
        changed = values(policy)
        with offload(reference, checkpoint, budget="40kB"), torch.inference_mode():
            for _ in range(3):
                out = reference(torch.ones(50))
        assert is_same(values(policy), changed)
        for number in (0, 2, 4):
            assert not torch.equal(changed[number], expected[number])
        assert out.isfinite().all()


def test_a_tensor_that_was_given_under_a_further_name_is_not_shared_with_a_module(tmp_path: Path) -> None:
    source = StateDictSource({"weight": torch.ones(50, 50)})
    (shard,) = plan_shards(source.specs(), max_shard_bytes=10**9, aliases={"head": "weight"}).shards
    (tmp_path / shard.path).write_bytes(b"".join(map(bytes, stream_shard(shard, source, max_read_bytes=2**20))))
    with open_checkpoint(tmp_path) as checkpoint:
        head, weight = checkpoint["head"][:], checkpoint["weight"][:]
        assert head.data_ptr() == weight.data_ptr()
        module = torch.nn.Linear(50, 50, bias=False, device="meta")
        load_into(module, checkpoint)
        head.zero_()
        assert module.weight.all()
        assert not weight.any()
        assert checkpoint["head"][:].all()


def test_reading_a_tensor_over_and_over_holds_no_more_than_one_mapping_of_its_file(folder: Path) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no list of mappings here")
    with open_checkpoint(folder) as checkpoint:
        for _ in range(50):
            checkpoint["2.weight"][:]
            checkpoint["1.weight"][:]
        assert maps.read_text().count(str(folder)) <= 2
