"""Which sample comes when, in every epoch, on every rank: arithmetic, without data, torch or random numbers.

The order of an epoch is a function of (seed, epoch) and the number of samples. It is cut into global batches, one for
each optimizer step; each global batch is cut among the ranks, and the part of a rank into micro-batches. A position in
it, the `Cursor`, is global: whole global batches that have been trained on. So it means the same on any number of ranks
and workers, and with any size of the micro-batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from hubshard.errors import FormatError
from hubshard.resume.data.permutation import FEISTEL, permuted

__all__ = [
    "FEISTEL",
    "SEQUENTIAL",
    "Cursor",
    "DataOrder",
    "MicroBatch",
    "Seeds",
    "Share",
    "sample_seeds",
    "worker_seeds",
]

SEQUENTIAL = "sequential-1"
"""The id of the order without shuffling: the position is the index."""

_VERSION = 1
_AGAIN = "Go on with what the run was begun with, or begin the data anew: do not load this state."


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position: `samples` of the epoch have been trained on, by all ranks together."""

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank takes of each global batch.

    Attributes:
        rank: of `world_size` ranks that read different data.
        micro_batch_size: the most samples that the rank takes at once; None for its whole part.
    """

    rank: int = 0
    world_size: int = 1
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise FormatError(f"rank {self.rank} of {self.world_size} ranks: ranks are counted from 0")
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise FormatError(f"micro_batch_size is {self.micro_batch_size}: it must be at least 1")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one rank takes at once: the positions `start` to `stop` (half-open) of the order of an epoch.

    Attributes:
        step_start: where its global batch begins.
        step_stop: where its global batch ends.
        ends_step: whether it is the last that this rank takes of its global batch.
    """

    epoch: int
    start: int
    stop: int
    step_start: int
    step_stop: int
    ends_step: bool

    @property
    def weight(self) -> float:
        """Its samples as a fraction of those of its global batch."""
        return (self.stop - self.start) / (self.step_stop - self.step_start)

    @property
    def cursor(self) -> Cursor:
        """The position once it has been trained on: that of whole global batches."""
        return Cursor(self.epoch, self.step_stop if self.ends_step else self.step_start)


@dataclass(frozen=True, slots=True)
class Seeds:
    """Seeds for the generators of Python (64 bits), NumPy (32 bits) and torch (63 bits)."""

    python: int
    numpy: int
    torch: int


@dataclass(frozen=True, slots=True)
class DataOrder:
    """The order of the samples in all epochs.

    Attributes:
        num_samples: of the dataset.
        global_batch_size: samples of one optimizer step, over all ranks and micro-batches.
        permutation: `FEISTEL` or `SEQUENTIAL`; a run keeps the one that it was begun with.
        drop_last: leave out the samples at the end of an epoch that do not fill a global batch.
    """

    num_samples: int
    global_batch_size: int
    seed: int = 0
    permutation: str = FEISTEL
    drop_last: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise FormatError("the dataset is empty")
        if self.global_batch_size < 1:
            raise FormatError(f"global_batch_size is {self.global_batch_size}: it must be at least 1")
        if self.permutation not in (FEISTEL, SEQUENTIAL):
            raise FormatError(
                f"unknown permutation {self.permutation!r}: this version knows {FEISTEL!r} and {SEQUENTIAL!r}",
                hint="It may be of a newer version: upgrade hubshard.",
            )
        if not self.samples_per_epoch:
            raise FormatError(
                f"the dataset has {self.num_samples} samples, fewer than one global batch of {self.global_batch_size}",
                hint="Take a smaller global_batch_size, or drop_last=False.",
            )

    @property
    def samples_per_epoch(self) -> int:
        """How many samples an epoch has, those that are dropped left out."""
        return self.num_samples - (self.num_samples % self.global_batch_size if self.drop_last else 0)

    @property
    def steps_per_epoch(self) -> int:
        """How many global batches an epoch has."""
        return -(-self.samples_per_epoch // self.global_batch_size)

    def indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """The indices of the dataset at the positions ``start`` to ``stop`` (half-open) of an epoch."""
        if self.permutation == SEQUENTIAL:
            return list(range(start, stop))
        return permuted(self.num_samples, self.seed, epoch, start, stop)

    def micro_batches(self, cursor: Cursor, share: Share) -> Iterator[MicroBatch]:
        """What a rank takes from the cursor to the end of its epoch, in order."""
        for step_start in range(cursor.samples, self.samples_per_epoch, self.global_batch_size):
            step_stop = min(step_start + self.global_batch_size, self.samples_per_epoch)
            spans = _spans(step_start, step_stop, share)
            for number, (start, stop) in enumerate(spans, 1):
                yield MicroBatch(cursor.epoch, start, stop, step_start, step_stop, ends_step=number == len(spans))

    def micro_batches_per_epoch(self, share: Share) -> int:
        """How many micro-batches a rank takes in a whole epoch."""
        full, rest = divmod(self.samples_per_epoch, self.global_batch_size)
        return full * len(_spans(0, self.global_batch_size, share)) + len(_spans(0, rest, share))

    def after(self, cursor: Cursor, delivered: int, share: Share) -> Cursor:
        """Where a rank that began at the cursor is after it took this many micro-batches."""
        per_step = len(_spans(0, self.global_batch_size, share))
        full = (self.samples_per_epoch - cursor.samples) // self.global_batch_size
        steps = min(full, delivered // per_step) if per_step else 0
        reached = Cursor(cursor.epoch, cursor.samples + steps * self.global_batch_size)
        for micro_batch in islice(self.micro_batches(reached, share), delivered - steps * per_step):
            reached = micro_batch.cursor
        return reached

    def uneven(self, share: Share) -> str | None:
        """Why some ranks take fewer micro-batches of a global batch than others; None where all take as many.

        A rank with fewer of them leaves the others waiting for it in the collectives of a micro-batch.
        """
        for size in (self.global_batch_size, self.samples_per_epoch % self.global_batch_size):
            fewest, most = size // share.world_size, -(-size // share.world_size)
            if fewest < -(-most // (share.micro_batch_size or max(most, 1))):
                at_once = "all" if share.micro_batch_size is None else f"at most {share.micro_batch_size}"
                return (
                    f"a global batch of {size} samples cannot be cut into as many micro-batches on each of "
                    f"{share.world_size} ranks: they get {fewest} or {most} samples of it, {at_once} at once"
                )
        return None

    def state(self, cursor: Cursor) -> dict[str, object]:
        """The order and a position in it, as plain values for JSON."""
        return {
            "version": _VERSION,
            "permutation": self.permutation,
            "seed": self.seed,
            "epoch": cursor.epoch,
            "samples": cursor.samples,
            "num_samples": self.num_samples,
            "global_batch_size": self.global_batch_size,
            "drop_last": self.drop_last,
        }

    def restored(self, state: Mapping[str, object]) -> tuple[DataOrder, Cursor]:
        """The order and position of a state: this order with the seed of the state.

        Raises:
            FormatError: the state is damaged, or of another dataset, global batch size or permutation; it says which.
        """
        if not isinstance(state, Mapping):
            raise FormatError(
                f"the state of the data order is {state!r}", hint="give what state_dict() gave, such as the step has it"
            )
        if state.get("version") != _VERSION:
            raise FormatError(
                f"the state of the data order has version {state.get('version')!r}; this version reads {_VERSION}",
                hint="It may be of a newer version: upgrade hubshard.",
            )
        self._same("the number of samples of the dataset", state, "num_samples")
        self._same("global_batch_size", state, "global_batch_size")
        self._same("the permutation (shuffle=)", state, "permutation")
        self._same("drop_last", state, "drop_last")
        seed, epoch, samples = (_integer(state, key) for key in ("seed", "epoch", "samples"))
        whole = samples % self.global_batch_size == 0 or samples == self.samples_per_epoch
        if epoch < 0 or not 0 <= samples <= self.samples_per_epoch or not whole:
            raise FormatError(
                f"the state of the data order is damaged: sample {samples} of epoch {epoch} is not between two global "
                f"batches of {self.global_batch_size}",
                hint="Restore an older step.",
            )
        return replace(self, seed=seed), Cursor(epoch, samples)

    def _same(self, what: str, state: Mapping[str, object], key: str) -> None:
        ours = getattr(self, key)
        if key not in state or type(state[key]) is not type(ours) or state[key] != ours:
            raise FormatError(
                f"{what} is {ours!r}, but {state.get(key)!r} in the saved state of the data order: "
                "samples would be lost or repeated",
                hint=_AGAIN,
            )


def sample_seeds(seed: int, epoch: int, index: int) -> Seeds:
    """The seeds for what the dataset draws for one sample: SHA-256 of ``hubshard sample {seed} {epoch} {index}``."""
    return _seeds(f"hubshard sample {seed} {epoch} {index}")


def worker_seeds(seed: int, epoch: int) -> Seeds:
    """The seeds from which the workers of an epoch get theirs: SHA-256 of ``hubshard workers {seed} {epoch}``."""
    return _seeds(f"hubshard workers {seed} {epoch}")


def _seeds(text: str) -> Seeds:
    digest = hashlib.sha256(text.encode()).digest()
    python, torch, numpy = (int.from_bytes(digest[at : at + 8], "little") for at in (0, 8, 16))
    return Seeds(python, numpy & 0xFFFFFFFF, torch >> 1)


def _spans(start: int, stop: int, share: Share) -> list[tuple[int, int]]:
    """The micro-batches of a rank in a global batch, none of them empty: parts of equal size but for one sample.

    Ranks take consecutive parts. All cut theirs into the same number, that of the largest, so that they take the micro-
    batches together although one may have a sample more.
    """
    size = stop - start
    first = start + size * share.rank // share.world_size
    last = start + size * (share.rank + 1) // share.world_size
    largest = -(-size // share.world_size)
    parts = -(-largest // (share.micro_batch_size or max(largest, 1)))
    cuts = [first + (last - first) * part // parts for part in range(parts + 1)] if parts else []
    return [(begin, end) for begin, end in pairwise(cuts) if begin < end]


def _integer(state: Mapping[str, object], key: str) -> int:
    value = state.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise FormatError(f"the state of the data order is damaged: {key} is {value!r}", hint="Restore an older step.")
    return value
