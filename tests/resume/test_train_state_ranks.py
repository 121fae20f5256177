"""TrainState on two ranks: one start of processes, whose findings are looked at here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hubshard.errors import FormatError
from hubshard.steps.places import LocalPlace
from tests import warm

torch = pytest.importorskip("torch")

from hubshard import TrainState  # noqa: E402

SCRIPT = Path(__file__).with_name("state_ranks_script.py")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks left."""
    folder = tmp_path_factory.mktemp("state-ranks")
    done = warm.run([SCRIPT, folder], imports="torch", ranks=2, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return folder


def _found(out: Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_under_ddp_it_goes_on_bit_by_bit_and_the_names_are_those_of_the_plain_model(out: Path) -> None:
    names = _found(out)[0]["ddp"]
    assert "model.0.weight" in names
    assert "optimizer.state.3.bias.exp_avg_sq" in names
    assert not any("module" in name for name in names)


def test_tensor_parallel_and_sharded_runs_go_on_bit_by_bit(out: Path) -> None:
    for found in _found(out):
        assert found["tp"] == 2
        assert found["fsdp AdamW"]
        assert found["fsdp Adagrad"]
        assert found["fsdp Factored"]


def test_state_that_is_a_ranks_own_without_saying_so_and_flat_parameters_are_refused(out: Path) -> None:
    for found in _found(out):
        assert (
            "optimizer.state.0.weight.moment: it is a plain tensor of the size of this rank's share"
            in (found["own share"])
        )
        assert "model: it is wrapped in FullyShardedDataParallel" in found["fsdp1"]


def test_each_rank_gets_back_its_own_generators_and_its_own_data(out: Path) -> None:
    draws = [found["draw"] for found in _found(out)]
    assert draws[0] != draws[1]


def test_data_of_each_rank_is_refused_on_another_number_of_ranks(out: Path) -> None:
    step = LocalPlace(out / "mine").open(1).step
    model = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.Dropout(), torch.nn.ReLU(), torch.nn.Linear(8, 5))

    class Mine:
        per_rank = True

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError(state)

    with pytest.raises(FormatError, match="data: it was saved on 2 ranks, each of which had its own"):
        TrainState(model=model, data=Mine(), best=None).prepare_load(step)
    assert set(TrainState(model=model, best=None).prepare_load(step)) == {"values", "model"}
