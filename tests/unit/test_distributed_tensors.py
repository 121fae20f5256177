"""A model that is split over a mesh of this process alone, which needs nobody else to be published."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
fsdp = pytest.importorskip("torch.distributed.fsdp")

from hubshard.errors import FormatError  # noqa: E402
from hubshard.publish.outgoing import Layout, Outgoing, from_memory  # noqa: E402
from hubshard.publish.sharing import sharing  # noqa: E402
from hubshard.sources.distributed import Alone, DistributedTensors, is_distributed  # noqa: E402
from tests.thread_ranks import job_of_one  # noqa: E402


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    with job_of_one():
        yield


def model() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))


def content(outgoing: Outgoing) -> dict[str, bytes]:
    return {file.path: b"".join(bytes(buffer) for buffer in file.data()) for file in outgoing.all_files}


@pytest.mark.parametrize("dtype", [None, "F16"])
def test_a_model_on_a_mesh_of_one_rank_gives_the_same_files(dtype: str | None) -> None:
    split = fsdp.fully_shard(model())
    layout = Layout(300, dtype=dtype)
    with sharing(split, None, stall_seconds=1) as (together, whole):
        assert together is None
        assert content(from_memory(split, layout, whole=whole)) == content(from_memory(model(), layout))
    with sharing(model(), None, stall_seconds=1) as (together, whole):
        assert together is None
        assert whole is None


def test_without_its_other_ranks_a_distributed_model_is_refused_by_name() -> None:
    with sharing(fsdp.fully_shard(model()), False, stall_seconds=1) as found:
        assert found == (None, None)
    with pytest.raises(FormatError, match=r"'0\.weight'.* is distributed"):
        from_memory(fsdp.fully_shard(model()), Layout(300))


class WithOther(Alone):
    """Rank 0 of two, which has heard from the other one."""

    size = 2

    def __init__(self, state: dict[str, Any], empty: list[int]) -> None:
        super().__init__()
        tensors = [[name, str(value.dtype), list(value.shape)] for name, value in state.items()]
        self._heard = {"tensors": {"tensors": tensors, "ties": {"groups": [], "empty": empty}}}

    def hear(self, rank: int, kind: str) -> Any:
        assert rank == 1
        return self._heard[kind]


def test_what_one_rank_ties_and_another_does_not_is_refused() -> None:
    shared = torch.ones(3)
    state = {"a": shared, "b": shared, "c": torch.ones(3)}
    with pytest.raises(FormatError, match="'a' and 'b' are one tensor on some ranks, and two on rank 1"):
        DistributedTensors(WithOther(state, []), range(2)).whole(state)


def test_what_is_tied_on_the_ranks_that_hold_some_of_it_is_tied() -> None:
    shared = torch.ones(3)
    state = {"a": shared, "b": shared, "c": torch.ones(3)}
    whole = DistributedTensors(WithOther(state, [0, 1]), range(2)).whole(state)
    assert whole["a"] is whole["b"]
    assert whole["c"] is not whole["a"]


def test_only_distributed_tensors_count() -> None:
    assert is_distributed(fsdp.fully_shard(model()))
    assert is_distributed(fsdp.fully_shard(model()).state_dict())
    assert not is_distributed(model())
    assert not is_distributed({"a": torch.ones(1), "b": 3})
    assert not is_distributed("a/folder")
