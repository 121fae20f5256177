"""The position of loaders that have an order of their own: torchdata's StatefulDataLoader, datasets' IterableDataset.

They go on where they stopped without reading again what came before, as far as their source allows; but their position
is that of one rank, and of its workers. It means nothing on another number of ranks or workers, where samples would be
lost or repeated without a word: such a state is refused. `hubshard.ResumableLoader`, for numbered samples, has no
such limit.

States are plain values for JSON. Each rank has its own and needs it back: save them by rank (`per_rank` is True).
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hubshard.errors import FormatError
from hubshard.resume.ranks import reading_ranks
from hubshard.steps import canonical

if TYPE_CHECKING:
    from datasets import IterableDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

__all__ = ["StatefulLoader", "StreamedDataset"]

_VERSION = 1
_LOG = logging.getLogger("hubshard")
_TENSOR = "torch.tensor"


class StatefulLoader:
    """A torchdata StatefulDataLoader, whose position is refused where it would mean something else.

    Iterate this object or the loader. What the dataset draws at random is not the same after a resume unless the
    dataset keeps its generator in its own state.

    Args:
        loader: the StatefulDataLoader of this rank.
        rank: of this process among those that read different data; None for its rank in torch.distributed, if any.
        world_size: the number of these ranks; given where `rank` is.
        allow_lost_examples: accept that the content of a shuffle buffer is lost at each resume.

    Attributes:
        per_rank: True: each rank has a state of its own.

    Raises:
        FormatError: the loader delivers in any order, or its dataset has a shuffle buffer that its state does not hold.
    """

    per_rank = True

    def __init__(
        self,
        loader: StatefulDataLoader[Any],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        allow_lost_examples: bool = False,
    ) -> None:
        self._loader = loader
        self._place = _place(rank, world_size, workers=loader.num_workers)
        if loader.num_workers and not getattr(loader, "in_order", True):
            raise FormatError(
                "a StatefulDataLoader with in_order=False does not know which samples it has delivered",
                hint="Make it with in_order=True.",
            )
        _refuse_shuffle_buffers(loader.dataset, allow_lost_examples=allow_lost_examples)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, object]:
        """The position behind the batch that was delivered last, of this rank.

        Raises:
            FormatError: the state of the dataset or sampler holds something that cannot be stored; it says where.
        """
        return _stored("torchdata.StatefulDataLoader", self._place, self._loader.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Go to a position that this rank saved.

        Where neither the dataset nor its iterator has a state, torchdata reads again all that came before; this is
        logged.

        Raises:
            FormatError: the number of ranks or workers was another one, or it is the state of another rank.
        """
        state = _read("torchdata.StatefulDataLoader", self._place, state_dict)
        replayed = _replayed(self._loader, state)
        if replayed:
            _LOG.warning(
                "The dataset %s has no state: the %d batches that came before are read again. "
                "Give it state_dict() and load_state_dict().",
                type(self._loader.dataset).__name__,
                replayed,
            )
        self._loader.load_state_dict(state)

    def check_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """See whether `load_state_dict` would take a position; nothing moves.

        Raises:
            FormatError: it would not.
        """
        _read("torchdata.StatefulDataLoader", self._place, state_dict)


class StreamedDataset:
    """The part of a `datasets.IterableDataset` that one rank reads, example by example, in this process.

    Iterating gives what is left of the current epoch; the next iteration goes on with the next epoch. For batches, or
    for reading ahead with workers, wrap a StatefulDataLoader over the dataset in a `StatefulLoader` instead.

    Going on opens only the shard where it stopped and those behind it; a generator is run from the start of that shard.
    The table formats ("arrow", "pandas", "polars") with a batched ``map`` may lose a batch, as datasets documents; and
    what ``map`` draws at random is not the same after a resume.

    Args:
        dataset: not yet divided among ranks.
        rank: of this process among those that read different data; None for its rank in torch.distributed, if any.
        world_size: the number of these ranks; given where `rank` is.
        allow_lost_examples: accept that the content of a shuffle buffer is lost at each resume.

    Attributes:
        per_rank: True: each rank has a state of its own.

    Raises:
        FormatError: the dataset has a shuffle buffer, which its state does not hold.
    """

    per_rank = True

    def __init__(
        self,
        dataset: IterableDataset,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        allow_lost_examples: bool = False,
    ) -> None:
        from datasets.distributed import split_dataset_by_node  # noqa: PLC0415  # slow, and optional

        _refuse_shuffle_buffers(dataset, allow_lost_examples=allow_lost_examples)
        self._place = _place(rank, world_size, shards=dataset.num_shards)
        self._dataset = split_dataset_by_node(dataset, self._place["rank"], self._place["world_size"])
        self._epoch = 0
        self._position: dict[str, Any] | None = None  # of the dataset; None at the beginning of an epoch
        self._is_read = False  # the dataset knows the position better
        self._iteration = 0

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0: that of the example delivered last until the iteration ends."""
        return self._epoch

    def __iter__(self) -> Iterator[Any]:
        self._go_to(self._epoch, self._current())
        return self._deliver(self._iteration)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; in the current one nothing moves, so that a restored position stays."""
        if epoch != self._epoch:
            self._go_to(epoch, None)

    def state_dict(self) -> dict[str, object]:
        """The position behind the example that was delivered last, of this rank."""
        return _stored("datasets.IterableDataset", self._place, {"epoch": self._epoch, "position": self._current()})

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Go to a position that this rank saved.

        Raises:
            FormatError: the number of ranks or shards was another one, or it is the state of another rank.
        """
        state = _read("datasets.IterableDataset", self._place, state_dict)
        self._go_to(state["epoch"], state["position"])

    def check_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """See whether `load_state_dict` would take a position; nothing moves.

        Raises:
            FormatError: it would not.
        """
        _read("datasets.IterableDataset", self._place, state_dict)

    def _current(self) -> dict[str, Any] | None:
        return self._dataset.state_dict() if self._is_read else self._position

    def _go_to(self, epoch: int, position: dict[str, Any] | None) -> None:
        self._epoch, self._position, self._is_read = epoch, position, False
        self._iteration += 1

    def _deliver(self, iteration: int) -> Iterator[Any]:
        self._dataset.set_epoch(self._epoch)
        self._dataset.load_state_dict(self._position or {})
        for example in self._dataset:
            self._must_be_newest(iteration)
            self._is_read = True
            yield example
        self._must_be_newest(iteration)
        self._go_to(self._epoch + 1, None)

    def _must_be_newest(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise FormatError(
                "this iteration of the dataset was ended by another one, by load_state_dict() or by set_epoch()",
                hint="Iterate anew.",
            )


def _place(rank: int | None, world_size: int | None, **parts: int) -> dict[str, int]:
    """What a position of this rank depends on."""
    ours, ranks = reading_ranks(rank, world_size)
    return {"rank": ours, "world_size": ranks, **parts}


def _stored(source: str, place: Mapping[str, int], state: object) -> dict[str, object]:
    text = canonical.encode(_tensors_as_text(state), path=f"the state of the {source}").decode("ascii")
    return {"version": _VERSION, "source": source, **place, "state": text}


def _read(source: str, place: Mapping[str, int], stored: Mapping[str, object]) -> Any:
    """The state within a stored one, if it is ours.

    Raises:
        FormatError: it is not; says why, and what to do.
    """
    if stored.get("version") != _VERSION or stored.get("source") != source:
        raise FormatError(
            f"the state is of version {stored.get('version')!r} of {stored.get('source')!r}, "
            f"where one of version {_VERSION} of {source!r} is wanted",
            hint="Go on with the loader that the run was begun with.",
        )
    for what, ours in place.items():
        if stored.get(what) != ours:
            raise FormatError(
                f"{what} is {ours}, but {stored.get(what)} in the saved state of the {source}: it is a position in "
                "what one rank and its workers read, and with others samples would be lost or repeated",
                hint="Go on with the same number of ranks, workers and shards, each rank with its own state; "
                "or begin the data anew. hubshard.ResumableLoader goes on with any number of them.",
            )
    text = stored.get("state")
    if not isinstance(text, str):
        raise FormatError(f"the saved state of the {source} is damaged: it has no text", hint="Restore an older step.")
    return _tensors_from_text(canonical.decode(text.encode(), path=f"the state of the {source}"))


def _refuse_shuffle_buffers(dataset: object, *, allow_lost_examples: bool) -> None:
    sizes = list(_shuffle_buffers(getattr(dataset, "_ex_iterable", None)))
    if sizes and not allow_lost_examples:
        raise FormatError(
            f"the dataset has a shuffle buffer of {max(sizes)} examples, which its state does not hold: "
            "a resumed run would never see them",
            hint="Shuffle the files or shards beforehand instead, or accept it with allow_lost_examples=True.",
        )


def _shuffle_buffers(examples: Any) -> Iterator[int]:
    """The sizes of the shuffle buffers in the chain of iterables within an IterableDataset."""
    size = getattr(examples, "buffer_size", None)
    if isinstance(size, int):
        yield size
    for inner in [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", [])]:
        if inner is not None:
            yield from _shuffle_buffers(inner)


def _replayed(loader: StatefulDataLoader[Any], state: Mapping[str, Any]) -> int:
    """How many batches torchdata reads again for a state: 0 where the dataset or its iterator has a state."""
    from torch.utils.data import IterableDataset  # noqa: PLC0415  # slow, and optional

    if not isinstance(loader.dataset, IterableDataset) or _has_dataset_state(state):
        return 0
    snapshot = state.get("_snapshot", {})
    return int(state.get("_num_yielded", 0)) + int(snapshot.get("_snapshot_step", 0))


def _has_dataset_state(state: object) -> bool:
    if not isinstance(state, dict):
        return False
    return any(
        value is not None if key in ("dataset_state", "dataset_iter_state") else _has_dataset_state(value)
        for key, value in state.items()
    )


def _tensors_as_text(state: Any) -> Any:
    """The same with each tensor (a sampler's generator has one) as its dtype, shape and bytes in base64."""
    import torch  # noqa: PLC0415  # slow, and optional

    if isinstance(state, torch.Tensor):
        raw = state.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(state.dtype).removeprefix("torch.")
        return {_TENSOR: [dtype, list(state.shape), base64.b64encode(raw).decode("ascii")]}
    return _mapped(state, _tensors_as_text)


def _tensors_from_text(state: Any) -> Any:
    if isinstance(state, dict) and state.keys() == {_TENSOR}:
        import torch  # noqa: PLC0415  # slow, and optional

        name, shape, text = state[_TENSOR]
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise FormatError(f"the saved state names the dtype {name!r}, which torch does not know")
        return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8).view(dtype).reshape(shape)
    return _mapped(state, _tensors_from_text)


def _mapped(state: Any, convert: Any) -> Any:
    if type(state) is dict:
        return {key: convert(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(convert(value) for value in state)
    return state
