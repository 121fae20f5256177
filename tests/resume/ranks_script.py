"""Run by torchrun on 4 ranks: saves on 1, 2, 3 and 4 of them, loads on others, and writes what each rank found.

Groups of ranks stand for worlds of their own, so that one start of processes serves for all of them.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hubshard.dcp import HubReader, HubWriter, LoadPlanner, SavePlanner

dcp: Any = checkpointing  # its types do not name what it exports
OUT = Path(sys.argv[1])
MOVES = [(1, 2), (2, 1), (3, 2), (2, 4), (4, 3), (1, 4), (4, 4)]
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def full_tensors() -> dict[str, tuple[torch.Tensor, int | None]]:
    """Each tensor, and the dimension that it is cut along; None for a replica."""
    generator = torch.Generator().manual_seed(11)
    bits = torch.randint(0, 256, (13, 6), dtype=torch.uint8, generator=generator)
    return {
        "odd": (torch.randn(13, 7, generator=generator), 0),
        "columns": (torch.randn(5, 11, generator=generator), 1),
        "narrow": (torch.randn(2, 3, generator=generator), 0),
        "bf16": (torch.randn(9, 2, 3, generator=generator).bfloat16(), 1),
        "fp8": (bits.view(torch.float8_e4m3fn), 0),
        "uint8": (bits, 1),
        "int64": (torch.arange(2**40, 2**40 + 10), 0),
        "bool": (bits[:, 0] > 100, 0),
        "scalar": (torch.tensor(3.25), None),
        "empty": (torch.empty(0, 4), 0),
        "replica": (torch.randn(6, 5, generator=generator), None),
        "large": (torch.randn(512, 2048, generator=generator), 0),
    }


def local_part(full: torch.Tensor, dim: int | None, rank: int, world: int) -> torch.Tensor:
    if dim is None:
        return full
    chunks = full.chunk(world, dim)
    return chunks[rank].contiguous() if rank < len(chunks) else full.narrow(dim, 0, 0).contiguous()


def state_of(mesh: DeviceMesh, *, zero: bool) -> dict[str, Any]:
    rank, world = mesh.get_local_rank(), mesh.size()
    tensors: dict[str, Any] = {}
    for name, (full, dim) in full_tensors().items():
        local = local_part(full, dim, rank, world)
        if zero:
            local = torch.zeros(local.shape, dtype=local.dtype)
        placement = Replicate() if dim is None else Shard(dim)
        tensors[name] = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=full.shape, stride=full.stride()
        )
    plain = torch.zeros(3, 3) if zero else torch.arange(9.0).reshape(3, 3)
    per_rank = {f"rank{r}": {"seed": 0 if zero else 2**70 + r} for r in range(world if not zero else 0)}
    return {"tensors": tensors, "plain": plain, "epoch": 0 if zero else 7, "rng": per_rank}


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return not one.numel() or torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def check_loaded(mesh: DeviceMesh, state: dict[str, Any]) -> int:
    """Assert that the state is right; bytes that this rank holds."""
    rank, world = mesh.get_local_rank(), mesh.size()
    held = 0
    for name, (full, dim) in full_tensors().items():
        local = state["tensors"][name].to_local()
        assert is_same(local, local_part(full, dim, rank, world)), name
        held += local.nbytes
    assert is_same(state["plain"], torch.arange(9.0).reshape(3, 3))
    assert state["epoch"] == 7
    return held + 36


def move(saver: DeviceMesh, loader: DeviceMesh, found: dict[str, Any]) -> None:
    name, folder = f"{saver.size()} to {loader.size()}", OUT / f"saved-on-{saver.size()}"
    if saver.get_coordinate() is not None and not (folder / "done").exists():
        writer = HubWriter(None, step=1, local_dir=folder, max_file_size="3MB")
        state = state_of(saver, zero=False)
        dcp.save(state, storage_writer=writer, planner=SavePlanner(), process_group=saver.get_group())
    dist.barrier()
    (folder / "done").touch()
    if loader.get_coordinate() is not None:
        reader = HubReader(None, local_dir=folder)
        state = state_of(loader, zero=True)
        dcp.load(state, storage_reader=reader, planner=LoadPlanner(), process_group=loader.get_group())
        found[name] = {"held": check_loaded(loader, state), "read": reader.nbytes_read}
    dist.barrier()


def model_on(mesh: DeviceMesh, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model under FSDP2 that has taken a step of AdamW."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 5))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    model(torch.randn(4, 9)).sum().backward()
    optimizer.step()
    return model, optimizer


def fsdp(saver: DeviceMesh, loader: DeviceMesh, found: dict[str, Any]) -> None:
    """Without any planner, asynchronously, through the state dict helpers."""
    folder = OUT / f"fsdp-{saver.size()}"
    background = dist.new_group(list(range(saver.size())), backend="gloo")  # training goes on in the other meanwhile
    if saver.get_coordinate() is not None:
        model, optimizer = model_on(saver, 1)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        future: Any = dcp.async_save(
            {"model": model_state, "optim": optimizer_state},
            storage_writer=HubWriter(None, step=3, local_dir=folder),
            process_group=background,
        )
        expected = get_state_dict(model, optimizer, options=FULL)
        future.result()
        if saver.get_local_rank() == 0:
            torch.save(expected, folder / "expected.pt")
    dist.barrier()
    if loader.get_coordinate() is not None:
        model, optimizer = model_on(loader, 2)
        state: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, storage_reader=HubReader(None, local_dir=folder), process_group=loader.get_group())
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        now = get_state_dict(model, optimizer, options=FULL)
        if loader.get_local_rank() == 0:
            expected = torch.load(folder / "expected.pt", weights_only=True)
            assert_same(now, expected)
            found[f"fsdp {saver.size()} to {loader.size()}"] = True
    dist.barrier()


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert is_same(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other
        assert type(one) is type(other)


def cut_both_ways(grid: DeviceMesh, inner: int, outer: int) -> torch.nn.Module:
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(10, inner), torch.nn.ReLU(), torch.nn.Linear(inner, outer))
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), OUT / "tp.pt")
    parallelize_module(model, grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=grid["dp"])
    return model


def tensor_parallel() -> None:
    """A tensor-parallel and sharded model on a grid of 2 by 2, saved for a model on one rank."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    try:
        model = cut_both_ways(grid, 6, 3)
    except NotImplementedError:  # torch 2.6 cuts a dimension twice only into equal parts
        model = cut_both_ways(grid, 8, 4)
    dcp.save({"model": model.state_dict()}, storage_writer=HubWriter(None, step=9, local_dir=OUT / "tp"))


def data_parallel(found: dict[str, Any]) -> None:
    """Under DDP every rank holds all of it, and each tensor is stored once."""
    torch.manual_seed(6)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 40))
    writer = HubWriter(None, step=2, local_dir=OUT / "ddp")
    dcp.save({"model": model.state_dict()}, storage_writer=writer)
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}}
    dcp.load(state, storage_reader=HubReader(None, local_dir=OUT / "ddp"))
    assert_same(state["model"], dict(model.state_dict()))
    if writer.saved is not None:
        found["stored"] = sum(file.nbytes - file.data_start for file in writer.saved.files)
        found["size"] = sum(tensor.nbytes for tensor in state["model"].values())


def ranks_that_disagree(found: dict[str, Any]) -> None:
    """Two ranks whose local folders hold different steps: refused, and nothing is loaded."""
    folders = [OUT / "own-disk-0", OUT / "own-disk-1"]
    for number, folder in enumerate(folders):
        dcp.save({"w": torch.ones(3)}, storage_writer=HubWriter(None, step=10 + number, local_dir=folder))
    state = {"w": torch.zeros(3)}
    try:
        dcp.load(state, storage_reader=HubReader(None, local_dir=folders[dist.get_rank() % 2]))
    except dcp.api.CheckpointException as error:
        found["disagreement"] = str(error)
    assert not state["w"].any()


def main() -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    try:
        meshes = {world: DeviceMesh("cpu", torch.arange(world)) for world in (1, 2, 3, 4)}
        for saver, loader in MOVES:
            move(meshes[saver], meshes[loader], found)
        fsdp(meshes[2], meshes[1], found)
        fsdp(meshes[3], meshes[2], found)
        fsdp(meshes[1], meshes[4], found)
        tensor_parallel()
        data_parallel(found)
        ranks_that_disagree(found)
    except BaseException:
        traceback.print_exc()
        raise
    (OUT / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
