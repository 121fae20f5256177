"""What a pull asks of the place that it writes to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hubshard.fetch.parts import Part
from hubshard.protocols import Entry, Revision
from hubshard.sources.selection import Selection

__all__ = ["LOCK", "Layout", "Recalled"]

LOCK = "lock"
"""The file in the private folder of a target that whoever works there holds the lock of."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """A revision as it lies at the target, known without the store.

    Attributes:
        at: the revision.
        listing: its files; of those that are there without a promised hash, both ids are empty.
        folder: where they are.
    """

    at: Revision
    listing: tuple[Entry, ...]
    folder: Path


class Layout(Protocol):
    """A target of a pull: the Hugging Face cache, or a directory.

    All but `recall` is called with the lock held.
    """

    @property
    def private(self) -> Path:
        """The folder of our own: lock, parts, records."""

    def recall(self, revision: str) -> Recalled | None:
        """What is there of a branch, tag or commit; None where it is not known."""

    def begin(self, at: Revision, selection: Selection, listing: Sequence[Entry]) -> None:
        """Look before anything is written.

        Raises:
            FormatError: the files cannot be shown there without harm.
        """

    def candidates(self, at: Revision, entry: Entry) -> Sequence[Path]:
        """Where the content of a file may lie already."""

    def protect(self, selection: Selection, content: Mapping[str, Path]) -> None:
        """See that nothing is lost which is not a pull's.

        Args:
            selection: the files.
            content: where the content of those is that are there, by path.

        Raises:
            FormatError: something would be.
        """

    def clean(self, known: Collection[str], there: Collection[str]) -> None:
        """Delete what runs that were killed have left and none can use.

        Args:
            known: names of the contents of the revision.
            there: those of them that are whole already.
        """

    def keep(self, entry: Entry, part: Part) -> Path:
        """Take over a checked file; not yet shown to readers. Returns where it is."""

    def show(self, at: Revision, selection: Selection, listing: Sequence[Entry], content: Mapping[str, Path]) -> Path:
        """Show all files, and never a part of them that looks whole.

        Args:
            at: the revision.
            selection: the files.
            listing: all files of the revision.
            content: where the content of each is, by its path.

        Returns:
            The folder that holds them.
        """
