"""The order of the data: every sample once, the same for everybody, and nothing lost where it is interrupted."""

from __future__ import annotations

import json
from itertools import chain, islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubshard import FormatError
from hubshard.resume.data.data_order import (
    FEISTEL,
    SEQUENTIAL,
    Cursor,
    DataOrder,
    MicroBatch,
    Share,
    sample_seeds,
    worker_seeds,
)
from hubshard.resume.data.permutation import permuted
from hubshard.resume.data.sampler import ResumableSampler
from hubshard.resume.ranks import reading_ranks

GOLDEN_10 = [1, 5, 2, 8, 7, 9, 4, 0, 6, 3]
GOLDEN_1000 = [728, 663, 805, 371, 583, 202, 830, 525, 941, 853]
GOLDEN_HUGE = [564262102230, 720936324357, 475225855964, 994863053109]
GOLDEN_SEEDS = [
    (17353804988349492744, 1386594873, 604654658036982604),
    (14704046619117853498, 2558342136, 313226101485642540),
    (8082069380948964511, 3621546755, 713468948851937504),
]
"""Runs depend on them: they change with the id of the permutation, or with the version of the state, alone."""

SEEDS = st.integers(-(2**70), 2**70)


@st.composite
def orders(draw: st.DrawFn) -> DataOrder:
    num_samples = draw(st.integers(1, 150))
    drop_last = draw(st.booleans())
    global_batch_size = draw(st.integers(1, num_samples if drop_last else 200))
    permutation = draw(st.sampled_from([FEISTEL, SEQUENTIAL]))
    return DataOrder(num_samples, global_batch_size, draw(SEEDS), permutation=permutation, drop_last=drop_last)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int | None]:
    """A world size and a micro-batch size."""
    return draw(st.integers(1, 9)), draw(st.none() | st.integers(1, 20))


def shares(cut: tuple[int, int | None]) -> list[Share]:
    world_size, micro_batch_size = cut
    return [Share(rank, world_size, micro_batch_size) for rank in range(world_size)]


def taken(order: DataOrder, cursor: Cursor, cut: tuple[int, int | None]) -> list[list[int]]:
    """The samples of each global batch that all ranks take from the cursor to the end of the epoch, in order."""
    steps: dict[int, list[int]] = {}
    for share in shares(cut):
        for batch in order.micro_batches(cursor, share):
            steps.setdefault(batch.step_start, []).extend(order.indices(batch.epoch, batch.start, batch.stop))
    return [steps[start] for start in sorted(steps)]


@given(st.integers(1, 3000), SEEDS, st.integers(0, 2**40))
@settings(max_examples=60)
def test_a_shuffled_epoch_has_every_index_once(num_samples: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(num_samples, seed, epoch, 0, num_samples)) == list(range(num_samples))


@given(st.integers(1, 2**62), SEEDS, st.data())
@settings(max_examples=60)
def test_any_part_of_a_huge_epoch_is_computed_alone(num_samples: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, num_samples - 1))
    stop = data.draw(st.integers(start, min(num_samples, start + 50)))
    indices = permuted(num_samples, seed, 3, start, stop)
    assert len(set(indices)) == stop - start
    assert all(0 <= index < num_samples for index in indices)
    assert indices == [permuted(num_samples, seed, 3, at, at + 1)[0] for at in range(start, stop)]


def test_the_permutation_is_the_one_that_its_id_promises() -> None:
    assert permuted(1, 0, 0, 0, 1) == [0]
    assert permuted(10, 0, 0, 0, 10) == GOLDEN_10
    assert permuted(1000, 1234, 7, 500, 510) == GOLDEN_1000
    assert permuted(10**12, -5, 2, 10**11, 10**11 + 4) == GOLDEN_HUGE


def test_the_permutation_is_the_one_that_is_described() -> None:
    """The description followed step by step, written another way."""
    import hashlib

    num_samples, seed, epoch = 97, 3, 11
    digest = hashlib.sha512(f"hubshard feistel-1 {seed} {epoch}".encode()).digest()
    keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 64, 8)]
    a, b = 10, 10  # ceil(sqrt(97)), ceil(97 / 10)

    def f(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    def index(x: int) -> int:
        left, right = divmod(x, b)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            left = (left + f((even + right) % 2**64)) % a
            right = (right + f((odd + left) % 2**64)) % b
        x = left * b + right
        return x if x < num_samples else index(x)

    assert permuted(num_samples, seed, epoch, 0, num_samples) == [index(x) for x in range(num_samples)]


def test_seeds_are_those_that_are_promised() -> None:
    found = [sample_seeds(0, 0, 0), sample_seeds(-1, 2, 10**12), worker_seeds(5, 1)]
    assert [(seeds.python, seeds.numpy, seeds.torch) for seeds in found] == GOLDEN_SEEDS


def test_epochs_seeds_and_samples_differ() -> None:
    first = permuted(500, 0, 0, 0, 500)
    assert first != list(range(500))
    assert len({tuple(permuted(500, seed, epoch, 0, 500)) for seed in range(4) for epoch in range(4)}) == 16
    assert len({sample_seeds(seed, epoch, at) for seed in range(4) for epoch in range(4) for at in range(4)}) == 64


def test_each_position_meets_each_index_about_equally_often() -> None:
    size, epochs = 12, 6000
    counts = [[0] * size for _ in range(size)]
    for epoch in range(epochs):
        for position, index in enumerate(permuted(size, 1, epoch, 0, size)):
            counts[position][index] += 1
    chi_square = sum((found - epochs / size) ** 2 / (epochs / size) for row in counts for found in row)
    assert 60 < chi_square < 195  # 121 degrees of freedom: within about five standard deviations


@given(orders(), cuts(), st.integers(0, 5))
def test_every_sample_comes_once_and_in_one_order_for_any_cut(
    order: DataOrder, cut: tuple[int, int | None], epoch: int
) -> None:
    steps = taken(order, Cursor(epoch), cut)
    whole = order.indices(epoch, 0, order.samples_per_epoch)
    assert [index for step in steps for index in step] == whole
    assert len(set(whole)) == len(whole) == order.samples_per_epoch
    assert [len(step) for step in steps[:-1]] == [order.global_batch_size] * (order.steps_per_epoch - 1)
    if not order.drop_last:
        assert sorted(whole) == list(range(order.num_samples))


@given(orders(), cuts(), cuts(), st.data())
def test_resuming_anywhere_on_any_ranks_is_the_uninterrupted_run(
    order: DataOrder, first: tuple[int, int | None], second: tuple[int, int | None], data: st.DataObject
) -> None:
    share = data.draw(st.sampled_from(shares(first)))
    delivered = list(order.micro_batches(Cursor(2), share))
    count = data.draw(st.integers(0, len(delivered)))
    state = json.loads(json.dumps(order.state(delivered[count - 1].cursor if count else Cursor(2))))
    fresh = DataOrder(order.num_samples, order.global_batch_size, 99, order.permutation, drop_last=order.drop_last)
    restored, cursor = fresh.restored(state)
    assert restored == order
    rest = [index for step in taken(restored, cursor, second) for index in step]
    assert rest == order.indices(2, cursor.samples, order.samples_per_epoch)
    done = sum(batch.ends_step for batch in delivered[:count])
    assert cursor.samples == min(done * order.global_batch_size, order.samples_per_epoch)


@given(orders(), cuts(), st.data())
def test_the_position_after_a_number_of_batches_is_that_of_the_last(
    order: DataOrder, cut: tuple[int, int | None], data: st.DataObject
) -> None:
    share = data.draw(st.sampled_from(shares(cut)))
    start = Cursor(1, data.draw(st.integers(0, order.steps_per_epoch - 1)) * order.global_batch_size)
    batches = list(order.micro_batches(start, share))
    found = [order.after(start, count, share) for count in range(len(batches) + 1)]
    assert found == [start, *(batch.cursor for batch in batches)]
    assert order.micro_batches_per_epoch(share) == len(list(order.micro_batches(Cursor(), share)))


@given(orders(), cuts())
def test_micro_batches_are_small_enough_and_as_many_on_all_ranks_unless_it_is_said(
    order: DataOrder, cut: tuple[int, int | None]
) -> None:
    by_rank = [list(order.micro_batches(Cursor(), share)) for share in shares(cut)]
    sizes = [batch.stop - batch.start for batches in by_rank for batch in batches]
    assert all(0 < size <= (cut[1] or size) for size in sizes)
    ends = [[batch.step_start for batch in batches] for batches in by_rank]
    assert (order.uneven(shares(cut)[0]) is None) or cut[0] > 1
    if order.uneven(shares(cut)[0]) is None:
        assert ends == [ends[0]] * cut[0]
    weights: dict[int, float] = {}
    for batch in (batch for batches in by_rank for batch in batches):
        weights[batch.step_start] = weights.get(batch.step_start, 0) + batch.weight
    assert all(weight == pytest.approx(1) for weight in weights.values())


def test_a_global_batch_is_cut_into_consecutive_parts() -> None:
    order = DataOrder(11, 8, permutation=SEQUENTIAL, drop_last=False)
    assert list(order.micro_batches(Cursor(4), Share(1, 2, 2))) == [
        MicroBatch(4, 4, 6, 0, 8, ends_step=False),
        MicroBatch(4, 6, 8, 0, 8, ends_step=True),
        MicroBatch(4, 9, 11, 8, 11, ends_step=True),
    ]


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("num_samples", 99, "number of samples of the dataset is 100, but 99"),
        ("global_batch_size", 16, "global_batch_size is 8, but 16"),
        ("permutation", SEQUENTIAL, "permutation"),
        ("permutation", "feistel-2", "permutation"),
        ("drop_last", False, "drop_last is True, but False"),
        ("drop_last", 1, "drop_last"),
        ("version", 2, "version 2"),
        ("samples", 12, "damaged: sample 12"),
        ("samples", 104, "damaged"),
        ("samples", -8, "damaged"),
        ("samples", True, "samples is True"),
        ("epoch", -1, "damaged"),
        ("epoch", "0", "epoch is '0'"),
        ("seed", None, "seed is None"),
    ],
)
def test_a_state_of_other_data_or_a_damaged_one_is_refused_by_name(key: str, value: object, named: str) -> None:
    order = DataOrder(100, 8)
    state = {**order.state(Cursor(1, 16)), key: value}
    with pytest.raises(FormatError, match=named) as raised:
        order.restored(state)
    assert raised.value.hint
    with pytest.raises(FormatError):
        order.restored({name: kept for name, kept in state.items() if name != key})


@pytest.mark.parametrize(
    ("order", "named"),
    [
        ({"num_samples": 0, "global_batch_size": 1}, "empty"),
        ({"num_samples": 5, "global_batch_size": 0}, "at least 1"),
        ({"num_samples": 5, "global_batch_size": 8}, "5 samples, fewer than one global batch of 8"),
        ({"num_samples": 5, "global_batch_size": 1, "permutation": "magic-1"}, "magic-1"),
    ],
)
def test_an_order_that_cannot_be_is_refused(order: dict[str, Any], named: str) -> None:
    with pytest.raises(FormatError, match=named):
        DataOrder(**order)


def test_a_rank_that_cannot_be_is_refused() -> None:
    for share, named in (
        ((2, 2, None), "rank 2 of 2"),
        ((-1, 2, None), "rank -1"),
        ((0, 1, 0), "micro_batch_size is 0"),
    ):
        with pytest.raises(FormatError, match=named):
            Share(*share)


def test_ranks_are_both_given_or_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reading_ranks(1, 4) == (1, 4)
    assert reading_ranks(None, None) == (0, 1)
    with pytest.raises(FormatError, match="both or neither"):
        reading_ranks(1, None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(FormatError, match="process group does not exist yet"):
        reading_ranks(None, None)


def test_a_sampler_gives_lists_of_indices_and_goes_on_with_the_next_epoch() -> None:
    sampler = ResumableSampler(range(10), global_batch_size=4, micro_batch_size=2, seed=3, drop_last=False)
    first, second = list(sampler), list(sampler)
    assert [len(batch) for batch in first] == [2, 2, 2, 2, 2]
    assert len(sampler) == 5
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(10))
    assert first != second
    sampler.set_epoch(1)
    assert sampler.epoch == 1
    assert list(sampler) == second
    sampler.set_epoch(2)
    assert sampler.epoch == 2
    with pytest.raises(FormatError, match="epoch -1"):
        sampler.set_epoch(-1)


def test_a_sampler_tells_its_position_after_the_batches_that_were_delivered() -> None:
    sampler = ResumableSampler(range(40), global_batch_size=8, micro_batch_size=4, rank=1, world_size=2)
    drawn = list(islice(sampler, 4))  # a DataLoader has prefetched, and delivered two
    state = sampler.state_dict(delivered=2)
    assert state["samples"] == 16
    assert sampler.state_dict()["samples"] == 32
    again = ResumableSampler(range(40), global_batch_size=8, micro_batch_size=4, rank=1, world_size=2)
    again.load_state_dict(state)
    assert list(islice(again, 2)) == drawn[2:]


def test_a_sampler_refuses_what_would_make_ranks_wait_for_one_another() -> None:
    with pytest.raises(
        FormatError, match="1 samples cannot be cut into as many micro-batches on each of 2 ranks"
    ) as it:
        ResumableSampler(range(9), global_batch_size=4, drop_last=False, rank=0, world_size=2)
    assert "allow_uneven" in str(it.value.hint)
    batches = [
        list(ResumableSampler(range(9), global_batch_size=4, drop_last=False, rank=r, world_size=2, allow_uneven=True))
        for r in range(2)
    ]
    assert [len(mine) for mine in batches] == [2, 3]
    assert sorted(index for mine in batches for batch in mine for index in batch) == list(range(9))
