"""The files of a step that lie partly on a disk, partly on the Hub. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from hubshard.protocols import Reader, Revision
from hubshard.readers import WrappedReader
from hubshard.steps.reading import LOCAL, REMOTE, StepFolder
from hubshard.steps.step import Step, step_folder
from hubshard.store.local import LocalStore

__all__ = ["open_files"]


def open_files(
    step: Step, folder: Path, present: Collection[str], *, store: Reader | None, at: Revision | None, where: str
) -> StepFolder:
    """The files of a step, read from the disk where it has them.

    Args:
        step: what they hold.
        folder: on the disk.
        present: names of the files there.
        store: the repo; None where the branch does not have the step.
        at: the revision of it.
        where: for people.

    Raises:
        FormatError: there is a link on the disk, or something else that is no plain file.
    """
    disk, at_disk = LocalStore(folder), Revision("main", "")  # where nothing is read from it
    if present:
        at_disk = disk.head("main") or at_disk
    if store is None or at is None or len(present) == len(step.files):
        return StepFolder(disk, at_disk, "", str(folder), LOCAL)
    prefix = f"{step_folder(step.step)}/"
    store.list(at)  # a store reads large ranges faster of what it has listed
    both = _DiskBeforeHub(disk, at_disk, {prefix + name: name for name in present}, store)
    return StepFolder(both, at, prefix, f"{where}/{step_folder(step.step)}", REMOTE)


class _DiskBeforeHub(WrappedReader):
    """A revision of a repo, some of whose files are read from a disk."""

    def __init__(self, disk: Reader, at_disk: Revision, on_disk: Mapping[str, str], hub: Reader) -> None:
        super().__init__(hub)
        self._disk = disk
        self._at_disk = at_disk
        self._on_disk = on_disk

    def read(self, at: Revision, path: str, start: int, stop: int, into: memoryview) -> None:
        name = self._on_disk.get(path)
        if name is None:
            super().read(at, path, start, stop, into)
        else:
            self._disk.read(self._at_disk, name, start, stop, into)
