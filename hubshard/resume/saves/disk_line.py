"""Which steps of a disk are of the line that a branch holds: it must not bring back, or mix in, any others. No torch.

A rollback of the branch cannot reach the disks of the run, and a folder may be another run's. So the folder keeps a
record of the branches that its steps have been on, or went on from, and of the rollbacks that it has followed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hubshard.errors import ConflictError, FormatError, StoreError
from hubshard.messages import listed
from hubshard.resume.saves.local_steps import LocalSteps
from hubshard.steps.places import BranchPlace
from hubshard.steps.rollbacks import Rollback

__all__ = ["BranchLine", "DiskLine"]

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class BranchLine:
    """What a branch tells the disks of its run.

    Attributes:
        where: the repo and branch.
        files: of each step on it, the names.
        rollbacks: of the branch, oldest first.
    """

    where: str
    files: Mapping[int, Sequence[str]]
    rollbacks: Sequence[Rollback]

    @classmethod
    def of(cls, place: BranchPlace, where: str) -> BranchLine:
        """That of a branch as it was looked at.

        Raises:
            FormatError: what tells its rollbacks is damaged.
        """
        files = {step: sorted(place.entries(step)) for step in sorted(place.steps())}
        return cls(where, files, list(place.rollbacks))


class DiskLine:
    """The steps on one disk, as a branch judges them.

    Args:
        local: the steps.
    """

    def __init__(self, local: LocalSteps) -> None:
        self._local = local
        self._record = local.rollbacks
        self._void: Collection[int] | None = None  # that the next step removes; None before any branch has judged

    @property
    def is_judged(self) -> bool:
        """Whether it is known which steps count."""
        return self._void is not None

    def judge(
        self, line: BranchLine | None, *, wanted: int | None = None, saved: Collection[int] = ()
    ) -> dict[int, str]:
        """The steps of the disk alone that do not count, and why; the next one that is saved removes them.

        Args:
            line: of the branch; None where there is none, and all steps of the disk count.
            wanted: the step that is asked for by its number: one that was rolled back counts then, with its line.
            saved: steps that the run has saved to the disk by now, or is about to: they count.

        Raises:
            ConflictError: nothing says that the disk belongs to the branch, and it holds newer steps, or those of
                another branch.
            FormatError: the disk holds steps that may have been rolled back, and cannot tell.
        """
        found = {} if line is None else self._found(line, wanted, saved)
        self._void = frozenset(found)
        return found

    def follow(self, where: str, ids: Collection[str], step: int) -> None:
        """What does not count goes, then the record tells that the disk goes on from the branch.

        In this order, and before the new step is shown: a kill at any moment leaves no step that does not count, but
        seems to; nor one that counts, but seems not to.

        Args:
            where: the repo and branch.
            ids: of its rollbacks.
            step: that is about to be shown.
        """
        if self._void is not None:
            self._void = [number for number in self._void if number != step and not self._local.drop(number)]
            if not self._void:
                self._record.add(where, ids)

    def meet(self, where: str, ids: Collection[str]) -> None:
        """A step of the disk is on the branch: the two belong together from now on."""
        if self._void is not None and not self._void and self._seen(where) is None:
            self._record.add(where, ids)

    def _seen(self, where: str) -> frozenset[str] | None:
        try:
            return self._record.of(where)
        except (FormatError, StoreError):
            return None

    def _found(self, line: BranchLine, wanted: int | None, saved: Collection[int]) -> dict[int, str]:
        alone = self._local.numbers() - line.files.keys() - {*saved}
        if not alone:
            return {}
        damage: FormatError | None = None
        try:
            seen = self._record.of(line.where)
        except FormatError as error:
            seen, damage = None, error
        last = min((one.step for one in line.rollbacks if seen is None or one.id not in seen), default=None)
        after = [] if last is None else [number for number in sorted(alone) if number > last]
        if seen is not None:
            return {} if wanted in after else dict.fromkeys(after, f"the branch was rolled back to step {last}")
        if line.files and not (line.files.keys() & {*saved} or self._shares(line)):
            return self._foreign(line, alone, wanted, damage)
        if after and wanted is None and (line.files or damage is not None):
            raise self._unclear(line, after, last, damage)
        return {}

    def _shares(self, line: BranchLine) -> bool:
        """Whether the disk has a step just as the branch has it, as a pull leaves it: names tell what is in a file."""
        for step in self._local.numbers() & line.files.keys():
            here = {path.name for path in self._local.folder(step).glob("rank-*.safetensors")}
            if here and here <= {*line.files[step]}:
                return True
        return False

    def _foreign(
        self, line: BranchLine, alone: Collection[int], wanted: int | None, damage: FormatError | None
    ) -> dict[int, str]:
        newest, others = max(line.files), self._record.branches()
        bad = [number for number in sorted(alone) if others or number > newest or number == wanted]
        if not bad:  # what a run saved before it reached the branch, where it has long gone on from another disk
            return dict.fromkeys(sorted(alone), f"nothing says that {self._local.root} belongs to {line.where}")
        told = f"they are of {listed(others)}" if others else damage and damage.message
        why = f" ({told})" if told else ""
        raise ConflictError(
            f"{self._local.root} holds {_named(bad)}, but nothing says that they are of the run that has saved "
            f"{_named(sorted(line.files))} to {line.where}{why}: one would take the place of the other",
            hint="choose another local_dir, or remove these steps from it, to go on from the branch; give them a "
            "branch of their own, with branch=, to go on from them; if they are of that run, `hubshard resume pull` "
            "one of its steps into the folder first",
        )

    def _unclear(
        self, line: BranchLine, after: Sequence[int], last: int | None, damage: FormatError | None
    ) -> FormatError:
        why = f"{self._record.path} is not there" if damage is None else damage.message
        return FormatError(
            f"{why}: so nothing tells whether {_named(after)} in {self._local.root} {_are(after)} from before the "
            f"rollback of {line.where} to step {last}",
            hint=f"if so, remove {'it' if len(after) == 1 else 'them'}; else name the one to go on from, with step=; "
            "or choose another local_dir, which takes what the branch has",
        )


def _named(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {listed(list(map(str, steps)), most=_MOST_NAMED)}"


def _are(steps: Sequence[int]) -> str:
    return "are" if len(steps) > 1 else "is"
