"""A DataLoader that goes on exactly where it stopped, on any number of ranks and workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from hubshard.errors import FormatError
from hubshard.resume.data.data_order import Cursor, DataOrder, MicroBatch, sample_seeds, worker_seeds
from hubshard.resume.data.sample_rng import kept_generators, seed_generators
from hubshard.resume.data.sampler import ResumableSampler

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from torch.utils.data import DataLoader

__all__ = ["MapDataset", "ResumableLoader"]

_Request = tuple[DataOrder, MicroBatch]
"""What a worker is asked for: it computes the indices itself."""


class MapDataset(Protocol):
    """A dataset whose samples are numbered from 0."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class ResumableLoader:
    """Batches of a map-style dataset, in an order and with random draws that no interruption changes.

    Iterating gives what is left of the current epoch; the next iteration goes on with the next epoch. An iteration that
    is left early is taken up by the next one. What comes is one micro-batch of this rank at a time; `ends_step` tells
    when the optimizer steps:

        loader = ResumableLoader(dataset, global_batch_size=64, micro_batch_size=8, num_workers=2)
        for epoch in range(loader.epoch, 3):
            for batch in loader:
                (loss(batch) * loader.weight * world_size).backward()  # DDP and FSDP take the mean over the ranks
                if loader.ends_step:
                    optimizer.step()

    `state_dict` is the position behind the batch that was delivered last, whatever workers have prefetched; within a
    global batch it is its beginning, since no step was made with it. It is global: one and the same on all ranks, for
    any number of ranks and workers and any micro-batch size.

    `random`, ``numpy.random`` and torch's generator for the CPU are seeded from (seed, epoch, index) before each
    sample, and put back after each batch: augmentation depends neither on the worker nor on what came before, and a
    loop that draws by itself is not disturbed. What collating draws depends on how batches are cut, so it is the same
    only with the same world size and micro-batch size.

    Args:
        dataset: has a length, and gives the sample of an index.
        global_batch_size: samples of one optimizer step, over all ranks and micro-batches.
        micro_batch_size: the most samples of one batch; None for all that this rank takes of a global batch.
        seed: of order and draws, an int of any size.
        shuffle: whether each epoch has a pseudo-random order of its own; otherwise the samples come as they are
            numbered.
        drop_last: leave out the samples at the end of an epoch that do not fill a global batch. Otherwise they are a
            smaller global batch, divided among the ranks: each sample comes once.
        num_workers: processes that read ahead; 0 reads in this process.
        rank: of this process among those that read different data; None for its rank in torch.distributed, if any. With
            model parallelism, give the rank in the data-parallel group.
        world_size: the number of these ranks; given where `rank` is.
        collate_fn: makes a batch of a list of samples; None for torch's ``default_collate``.
        seed_samples: False leaves all generators alone, and reads with ``dataset.__getitems__`` where there is one:
            faster for datasets that draw nothing.
        allow_uneven: accept that some ranks take fewer micro-batches of a global batch than others. They must not meet
            in collectives for each micro-batch then.
        pin_memory: as in `torch.utils.data.DataLoader`, like those that follow.
        prefetch_factor: batches that each worker reads ahead.
        persistent_workers: keep the workers from one iteration to the next.
        timeout: seconds to wait for a batch of a worker; 0 for ever.
        worker_init_fn: called in each worker with its number.
        multiprocessing_context: how workers are started.

    Attributes:
        sampler: the `ResumableSampler` that holds the position.

    Raises:
        FormatError: an argument that cannot be; a dataset without a length; or ranks would take different numbers of
            micro-batches.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        num_workers: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed_samples: bool = True,
        allow_uneven: bool = False,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
    ) -> None:
        import torch  # noqa: PLC0415  # slow, and optional
        from torch.utils.data import DataLoader, default_collate  # noqa: PLC0415  # slow, and optional

        _must_be_map_style(dataset)
        self.sampler = ResumableSampler(
            dataset,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            allow_uneven=allow_uneven,
        )
        self._generator = torch.Generator()  # without one of its own, a DataLoader draws from the global generator
        self._loader: DataLoader[Any] = DataLoader(
            _Batches(dataset, collate_fn or default_collate, seed_samples=seed_samples),  # type: ignore[arg-type]
            batch_size=None,  # what the sampler gives is a whole batch
            sampler=_Requests(self.sampler),
            collate_fn=_as_it_is,
            generator=self._generator,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
        )
        self._delivered: MicroBatch | None = None
        self._iteration = 0

    @property
    def dataset(self) -> MapDataset:
        """The dataset."""
        batches: Any = self._loader.dataset
        dataset: MapDataset = batches.dataset
        return dataset

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0: that of the batch delivered last until the iteration ends."""
        return self.sampler.epoch

    @property
    def steps_per_epoch(self) -> int:
        """How many global batches an epoch has."""
        return self.sampler.order.steps_per_epoch

    @property
    def ends_step(self) -> bool:
        """Whether the batch delivered last is the last one of this rank in its global batch: the optimizer steps."""
        return self._delivered is None or self._delivered.ends_step

    @property
    def weight(self) -> float:
        """The samples of the batch delivered last as a fraction of its global batch; 0 before the first.

        The mean loss of each micro-batch times its weight, summed over micro-batches and ranks, is the mean loss of the
        global batch, also where parts are of different size.
        """
        return 0.0 if self._delivered is None else self._delivered.weight

    def __len__(self) -> int:
        """How many micro-batches this rank takes in a whole epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self._begin_iteration()
        self._generator.manual_seed(worker_seeds(self.sampler.order.seed, self.epoch).torch)
        return self._deliver(self._iteration, self.sampler.micro_batches(), iter(self._loader))

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; in the current one nothing moves, so that a restored position stays."""
        if epoch != self.epoch:
            self.sampler.set_epoch(epoch)
            self._begin_iteration()

    def state_dict(self) -> dict[str, object]:
        """The position behind the global batch delivered last, as plain values for JSON, the same on all ranks."""
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Go to a position that was saved with any number of ranks and workers and any micro-batch size.

        The seed of the state becomes ours. A state that was saved at the last batch of an epoch, within the loop, gives
        an empty iteration first: what follows the loop at the end of an epoch has still to be done.

        Raises:
            FormatError: it is of another dataset, global batch size or permutation; it says which.
        """
        self.sampler.load_state_dict(state_dict)
        self._begin_iteration()

    def check_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """See whether `load_state_dict` would take a position; nothing moves.

        Raises:
            FormatError: it would not.
        """
        self.sampler.check_state_dict(state_dict)

    def _begin_iteration(self) -> None:
        self._iteration += 1
        self._delivered = None

    def _deliver(self, iteration: int, micro_batches: Iterator[MicroBatch], batches: Iterator[Any]) -> Iterator[Any]:
        for micro_batch in micro_batches:
            self._must_be_newest(iteration)
            batch = next(batches)
            self.sampler.cursor = micro_batch.cursor
            self._delivered = micro_batch
            yield batch
        self._must_be_newest(iteration)
        for _ in batches:  # there is none: it lets the workers end, or get ready for the next epoch
            raise AssertionError("the workers gave more batches than they were asked for")
        self.sampler.cursor = Cursor(self.epoch + 1)

    def _must_be_newest(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise FormatError(
                "this iteration of the loader was ended by another one, by load_state_dict() or by set_epoch()",
                hint="Iterate anew: for batch in loader.",
            )


class _Requests:
    """The sampler of the inner DataLoader."""

    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[_Request]:
        order = self._sampler.order
        return ((order, micro_batch) for micro_batch in self._sampler.micro_batches())


class _Batches:
    """The dataset of the inner DataLoader: its items are batches. It is what a worker gets."""

    def __init__(self, dataset: MapDataset, collate: Callable[[list[Any]], Any], *, seed_samples: bool) -> None:
        self.dataset = dataset
        self._collate = collate
        self._seed_samples = seed_samples

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, request: _Request) -> Any:
        order, wanted = request
        indices = order.indices(wanted.epoch, wanted.start, wanted.stop)
        if not self._seed_samples:
            return self._collate(_all_at_once(self.dataset, indices))
        with kept_generators():
            samples = []
            for index in indices:
                seed_generators(sample_seeds(order.seed, wanted.epoch, index))
                samples.append(self.dataset[index])
            return self._collate(samples)  # what it draws follows on the last sample


def _all_at_once(dataset: MapDataset, indices: list[int]) -> list[Any]:
    getitems = getattr(dataset, "__getitems__", None)
    return [dataset[index] for index in indices] if getitems is None else list(getitems(indices))


def _as_it_is(batch: Any) -> Any:
    return batch


def _must_be_map_style(dataset: object) -> None:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise FormatError(
            f"{type(dataset).__name__} has no length or no items by number: an iterable dataset has its own order",
            hint="See hubshard.resume.data.adapters for StatefulDataLoader and datasets.IterableDataset.",
        )
