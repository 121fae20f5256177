"""Publishing from several ranks: each streams shards of its own, whose tensors it gathers piece by piece; one commits.

Rank 0 looks at the Hub, shares out the shards, keeps what is finished on the staging branch, and makes the commit. A
rank that reads a piece asks those that hold it, so ranks go at their own pace, and what one of them finds on the Hub
already, hashes, or sends again concerns no other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from hubshard.errors import FormatError, HubshardError
from hubshard.events import Totals
from hubshard.protocols import Entry, Revision, Staged
from hubshard.publish.delivery import Delivery, Published, Work
from hubshard.publish.destination import Destination, by_path
from hubshard.publish.outgoing import OutFile, Outgoing
from hubshard.publish.staging import publish_key
from hubshard.publish.upload import Known, Upload
from hubshard.store.hub import HubStore

if TYPE_CHECKING:
    from hubshard.ranks.group import RankGroup

__all__ = ["Shares", "owners_of"]

_LOOK_SECONDS = 0.2


def owners_of(sizes: Sequence[int], ranks: int, *, first_has: int = 0) -> list[int]:
    """Which rank sees to which file: the largest ones first, each to the rank that has the least.

    With n files of about the same size, the ranks differ from their mean by less than ranks/n of it.

    Args:
        sizes: of the files (bytes).
        ranks: how many there are.
        first_has: bytes that rank 0 has to see to besides.
    """
    loads = [first_has, *(0 for _ in range(ranks - 1))]
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        owners[number] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[owners[number]] += sizes[number]
    return owners


class Shares:
    """The ranks of a model that is split over them, as `Together`.

    Args:
        group: of these ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._totals: list[Totals] = []
        self._rank_bytes: tuple[int, ...] = ()

    @property
    def leads(self) -> bool:
        """See `Together`."""
        return self._group.rank == 0

    @property
    def size(self) -> int:
        """See `Together`."""
        return self._group.size

    def agree(self, what: str) -> None:
        """See `Together`.

        Raises:
            FormatError: a rank publishes something else.
        """
        if not self.leads:
            self._group.tell(0, "what", what)
            return
        for rank in range(1, self._group.size):
            theirs = self._group.hear(rank, "what")
            if theirs != what:
                raise FormatError(
                    f"rank {rank} publishes {theirs}, and rank 0 {what}", hint="give the same model and options on all"
                )

    def stage(self, upload: Upload, outgoing: Outgoing, batch_bytes: int | None) -> Sequence[Staged]:
        """See `Together`."""
        group, shards = self._group, outgoing.shards
        known = upload.look(batch_bytes)
        beside = sum(file.nbytes for file in outgoing.files)
        owners = owners_of([shard.nbytes for shard in shards], group.size, first_has=beside)
        self._rank_bytes = tuple(
            sum(shard.nbytes for shard, owner in zip(shards, owners, strict=True) if owner == rank)
            + (beside if rank == 0 else 0)
            for rank in range(group.size)
        )
        share = [[n for n, owner in enumerate(owners) if owner == rank] for rank in range(group.size)]
        for rank in range(1, group.size):
            paths = [shards[number].path for number in share[rank]]
            told = {"shards": share[rank], "tree": _entries(known.tree, paths), "found": _entries(known.found, paths)}
            at = {"repo_id": upload.to.store.repo_id, "base": [upload.to.base.branch, upload.to.base.commit]}
            group.tell(rank, "begin", told | at)
        keeper = _Keeper(group, upload, {shard.path: shard for shard in shards})
        with keeper:
            own = upload.send([*(shards[number] for number in share[0]), *outgoing.files], known)
            done = [group.hear(rank, "done") for rank in range(1, group.size)]
        self._totals = [Totals(**told["totals"]) for told in done]
        staged = [*own, *(Staged(**each) for told in done for each in told["staged"])]
        order = {file.path: number for number, file in enumerate(outgoing.all_files)}
        return sorted(staged, key=lambda each: order[each.path])

    def follow(self, to: Delivery, outgoing: Outgoing, work: Work) -> Published:
        """See `Together`."""
        begin = self._group.hear(0, "begin")
        store = HubStore(begin["repo_id"], token=to.token, endpoint=to.endpoint, patience=work.patience)
        key = publish_key(outgoing.plans, repo_id=store.repo_id, revision=to.revision)
        at = Destination(store, to.revision, Revision(*begin["base"]), to.create_pr, key)
        upload = Upload(
            at,
            outgoing,
            work.op,
            scratch=work.scratch,
            streams=to.streams,
            ranks=self.size,
            keep=self._tell_kept,
        )
        known = Known(_entries_of(begin["tree"]), _entries_of(begin["found"]))
        staged = upload.send([outgoing.shards[number] for number in begin["shards"]], known)
        done = {"staged": [_plain(each) for each in staged], "totals": asdict(work.op.totals())}
        self._group.tell(0, "done", done)
        told = self._group.hear(0, "published")
        work.op.end(told["commit"])
        return Published(**told, plans=outgoing.plans)

    def published(self, done: Published) -> Published:
        """See `Together`."""
        ours = replace(
            done,
            sent_bytes=done.sent_bytes + sum(totals.sent_bytes for totals in self._totals),
            skipped_bytes=done.skipped_bytes + sum(totals.skipped_bytes for totals in self._totals),
            deduplicated_bytes=done.deduplicated_bytes + sum(totals.deduplicated_bytes for totals in self._totals),
            retries=done.retries + sum(totals.retries for totals in self._totals),
            rank_bytes=self._rank_bytes,
        )
        self._group.tell_all("published", ours.facts)
        return ours

    def _tell_kept(self, _file: OutFile, staged: Staged) -> None:
        self._group.tell(0, "kept", _plain(staged))


class _Keeper:
    """Puts what other ranks have finished on the staging branch, while rank 0 has work of its own."""

    def __init__(self, group: RankGroup, upload: Upload, files: Mapping[str, OutFile]) -> None:
        self._group = group
        self._upload = upload
        self._files = files
        self._has_failed = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hubshard-keeper", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: object, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if kind is not None and not self._has_failed:  # what a rank has finished outlives the failure of another
            with contextlib.suppress(HubshardError):
                self._keep()

    def _run(self) -> None:
        try:
            while not self._ended.wait(_LOOK_SECONDS):
                self._keep()
        except HubshardError as error:  # raised again where rank 0 waits, and told to the others by it
            self._has_failed = True
            self._group.stop(error)

    def _keep(self) -> None:
        for _, told in self._group.heard("kept"):
            staged = Staged(**told)
            self._upload.keep(self._files[staged.path], staged)


# Plain data, as it travels


def _plain(staged: Staged) -> dict[str, Any]:
    return asdict(staged)


def _entries(entries: Mapping[str, Entry], paths: Sequence[str]) -> list[dict[str, Any]]:
    return [asdict(replace(entries[path], path=path)) for path in paths if path in entries]


def _entries_of(told: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
    return by_path(Entry(**entry) for entry in told)
