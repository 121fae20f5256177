"""Run by torchrun: publishes models that are split over the ranks, and by rank 0 alone the same models whole."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hubshard

FOUND: dict[str, Any] = {}


class Odd(nn.Module):
    """Shapes that no number of ranks divides, tied weights, buffers, several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(12))
        self.few = nn.Parameter(torch.randn(3, 5))
        self.bf16 = nn.Parameter(torch.randn(17, 3, 2).to(torch.bfloat16))
        self.norm = nn.BatchNorm1d(24)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(24))
        self.head = nn.Linear(24, 101, bias=False)
        self.head.weight = self.embed.weight


def repo(name: str) -> str:
    return f"ranks-{dist.get_world_size()}/{name}"


def odd() -> Odd:
    torch.manual_seed(7)
    return Odd()


def publish(name: str, model: Any, whole: Any, **options: Any) -> hubshard.Published:
    """Publish from all ranks to NAME, and what it should be equal to from rank 0 alone to NAME-whole."""
    options = {"max_shard_size": "4kB"} | options
    if dist.get_rank() == 0:
        hubshard.push_to_hub(whole, repo(f"{name}-whole"), **(options | {"process_group": False}))
    published = hubshard.push_to_hub(model, repo(name), **options)
    FOUND[name] = {
        "commit": published.commit,
        "changed": published.changed,
        "rank_bytes": published.rank_bytes,
        "total": published.total_bytes,
        "sent": published.sent_bytes,
        "shards": published.shards,
        "deleted": published.deleted,
    }
    return published


def fsdp() -> None:
    model = odd()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.mean.fill_(dist.get_rank() + 1.0)  # each rank has buffers of its own
    whole = odd()
    whole.mean.fill_(1.0)
    publish("fsdp", model, whole)
    publish("fsdp-again", model, whole)
    again = hubshard.push_to_hub(model, repo("fsdp-again"), max_shard_size="4kB")
    FOUND["unchanged"] = [again.changed, again.sent_bytes]
    publish("fsdp-cast", model, whole, dtype="bfloat16")
    publish("fsdp-state", get_model_state_dict(model), whole.state_dict())
    publish("fsdp-tagged", model, whole, tag="v1", variant="fp32", message="From all ranks")
    dry = hubshard.push_to_hub(model, repo("dry"), dry_run=True)
    FOUND["dry"] = [dry.commit, dry.total_bytes]
    asked = hubshard.push_to_hub(model, repo("fsdp"), create_pr=True, max_shard_size="7kB")
    FOUND["asked"] = asked.pr_url


def even() -> None:
    model = layers(43, 32)
    fully_shard(model)
    with torch.no_grad():  # leaves parameters whole
        model(torch.zeros(2, 32))
    publish("even", model, layers(43, 32), max_shard_size="5kB")


def hybrid() -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = odd()
    fully_shard(model, mesh=mesh)
    publish("hybrid", model, odd())


def placements() -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    torch.manual_seed(3)
    whole = {
        "rows": torch.randn(13, 7),
        "columns": torch.randn(7, 13),
        "both": torch.randn(9, 11, 3),
        "twice": torch.randn(11, 4),
        "replica": torch.randn(50),
        "scalar": torch.tensor(3.5),
        "ints": torch.arange(77).reshape(11, 7),
        "bytes": torch.arange(60, dtype=torch.uint8).reshape(6, 10),
        "flags": torch.arange(14).reshape(7, 2) % 3 == 0,
        "small": torch.randn(8, 8).to(torch.float8_e4m3fn),
        "none": torch.zeros(0, 4),
        "large": torch.randn(1500, 1501),
        "plain": torch.randn(6, 6),
    }
    where = {
        "rows": (Shard(0), Replicate()),
        "columns": (Replicate(), Shard(1)),
        "both": (Shard(1), Shard(0)),
        "twice": (Shard(0), Shard(0)),
        "large": (Shard(1), Shard(0)),
    }
    default = (Replicate(), Replicate())
    split: dict[str, torch.Tensor] = {
        name: distribute_tensor(tensor, mesh, where.get(name, default))
        for name, tensor in whole.items()
        if name not in {"plain", "small"}
    }
    split["plain"] = whole["plain"]
    split["small"] = distribute_tensor(whole["small"].view(torch.uint8), mesh, (Shard(0), Shard(1)))
    publish("placements", split, whole | {"small": whole["small"].view(torch.uint8)}, max_shard_size="2kB")


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = odd()
    plan: dict[str, Any] = {f"layers.{n}": ColwiseParallel() if n % 2 else RowwiseParallel() for n in range(12)}
    parallelize_module(model, mesh, plan)
    publish("tensor-parallel", model, odd())


def two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "model"))
    model = odd()
    plan: dict[str, Any] = {f"layers.{n}": ColwiseParallel() if n % 2 else RowwiseParallel() for n in range(12)}
    parallelize_module(model, mesh["model"], plan)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"])
    parts: list[Any] = [part for layer in model.layers for part in layer.parameters()]
    kinds = {type(placement).__name__ for part in parts for placement in part.placements}
    FOUND["kinds"] = sorted(kinds)
    # what is outside of the layers stays a plain tensor on every rank
    publish("two-dimensions", model, odd())
    replicated = odd()
    parallelize_module(replicated, mesh["model"], plan)  # by the other dimension of the mesh there are but replicas
    publish("submesh", replicated, odd())


def transformers_models() -> None:
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(1)
    common: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, tie_word_embeddings=True))
    experts = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**common, num_local_experts=4, num_experts_per_tok=2)
    )
    for name, whole in (("llama", llama), ("experts", experts)):
        model = type(whole)(whole.config)
        model.load_state_dict(whole.state_dict())
        model.tie_weights()
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        publish(name, model, whole, max_shard_size="20kB")
        publish(f"{name}-cast", model, whole, max_shard_size="20kB", dtype="bfloat16")


def other_libraries() -> None:
    """Models of diffusers, and adapters of peft: the files are those of one process, configs included."""
    small: Any = importlib.import_module("tests.e2e.small_pipelines")
    model, whole = small.unet(), small.unet()
    fully_shard(model)
    publish("unet", model, whole, max_shard_size="300kB")
    model, whole = (small.lora(small.llama(), "default", "style") for _ in range(2))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    publish("lora", model, whole)


def transformers_tensor_parallel() -> None:
    transformers: Any = importlib.import_module("transformers")
    split: Any = importlib.import_module("transformers.distributed").DistributedConfig(tp_plan="auto")
    folder = Path(sys.argv[1]) / "tensor-parallel"
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    if dist.get_rank() == 0:
        torch.manual_seed(2)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    whole = transformers.LlamaForCausalLM.from_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, distributed_config=split)
    FOUND["split"] = sorted(name for name, part in model.named_parameters() if hasattr(part, "placements"))
    publish("tensor-parallel-llama", model, whole, max_shard_size="40kB")


def replicas() -> None:
    """Each rank holds everything: all call, rank 0 alone calls, each rank publishes its own."""
    model = odd()
    if dist.get_rank():
        nn.init.zeros_(model.few)  # only rank 0's counts
    publish("replicas", nn.parallel.DistributedDataParallel(model), odd(), max_shard_size="10kB")
    if dist.get_rank() == 0:
        hubshard.push_to_hub(model, repo("alone"), max_shard_size="10kB")
    dist.barrier()
    own = hubshard.push_to_hub(
        {"a": torch.full((2,), dist.get_rank())}, repo(f"own-{dist.get_rank()}"), process_group=False
    )
    FOUND["own"] = own.changed
    FOUND["rank 1 alone"] = "" if dist.get_rank() != 1 else refused(model, repo("never"), stall_seconds=0.25)


def refused(model: Any, repo_id: str, **options: Any) -> str:
    try:
        hubshard.push_to_hub(model, repo_id, **({"max_shard_size": "4kB"} | options))
    except hubshard.HubshardError as error:
        return f"{type(error).__name__}: {error} | {error.hint}"
    except ZeroDivisionError:
        return "its own"
    return "published"


def refusals() -> None:
    """What fails on one rank ends all, and the next publish works."""
    rank = dist.get_rank()
    model = odd()
    fully_shard(model)
    FOUND["alone"] = "" if rank else refused(model, repo("refused"), stall_seconds=0.25)
    dist.barrier()
    FOUND["options"] = refused(model, repo("refused"), max_shard_size="4kB" if rank else "8kB")
    FOUND["dry on one"] = refused(model, repo("refused"), dry_run=rank == 0)
    FOUND["other hub"] = refused(model, repo("refused"), endpoint="http://127.0.0.1:9" if rank else None)
    FOUND["model"] = refused({"a": next(model.parameters())} if rank == 1 else model, repo("refused"))
    for failing in (0, 1):

        def fail(event: hubshard.Event, failing: int = failing) -> None:
            if rank == failing and event.kind == "read":
                raise ZeroDivisionError("a bad day")

        FOUND[f"fails on {failing}"] = refused(model, repo("refused"), on_event=fail)
    FOUND["at last"] = refused(model, repo("refused"))
    dist.barrier()
    partial = {"a": DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (dist.get_world_size(),)), [Partial()])}
    FOUND["partial"] = refused(partial, repo("refused"))


def some() -> None:
    """The first and the last rank publish what is split over them; they hold different numbers of groups."""
    members = [0, dist.get_world_size() - 1]
    group, mesh = dist.new_group(members), DeviceMesh("cpu", members)
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    if dist.get_rank() in members:
        split = {"a": distribute_tensor(torch.arange(9), mesh, [Shard(0)])}
        publish("some", split, {"a": torch.arange(9)}, process_group=group)


def layers(count: int, width: int) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def killed() -> None:
    """Rank 1 dies after its third shard; whoever is left must end by itself."""
    seen: list[str] = []

    def die(event: hubshard.Event) -> None:
        seen.extend([event.path] if event.kind == "staged" else [])
        if dist.get_rank() == 1 and len(seen) == 3:
            time.sleep(1)  # so that rank 0 has kept the first ones
            os.kill(os.getpid(), 9)

    model = layers(24, 96)
    fully_shard(model)
    options: dict[str, Any] = {"max_shard_size": "40kB", "staging_batch_size": 1, "stall_seconds": 5}
    FOUND["killed"] = refused(model, repo("killed"), on_event=die, **options)


def replicas_killed() -> None:
    """Rank 0 dies after its second shard, while the others, which hold the same, wait for what comes of it."""
    staged: list[str] = []

    def die(event: hubshard.Event) -> None:
        staged.extend([event.path] if event.kind == "staged" else [])
        if len(staged) == 2:
            time.sleep(2)  # so that the others wait
            os.kill(os.getpid(), 9)

    options: dict[str, Any] = {"max_shard_size": "40kB", "staging_batch_size": 1, "stall_seconds": 1000}
    FOUND["killed"] = refused(layers(24, 96), repo("replicas-killed"), on_event=die, **options)


def resumed() -> None:
    events: list[hubshard.Event] = []
    whole, model = layers(24, 96), layers(24, 96)
    fully_shard(model)
    published = hubshard.push_to_hub(model, repo("killed"), max_shard_size="40kB", on_event=events.append)
    FOUND["sent again"] = sorted(event.path for event in events if event.kind == "staged")
    FOUND["skipped"] = sorted(event.path for event in events if event.kind == "skipped")
    FOUND["bytes"] = [published.total_bytes, published.sent_bytes, published.skipped_bytes]
    if dist.get_rank() == 0:
        hubshard.push_to_hub(whole, repo("killed-whole"), max_shard_size="40kB", process_group=False)


def memory() -> None:
    """How much more memory a publish takes than the rank holds before it."""
    warm = layers(4, 64)
    fully_shard(warm)
    hubshard.push_to_hub(warm, repo("warm"), max_shard_size="20kB")
    model = layers(64, 1024)
    fully_shard(model)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    published = hubshard.push_to_hub(model, repo("memory"), max_shard_size="18MB")
    FOUND["memory"] = [published.total_bytes, resident("VmHWM") - before]
    FOUND["rank_bytes"] = published.rank_bytes


def resident(what: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(what))


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        fsdp,
        even,
        hybrid,
        placements,
        tensor_parallel,
        two_dimensions,
        transformers_models,
        other_libraries,
        transformers_tensor_parallel,
        replicas,
        refusals,
        some,
        killed,
        replicas_killed,
        resumed,
        memory,
    )
}


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        CASES[name]()
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(FOUND))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
