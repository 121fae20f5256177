"""Run by torchrun on 2 ranks: TrainState under DDP, tensor parallelism and FSDP2; writes what was found."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpointing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hubshard import FormatError, TrainState
from hubshard.dcp import HubReader, HubWriter, LoadPlanner, SavePlanner
from hubshard.steps.places import LocalPlace
from hubshard.steps.step import Step

dcp: Any = checkpointing  # its types do not name what it exports
OUT = Path(sys.argv[1])


def save(state: TrainState, name: str, step: int = 1) -> Step:
    dcp.save(state.state_dict(), storage_writer=HubWriter(None, step=step, local_dir=OUT / name), planner=SavePlanner())
    return LocalPlace(OUT / name).open(step).step


def load(state: TrainState, name: str, step: int = 1) -> None:
    wanted = state.prepare_load(LocalPlace(OUT / name).open(step).step)
    dcp.load(wanted, storage_reader=HubReader(None, step=step, local_dir=OUT / name), planner=LoadPlanner())
    state.load_state_dict(wanted)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """A copy of all tensors, whole."""
    found: dict[str, torch.Tensor] = dict(model.state_dict())
    for number, values in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": value for key, value in values.items() if isinstance(value, torch.Tensor)}
    return {
        name: (held.full_tensor() if isinstance(held, DTensor) else held).detach().clone()
        for name, held in found.items()
    }


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def goes_on(make: Callable[[int], tuple[Any, Any]], name: str) -> Step:
    """Save, train on; build it anew, load, train on: the same on each rank."""
    model, optimizer = make(1)
    torch.manual_seed(50 + dist.get_rank())
    train(model, optimizer, 2)
    saved = save(TrainState(model=model, optimizer=optimizer), name)
    train(model, optimizer, 3)
    other, its_optimizer = make(2)
    load(TrainState(model=other, optimizer=its_optimizer), name)
    train(other, its_optimizer, 3)
    assert_same(tensors_of(other, its_optimizer), tensors_of(model, optimizer))
    return saved


def plain(seed: int, *, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    middle: nn.Module = nn.BatchNorm1d(8) if norm else nn.Dropout(0.3)
    return nn.Sequential(nn.Linear(10, 8), middle, nn.ReLU(), nn.Linear(8, 5))


def data_parallel(found: dict[str, Any]) -> None:
    def make(seed: int) -> tuple[Any, Any]:
        model = DistributedDataParallel(plain(seed, norm=True))
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    found["ddp"] = sorted(goes_on(make, "ddp").tensors)


def tensor_parallel(found: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def make(seed: int) -> tuple[Any, Any]:
        model = plain(seed)[::3]  # no dropout
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    torch.manual_seed(0)
    found["tp"] = len(goes_on(make, "tp").pieces("optimizer.state.0.weight.momentum_buffer"))


class Factored(torch.optim.Optimizer):
    """Keeps a mean for each row, which has not the shape of the parameter, and is a DTensor as it is."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                square = param.grad.square().reshape(param.shape[0], -1).mean(1)
                row = self.state[param].setdefault("row", torch.zeros_like(square))
                row.mul_(0.9).add_(square)
                param.sub_(param.grad * group["lr"] * row.full_tensor().sum())  # in one order, however it lies
        return closure


def sharded(found: dict[str, Any]) -> None:
    for kind in (torch.optim.AdamW, torch.optim.Adagrad, Factored):

        def make(seed: int, kind: Any = kind) -> tuple[Any, Any]:
            model = plain(seed)
            fully_shard(model[0])
            fully_shard(model, reshard_after_forward=False)
            return model, kind(model.parameters(), lr=0.01)

        goes_on(make, f"fsdp-{kind.__name__}")
        found[f"fsdp {kind.__name__}"] = True


class OwnShare(torch.optim.Optimizer):
    """Keeps plain tensors of a rank's share."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["moment"] = torch.zeros_like(param.to_local())
        return closure


def refused(found: dict[str, Any]) -> None:
    def why(call: Callable[[], Any]) -> str:
        try:
            call()
        except FormatError as error:
            return str(error)
        raise AssertionError("it was not refused")

    model = plain(1)
    fully_shard(model)
    optimizer = OwnShare(model.parameters())
    optimizer.step()
    found["own share"] = why(TrainState(model=model, optimizer=optimizer).state_dict)
    flat = FullyShardedDataParallel(plain(1), device_id=torch.device("cpu"))
    found["fsdp1"] = why(lambda: TrainState(model=flat))


class Mine:
    """What each rank has of its own."""

    per_rank = True

    def __init__(self, value: int) -> None:
        self.value = value
        self.window = torch.full((value + 1,), float(value))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "window": self.window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.window = state["value"], state["window"]


def by_rank(found: dict[str, Any]) -> None:
    rank = dist.get_rank()
    mine, draws = Mine(10 * rank + 1), []
    state = TrainState(model=plain(1), data=mine, best=rank)
    torch.manual_seed(rank)
    save(state, "mine")
    draws.append(torch.rand(()).item())
    state = TrainState(model=plain(2), data=(other := Mine(0)), best=None)
    load(state, "mine")
    draws.append(torch.rand(()).item())
    assert (other.value, state.extras["best"]) == (10 * rank + 1, 0)
    assert torch.equal(other.window, mine.window)
    assert draws[0] == draws[1]
    found["draw"] = draws[0]


def main() -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    try:
        for check in (data_parallel, tensor_parallel, sharded, refused, by_rank):
            check(found)
    except BaseException:
        traceback.print_exc()
        raise
    (OUT / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
