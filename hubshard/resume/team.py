"""The ranks of a run, and how they act together: what fails on one of them fails on all, with the same error.

The ranks are connected by gloo backends of our own, made on the store of the default process group. So threads in the
background never meet the collectives of the training, and whoever makes or destroys process groups does not meet ours.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hubshard.errors import HubshardError
from hubshard.ranks.gloo import gloo_backend, reason_of, set_limit, shared_store
from hubshard.ranks.telling import error_of, plain_error, told_bytes, told_value
from hubshard.resume.agreement import StepAgreement
from hubshard.resume.ranks import LostRankError, check_alone

__all__ = ["Team", "teams_of"]

T = TypeVar("T")
R = TypeVar("R")

_LOG = logging.getLogger("hubshard")
_LONG_WAIT_SECONDS = 30.0
_MEET_SECONDS = 1800.0  # as torch.distributed waits
_LIMIT_SECONDS = 2 * 24 * 3600.0  # an upload may take its time; a rank that dies closes its connections at once
_PART_SECONDS = 60.0
_MADE: Counter[str] = Counter()  # teams per process group, in this process


class Team:
    """Some ranks that exchange small values, such as `told_bytes` takes; without a wire one rank alone.

    Every method is called by all ranks, in the same order, and by one thread at a time. What fails on one of them fails
    on all: an error of ours is the same on all of them, with the rank in its message, but for rank 0, which speaks for
    all; any other is raised as it is where it came up, and told to the others in a `StoreError`.

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
        return self.join(work, list)

    def first(self, work: Callable[[], T]) -> T:
        """Rank 0 works; all get what it found.

        Raises:
            Exception: it failed there.
        """
        return cast("T", self._spread(_outcome(work, 0) if self.is_first else None, None))

    def join(self, work: Callable[[], T], join: Callable[[list[T]], R]) -> R:
        """Every rank works, rank 0 joins what they found, all get that.

        Raises:
            Exception: that of the first rank on which it failed, or of `join`.
        """
        mine, outcomes = self._gathered(work)
        return cast("R", self._spread(None if outcomes is None else _joined(outcomes, join), mine))

    def share_out(self, work: Callable[[], T], share: Callable[[list[T]], Sequence[R]]) -> R:
        """Every rank works, rank 0 makes a share for each out of what they found, each gets its own.

        Raises:
            Exception: that of the first rank on which it failed, or of `share`.
        """
        mine, outcomes = self._gathered(work)
        shares: list[_Outcome] = []
        if outcomes is not None:
            made = _joined(outcomes, share)
            shares = [made] * self.size if made.error is not None else [_Outcome(0, item) for item in made.value]
        raw = b"" if self._wire is None else self._wire.scatter(list(map(_bytes_of, shares)))
        return cast("R", self._value(shares[0] if shares else _outcome_of(raw), mine))

    def agreements(self) -> Callable[[str], StepAgreement]:
        """Makes agreements of the ranks on steps, under names that nobody else uses."""
        store = None if self._wire is None else shared_store(self._name)

        def make(name: str) -> StepAgreement:
            return StepAgreement(store, name=name, world_size=self.size)

        return make

    def part(self, limit_seconds: float = _PART_SECONDS) -> None:
        """Wait a while for the others to come here too, or to be gone, before this process may end.

        It may be the one that keeps the store, into which the others look after each of their last steps.
        """
        with suppress(LostRankError):
            if self._wire is not None:
                self._wire.limit(min(limit_seconds, _PART_SECONDS))
                self._wire.any_of([False])

    def close(self) -> None:
        """Cut the wire.

        A collective that is under way goes on; the next one fails, rather than take this rank for alone.
        """
        if self._wire is not None:
            self._wire.cut()

    def _gathered(self, work: Callable[[], T]) -> tuple[_Outcome, list[_Outcome] | None]:
        """What came of it here; and on rank 0 what did on each."""
        mine = _outcome(work, self.rank)
        if self._wire is None:
            return mine, [mine]
        raws = self._wire.gather(_bytes_of(mine))
        return mine, None if raws is None else [mine, *map(_outcome_of, raws[1:])]

    def _spread(self, outcome: _Outcome | None, mine: _Outcome | None) -> Any:
        """What rank 0 has for all."""
        raw = b"" if self._wire is None else self._wire.broadcast(None if outcome is None else _bytes_of(outcome))
        return self._value(outcome or _outcome_of(raw), mine)

    def _value(self, outcome: _Outcome, mine: _Outcome | None) -> Any:
        if outcome.error is None:
            return outcome.value
        own = mine.error if mine is not None and outcome.rank == self.rank else None
        if own is None or own is outcome.error:
            raise outcome.error
        if isinstance(own, HubshardError):
            raise outcome.error from own
        raise own


def teams_of(group: dist.ProcessGroup | None, *, count: int) -> list[Team]:
    """Several teams of the same ranks, so that several threads may act with the others at once; made by all of them.

    The first is for the thread that trains: it says so where a wait is long.

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
    for number in range(count):
        name = f"hubshard/{key}/{_MADE[key]}"
        _MADE[key] += 1
        teams.append(Team(_Wire(name, rank, size, says=number == 0) if size > 1 else None, name))
    return teams


class _Wire:
    """A gloo backend that carries bytes.

    Args:
        name: under which the ranks find each other.
        rank: of this process.
        size: number of ranks.
        says: whether to log that a wait is long: the training stands still meanwhile.
    """

    def __init__(self, name: str, rank: int, size: int, *, says: bool) -> None:
        self.rank = rank
        self.size = size
        self._says = says
        self._why = ""
        self._backend = gloo_backend(name, rank, size, meet_seconds=_MEET_SECONDS, limit_seconds=_LIMIT_SECONDS)

    def cut(self) -> None:
        """Close the connections, once no collective is under way on them."""
        self._backend, self._why = None, "this rank has ended its run"

    def limit(self, limit_seconds: float) -> None:
        """Wait no longer for the others from now on."""
        with self._to_the_end():
            set_limit(self._backend, limit_seconds)

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """See `Team.any_of`."""
        with self._to_the_end():
            return [bool(flag) for flag in self._most([int(flag) for flag in flags])]

    def broadcast(self, raw: bytes | None) -> bytes:
        """The bytes of rank 0."""
        with self._to_the_end():
            (nbytes,) = self._most([0 if raw is None else len(raw)])
            data = _tensor(raw, nbytes)
            options = c10d.BroadcastOptions()
            options.rootRank = 0
            self._do(lambda backend: backend.broadcast([data], options))
            return _bytes(data)

    def gather(self, raw: bytes) -> list[bytes] | None:
        """On rank 0 the bytes of all; None on the others."""
        with self._to_the_end():
            longest = self._most([len(raw)])[0] + _LENGTH_BYTES
            is_root = self.rank == 0
            outs = [[torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]] if is_root else []
            options = c10d.GatherOptions()
            options.rootRank = 0
            self._do(lambda backend: backend.gather(outs, [_tensor(_framed(raw), longest)], options))
            return [_unframed(_bytes(out)) for out in outs[0]] if is_root else None

    def scatter(self, raws: Sequence[bytes]) -> bytes:
        """Those of the bytes on rank 0, one for each rank, that are meant for this one; the others give none."""
        with self._to_the_end():
            longest = self._most([max(map(len, raws), default=0)])[0] + _LENGTH_BYTES
            own = torch.empty(longest, dtype=torch.uint8)
            ins = [] if not raws else [[_tensor(_framed(raw), longest) for raw in raws]]
            options = c10d.ScatterOptions()
            options.rootRank = 0
            self._do(lambda backend: backend.scatter([own], ins, options))
            return _unframed(_bytes(own))

    def _most(self, numbers: Sequence[int]) -> list[int]:
        held = torch.tensor(numbers, dtype=torch.int64)
        options = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._do(lambda backend: backend.allreduce([held], options))
        return [int(number) for number in held.tolist()]

    @contextmanager
    def _to_the_end(self) -> Iterator[None]:
        """Cut the wire where this rank does not take part in something to its end: the others would wait for it."""
        if self._backend is None:
            raise self._lost()
        try:
            yield
        except BaseException:
            self._backend = None  # which closes the connections
            raise

    def _do(self, start: Callable[[Any], Any]) -> None:
        backend = self._backend
        if backend is None:
            raise self._lost()
        said = threading.Timer(_LONG_WAIT_SECONDS, self._say_that_it_waits)
        said.daemon = True
        try:
            if self._says:
                said.start()
            start(backend).wait()
        except RuntimeError as error:
            self._why = reason_of(error)
            raise self._lost() from error
        finally:
            said.cancel()

    def _lost(self) -> LostRankError:
        return LostRankError(
            f"rank {self.rank} cannot reach the others: {self._why}",
            hint="a process of the run has ended: start the run again, it restores the newest step",
        )

    def _say_that_it_waits(self) -> None:
        _LOG.warning(
            "rank %d is waiting for another rank, which is at work still or has not called the same: every rank makes "
            "the ResumeBranch, and calls restore, save, wait and rollback",
            self.rank,
        )


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


@dataclass(frozen=True)
class _Outcome:
    # on which rank, and a value, or the error that came instead
    rank: int
    value: Any
    error: BaseException | None = None


def _outcome(work: Callable[[], Any], rank: int) -> _Outcome:
    try:
        return _Outcome(rank, work())
    except BaseException as error:  # noqa: BLE001  # the others wait: they are told, and then it is raised
        return _Outcome(rank, None, error)


def _joined(outcomes: Sequence[_Outcome], join: Callable[[list[Any]], Any]) -> _Outcome:
    """The first failure; or what rank 0 makes of all values."""
    failed = next((outcome for outcome in outcomes if outcome.error is not None), None)
    return failed or _outcome(lambda: join([outcome.value for outcome in outcomes]), 0)


def _bytes_of(outcome: _Outcome) -> bytes:
    error = outcome.error
    if error is None:
        try:
            return told_bytes((outcome.rank, outcome.value, None))
        except Exception as untold:  # noqa: BLE001  # the others wait: they are told this
            error = untold
    return told_bytes((outcome.rank, None, plain_error(error, outcome.rank or None)))


def _outcome_of(raw: bytes) -> _Outcome:
    rank, value, error = told_value(raw)
    return _Outcome(rank, value, None if error is None else error_of(error))
