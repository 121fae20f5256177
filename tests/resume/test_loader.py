"""The loader: bit for bit what an uninterrupted run would have read, on any number of ranks and workers."""

from __future__ import annotations

import json
import random
import textwrap
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

from hubshard import FormatError, ResumableLoader, ResumableSampler
from tests import warm

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

Batch = dict[str, Any]


class Drawing:
    """A dataset that augments: it draws from each of the generators that draw where none is named."""

    def __init__(self, size: int = 60) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Batch:
        draws = [random.random(), float(np.random.rand()), np.random.normal()]
        return {"index": index, "draws": torch.tensor(draws, dtype=torch.float64), "torch": torch.randn(3)}


def collate_and_draw(samples: list[Batch]) -> Batch:
    batch: Batch = torch.utils.data.default_collate(samples)
    return {**batch, "mask": torch.rand(len(samples)), "python": random.random()}


def loader(dataset: Any = None, **changes: Any) -> ResumableLoader:
    given = {"global_batch_size": 8, "micro_batch_size": 4, "seed": 5, "rank": 0, "world_size": 1, **changes}
    return ResumableLoader(Drawing() if dataset is None else dataset, **given)


def rows(batches: list[Batch]) -> list[tuple[Any, ...]]:
    """Each sample with what was drawn for it, exactly."""
    return [
        (int(index), tuple(draws.tolist()), tuple(normal.tolist()))
        for batch in batches
        for index, draws, normal in zip(batch["index"], batch["draws"], batch["torch"], strict=True)
    ]


def indices(batches: list[Batch]) -> list[int]:
    return [int(index) for batch in batches for index in batch["index"]]


def equal(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        ours.keys() == theirs.keys()
        and all(torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])) for key in ours)
        for ours, theirs in zip(first, second, strict=True)
    )


def through_json(state: dict[str, object]) -> dict[str, object]:
    read: dict[str, object] = json.loads(json.dumps(state))
    return read


@pytest.fixture(scope="module")
def two_epochs() -> list[list[Batch]]:
    """What a run without workers that nothing interrupts reads in its first two epochs."""
    ours = loader(collate_fn=collate_and_draw)
    return [list(ours), list(ours)]


def test_an_epoch_has_every_sample_once_and_the_next_one_another_order(two_epochs: list[list[Batch]]) -> None:
    first, second = (indices(epoch) for epoch in two_epochs)
    assert len(set(first)) == len(first) == len(set(second)) == len(second) == 56  # drop_last: 7 whole global batches
    assert first != second
    by_index = {row[0]: row for row in rows(two_epochs[0])}
    assert all(by_index[row[0]] != row for row in rows(two_epochs[1]) if row[0] in by_index)  # drawn anew in each epoch


@pytest.mark.parametrize(
    ("saved_workers", "restored_workers", "persistent"), [(2, 2, False), (2, 0, False), (0, 2, True)]
)
def test_resuming_mid_epoch_reads_the_same_bit_for_bit(
    two_epochs: list[list[Batch]], saved_workers: int, restored_workers: int, persistent: bool
) -> None:
    first = loader(num_workers=saved_workers, prefetch_factor=3 if saved_workers else None, collate_fn=collate_and_draw)
    assert equal(list(islice(first, 6)), two_epochs[0][:6])
    second = loader(
        num_workers=restored_workers,
        persistent_workers=persistent,
        collate_fn=collate_and_draw,
        seed=77,  # that of the state is taken
    )
    second.load_state_dict(through_json(first.state_dict()))
    assert second.epoch == 0
    assert equal(list(second), two_epochs[0][6:])
    assert second.epoch == 1
    assert equal(list(second), two_epochs[1])


def test_the_state_is_that_of_the_batch_delivered_last_whatever_is_prefetched() -> None:
    ours = loader(num_workers=2, prefetch_factor=6)
    found = [(ours.state_dict()["samples"], ours.ends_step) for _ in ours]
    assert found == [(8 * (count // 2), count % 2 == 0) for count in range(1, 15)]
    assert (ours.state_dict()["epoch"], ours.state_dict()["samples"]) == (1, 0)


def test_two_ranks_then_four_then_one_read_every_sample_once_in_the_same_global_order() -> None:
    whole = rows(list(loader(Drawing(200), global_batch_size=16, micro_batch_size=None, drop_last=False)))
    read: list[tuple[Any, ...]] = []
    state: dict[str, object] | None = None
    for world_size, micro_batch_size, steps in ((2, 4, 5), (4, None, 4), (1, 3, None)):
        ranks = [
            loader(
                Drawing(200),
                global_batch_size=16,
                micro_batch_size=micro_batch_size,
                drop_last=False,
                rank=rank,
                world_size=world_size,
            )
            for rank in range(world_size)
        ]
        for ours in ranks:
            if state is not None:
                ours.load_state_dict(state)
        by_rank = [list(global_batches(ours, steps)) for ours in ranks]
        read += [row for together in zip(*by_rank, strict=True) for mine in together for row in mine]
        states = [through_json(ours.state_dict()) for ours in ranks]
        assert states == [states[0]] * world_size
        state = states[0]
    assert read == whole
    assert sorted(row[0] for row in read) == list(range(200))


def global_batches(ours: ResumableLoader, steps: int | None) -> Iterator[list[tuple[Any, ...]]]:
    """What one rank reads in each of so many global batches."""
    mine: list[tuple[Any, ...]] = []
    done = 0
    for batch in ours:
        mine += rows([batch])
        if ours.ends_step:
            yield mine
            mine, done = [], done + 1
            if done == steps:
                return


def test_a_state_from_within_a_global_batch_is_its_beginning() -> None:
    ours = loader()
    before = list(islice(ours, 3))
    assert not ours.ends_step
    assert ours.state_dict()["samples"] == 8
    again = loader()
    again.load_state_dict(ours.state_dict())
    assert equal([next(iter(again))], before[2:])


def test_weights_make_the_mean_of_parts_the_mean_of_the_global_batch() -> None:
    ranks = [loader(range(11), collate_fn=list, drop_last=False, rank=rank, world_size=2) for rank in range(2)]
    assert ranks[0].weight == 0.0
    sums = [0.0, 0.0]
    for ours in ranks:
        step = 0
        for batch in ours:
            sums[step] += ours.weight * sum(batch) / len(batch)
            step += ours.ends_step
    order = ranks[0].sampler.order.indices(0, 0, 11)
    assert sums == [pytest.approx(sum(order[:8]) / 8), pytest.approx(sum(order[8:]) / 3)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_generators_of_the_training_loop_are_not_touched(num_workers: int) -> None:
    def state() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before = state()
    ours = loader(num_workers=num_workers)
    for _ in ours:
        assert state() == before
    assert state() == before


def test_the_generators_are_put_back_when_the_dataset_fails() -> None:
    class Failing(Drawing):
        def __getitem__(self, index: int) -> Batch:
            raise KeyError(f"{torch.rand(1)} {index}")

    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        list(loader(Failing()))
    assert torch.equal(torch.get_rng_state(), before)


def test_without_seeds_the_dataset_is_read_with_getitems_and_draws_from_the_loops_generator() -> None:
    class Together(Drawing):
        def __getitems__(self, wanted: list[int]) -> list[Batch]:
            return [{"index": index, "draw": torch.rand(1)} for index in wanted]

    torch.manual_seed(9)
    batches = list(loader(Together(), seed_samples=False))
    torch.manual_seed(9)
    assert torch.equal(
        torch.cat([batch["draw"] for batch in batches]).flatten(), torch.cat([torch.rand(1) for _ in range(56)])
    )
    assert indices(batches) == loader().sampler.order.indices(0, 0, 56)
    assert "draws" in next(iter(loader(Together())))  # with seeds, one sample after the other


def test_workers_without_seeds_draw_from_the_seed_of_the_loader() -> None:
    torch.manual_seed(1)
    first = list(loader(num_workers=2, seed_samples=False))
    torch.manual_seed(2)
    assert equal(first, list(loader(num_workers=2, seed_samples=False)))


def test_an_iteration_that_was_left_is_taken_up_by_the_next_one() -> None:
    whole = list(loader())
    ours = loader(num_workers=2, persistent_workers=True)
    first = list(islice(ours, 4))
    assert equal(first + list(ours), whole)


def test_an_iteration_ends_where_another_begins_or_the_position_is_set() -> None:
    ours = loader()
    state = ours.state_dict()
    for move in (lambda: iter(ours), lambda: ours.load_state_dict(state), lambda: ours.set_epoch(ours.epoch + 1)):
        batches = iter(ours)
        next(batches)
        move()
        with pytest.raises(FormatError, match="this iteration of the loader was ended"):
            next(batches)


def test_a_state_saved_at_the_last_batch_leaves_the_end_of_the_epoch_to_be_done(two_epochs: list[list[Batch]]) -> None:
    ours = loader(collate_fn=collate_and_draw)
    for _ in ours:
        state = ours.state_dict()
    again = loader(collate_fn=collate_and_draw)
    again.load_state_dict(state)
    assert (again.epoch, list(again)) == (0, [])
    assert again.epoch == 1
    assert equal(list(again), two_epochs[1])


def test_set_epoch_goes_to_the_beginning_of_another_epoch_and_keeps_a_position_in_this_one(
    two_epochs: list[list[Batch]],
) -> None:
    ours = loader(collate_fn=collate_and_draw)
    ours.set_epoch(1)
    assert equal(list(islice(ours, 4)), two_epochs[1][:4])
    ours.set_epoch(1)
    assert equal(list(ours), two_epochs[1][4:])
    assert (len(ours), ours.steps_per_epoch, len(ours.dataset)) == (14, 7, 60)


def test_without_shuffling_samples_come_as_they_are_numbered() -> None:
    assert list(chain(*loader(range(10), shuffle=False, drop_last=False, collate_fn=list))) == list(range(10))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dataset": Drawing(61)}, "the number of samples of the dataset is 61, but 60"),
        ({"global_batch_size": 16}, "global_batch_size is 16, but 8"),
        ({"shuffle": False}, "permutation.*is 'sequential-1', but 'feistel-1'"),
    ],
)
def test_a_state_of_other_data_is_refused_and_nothing_moves(changes: dict[str, Any], named: str) -> None:
    ours = loader()
    list(islice(ours, 2))
    other = loader(**changes)
    with pytest.raises(FormatError, match=named) as raised:
        other.load_state_dict(ours.state_dict())
    assert "was begun with" in str(raised.value.hint)
    assert other.state_dict()["samples"] == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"global_batch_size": 2.5}, "global_batch_size=2.5 is no whole number"), ({"seed": "a"}, "seed='a' is no whole")],
)
def test_arguments_that_are_no_whole_numbers_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(FormatError, match=named):
        loader(**changes)


def test_a_state_that_is_none_is_refused() -> None:
    ours = loader()
    nothing: Any = None
    with pytest.raises(FormatError, match="the state of the data order is None"):
        ours.load_state_dict(nothing)


def test_an_iterable_dataset_is_refused_with_the_way_out() -> None:
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    with pytest.raises(FormatError, match="Stream has no length") as raised:
        loader(Stream())
    assert "adapters" in str(raised.value.hint)


def test_a_plain_dataloader_takes_the_sampler() -> None:
    sampler = ResumableSampler(range(20), global_batch_size=5, seed=1)
    plain = torch.utils.data.DataLoader(range(20), batch_sampler=sampler, collate_fn=list)
    first, second = list(plain), list(plain)
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(20))
    assert first != second
    assert len(plain) == 4


def test_two_processes_of_torchrun_read_what_one_reads(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, sys
            from itertools import islice
            from pathlib import Path
            import torch.distributed as dist
            from hubshard import FormatError, ResumableLoader

            def loader():
                cut = {"global_batch_size": 8, "micro_batch_size": 2}
                return ResumableLoader(range(50), **cut, drop_last=False, collate_fn=list)

            try:
                loader()
            except FormatError as error:
                refused = str(error)
            dist.init_process_group("gloo")
            first = loader()
            read = list(islice(first, 6))
            second = loader()
            second.load_state_dict(first.state_dict())
            read += list(second)
            state = second.state_dict()
            told = {"refused": refused, "read": read, "state": state, "ranks": dist.get_world_size()}
            Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(told))
            dist.barrier()
            dist.destroy_process_group()
            """
        )
    )
    done = warm.run([script, tmp_path], imports="torch", ranks=2, timeout=120)
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert "process group does not exist yet" in told[0]["refused"]
    assert told[0]["ranks"] == 2
    alone = loader(range(50), seed=0, micro_batch_size=None, drop_last=False, collate_fn=list)
    whole = list(alone)
    steps = zip(*[iter(told[0]["read"][:12])] * 2, *[iter(told[1]["read"][:12])] * 2, strict=True)
    assert [list(chain(*step)) for step in steps] == whole[:6]
    assert [*chain(*told[0]["read"][12:]), *chain(*told[1]["read"][12:])] == whole[6]
    assert told[0]["state"] == told[1]["state"] == alone.state_dict()
