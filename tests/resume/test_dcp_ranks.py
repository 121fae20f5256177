"""Saved on some ranks, loaded on others: one start of four processes, whose findings are looked at here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hubshard.steps.places import LocalPlace
from tests import warm

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from hubshard.dcp import HubReader  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*assuming the intent is:UserWarning")

SCRIPT = Path(__file__).with_name("ranks_script.py")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks left: their findings and the steps."""
    folder = tmp_path_factory.mktemp("ranks")
    done = warm.run([SCRIPT, folder], imports="torch", ranks=4, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return folder


def _found(out: Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("move", ["1 to 2", "2 to 1", "3 to 2", "2 to 4", "4 to 3", "1 to 4", "4 to 4"])
def test_a_state_moves_bit_by_bit_to_another_number_of_ranks_and_each_reads_its_share(out: Path, move: str) -> None:
    found = [rank[move] for rank in _found(out) if move in rank]
    assert len(found) == int(move[-1])
    blocks = 3 * 2**16  # at the ends of what it takes from each file
    for rank in found:
        assert 0 < rank["read"] <= rank["held"] + blocks


def test_model_and_optimizer_under_fsdp_move_through_async_save_and_the_state_dict_helpers(out: Path) -> None:
    for move in ("fsdp 2 to 1", "fsdp 3 to 2", "fsdp 1 to 4"):
        assert _found(out)[0][move] is True


def test_a_tensor_parallel_and_sharded_model_is_loaded_by_one_rank(out: Path) -> None:
    expected = torch.load(out / "tp.pt", weights_only=True)
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected.items()}}
    dcp.load(state, storage_reader=HubReader(None, local_dir=out / "tp"))
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in expected.items())


def test_replicas_are_stored_once(out: Path) -> None:
    found = _found(out)[0]
    assert found["stored"] == found["size"] == 4 * (50 * 40 + 40)
    step = LocalPlace(out / "saved-on-3").open(1).step
    assert step.world_size == 3
    assert len(step.pieces("tensors.replica")) == 1
    assert len(step.pieces("tensors.odd")) == 3
    assert sum(file.nbytes - file.data_start for file in step.files) == sum(
        placement.spec.nbytes for placement in step.tensors.values()
    )


def test_ranks_that_find_different_steps_are_told(out: Path) -> None:
    for found in _found(out):
        assert "different steps: step 1" in found["disagreement"]


def test_what_differs_from_rank_to_rank_is_kept_by_its_key(out: Path) -> None:
    scalars = LocalPlace(out / "saved-on-3").open(1).step.scalars
    assert [scalars[f"rng.rank{rank}.seed"] for rank in range(3)] == [2**70, 2**70 + 1, 2**70 + 2]


def test_a_step_that_lacks_the_file_of_one_rank_is_refused(out: Path, tmp_path: Path) -> None:
    shutil.copytree(out / "saved-on-3", tmp_path / "steps")
    (gone,) = (tmp_path / "steps").glob("step-*/rank-00001-00001-*")
    gone.unlink()
    state = {"tensors": {"odd": torch.zeros(13, 7)}}
    with pytest.raises(CheckpointException, match=f"missing: {gone.name}"):
        dcp.load(state, storage_reader=HubReader(None, local_dir=tmp_path / "steps"))
    assert not state["tensors"]["odd"].any()


def test_files_of_a_larger_world_in_the_same_folder_change_nothing(out: Path, tmp_path: Path) -> None:
    shutil.copytree(out / "saved-on-2", tmp_path / "steps")
    folder = tmp_path / "steps" / "step-00000001"
    strangers = [shutil.copy(path, folder) for path in (out / "saved-on-4").glob("step-*/rank-*")]
    expected, state = ({"tensors": {"odd": torch.zeros(13, 7), "large": torch.zeros(512, 2048)}} for _ in range(2))
    dcp.load(expected, storage_reader=HubReader(None, local_dir=out / "saved-on-2"))
    reader = HubReader(None, local_dir=tmp_path / "steps")
    dcp.load(state, storage_reader=reader)
    assert reader.opened is not None
    assert set(reader.opened.ignored) == {Path(path).name for path in strangers}
    assert all(torch.equal(state["tensors"][name], expected["tensors"][name]) for name in ("odd", "large"))
    assert state["tensors"]["large"].any()
