"""ResumeBranch on several ranks: one start of three processes, whose findings are looked at here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import warm

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("torch")

SCRIPT = Path(__file__).with_name("branch_ranks_script.py")
BLOCKS = 3 * 2**16
"""At the ends of what a rank takes from each file."""


@pytest.fixture(scope="module")
def ranks(module_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("branch-ranks")
    env = module_hub.client_env()
    done = warm.run([SCRIPT, folder, "org/ranks"], imports="torch", ranks=3, env=env, timeout=290)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(3)]


def test_one_of_the_ranks_that_share_a_disk_writes_the_manifest(ranks: list[dict[str, Any]]) -> None:
    assert [rank["is_first_of_disk"] for rank in ranks[:2]] == [True, False]
    assert [rank["saved"] for rank in ranks[:2]] == [[1, 2], [1, 2]]
    assert [rank["unsent"] for rank in ranks[:2]] == [[], []]


def test_ranks_leave_together_since_one_of_them_may_keep_what_the_others_look_into(ranks: list[dict[str, Any]]) -> None:
    assert [rank["left together"] for rank in ranks[:2]] == [True, True]


@pytest.mark.parametrize("world", [1, 3])
def test_a_state_comes_from_the_branch_to_another_number_of_ranks_and_each_reads_its_share(
    ranks: list[dict[str, Any]], world: int
) -> None:
    for rank in ranks[:world]:
        assert rank[f"on {world}"] == 2
        assert 0 < rank[f"read on {world}"] <= rank[f"held on {world}"] + BLOCKS


def test_ranks_with_disks_of_their_own_take_from_the_branch_what_those_lack(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks[:2]):
        assert rank["owns its disk"]
        assert rank["on its disk"] == ["manifest.j", f"rank-0000{number}"]
        assert rank["after the loss of a disk"] == 1


def test_what_fails_on_one_rank_is_raised_on_all_with_the_rank(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["refused"] == ranks[1]["refused"]
    assert ranks[0]["refused"].startswith("FormatError: rank 1: bad: an object cannot be stored")
    assert all("step 1 was not saved: " in rank["failed"] for rank in ranks[:2])


def test_a_save_is_skipped_on_all_ranks_where_one_is_busy(ranks: list[dict[str, Any]]) -> None:
    assert [rank["skipped"] for rank in ranks[:2]] == [True, True]
    assert ranks[0]["steps of a busy run"] == [1, 3]


def test_a_save_is_planned_anew_on_all_ranks_only_where_the_layout_of_one_has_changed(
    ranks: list[dict[str, Any]],
) -> None:
    assert all(rank["planned once"] and rank["planned anew"] for rank in ranks[:2])


def test_a_flipped_byte_that_one_rank_finds_leads_all_to_the_older_step(ranks: list[dict[str, Any]]) -> None:
    assert [rank["flipped"] for rank in ranks[:2]] == [1, 1]
    assert [rank["removed"] for rank in ranks[:2]] == [[2], [2]]


def test_ranks_that_hold_other_layers_or_plain_shares_of_them_are_refused_before_anything_is_saved(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks[:2]:
        lacks = "lacks layer0.bias, layer0.weight of the first rank and has layer1.bias, layer1.weight"
        assert rank["other layers"].startswith(f"FormatError: rank 1: model: it {lacks}, which that lacks")
        assert rank["other shares"].startswith("FormatError: rank 1: model.layer.bias: a plain tensor that differs")
        assert rank["saved of unlike"] == [1]


def test_ranks_that_are_no_team_save_and_restore_a_state_each(ranks: list[dict[str, Any]]) -> None:
    assert [rank["restored apart"] for rank in ranks[:2]] == [10, 11]
