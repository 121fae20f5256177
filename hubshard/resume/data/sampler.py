"""A batch sampler whose position is global: the same samples in the same order on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from operator import index

from hubshard.errors import FormatError
from hubshard.resume.data.data_order import FEISTEL, SEQUENTIAL, Cursor, DataOrder, MicroBatch, Share
from hubshard.resume.ranks import reading_ranks

__all__ = ["ResumableSampler"]


class ResumableSampler:
    """The micro-batches of one rank, as lists of indices: a ``batch_sampler`` for a DataLoader.

    Iterating gives what is left of the current epoch; the next iteration goes on with the next epoch.

    A DataLoader with workers draws ahead of what it delivers. Only its user knows how many batches were delivered, and
    says so to `state_dict`. `ResumableLoader` does all this by itself, and seeds what the dataset draws.

    Args:
        dataset: anything with a length: the number of samples.
        global_batch_size: samples of one optimizer step, over all ranks and micro-batches.
        micro_batch_size: the most samples of one list; None for all that this rank takes of a global batch.
        seed: of the order, an int of any size.
        shuffle: whether each epoch has a pseudo-random order of its own; otherwise the samples come as they are
            numbered.
        drop_last: leave out the samples at the end of an epoch that do not fill a global batch. Otherwise they are a
            smaller global batch, divided among the ranks: each sample comes once.
        rank: of this process among those that read different data; None for its rank in torch.distributed, if any. With
            model parallelism, give the rank in the data-parallel group.
        world_size: the number of these ranks; given where `rank` is.
        allow_uneven: accept that some ranks take fewer micro-batches of a global batch than others. They must not meet
            in collectives for each micro-batch then.

    Attributes:
        order: the `DataOrder`.
        share: the `Share` of this rank.
        cursor: the `Cursor` behind the micro-batch that was taken last.

    Raises:
        FormatError: an argument that cannot be; or ranks would take different numbers of micro-batches.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        allow_uneven: bool = False,
    ) -> None:
        permutation = FEISTEL if shuffle else SEQUENTIAL
        self.order = DataOrder(
            len(dataset),
            _whole("global_batch_size", global_batch_size),
            _whole("seed", seed),
            permutation=permutation,
            drop_last=bool(drop_last),
        )
        self.share = Share(
            *reading_ranks(rank, world_size),
            None if micro_batch_size is None else _whole("micro_batch_size", micro_batch_size),
        )
        self.cursor = Cursor()
        self._start = self.cursor
        why = self.order.uneven(self.share)
        if why is not None and not allow_uneven:
            raise FormatError(
                why,
                hint="Take another global_batch_size or micro_batch_size, or drop_last=True. "
                "allow_uneven=True is for loops without a collective for each micro-batch.",
            )

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self.cursor.epoch

    def __len__(self) -> int:
        """How many micro-batches this rank takes in a whole epoch."""
        return self.order.micro_batches_per_epoch(self.share)

    def __iter__(self) -> Iterator[list[int]]:
        self._start = self.cursor
        for micro_batch in self.micro_batches():
            self.cursor = micro_batch.cursor
            yield self.order.indices(micro_batch.epoch, micro_batch.start, micro_batch.stop)
        self.cursor = Cursor(self._start.epoch + 1)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """What is left of the epoch, as positions; taking them does not move the cursor."""
        return self.order.micro_batches(self.cursor, self.share)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; in the current one nothing moves, so that a restored position stays."""
        if epoch < 0:
            raise FormatError(f"epoch {epoch}: epochs are counted from 0")
        if epoch != self.cursor.epoch:
            self.cursor = self._start = Cursor(epoch)

    def state_dict(self, delivered: int | None = None) -> dict[str, object]:
        """The position as plain values for JSON, the same on all ranks: that of whole global batches.

        Args:
            delivered: how many batches of the current iteration were delivered; None for all that were drawn, which is
                right
                without workers.
        """
        cursor = self.cursor if delivered is None else self.order.after(self._start, delivered, self.share)
        return self.order.state(cursor)

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Go to a position that was saved on any number of ranks; its seed becomes ours.

        Raises:
            FormatError: see `check_state_dict`.
        """
        self.order, self.cursor = self.order.restored(state_dict)
        self._start = self.cursor

    def check_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """See whether `load_state_dict` would take a position; nothing moves.

        Raises:
            FormatError: it is of another dataset, global batch size or permutation; it says which.
        """
        self.order.restored(state_dict)


def _whole(name: str, value: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise FormatError(f"{name}={value!r} is no whole number", hint="give an int")
    return index(value)
