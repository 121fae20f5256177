"""Loaders with an order of their own: their position comes back exactly, or is refused with the reason."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from hubshard import FormatError
from hubshard.resume.data.adapters import StatefulLoader, StreamedDataset

torch = pytest.importorskip("torch")


def through_json(state: dict[str, object]) -> dict[str, object]:
    read: dict[str, object] = json.loads(json.dumps(state))
    return read


@pytest.fixture
def stateful(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader  # type: ignore[no-any-return]


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets")


pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata, with a newer torch


def adapted(
    stateful: Callable[..., Any], dataset: Any = range(30), *, rank: int = 0, ranks: int = 1, **given: Any
) -> Any:
    return StatefulLoader(stateful(dataset, batch_size=3, **given), rank=rank, world_size=ranks)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_dataloader_goes_on_behind_the_batch_delivered_last(
    stateful: Callable[..., Any], num_workers: int
) -> None:
    torch.manual_seed(4)
    ours = adapted(stateful, shuffle=True, num_workers=num_workers)
    batches = iter(ours)
    before = [next(batches).tolist() for _ in range(4)]
    state = through_json(ours.state_dict())
    rest = [batch.tolist() for batch in batches]
    torch.manual_seed(5)
    again = adapted(stateful, shuffle=True, num_workers=num_workers)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == rest
    assert sorted(sum(before + rest, [])) == list(range(30))  # noqa: RUF017  # ten lists
    assert len(again) == 10


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ranks": 4}, "world_size is 4, but 2"),
        ({"rank": 1}, "rank is 1, but 0"),
        ({"num_workers": 2}, "workers is 2, but 0"),
    ],
)
def test_a_stateful_dataloader_refuses_other_ranks_and_workers(
    stateful: Callable[..., Any], changes: dict[str, int], named: str
) -> None:
    state = adapted(stateful, ranks=2).state_dict()
    with pytest.raises(FormatError, match=f"{named}.*lost or repeated") as raised:
        adapted(stateful, **{"ranks": 2, **changes}).load_state_dict(state)
    assert "ResumableLoader" in str(raised.value.hint)


def test_a_state_of_another_loader_or_a_damaged_one_is_refused(stateful: Callable[..., Any]) -> None:
    ours = adapted(stateful)
    state = ours.state_dict()
    for changes, named in (
        ({"source": "other"}, "'other'"),
        ({"version": 9}, "version 9"),
        ({"state": None}, "damaged"),
    ):
        with pytest.raises(FormatError, match=named):
            ours.load_state_dict({**state, **changes})


def test_a_loader_that_delivers_in_any_order_is_refused(stateful: Callable[..., Any]) -> None:
    with pytest.raises(FormatError, match="in_order"):
        adapted(stateful, num_workers=2, in_order=False)


def test_a_state_that_cannot_be_stored_is_refused_by_its_path(stateful: Callable[..., Any]) -> None:
    class Keeper:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> int:
            return index

        def state_dict(self) -> dict[str, object]:
            return {"inner": [1, object()]}

        def load_state_dict(self, state: object) -> None:
            raise AssertionError(state)

    ours = adapted(stateful, Keeper())
    next(iter(ours))
    with pytest.raises(FormatError, match=r"dataset_state.*inner.*object"):
        ours.state_dict()


def test_reading_again_what_came_before_is_said(stateful: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(30))

    for num_workers in (0, 1):
        ours = adapted(stateful, Stream(), num_workers=num_workers)
        assert len(list(islice(ours, 4))) == 4
        again = adapted(stateful, Stream(), num_workers=num_workers)
        with caplog.at_level(logging.WARNING, "hubshard"):
            again.load_state_dict(ours.state_dict())
        assert "Stream has no state: the 4 batches that came before are read again" in caplog.text
        assert next(iter(again)).tolist() == [12, 13, 14]
        caplog.clear()


def streamed(datasets: Any, size: int = 40) -> Any:
    return datasets.Dataset.from_dict({"a": list(range(size))}).to_iterable_dataset(num_shards=4)


def values(examples: Any) -> list[int]:
    return [example["a"] for example in examples]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_streamed_dataset_goes_on_behind_the_example_delivered_last(datasets: Any, world_size: int) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        ours = StreamedDataset(streamed(datasets), rank=rank, world_size=world_size)
        examples = iter(ours)
        before = values(islice(examples, 5))
        state = through_json(ours.state_dict())
        rest = values(examples)
        again = StreamedDataset(streamed(datasets), rank=rank, world_size=world_size)
        again.load_state_dict(state)
        assert values(again) == rest
        assert (ours.epoch, again.epoch) == (1, 1)
        seen += before + rest
    assert sorted(seen) == list(range(40))


def test_epochs_of_a_streamed_dataset_follow_one_another_and_are_taken_up(datasets: Any) -> None:
    whole = StreamedDataset(streamed(datasets), rank=0, world_size=1)
    epochs = [values(whole) for _ in range(3)]
    assert epochs[1] != epochs[2]  # datasets shuffles the shards of all epochs but the first
    ours = StreamedDataset(streamed(datasets), rank=0, world_size=1)
    assert values(ours) == epochs[0]
    assert ours.state_dict() == {**whole.state_dict(), "state": ours.state_dict()["state"]}
    assert values(islice(ours, 7)) == epochs[1][:7]
    assert values(islice(ours, 3)) == epochs[1][7:10]  # the next iteration goes on
    again = StreamedDataset(streamed(datasets), rank=0, world_size=1)
    again.load_state_dict(through_json(ours.state_dict()))
    again.set_epoch(1)
    assert values(again) == epochs[1][10:]
    assert values(again) == epochs[2]
    again.set_epoch(1)
    assert values(again) == epochs[1]


def test_a_state_saved_at_the_last_example_leaves_the_end_of_the_epoch_to_be_done(datasets: Any) -> None:
    ours = StreamedDataset(streamed(datasets), rank=0, world_size=1)
    for _ in ours:
        state = ours.state_dict()
    again = StreamedDataset(streamed(datasets), rank=0, world_size=1)
    again.load_state_dict(state)
    assert (again.epoch, values(again), again.epoch) == (0, [], 1)


def test_going_on_opens_only_the_shard_where_it_stopped_and_those_behind(datasets: Any) -> None:
    opened: list[int] = []

    def generate(shards: list[int]) -> Iterator[dict[str, int]]:
        for shard in shards:
            opened.append(shard)
            yield from ({"a": 10 * shard + at} for at in range(10))

    def stream() -> StreamedDataset:
        shards = {"shards": list(range(6))}
        return StreamedDataset(
            datasets.IterableDataset.from_generator(generate, gen_kwargs=shards), rank=0, world_size=1
        )

    ours = stream()
    assert values(islice(ours, 35)) == list(range(35))
    again = stream()
    opened.clear()
    again.load_state_dict(through_json(ours.state_dict()))
    assert values(again) == list(range(35, 60))
    assert opened == [3, 4, 5]


def test_a_streamed_dataset_refuses_other_ranks_and_shards(datasets: Any) -> None:
    state = StreamedDataset(streamed(datasets), rank=0, world_size=2).state_dict()
    with pytest.raises(FormatError, match=r"world_size is 4, but 2.*lost or repeated"):
        StreamedDataset(streamed(datasets), rank=0, world_size=4).load_state_dict(state)
    more = datasets.Dataset.from_dict({"a": list(range(40))}).to_iterable_dataset(num_shards=8)
    with pytest.raises(FormatError, match="shards is 8, but 4"):
        StreamedDataset(more, rank=0, world_size=2).load_state_dict(state)


def test_a_shuffle_buffer_is_refused_unless_its_loss_is_accepted(datasets: Any, stateful: Callable[..., Any]) -> None:
    shuffled = streamed(datasets).map(lambda row: row).shuffle(seed=1, buffer_size=10).filter(lambda row: row["a"] >= 0)
    with pytest.raises(FormatError, match="shuffle buffer of 10 examples"):
        StreamedDataset(shuffled, rank=0, world_size=1)
    with pytest.raises(FormatError, match="shuffle buffer of 10 examples"):
        adapted(stateful, shuffled)
    mixed = datasets.interleave_datasets([streamed(datasets), shuffled])
    with pytest.raises(FormatError, match="shuffle buffer of 10 examples"):
        StreamedDataset(mixed, rank=0, world_size=1)
    accepted = StreamedDataset(shuffled, rank=0, world_size=1, allow_lost_examples=True)
    assert sorted(values(accepted)) == list(range(40))


def test_an_iteration_of_a_streamed_dataset_ends_where_another_begins(datasets: Any) -> None:
    ours = StreamedDataset(streamed(datasets), rank=0, world_size=1)
    examples = iter(ours)
    next(examples)
    assert values(ours) == list(range(1, 40))
    with pytest.raises(FormatError, match="was ended by another one"):
        next(examples)


def test_a_stateful_dataloader_over_a_streamed_dataset_goes_on_with_its_workers(
    datasets: Any, stateful: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    ours = adapted(stateful, streamed(datasets), num_workers=2)
    batches = iter(ours)
    before = [batch["a"].tolist() for batch in islice(batches, 5)]
    state = through_json(ours.state_dict())
    rest = [batch["a"].tolist() for batch in batches]
    again = adapted(stateful, streamed(datasets), num_workers=2)
    again.load_state_dict(state)
    assert [batch["a"].tolist() for batch in again] == rest
    assert sorted(value for batch in before + rest for value in batch) == list(range(40))
    assert caplog.text == ""
