"""TrainState with a CUDA device: its generators, fused and capturable optimizers, gradient scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hubshard.dcp import HubReader, HubWriter, LoadPlanner, SavePlanner
from hubshard.resume import TrainState
from hubshard.steps.places import LocalPlace

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
nn = torch.nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.filterwarnings("ignore:torch.distributed is .*assuming the intent is:UserWarning"),
]


def _made(seed: int, options: dict[str, Any]) -> tuple[Any, Any, Any, TrainState]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
    return model, optimizer, scaler, TrainState(model=model, optimizer=optimizer, scaler=scaler)


def _train(model: Any, optimizer: Any, scaler: Any, steps: int) -> None:
    for _ in range(steps):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(32, 64, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=["plain", "fused", "capturable"])
def test_a_run_on_a_gpu_goes_on_bit_by_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    model, optimizer, scaler, state = _made(1, options)
    _train(model, optimizer, scaler, 3)
    dcp.save(
        state.state_dict(),
        storage_writer=HubWriter(None, step=3, local_dir=tmp_path),
        planner=SavePlanner(),
    )
    _train(model, optimizer, scaler, 3)
    other, its_optimizer, its_scaler, its_state = _made(2, options)
    wanted = its_state.prepare_load(LocalPlace(tmp_path).open(3).step)
    dcp.load(wanted, storage_reader=HubReader(None, local_dir=tmp_path), planner=LoadPlanner())
    its_state.load_state_dict(wanted)
    steps = [values["step"].device for values in its_optimizer.state.values()]
    assert steps == [values["step"].device for values in optimizer.state.values()]
    _train(other, its_optimizer, its_scaler, 3)
    assert its_scaler.state_dict() == scaler.state_dict()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
