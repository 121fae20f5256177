"""The ranks of a run, and how they act together: what fails on one of them fails on all, with the same error.

The ranks are connected by gloo backends of our own, made on the store of the default process group. So threads in the
background never meet the collectives of the training, and whoever makes or destroys process groups does not meet ours.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hubshard.errors import HubshardError, StoreError
from hubshard.resume.agreement import StepAgreement
from hubshard.resume.ranks import check_alone

__all__ = ["Team", "teams_of"]

T = TypeVar("T")
R = TypeVar("R")

_LONGEST = timedelta(days=2)  # an upload may take its time; a rank that dies closes its connections at once
_MADE: Counter[str] = Counter()  # teams per process group, in this process


class Team:
    """Some ranks that exchange small objects; without a wire one rank alone.

    Every method is called by all ranks, in the same order, and by one thread at a time.

    Args:
        wire: to the others.
        name: the same on all ranks, and used by no other team of them.
    """

    def __init__(self, wire: _Wire | None, name: str) -> None:
        self._wire = wire
        self._name = name
        self.rank = 0 if wire is None else wire.rank
        self.size = 1 if wire is None else wire.size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Which of some flags are up on any rank; the fastest thing to ask, since the training may wait for it."""
        return list(flags) if self._wire is None else self._wire.any_of(flags)

    def each(self, work: Callable[[], T]) -> list[T]:
        """Every rank works; what each of them found, by rank.

        Raises:
            Exception: that of the first rank on which it failed.
        """
        outcomes: list[_Outcome] = self.join(lambda: _outcome(work), lambda found: found)
        return [outcome.value for outcome in _successes(outcomes)]

    def first(self, work: Callable[[], T]) -> T:
        """Rank 0 works; all get what it found.

        Raises:
            Exception: it failed there.
        """
        return cast("T", self._spread(_outcome(work) if self.is_first else None))

    def join(self, work: Callable[[], T], join: Callable[[list[T]], R]) -> R:
        """Every rank works, rank 0 joins what they found, all get that.

        Raises:
            Exception: that of the first rank on which it failed, or of `join`.
        """
        outcomes = self._gathered(work)
        joined = None if outcomes is None else _outcome(lambda: join([found.value for found in _successes(outcomes)]))
        return cast("R", self._spread(joined))

    def share_out(self, work: Callable[[], T], share: Callable[[list[T]], Sequence[R]]) -> R:
        """Every rank works, rank 0 makes a share for each out of what they found, each gets its own.

        Raises:
            Exception: that of the first rank on which it failed, or of `share`.
        """
        outcomes = self._gathered(work)
        shares: list[_Outcome] | None = None
        if outcomes is not None:
            made = _outcome(lambda: share([found.value for found in _successes(outcomes)]))
            shares = [made] * self.size if made.error else [_Outcome(item, None) for item in made.value]
        if self._wire is None:
            own = (shares or [])[0]
        else:
            own = _loads(self._wire.scatter(None if shares is None else [_dumps(item) for item in shares]))
        return cast("R", _successes([own])[0].value)

    def agreements(self) -> Callable[[str], StepAgreement]:
        """Makes agreements of the ranks on steps, under names that nobody else uses."""
        store = None if self._wire is None else c10d._get_default_store()  # noqa: SLF001  # there is no other door

        def make(name: str) -> StepAgreement:
            return StepAgreement(store, name=f"{self._name}/{name}", world_size=self.size)

        return make

    def close(self) -> None:
        """Cut the wire."""
        self._wire = None

    def _gathered(self, work: Callable[[], T]) -> list[_Outcome] | None:
        mine = _outcome(work)
        if self._wire is None:
            return [mine]
        raw = self._wire.gather(_dumps(mine))
        return None if raw is None else [mine, *(_loads(item) for item in raw[1:])]

    def _spread(self, outcome: _Outcome | None) -> Any:
        if self._wire is not None:
            raw = self._wire.broadcast(None if outcome is None else _dumps(outcome))
            outcome = outcome or _loads(raw)
        return _successes([] if outcome is None else [outcome])[0].value


def teams_of(group: dist.ProcessGroup | None, *, count: int) -> list[Team]:
    """Several teams of the same ranks, so that several threads may act with the others at once; made by all of them.

    Args:
        group: the ranks; None for all.
        count: of teams.

    Raises:
        FormatError: several processes were started, and their process group does not exist yet.
    """
    if not dist.is_available() or not dist.is_initialized():
        check_alone("save a state of its own", hint="Call torch.distributed.init_process_group() first.")
        return [Team(None, "") for _ in range(count)]
    group = group or dist.group.WORLD
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    key = "world" if group is dist.group.WORLD else "-".join(map(str, dist.get_process_group_ranks(group)))
    teams = []
    for _ in range(count):
        name = f"hubshard/{key}/{_MADE[key]}"
        _MADE[key] += 1
        teams.append(Team(_Wire(name, rank, size) if size > 1 else None, name))
    return teams


class _Wire:
    """A gloo backend that carries bytes.

    Args:
        name: under which the ranks find each other.
        rank: of this process.
        size: number of ranks.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        store = c10d.PrefixStore(name, c10d._get_default_store())  # noqa: SLF001  # there is no other door
        self._backend: Any = dist.ProcessGroupGloo(store, rank, size, _LONGEST)

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """See `Team.any_of`."""
        return [bool(flag) for flag in self._most([int(flag) for flag in flags])]

    def broadcast(self, raw: bytes | None) -> bytes:
        """The bytes of rank 0."""
        (nbytes,) = self._most([0 if raw is None else len(raw)])
        data = _tensor(raw, nbytes)
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        self._do(lambda: self._backend.broadcast([data], options))
        return _bytes(data)

    def gather(self, raw: bytes) -> list[bytes] | None:
        """On rank 0 the bytes of all; None on the others."""
        longest = self._most([len(raw)])[0] + _LENGTH_BYTES
        is_root = self.rank == 0
        outs = [[torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]] if is_root else []
        options = c10d.GatherOptions()
        options.rootRank = 0
        self._do(lambda: self._backend.gather(outs, [_tensor(_framed(raw), longest)], options))
        return [_unframed(_bytes(out)) for out in outs[0]] if is_root else None

    def scatter(self, raws: Sequence[bytes] | None) -> bytes:
        """Those of the bytes on rank 0 that are meant for this rank."""
        longest = self._most([max(map(len, raws or [b""]))])[0] + _LENGTH_BYTES
        own = torch.empty(longest, dtype=torch.uint8)
        ins = [] if raws is None else [[_tensor(_framed(raw), longest) for raw in raws]]
        options = c10d.ScatterOptions()
        options.rootRank = 0
        self._do(lambda: self._backend.scatter([own], ins, options))
        return _unframed(_bytes(own))

    def _most(self, numbers: Sequence[int]) -> list[int]:
        held = torch.tensor(numbers, dtype=torch.int64)
        options = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._do(lambda: self._backend.allreduce([held], options))
        return [int(number) for number in held.tolist()]

    def _do(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise StoreError(
                f"rank {self.rank} cannot reach the others: {error}",
                hint="a process of the run has ended: start the run again, it restores the newest step",
            ) from error


_LENGTH_BYTES = 8


def _framed(raw: bytes) -> bytes:
    return len(raw).to_bytes(_LENGTH_BYTES, "little") + raw


def _unframed(raw: bytes) -> bytes:
    return raw[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")]


def _tensor(raw: bytes | None, nbytes: int) -> torch.Tensor:
    data = torch.zeros(nbytes, dtype=torch.uint8)
    if raw:
        data[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return data


def _bytes(data: torch.Tensor) -> bytes:
    return data.numpy().tobytes()


# What came out of the work of a rank


class _Outcome:
    # a value, or the error that came instead
    def __init__(self, value: Any, error: BaseException | None) -> None:
        self.value = value
        self.error = error


def _outcome(work: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(work(), None)
    except BaseException as error:  # noqa: BLE001  # the others wait: they are told, and then it is raised
        return _Outcome(None, error)


def _dumps(outcome: _Outcome) -> bytes:
    """An outcome as bytes, for ranks of the same run; an error that cannot travel is told in words."""
    try:
        raw = pickle.dumps(outcome)
        if outcome.error is not None:
            pickle.loads(raw)  # noqa: S301  # our own, of just now
    except Exception as error:  # noqa: BLE001  # whatever a foreign object does when it is copied
        told = outcome.error or error
        raw = pickle.dumps(_Outcome(None, HubshardError(f"{type(told).__name__}: {told}")))
    return raw


def _loads(raw: bytes) -> Any:
    return pickle.loads(raw)  # noqa: S301  # from a rank of the same run


def _successes(outcomes: Sequence[_Outcome]) -> Sequence[_Outcome]:
    """The outcomes; or the first error among them is raised."""
    for rank, outcome in enumerate(outcomes):
        error = outcome.error
        if error is not None and rank and isinstance(error, HubshardError):
            told = copy.copy(error)
            told.message = f"rank {rank}: {error.message}"
            raise told from error
        if error is not None:
            raise error
    return outcomes
