"""How ranks talk to each other: what travels, and connections that end, on threads with a store in memory."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hubshard import errors
from hubshard.errors import FormatError, HubshardError, NotFoundError, StoreError
from hubshard.protocols import Revision, Staged
from hubshard.ranks.telling import error_of, plain_error, told_bytes, told_value
from hubshard.steps.step import Step
from hubshard.store.patience import BusyError
from hubshard.watch import LimitError
from tests import warm
from tests.systems import KILLED
from tests.thread_ranks import job_of_one, on_ranks

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from hubshard.ranks.gloo import gloo_backend  # noqa: E402  # imports torch
from hubshard.ranks.group import Job, RankGroup  # noqa: E402  # imports torch


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 2**80, -0.0, float("inf"), "\u00e9", b"\0\xff"],
        (1, ("a", [(), {}]), frozenset({1, 2}), {3: (4,)}),
        {"told": 1},
        {"told": {"told": ["data", "os", "path", {}]}, "tuple": [1]},
        Staged("a/b", 3, "0" * 64, {"kind": "lfs", "parts": [1, 2]}, "id", 7),
        Step(5, 2, [], {}, {"epoch": 1}, {"epoch": ("values", "epoch")}),
        {"at": Revision("main", "0" * 40), "offsets": array("q", [1, -(2**40)])},
    ],
)
def test_what_ranks_tell_each_other_comes_as_it_was(value: object) -> None:
    told = told_value(told_bytes(value))
    assert told == value
    assert type(told) is type(value)


@dataclass(frozen=True)
class Foreign:
    number: int


@pytest.mark.parametrize("value", [object(), Foreign(1), {"a": [Foreign]}, b"".join])
def test_nothing_but_plain_data_and_our_own_is_told(value: object) -> None:
    with pytest.raises(FormatError, match="what is told to other ranks"):
        told_bytes(value)


def test_no_class_but_our_own_dataclasses_is_made_of_what_is_told() -> None:
    for module, name in [("subprocess", "Popen"), ("hubshard.errors", "HubshardError"), (__name__, "Foreign")]:
        with pytest.raises(FormatError, match=f"tells a {module}.{name}"):
            told_value(told_bytes({"tolD": ["data", module, name, {}]}).replace(b"tolD", b"told"))


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_stays_what_it_is(name: str) -> None:
    kind: type[HubshardError] = getattr(errors, name)
    told = error_of(plain_error(kind("it went wrong", hint="do this"), 3))
    assert type(told) is kind
    assert (told.message, told.hint) == ("rank 3: it went wrong", "do this")
    same = told_value(told_bytes([kind("it went wrong")]))[0]
    assert (type(same), str(same), same.hint) == (kind, "it went wrong", None)


def test_errors_beside_the_tree_are_told_by_the_nearest_class() -> None:
    class SpecialError(NotFoundError):
        pass

    limit = error_of(plain_error(LimitError("slow", retryable=True)))
    assert type(limit) is LimitError
    assert limit.retryable
    busy = error_of(plain_error(BusyError("later", wait_seconds=3.0)))
    assert type(busy) is StoreError
    assert busy.retryable
    assert type(error_of(plain_error(SpecialError("gone")))) is NotFoundError
    foreign = error_of(plain_error(KeyError("a"), 1))
    assert (type(foreign), foreign.message) == (StoreError, "rank 1: KeyError: 'a'")
    assert error_of(plain_error(FormatError("bad \udcff name"))).message == "bad \\udcff name"


# Connections


@pytest.fixture
def _job() -> Iterator[None]:
    with job_of_one():
        yield


@pytest.mark.usefixtures("_job")
def test_a_rank_that_nobody_meets_is_told_so() -> None:
    with pytest.raises(StoreError, match="rank 0 cannot connect to the other 1"):
        gloo_backend("alone", 0, 2, meet_seconds=0.2, limit_seconds=60)


@pytest.mark.usefixtures("_job")
def test_an_operation_may_last_longer_than_the_ranks_waited_to_meet() -> None:
    def act(rank: int) -> int:
        backend = gloo_backend("patient", rank, 2, meet_seconds=1, limit_seconds=60)
        time.sleep(1.4 * rank)
        held = torch.tensor([rank])
        backend.allreduce([held]).wait()
        return int(held)

    assert on_ranks(2, act) == [1, 1]


@pytest.mark.usefixtures("_job")
def test_ranks_ask_and_tell_and_what_fails_on_one_is_the_same_error_on_the_other() -> None:
    def act(rank: int) -> Any:
        group = RankGroup(Job(rank, (0, 1), "hubshard/test"), "call", limit_seconds=20)
        try:
            group.tell(1 - rank, "greeting", (rank, 2**70))
            heard = group.hear(1 - rank, "greeting")
            if rank == 1:
                group.give_up(NotFoundError("no such file", hint="look"))
                return heard
            assert heard == (1, 2**70)
            return group.hear(1, "more")
        finally:
            group.close()

    failed, heard = on_ranks(2, act)
    assert heard == (0, 2**70)
    assert (type(failed), failed.message, failed.hint) == (NotFoundError, "rank 1: no such file", "look")


@pytest.mark.usefixtures("_job")
def test_ranks_of_which_one_is_lost_end_without_waiting_for_it() -> None:
    def act(rank: int) -> Any:
        if rank == 1:
            gloo_backend("hubshard/test/call", 1, 3, meet_seconds=20, limit_seconds=20)  # and is gone at once
            return None
        group = RankGroup(Job(rank, (0, 1, 2), "hubshard/test"), "call", limit_seconds=20)
        try:
            if rank == 2:
                group.hear(0, "nothing")
            group.hear(1, "nothing")
        except StoreError as error:
            group.give_up(error)
            return error
        finally:
            group.close()
            assert not group._mailbox.is_alive()

    first, _, last = on_ranks(3, act)
    assert type(first) is type(last) is StoreError
    assert str(first) == str(last)
    assert str(first).startswith("rank 1 is gone, or cannot be reached")


LEFT_ALONE = """
import os, sys, time
import torch.distributed as dist
from hubshard.errors import StoreError
from hubshard.ranks.group import RankGroup, job_of
rank, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = RankGroup(job_of(None), "call", limit_seconds=600)
group.tell(1 - rank, "greeting")
group.hear(1 - rank, "greeting")
if rank == 0:
    os.kill(os.getpid(), 9)
try:
    while True:
        group.tell(0, "more")
        time.sleep(0.05)
except StoreError as error:
    print(error.message, flush=True)
    group.give_up(error)
group.close()
"""


def test_a_process_ends_at_once_where_rank_0_was_killed_and_the_store_lives_on(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    argv = [["-c", LEFT_ALONE, rank, store.port] for rank in range(2)]
    ranks = [warm.start(each, tmp_path / "log", imports="torch") for each in argv]
    assert [rank.wait(timeout=100) for rank in ranks] == [KILLED, 0]
    assert (tmp_path / "log").read_text().startswith("rank 0 is gone, or cannot be reached: ")
