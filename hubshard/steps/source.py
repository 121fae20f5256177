"""The model in a saved step, as a `Source`: read by checked ranges, whatever ranks had saved it. No torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from hubshard.engine import run
from hubshard.errors import FormatError, NotFoundError
from hubshard.manifest import FileDigest, Manifest, Piece
from hubshard.messages import counted
from hubshard.plan import natural_key
from hubshard.protocols import Buffer, Reader
from hubshard.reads import Read, plan_reads
from hubshard.steps.checked import KEPT_BYTES, CheckedReader
from hubshard.steps.places import BranchPlace, LocalPlace, OpenStep, Place, find_step, no_branch
from hubshard.steps.reading import REMOTE, copy_runs, part_manifest
from hubshard.steps.step import Placement, Step, TreePath
from hubshard.tensors import Box, TensorSpec

__all__ = ["MODEL_PART", "PartManifest", "StepSource", "open_step"]

MODEL_PART = "model"
"""The key under which a training state holds its model."""

_COMPILED = "_orig_mod."  # what torch.compile puts before the names of what it wraps
_VALUES = "values."  # where TrainState keeps what is no tensor
_SHOWN = 8


class StepSource:
    """The tensors of one part of a step, such as its model, under the names that they have there.

    Tied weights are one tensor and its aliases: names that lie at the very same bytes, or that `TrainState` records.
    A read fetches whole blocks and checks them; what is left of a block is kept for the next read, up to a bound.

    Attributes:
        opened: the step.
        part: what its names begin with: the key of the state that holds it, perhaps followed by more, after dots.
        reader: what its bytes are read with.
        left_out: what lies in the part and is no tensor.
    """

    def __init__(self, opened: OpenStep, part: str = MODEL_PART, *, kept_bytes: int = KEPT_BYTES) -> None:
        """Look at the manifest, not at the tensors.

        Args:
            opened: the step.
            part: "" for all tensors of the step.
            kept_bytes: bound of what is kept between reads.

        Raises:
            NotFoundError: there is no tensor in this part: says what the step holds.
            FormatError: it holds such names, but not below such a key.
        """
        step = opened.step
        self.opened = opened
        self.part = part
        self.reader = CheckedReader(opened.folder, step, kept_bytes=kept_bytes)
        names = [name for name, placed in step.tensors.items() if _is_in(name, placed.path, part)]
        if not names:
            raise _nothing_in(step, part, opened.folder.where)
        stored = {_own_name(name, part): name for name in names}
        if len(stored) < len(names):
            raise FormatError(f"{opened.folder.where}: two names under {part!r} differ only by {_COMPILED!r}")
        self._stored: Mapping[str, str] = stored
        self._aliases = _aliases({own: step.tensors[name] for own, name in stored.items()}) | _recorded(step, part)
        self._specs = {
            own: TensorSpec(own, step.tensors[name].spec.dtype, step.tensors[name].spec.shape)
            for own, name in stored.items()
            if own not in self._aliases
        }
        unknown = set(self._aliases.values()) - self._specs.keys()
        if unknown:
            raise FormatError(f"{opened.folder.where}: it records further names of {min(unknown)!r}, which it lacks")
        self.left_out = tuple(sorted(name for name, path in step.scalar_paths.items() if _is_in(name, path, part)))

    def specs(self) -> Sequence[TensorSpec]:
        """All tensors of the part."""
        return tuple(self._specs.values())

    def aliases(self) -> Mapping[str, str]:
        """Further names of tensors that were stored once: alias to stored name."""
        return self._aliases

    @property
    def nbytes_read(self) -> int:
        """Bytes that were fetched so far."""
        return self.reader.nbytes_read

    @cached_property
    def part_manifest(self) -> PartManifest:
        """Where the tensors lie, relative to the folder of the step."""
        step = self.opened.step
        files = {file.name: FileDigest(file.nbytes, file.sha256) for file in step.files}
        return PartManifest(self._specs, (), files, aliases=self._aliases, step=step, stored=self._stored)

    def files(self) -> Mapping[str, str]:
        """The files that hold tensors of the part: name to sha256 (hex)."""
        step = self.opened.step
        numbers = {number for name in self._stored.values() for number in set(step.tensors[name].files)}
        return {step.files[number].name: step.files[number].sha256 for number in sorted(numbers)}

    def read(self, name: str, box: Box) -> Buffer:
        """The row-major little-endian bytes of `box` of the tensor `name`, in a new buffer.

        Raises:
            FormatError: there is no such tensor or box.
            IntegrityError: a block is not as it was saved: names file and block.
        """
        spec = self._specs.get(name)
        if spec is None:
            raise FormatError(f"there is no tensor {name!r} in {self.opened.folder.where}")
        spec.check_box(box)
        into = memoryview(bytearray(box.numel * spec.bits // 8))
        pace = self.opened.folder.pace
        manifest, boxes = part_manifest(self.opened.step, [(self._stored[name], box)])
        plan = plan_reads(manifest, boxes, max_gap_bytes=pace.max_gap_bytes, max_read_bytes=pace.max_read_bytes)
        if len(plan.reads) < 2 or pace != REMOTE:
            for read in plan.reads:
                self._read(read, into)
            return into
        work = partial(self._read, into=into)
        workers = min(pace.workers, len(plan.reads))
        for _ in run(plan.reads, cost=lambda _: 0, work=work, budget_bytes=0, workers=workers):
            pass
        return into

    def _read(self, read: Read, into: memoryview) -> None:
        at = self.opened.folder.at
        for copy in read.copies[:1]:
            runs = list(copy.runs()) if len(read.copies) == 1 and copy.source == 0 else []
            if len(runs) == 1 and runs[0][2] == read.nbytes:
                start = runs[0][1]
                self.reader.read(at, read.path, read.start, read.stop, into[start : start + read.nbytes])
                return
        raw = memoryview(bytearray(read.nbytes))
        self.reader.read(at, read.path, read.start, read.stop, raw)
        for copy in read.copies:
            copy_runs(copy, raw, into)


@dataclass(frozen=True)
class PartManifest(Manifest):
    """A `Manifest` whose pieces are made when they are asked for: those of thousands of ranks are millions.

    Its `pieces` are empty; `pieces_of` answers for each tensor.

    Attributes:
        step: what it is of.
        stored: the names in the step, by the names here.
    """

    step: Step = field(kw_only=True)
    stored: Mapping[str, str] = field(kw_only=True)

    @cached_property
    def pieces_of(self) -> Mapping[str, Sequence[Piece]]:
        """The pieces of each tensor, sorted by where their boxes begin."""
        return _PiecesOf(self.step, {name: self.stored[name] for name in self.tensors})


class _PiecesOf(Mapping[str, Sequence[Piece]]):
    def __init__(self, step: Step, stored: Mapping[str, str]) -> None:
        self._step = step
        self._stored = stored

    def __getitem__(self, name: str) -> Sequence[Piece]:
        return [Piece(name, piece.box, piece.at) for piece in self._step.pieces(self._stored[name])]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def open_step(
    store: Reader | None,
    *,
    step: int | None,
    branch: str,
    where: str = "",
    local_dir: str | os.PathLike[str] | None = None,
) -> OpenStep:
    """A step of a local folder, or else of a branch.

    Args:
        store: the repo, or None.
        step: its number; None for the newest that is whole, with a warning for each that is passed over.
        branch: of the repo; a tag or a commit will do.
        where: the repo, for people.
        local_dir: a folder that holds a folder per step; its steps go before those of the branch.

    Raises:
        NotFoundError: no such step, or no such branch.
        HubshardError: what is wrong with it.
    """
    local = None if local_dir is None else LocalPlace(Path(local_dir))
    places: list[Place] = [] if local is None else [local]
    if local_dir is not None and local is not None and store is None and not local.steps():
        what = "holds no steps" if Path(local_dir).is_dir() else "does not exist"
        raise NotFoundError(f"{os.fspath(local_dir)} {what}", hint="name the folder that holds a folder per step")
    if store is not None and (local is None or step is None or step not in local.steps()):
        at = store.head(branch)
        if at is not None:
            places.append(BranchPlace(store, at, f"{where}@{branch}"))
        elif local is None or not local.steps():
            raise no_branch(where, branch)
    return find_step(places, step)


def _is_in(name: str, path: TreePath, part: str) -> bool:
    """Whether a value lies in the part; one that is a key of the state itself lies in none, whatever its name."""
    if not part:
        return True
    return len(path) > 1 and f"{part}.".startswith(f"{path[0]}.") and name.startswith(f"{part}.")


def _own_name(name: str, part: str) -> str:
    return (name[len(part) + 1 :] if part else name).replace(_COMPILED, "")


def _aliases(placed: Mapping[str, Placement]) -> dict[str, str]:
    # of names for the same bytes the first in natural order is kept
    alike: dict[object, list[str]] = {}
    for name, at in placed.items():
        if at.spec.numel:
            alike.setdefault((at.spec.dtype, at.tiling, at.files, at.starts), []).append(name)
    aliases: dict[str, str] = {}
    for names in alike.values():
        kept = min(names, key=lambda name: (natural_key(name), name))
        aliases |= {name: kept for name in names if name != kept}
    return aliases


def _recorded(step: Step, part: str) -> dict[str, str]:
    """What `train_state` records of tied weights: under the names of all parts that hold this one."""
    found: dict[str, str] = {}
    start = f"{part}." if part else ""
    for name, value in step.scalars.items():
        holder = f"{name.removeprefix(_VALUES)}."
        if not name.startswith(_VALUES) or not (start or holder).startswith(holder):
            continue
        state = value[0] if isinstance(value, tuple) and len(value) == 1 else None
        aliases = state.get("aliases") if isinstance(state, dict) else None
        for alias, kept in aliases.items() if isinstance(aliases, dict) else ():
            if f"{holder}{alias}".startswith(start):
                found[f"{holder}{alias}"[len(start) :]] = f"{holder}{kept}"[len(start) :]
    return found


def _nothing_in(step: Step, part: str, where: str) -> FormatError | NotFoundError:
    if part and any(name.startswith(f"{part}.") for name in step.tensors):
        return FormatError(
            f"{where}: names begin with {part + '.'!r}, but the state that was saved has no key {part!r}: it was flat",
            hint=f'take all of its tensors with part="", or save {{{part!r}: model.state_dict()}}',
        )
    return NotFoundError(
        f"{where} holds no tensor under {part!r}; it holds {_held(step)}" if part else f"{where} holds no tensor",
        hint="name another part" if step.tensors else None,
    )


def _held(step: Step) -> str:
    tensors = Counter(".".join(map(str, placed.path[:1])) for placed in step.tensors.values())
    values = Counter(".".join(map(str, path[:1])) for path in step.scalar_paths.values())
    found = [
        f"{key!r} ({counted(tensors[key], 'tensor')}, {counted(values[key], 'value')})"
        for key in sorted(tensors.keys() | values.keys())
    ]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (", ".join(found[:_SHOWN]) + more) or "nothing"
