"""Loading with PyTorch's distributed checkpoint (DCP), from a branch of the Hub, a local folder, or both.

Interface: `torch.distributed.checkpoint.StorageReader`; format: `hubshard.steps.step`.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from hubshard.errors import FormatError, IncompleteError, IntegrityError, NotFoundError
from hubshard.resume.dcp.branch_fallback import BranchFallback
from hubshard.resume.dcp.planners import has_default_placing, place_value
from hubshard.resume.dcp.torch_items import Destination, box_to_read, metadata_of
from hubshard.resume.saves.disk_line import BranchLine, DiskLine
from hubshard.resume.saves.local_steps import LocalSteps
from hubshard.steps.canonical import decode, encode
from hubshard.steps.places import (
    BranchPlace,
    LocalPlace,
    OpenStep,
    Place,
    check_places,
    find_step,
    hub_store,
    no_branch,
    refuse_id,
)
from hubshard.steps.reading import LOCAL, read_boxes
from hubshard.steps.step import Step, checked_number

if TYPE_CHECKING:
    from hubshard.store.hub_client import Token

__all__ = ["HubReader"]

_LOG = logging.getLogger("hubshard")
_STAGED_BYTES = 256 * 2**20


class HubReader(StorageReader):
    """Reads a step of a training run: `dcp.load(state, storage_reader=HubReader("org/run"))`.

    On any number of ranks, each of which fetches only what it needs. The manifest, and that every file is there with
    its size, is checked before the state is touched; every byte is checked while it is read. It runs no code of the
    checkpoint. A step in the local folder is taken from there, all others from the branch, and so is what turns out to
    be damaged in the folder, where the branch holds the same save of the step. Of the folder alone, steps that a
    rollback of the branch has removed do not count, as in `ResumeBranch.restore`, unless one is named with `step`.

    Once the metadata is read, `opened` is the step, with the files that were `ignored`; after the load, `nbytes_read`
    the bytes that this rank fetched.

    Args:
        repo_id: the repo, "org/name"; None to read from `local_dir` alone.
        step: number of the step; None for the newest that is whole. Broken ones are passed over, with a warning.
        branch: of the repo; a tag or a commit will do.
        local_dir: folder that holds a folder per step.
        token: of the Hub; see `HubStore`.
        endpoint: the Hub's URL; None for huggingface_hub's.

    Raises:
        FormatError: neither a repo nor a folder, or an invalid repo.
    """

    def __init__(
        self,
        repo_id: str | None,
        *,
        step: int | None = None,
        branch: str = "resume",
        local_dir: str | os.PathLike[str] | None = None,
        token: Token = None,
        endpoint: str | None = None,
    ) -> None:
        check_places(repo_id, local_dir)
        self.repo_id = repo_id
        self.step = None if step is None else checked_number(step)
        self.branch = branch
        self.local_dir = None if local_dir is None else Path(local_dir)
        self.opened: OpenStep | None = None
        self.nbytes_read = 0
        self._token = token
        self._endpoint = endpoint

    # The interface, in the order in which DCP calls it

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See `StorageReader`; a checkpoint id is refused, since the step is the id."""
        refuse_id(checkpoint_id)
        self.opened = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """See `StorageReader`. Finds the step and checks it.

        Raises:
            NotFoundError: no such step, branch or repo.
            IncompleteError: a file is missing.
            IntegrityError: a file has another size than the manifest says.
            FormatError: the manifest is damaged; or the folder cannot tell which of its steps were rolled back.
            ConflictError: the folder holds newer steps than the branch, which are another run's as far as it tells.
        """
        opened = find_step(self._places(), self.step)
        if self.repo_id is not None and opened.folder.pace is LOCAL:
            fallback = BranchFallback(partial(self._on_branch, self.repo_id, opened.step.step), opened.sha256)
            opened = dataclasses.replace(opened, folder=dataclasses.replace(opened.folder, fallback=fallback))
        self.opened = opened
        return metadata_of(self.opened.step)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:  # noqa: FBT001
        """See `StorageReader`."""
        del metadata, is_coordinator
        self.nbytes_read = 0

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See `StorageReader`."""
        opened = self._opened()
        return dataclasses.replace(plan, storage_data=(opened.step.step, opened.sha256, opened.folder.where))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See `StorageReader`.

        Raises:
            FormatError: the ranks found different steps.
        """
        found = {plan.storage_data[:2]: plan.storage_data for plan in plans}
        if len(found) > 1:
            steps = " and ".join(f"step {step} in {where}" for step, _, where in found.values())
            raise FormatError(
                f"the ranks found different steps: {steps}", hint="name one with step=, or share the local folder"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See `StorageReader`.

        Raises:
            FormatError: the state has another dtype than the step; nothing was read yet.
            IntegrityError: a block is not as it was saved: names file and block.
        """
        step = self._opened().step
        wanted = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        places = [_destination(item, planner, step) for item in wanted]
        for batch in _batches(places):
            self._read(batch, wanted, places, planner)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                _load_value(item, planner, step)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def check(self, plan: LoadPlan, planner: LoadPlanner) -> Collection[str]:
        """See that the state can take what `read_data` would read; nothing is read yet.

        Returns:
            The files that are needed.

        Raises:
            FormatError: the state has another dtype than the step.
        """
        step = self._opened().step
        wanted = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        for item in wanted:
            _destination(item, planner, step)
        boxes = [(item.storage_index.fqn, box_to_read(item, step)) for item in wanted]
        return {piece.at.path for name, box in boxes if box.numel for piece in step.pieces(name, box)}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See `StorageReader`: no id leads to this reader by itself."""
        del checkpoint_id
        return False

    # How

    def _opened(self) -> OpenStep:
        if self.opened is None:
            raise FormatError("no step was opened yet", hint="call read_metadata first, as dcp.load does")
        return self.opened

    def _places(self) -> list[Place]:
        places: list[Place] = [] if self.local_dir is None else [LocalPlace(self.local_dir)]
        if self.repo_id is None or (self.step is not None and places and _holds(places[0], self.step)):
            return places
        store = hub_store(self.repo_id, self._token, self._endpoint)
        at = store.head(self.branch)
        if at is None and not (places and places[0].steps()):
            raise no_branch(self.repo_id, self.branch)
        if at is None:
            return places
        place = BranchPlace(store, at, f"{self.repo_id}@{self.branch}")
        if self.local_dir is not None and self.step is None:
            void = DiskLine(LocalSteps(self.local_dir)).judge(BranchLine.of(place, place.where))
            for number in sorted(void, reverse=True):
                _LOG.warning("step %d is passed over: %s", number, void[number])
            places = [LocalPlace(self.local_dir, void.keys())]
        return [*places, place]

    def _on_branch(self, repo_id: str, step: int) -> OpenStep:
        store = hub_store(repo_id, self._token, self._endpoint)
        at = store.head(self.branch)
        if at is None:
            raise no_branch(repo_id, self.branch)
        return BranchPlace(store, at, f"{repo_id}@{self.branch}").open(step)

    def _read(
        self, batch: Sequence[int], wanted: Sequence[ReadItem], places: Sequence[Destination], planner: LoadPlanner
    ) -> None:
        opened = self._opened()
        for number in batch:
            places[number].begin()
        boxes = [(wanted[n].storage_index.fqn, box_to_read(wanted[n], opened.step)) for n in batch]
        self.nbytes_read += read_boxes(
            opened.folder, opened.step, boxes, lambda n, copy, raw: places[batch[n]].take(copy, raw)
        )
        for number in batch:
            places[number].finish()
            planner.commit_tensor(wanted[number], places[number].tensor)


def _holds(place: Place, step: int) -> bool:
    """Whether a step is there, and whole as far as sizes tell."""
    try:
        place.open(step)
    except (NotFoundError, IncompleteError, IntegrityError, FormatError):
        return False
    return True


def _destination(item: ReadItem, planner: LoadPlanner, step: Step) -> Destination:
    name = item.storage_index.fqn
    tensor = planner.resolve_tensor(item)
    return Destination(tensor, name=name, spec=step.tensors[name].spec, box=box_to_read(item, step))


def _batches(places: Sequence[Destination]) -> list[list[int]]:
    """Numbers of destinations, so that what a batch holds apart from the state itself stays small."""
    batches: list[list[int]] = [[number for number, place in enumerate(places) if not place.staged_bytes]]
    held = 0
    for number, place in enumerate(places):
        if place.staged_bytes:
            if not held or held + place.staged_bytes > _STAGED_BYTES:
                batches.append([])
                held = 0
            batches[-1].append(number)
            held += place.staged_bytes
    return batches


def _load_value(item: ReadItem, planner: LoadPlanner, step: Step) -> None:
    name = item.storage_index.fqn
    raw = encode(step.scalars[name], path=name)  # a value of its own for each load
    if has_default_placing(planner):
        place_value(planner, item.dest_index.fqn, decode(raw, path=name))
    else:
        planner.load_bytes(item, io.BytesIO(raw))
