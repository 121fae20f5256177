"""Publishing where every process of a job holds all of it, as with DistributedDataParallel: rank 0 does the work.

The others wait for what came of it, if they call at all: rank 0 neither waits for them nor needs them.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from hubshard.errors import FormatError, StoreError
from hubshard.protocols import Staged
from hubshard.publish.delivery import Delivery, Published, Work
from hubshard.publish.liveness import Lifeline, Peer
from hubshard.publish.meeting import KeyStore, polled, reachable
from hubshard.publish.outgoing import Outgoing
from hubshard.publish.upload import Upload
from hubshard.ranks.telling import error_of, plain_error, told_bytes, told_value

__all__ = ["Replicas"]

_BEATS = 6
_FOREVER_SECONDS = 10.0**9
_LONGEST_POLL_SECONDS = 1.0
_FAREWELL_SECONDS = 3.0
_calls: Counter[str] = Counter()  # of this process: ranks that publish the same again and again count alike


class Replicas:
    """The processes of a job that all hold the same, as `Together`.

    Args:
        store: that all of them see, for them alone.
        rank: of this process.
        limit_seconds: of silence after which rank 0 counts as gone.
        wait_seconds: for which rank 0 is waited for in the first place.
    """

    def __init__(self, store: KeyStore, rank: int, *, limit_seconds: float, wait_seconds: float) -> None:
        self._store = store
        self._rank = rank
        self._limit_seconds = limit_seconds
        self._wait_seconds = wait_seconds
        self._key = ""
        self._lifeline: Lifeline | None = None
        self._ended = threading.Event()
        self._beat = threading.Thread(target=self._tell_alive, name="hubshard-alive", daemon=True)

    @property
    def leads(self) -> bool:
        """See `Together`."""
        return self._rank == 0

    @property
    def size(self) -> int:
        """See `Together`: one process does the work."""
        return 1

    def agree(self, what: str) -> None:
        """See `Together`.

        Raises:
            FormatError: rank 0 publishes nothing like it.
        """
        name = hashlib.sha256(what.encode()).hexdigest()[:16]
        key = f"{name}/{_calls[name]}"
        if self.leads:
            self._lifeline = Lifeline()
            self._store.set(f"{key}/lifeline", self._lifeline.address)
            self._store.set(f"{key}/alive", "0")
            self._key = key
            self._beat.start()
        else:
            with reachable():
                self._wait_for_first(key, what)
                self._store.add(f"{key}/following", 1)
            self._key = key
        _calls[name] += 1

    def stage(self, upload: Upload, outgoing: Outgoing, batch_bytes: int | None) -> Sequence[Staged]:
        """See `Together`."""
        del outgoing
        return upload.stage(batch_bytes)

    def follow(self, to: Delivery, outgoing: Outgoing, work: Work) -> Published:
        """See `Together`."""
        del to
        with reachable(), closing(Peer(self._store.get(f"{self._key}/lifeline").decode())) as leader:
            told = self._outcome(leader)
            self._store.add(f"{self._key}/followed", 1)
        if "error" in told:
            raise error_of(told["error"])
        work.op.end(told["commit"])
        return Published(**told, plans=outgoing.plans)

    def published(self, done: Published) -> Published:
        """See `Together`."""
        self._tell(done.facts)
        return done

    def give_up(self, error: BaseException) -> None:
        """Tell the others that rank 0 has failed."""
        if self.leads and self._key:
            self._tell({"error": plain_error(error, 0)})

    def close(self) -> None:
        """Tell of no more signs of life. Those that wait are left the time to hear what came of it.

        The process of rank 0 often keeps the store, and ends soon.
        """
        self._ended.set()
        if self._beat.ident is not None:
            self._beat.join()
            with suppress(RuntimeError):
                for _ in polled(_FAREWELL_SECONDS):
                    if self._store.add(f"{self._key}/followed", 0) >= self._store.add(f"{self._key}/following", 0):
                        break
        if self._lifeline is not None:
            self._lifeline.close()

    def _tell(self, outcome: Mapping[str, Any]) -> None:
        # what was published stays so where nobody can be told of it: torch.distributed raises RuntimeError for that
        with suppress(RuntimeError):
            self._store.set(f"{self._key}/done", told_bytes(outcome).decode())

    def _outcome(self, leader: Peer) -> Any:
        last, since = b"", time.monotonic()
        for _ in polled(_FOREVER_SECONDS, longest_seconds=_LONGEST_POLL_SECONDS):
            has_ended = leader.has_ended()  # asked first: it may have told what came of it, and ended
            if self._store.check([f"{self._key}/done"]):
                break
            if has_ended:
                raise _gone("is gone")
            alive = self._store.get(f"{self._key}/alive")
            if alive != last:
                last, since = alive, time.monotonic()
            elif time.monotonic() - since > self._limit_seconds:
                raise _gone(f"has been silent for {self._limit_seconds:.0f} s")
        return told_value(self._store.get(f"{self._key}/done"))

    def _wait_for_first(self, key: str, what: str) -> None:
        for _ in polled(self._wait_seconds, waits_for=lambda: f"rank 0 to publish {what}"):
            if self._store.check([f"{key}/alive"]):
                return
        raise FormatError(
            f"rank {self._rank} publishes {what}, and rank 0 has not called for the same within "
            f"{self._wait_seconds:.0f} s",
            hint="call push_to_hub on rank 0, or on all ranks; with process_group=False a rank publishes by itself",
        )

    def _tell_alive(self) -> None:
        beat = 0
        while not self._ended.wait(self._limit_seconds / _BEATS):
            beat += 1
            with suppress(RuntimeError):
                self._store.set(f"{self._key}/alive", str(beat))


def _gone(how: str) -> StoreError:
    return StoreError(
        f"rank 0, which publishes, {how}",
        hint="see what became of it; then publish again: what was finished is not sent again",
    )
