"""TrainState in one process: everything comes back bit by bit, and what cannot is refused by its path."""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hubshard.errors import FormatError
from hubshard.steps.places import LocalPlace
from hubshard.steps.step import Step

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
np = pytest.importorskip("numpy")

from torch import nn  # noqa: E402
from torch.optim import lr_scheduler, swa_utils  # noqa: E402

from hubshard import ResumableLoader, TrainState  # noqa: E402
from hubshard.dcp import HubReader, HubWriter, LoadPlanner, SavePlanner  # noqa: E402
from hubshard.resume.data.adapters import StatefulLoader  # noqa: E402
from hubshard.resume.state import rng, tree  # noqa: E402

averaging: Any = swa_utils  # its functions have no types

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is .*assuming the intent is:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning"),
    # torch 2.6 warns of itself
    pytest.mark.filterwarnings("ignore:The epoch parameter in .scheduler.step:UserWarning"),
]


def save(state: TrainState, folder: Path, step: int = 1) -> Step:
    writer = HubWriter(None, step=step, local_dir=folder)
    dcp.save(state.state_dict(), storage_writer=writer, planner=SavePlanner())
    assert writer.saved is not None
    return writer.saved


def load(state: TrainState, folder: Path, step: int = 1) -> None:
    wanted = state.prepare_load(LocalPlace(folder).open(step).step)
    dcp.load(wanted, storage_reader=HubReader(None, step=step, local_dir=folder), planner=LoadPlanner())
    state.load_state_dict(wanted)


def bits(value: Any) -> Any:
    """A state as something that is equal only where every bit, dtype and type is."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [bits(item) for item in value]
    return type(value).__name__, repr(value)


def network(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))


def train(model: nn.Module, optimizer: Any, steps: int, *, scheduler: Any = None) -> None:
    """Steps on batches drawn from torch's generator."""
    for _ in range(steps):
        batch = torch.randn(5, 7)

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = model(batch.to(next(model.parameters()).dtype)).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        if scheduler is not None:
            scheduler.step()


class LowPrecision(torch.optim.Optimizer):  # type: ignore[misc,name-defined]
    """Keeps its moments in another dtype than the parameter, a count, and nothing for some."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["moment"] = torch.zeros(param.shape, dtype=torch.float64)
                    state["codes"] = torch.zeros(param.shape, dtype=torch.uint8)
                    state["pages"] = [torch.zeros(3, dtype=torch.int64), None]
                    state["kind"] = "plain"
                state["moment"].mul_(0.9).add_(param.grad.double())
                state["codes"] += 3
                state["pages"][0] += 1
                state["count"] = state.get("count", 0) + 1
                param.sub_((state["moment"] * group["lr"] * state["count"]).to(param.dtype))
        return closure


Make = Callable[[Any], Any]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "lr as a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "low precision": LowPrecision,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 2], ids=["into a fresh run", "into a run under way"])
def test_a_run_goes_on_bit_by_bit_with_every_optimizer(tmp_path: Path, name: str, before: int) -> None:
    def made(seed: int) -> tuple[nn.Module, Any, TrainState]:
        model = network(seed)
        optimizer = OPTIMIZERS[name](model.parameters())
        return model, optimizer, TrainState(model=model, optimizer=optimizer)

    model, optimizer, state = made(1)
    train(model, optimizer, 3)
    held = bits(optimizer.state_dict()), bits(model.state_dict())
    save(state, tmp_path)
    assert (bits(optimizer.state_dict()), bits(model.state_dict())) == held
    train(model, optimizer, 3)

    other, its_optimizer, its_state = made(2)
    train(other, its_optimizer, before)
    load(its_state, tmp_path)
    assert (bits(its_optimizer.state_dict()), bits(other.state_dict())) == held
    train(other, its_optimizer, 3)
    assert bits(other.state_dict()) == bits(model.state_dict())
    assert bits(its_optimizer.state_dict()) == bits(optimizer.state_dict())


def test_a_save_before_the_first_step_makes_no_state_and_a_restore_of_it_removes_what_there_is(tmp_path: Path) -> None:
    model = network(1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(model=model, optimizer=optimizer)
    before = bits(model.state_dict())
    save(state, tmp_path)
    assert not optimizer.state
    assert all(param.grad is None for param in model.parameters())
    train(model, optimizer, 2)
    load(state, tmp_path)
    assert not optimizer.state
    assert bits(model.state_dict()) == before


def test_parameters_in_half_precision_that_are_frozen_or_never_used_keep_what_state_they_have(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Any, Any, TrainState]:
        torch.manual_seed(seed)
        model: Any = nn.ModuleDict({"used": nn.Linear(7, 3), "idle": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
        model.bfloat16()["frozen"].requires_grad_(requires_grad=False)
        groups = [{"params": model[key].parameters(), "lr": lr} for key, lr in (("idle", 0.5), ("used", 0.1))]
        optimizer = torch.optim.Adam([*groups, {"params": list(model["frozen"].parameters())}], betas=(0.8, 0.9))
        return model, optimizer, TrainState(model=model, optimizer=optimizer)

    model, optimizer, state = made(1)
    train(model["used"], optimizer, 2)
    for values in optimizer.state.values():
        values["exp_avg"] = values["exp_avg"].double()  # as optimizers do that keep more precision
    save(state, tmp_path)
    other, its_optimizer, its_state = made(2)
    load(its_state, tmp_path)
    assert bits(its_optimizer.state_dict()) == bits(optimizer.state_dict())
    assert len(its_optimizer.state) == 2
    assert bits(other.state_dict()) == bits(model.state_dict())


def test_a_learning_rate_that_is_a_tensor_stays_the_same_object(tmp_path: Path) -> None:
    model, rate = network(1), torch.tensor(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, foreach=False)
    state = TrainState(model=model, optimizer=optimizer)
    save(state, tmp_path)
    rate.fill_(0.1)
    load(state, tmp_path)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


SCHEDULERS: dict[str, Make] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    def made(seed: int) -> tuple[nn.Module, Any, Any, TrainState]:
        model = network(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        return model, optimizer, scheduler, TrainState(model=model, optimizer=optimizer, scheduler=scheduler)

    model, optimizer, scheduler, state = made(1)
    train(model, optimizer, 3, scheduler=scheduler)
    save(state, tmp_path)
    train(model, optimizer, 5, scheduler=scheduler)
    other, its_optimizer, its_scheduler, its_state = made(2)
    load(its_state, tmp_path)
    train(other, its_optimizer, 5, scheduler=its_scheduler)
    assert its_scheduler.get_last_lr() == scheduler.get_last_lr()
    assert bits(other.state_dict()) == bits(model.state_dict())


def test_a_plateau_that_has_seen_nothing_yet_and_one_that_has_come_back(tmp_path: Path) -> None:
    model = network(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)  # its best is infinity
    state = TrainState(model=model, optimizer=optimizer, scheduler=plateau)
    save(state, tmp_path, 1)
    plateau.step(3.0)
    plateau.step(torch.tensor(4.0))
    held = bits(plateau.state_dict())
    save(state, tmp_path, 2)
    load(state, tmp_path, 1)
    assert math.isinf(plateau.best)
    load(state, tmp_path, 2)
    assert bits(plateau.state_dict()) == held


def test_a_gradient_scaler_and_averaged_weights_of_every_kind_come_back(tmp_path: Path) -> None:
    def made(seed: int, kind: str) -> tuple[Any, ...]:
        model = network(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed, growth_interval=2)
        kinds: dict[str, Callable[[], Any]] = {
            "averaged": lambda: averaging.AveragedModel(model, multi_avg_fn=averaging.get_ema_multi_avg_fn(0.9)),
            "module": lambda: copy.deepcopy(model),
            "dict": lambda: {key: value.clone() for key, value in model.state_dict().items()},
        }
        ema = kinds[kind]()
        return model, optimizer, scaler, ema, TrainState(model=model, optimizer=optimizer, scaler=scaler, ema=ema)

    for kind in ("averaged", "module", "dict"):
        model, optimizer, scaler, ema, state = made(1, kind)
        for _ in range(3):
            scaler.scale(model(torch.randn(5, 7)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if kind == "averaged":
            ema.update_parameters(model)
        save(state, tmp_path / kind)
        _, _, its_scaler, its_ema, its_state = made(5, kind)
        held_before = its_ema["0.weight"] if kind == "dict" else next(its_ema.parameters())
        load(its_state, tmp_path / kind)
        assert its_scaler.state_dict() == scaler.state_dict()
        assert scaler.get_scale() == 4.0
        averaged, its_averaged = (it if kind == "dict" else it.state_dict() for it in (ema, its_ema))
        assert bits(its_averaged) == bits(averaged)
        assert held_before is (its_ema["0.weight"] if kind == "dict" else next(its_ema.parameters()))


def test_what_is_drawn_after_a_restore_is_what_was_drawn_after_the_save(tmp_path: Path) -> None:
    def drawn() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.random(), np.random.normal(), torch.rand(()).item()]

    state = TrainState(model=network(1))
    random.seed(2**80)
    np.random.seed(7)
    drawn()  # a second normal value is kept for the next call
    save(state, tmp_path)
    expected = [drawn() for _ in range(3)]
    load(state, tmp_path)
    assert [drawn() for _ in range(3)] == expected


def test_the_state_of_the_generators_has_the_same_size_whatever_they_have_drawn() -> None:
    sizes = set()
    for seed in range(20):
        random.seed(seed)
        np.random.seed(seed)
        [random.gauss(0, 1) for _ in range(seed)]
        [np.random.normal() for _ in range(7 * seed)]
        sizes.add(rng.generators_state().numel())
    assert len(sizes) == 1


def test_the_seeds_of_a_rank_are_those_they_always_were() -> None:
    assert rng.rank_seeds(1, 2, 3) != rng.rank_seeds(1, 3, 2)
    seeds = rng.rank_seeds(5, 0, 100)
    assert (seeds.python, seeds.numpy, seeds.torch) == (759066511966568759, 3024620921, 4881054703341736974)


class Numbers:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


def test_the_data_goes_on_behind_the_last_batch_and_the_counters_come_back(tmp_path: Path) -> None:
    def made() -> tuple[ResumableLoader, TrainState]:
        loader = ResumableLoader(Numbers(), global_batch_size=4, seed=3)
        return loader, TrainState(model=network(1), data=loader)

    loader, state = made()
    batches = iter(loader)
    next(batches)
    next(batches)
    state.step, state.epoch, state.samples = 2, 0, 2**60
    save(state, tmp_path)
    rest = [batch.tolist() for batch in batches]
    its_loader, its_state = made()
    load(its_state, tmp_path)
    assert (its_state.step, its_state.epoch, its_state.samples) == (2, 0, 2**60)
    assert [batch.tolist() for batch in its_loader] == rest
    smaller = TrainState(model=network(1), data=ResumableLoader(Numbers(), global_batch_size=8))
    with pytest.raises(FormatError, match="global_batch_size is 8, but 4"):
        load(smaller, tmp_path)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_loader_of_torchdata_goes_on_by_its_adapter_which_is_not_asked_for_its_state_before(tmp_path: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    class Asked(StatefulLoader):
        count = 0

        def state_dict(self) -> dict[str, object]:
            self.count += 1
            return super().state_dict()

    def made() -> tuple[Asked, TrainState]:
        torch.manual_seed(4)
        loader = Asked(torchdata.StatefulDataLoader(Numbers(), batch_size=3, shuffle=True))
        return loader, TrainState(model=network(1), data=loader)

    loader, state = made()
    batches = iter(loader)
    next(batches)
    next(batches)
    save(state, tmp_path)
    rest = [batch.tolist() for batch in batches]
    its_loader, its_state = made()
    load(its_state, tmp_path)
    assert (loader.count, its_loader.count) == (1, 0)
    assert [batch.tolist() for batch in its_loader] == rest
    bare = torchdata.StatefulDataLoader(Numbers(), batch_size=3, shuffle=True)
    load(TrainState(model=network(1), data=bare), tmp_path)  # which is given its adapter
    assert [batch.tolist() for batch in bare] == rest


class Counter:
    """Stateful; each rank has one of its own if told so."""

    def __init__(self, count: int, *, per_rank: bool = False) -> None:
        self.count = count
        self.window = torch.full((3,), float(count))
        self.per_rank = per_rank

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "window": self.window, "by_key": {(1, "a"): [self.window * 2, b"x"]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        assert state["window"] is self.window
        assert bits(state["by_key"]) == bits({(1, "a"): [self.window * 2, b"x"]})


def test_extras_of_every_kind_come_back_those_that_can_in_place(tmp_path: Path) -> None:
    def made(seed: int) -> dict[str, Any]:
        return {
            "best": math.inf if seed == 1 else 0.5,
            "name": "a" * seed,
            "history": [1.5, {"n": 2**70 + seed}, (seed, None, b"\x00")],
            "seen": {"ids": {seed, 7}, 3: torch.full((seed, 2), seed), "nested": {"deep": [torch.tensor(seed)]}},
            "quantiles": torch.arange(4) * seed,
            "meter": Counter(seed),
            "own": Counter(seed, per_rank=True),
            "teacher": nn.Linear(2, 2),
            "marked": {"$tensor": "no tensor", "x": [{"$tensor": "neither"}, {"$tensor": torch.ones(2)}]},
        }

    extras, others = made(1), made(2)
    save(TrainState(model=network(1), **extras), tmp_path)
    state = TrainState(model=network(1), **others)
    kept = {name: others[name] for name in ("history", "seen", "quantiles", "meter", "teacher")}
    kept["deep"] = others["seen"]["nested"]["deep"][0]
    load(state, tmp_path)
    assert state.extras["best"] == math.inf
    for name in ("name", "history", "seen", "quantiles", "marked"):
        assert bits(state.extras[name]) == bits(extras[name]), name
    for name in ("meter", "own"):
        assert bits(state.extras[name].state_dict()) == bits(extras[name].state_dict())
    assert bits(others["teacher"].state_dict()) == bits(extras["teacher"].state_dict())
    assert all(state.extras[name] is kept[name] for name in kept if name != "deep")
    assert state.extras["seen"]["nested"]["deep"][0] is kept["deep"]


def test_several_optimizers_and_schedulers_come_back_each_as_itself(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.ModuleDict, dict[str, Any], list[Any], TrainState]:
        model = nn.ModuleDict({"generator": network(seed), "critic": network(seed + 1)})
        optimizers = {name: torch.optim.Adam(part.parameters(), lr=0.01) for name, part in model.items()}
        schedulers = [lr_scheduler.ExponentialLR(one, 0.5) for one in optimizers.values()]
        return model, optimizers, schedulers, TrainState(model=model, optimizer=optimizers, scheduler=schedulers)

    model, optimizers, schedulers, state = made(1)
    train(model["generator"], optimizers["generator"], 2, scheduler=schedulers[0])
    train(model["critic"], optimizers["critic"], 1)
    saved = save(state, tmp_path)
    other, its_optimizers, its_schedulers, its_state = made(5)
    load(its_state, tmp_path)
    assert bits(other.state_dict()) == bits(model.state_dict())
    for name in optimizers:
        assert bits(its_optimizers[name].state_dict()) == bits(optimizers[name].state_dict())
    assert [one.state_dict() for one in its_schedulers] == [one.state_dict() for one in schedulers]
    assert "optimizer.critic.state.critic.0.weight.exp_avg" in saved.tensors
    with pytest.raises(FormatError, match=r"optimizer: 'a\.b' names one of several"):
        TrainState(model=model, optimizer={"a.b": optimizers["critic"]})


def test_compiled_and_checkpointed_modules_have_the_names_of_plain_ones(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def made(seed: int, *, wrapped: bool) -> tuple[nn.Module, Any, TrainState]:
        inner = network(seed)
        model: Any = inner
        if wrapped:
            inner[0] = checkpoint_wrapper(inner[0])
            model = torch.compile(inner, backend="eager")
        optimizer = torch.optim.AdamW(model.parameters())
        train(inner, optimizer, 1)
        return inner, optimizer, TrainState(model=model, optimizer=optimizer)

    plain, optimizer, state = made(1, wrapped=False)
    names = set(save(state, tmp_path, 1).tensors)
    wrapped, its_optimizer, its_state = made(2, wrapped=True)
    assert set(save(its_state, tmp_path, 2).tensors) == names
    load(its_state, tmp_path, 1)
    assert [bits(held) for held in wrapped.state_dict().values()] == [
        bits(held) for held in plain.state_dict().values()
    ]
    assert bits(its_optimizer.state_dict()) == bits(optimizer.state_dict())


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.register_buffer("scale", torch.ones(2))
        if tied:
            self.head.weight = self.embed.weight


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    optimizer, its_optimizer = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    model.head(model.embed(torch.tensor([1]))).sum().backward()
    optimizer.step()
    saved = save(TrainState(model=model, optimizer=optimizer), tmp_path)
    assert {name for name in saved.tensors if name.startswith("model.")} == {"model.embed.weight", "model.scale"}
    load(TrainState(model=other, optimizer=its_optimizer), tmp_path)
    assert other.head.weight is other.embed.weight
    assert bits(other.state_dict()) == bits(model.state_dict())
    assert bits(its_optimizer.state_dict()) == bits(optimizer.state_dict())
    untied = Tied(tied=False)
    before = bits(untied.state_dict())
    with pytest.raises(FormatError, match=r"the step has the tied weights .*head.weight.* this run \{\}"):
        load(TrainState(model=untied), tmp_path)
    assert bits(untied.state_dict()) == before


class Remembering(nn.Linear):
    memory: Any = None

    def get_extra_state(self) -> Any:
        return self.memory

    def set_extra_state(self, state: Any) -> None:
        self.memory = state


def test_what_modules_keep_beside_their_tensors_comes_back_and_is_no_tensor_of_the_model(tmp_path: Path) -> None:
    model, other = Remembering(2, 2), Remembering(2, 2)
    model.memory = {"amax": torch.arange(3), "recipe": ("delayed", 1.5)}
    state = TrainState(model=nn.Sequential(model))
    saved = save(state, tmp_path)
    assert {name for name in saved.tensors if name.startswith("model.")} == {"model.0.weight", "model.0.bias"}
    load(TrainState(model=nn.Sequential(other)), tmp_path)
    assert bits(other.memory) == bits(model.memory)


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"meter": {"fn": [print]}}, r"extras\.meter\.fn\[0\]: .* cannot be stored"),
        ({"array": {"x": np.arange(3)}}, r"extras\.array\.x: a numpy\.ndarray cannot be stored"),
        ({"tensors": {torch.ones(1)}}, r"extras\.tensors.*cannot be stored"),
        ({"odd": object()}, r"extras\.odd: an object cannot be stored"),
        (
            {"it": [torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)]},
            r"extras\.it\.0: a nested tensor cannot be stored",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_path_before_anything_is_written(
    tmp_path: Path, extras: dict[str, Any], message: str
) -> None:
    state = TrainState(model=network(1), **extras)
    with pytest.raises(FormatError, match=message):
        save(state, tmp_path)
    assert not list(tmp_path.iterdir())


def test_state_of_an_optimizer_a_scheduler_or_data_that_cannot_be_stored_is_refused_by_its_path(tmp_path: Path) -> None:
    model = network(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[3].bias]["hook"] = print
    scheduler: Any = lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(FormatError, match=r"optimizer\.state\.3\.bias\.hook: .* cannot be stored"):
        save(TrainState(model=model, optimizer=optimizer), tmp_path)
    scheduler.gamma = object()
    with pytest.raises(FormatError, match=r"scheduler\.gamma: an object cannot be stored"):
        save(TrainState(model=model, scheduler=scheduler), tmp_path)
    with pytest.raises(FormatError, match=r"data: list_iterator has no state_dict\(\)"):
        TrainState(model=model, data=iter([1]))
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(FormatError, match="holds 1 parameter not of the model"):
        save(TrainState(model=model, optimizer=stranger), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_step_that_does_not_fit_is_refused_by_what_differs_and_nothing_is_changed(tmp_path: Path) -> None:
    model = network(1)
    save(TrainState(model=model, optimizer=torch.optim.Adam(model.parameters()), best=1), tmp_path)

    def refused(other: nn.Module, message: str, **parts: Any) -> None:
        before = bits(other.state_dict())
        with pytest.raises(FormatError, match=message):
            load(TrainState(model=other, **parts), tmp_path)
        assert bits(other.state_dict()) == before

    refused(nn.Sequential(*network(2), nn.Linear(3, 1)), r"model: the step does not hold '4\.bias', '4\.weight'")
    refused(network(2)[:3], r"model: this run does not have '3\.bias', '3\.weight'")
    wider = network(2)
    wider[0] = nn.Linear(8, 6)
    refused(wider, r"model: '0\.weight' is torch\.float32 of shape \(6, 8\), and was saved as .* shape \(6, 7\)")
    refused(network(2).double(), r"model: .* is torch\.float64")
    with torch.device("meta"):
        hollow = network(2)
    with pytest.raises(FormatError, match=r"model: '0\.weight' is on the meta device"):
        load(TrainState(model=hollow), tmp_path)
    other = network(2)
    refused(other, "ema: the step does not hold it; it holds extras.best, model, optimizer", ema={})
    halves = [list(other.parameters())[:2], list(other.parameters())[2:]]
    groups = torch.optim.Adam([{"params": half} for half in halves])
    refused(other, r"its groups hold other parameters.*\[6\] and \[2, 4\]", optimizer=groups)


def test_parts_of_another_kind_or_on_other_data_are_refused_before_anything_is_touched(tmp_path: Path) -> None:
    def made(seed: int, **changes: Any) -> tuple[nn.Module, TrainState]:
        model = network(seed)
        options = {"samples": 40, "optimizer": torch.optim.AdamW, "scheduler": lr_scheduler.StepLR, "scaler": False}
        options |= changes
        optimizer = options["optimizer"](model.parameters(), lr=0.1)
        state = TrainState(
            model=model,
            optimizer=optimizer,
            scheduler=options["scheduler"](optimizer, 3),
            scaler=torch.amp.GradScaler("cpu", enabled=options["scaler"]),
            data=ResumableLoader(range(options["samples"]), global_batch_size=4),
        )
        return model, state

    save(made(1)[1], tmp_path)
    for changes, message in [
        ({"optimizer": torch.optim.Adam}, "optimizer: it is Adam, and the step was saved from AdamW"),
        (
            {"scheduler": lr_scheduler.CosineAnnealingLR},
            "scheduler: it is a CosineAnnealingLR, and the step was saved from one without T_max, eta_min",
        ),
        ({"scaler": True}, "scaler: it is enabled, and was not when the step was saved"),
        ({"samples": 44}, "data: the number of samples of the dataset is 44, but 40 in the saved state"),
    ]:
        model, state = made(2, **changes)
        before = bits(model.state_dict())
        with pytest.raises(FormatError, match=message):
            load(state, tmp_path)
        assert bits(model.state_dict()) == before
    load(made(2)[1], tmp_path)


def test_a_part_that_takes_its_state_badly_says_that_the_rest_is_overwritten(tmp_path: Path) -> None:
    class Picky(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError(max(state))

    save(TrainState(model=network(1), picky=Counter(1)), tmp_path)
    with pytest.raises(FormatError, match=r"extras\.picky: it does not take .*KeyError: 'window'; the state is partly"):
        load(TrainState(model=network(2), picky=Picky(2)), tmp_path)


def test_what_the_step_holds_beyond_the_state_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = network(1)
    save(TrainState(model=model, optimizer=torch.optim.Adam(model.parameters()), best=1), tmp_path)
    with caplog.at_level(logging.WARNING, "hubshard"):
        load(TrainState(model=network(2)), tmp_path)
    assert "step 1 also holds what is not restored: extras.best, optimizer" in caplog.text


def test_a_state_that_was_not_prepared_is_refused_and_says_what_to_do() -> None:
    model = network(1)
    optimizer = torch.optim.Adam(model.parameters())
    state = TrainState(model=model, optimizer=optimizer)
    train(model, optimizer, 1)
    taken = state.state_dict()
    with pytest.raises(FormatError, match="lacks model, optimizer, progress") as caught:
        state.load_state_dict({"model": taken["model"]})
    assert caught.value.hint is not None
    assert "prepare_load" in caught.value.hint
    del taken["optimizer"]["state.0.bias.exp_avg"]
    with pytest.raises(FormatError, match=r"optimizer: .* lacks the tensor 'state\.0\.bias\.exp_avg'"):
        state.load_state_dict(taken)


def test_a_step_that_was_saved_from_something_else_is_refused(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(2)}}, storage_writer=HubWriter(None, step=1, local_dir=tmp_path))
    with pytest.raises(FormatError, match="step 1 was not saved from a TrainState"):
        load(TrainState(model=network(1)), tmp_path)


def test_trees_come_apart_and_together_whatever_their_keys_are() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    state = {"a.b": one, "a": {"b": two, 1: (three, {"1": three})}, "$tensor": 1}
    value, tensors = tree.split(state, path="it")
    assert len(tensors) == 4
    assert set(tree.tensor_names(value)) == set(tensors)
    joined = tree.join(value, tensors, path="it")
    assert bits(joined) == bits(state)
    assert joined["a.b"] is one
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(FormatError, match="it: nested deeper"):
        tree.split(deep, path="it")
