"""The local folder of a run: a folder per step, its manifest last to come and first to go. No torch."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import stat
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hubshard.disk import hint_for, sync_folder
from hubshard.errors import IntegrityError, StoreError
from hubshard.resume.saves.seen_rollbacks import SeenRollbacks
from hubshard.steps.places import LocalPlace, OpenStep
from hubshard.steps.step import MANIFEST_NAME, Step, step_folder, step_number
from hubshard.steps.step_json import decode_step

__all__ = ["LocalSteps"]

_LOG = logging.getLogger("hubshard")
_HARMLESS = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Why something cannot be read that may be whole all the same."""
_OURS = re.compile(r"rank-[0-9]{5,}-.*\.safetensors\Z|\.rank-[0-9]{5,}-.*\.part\Z|\.?manifest\.json(-.*\.part)?\Z")


class LocalSteps:
    """The steps on one disk.

    Args:
        root: the folder; it is made by the first save.

    Attributes:
        rollbacks: of branches of the Hub that these steps have followed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rollbacks = SeenRollbacks(root)

    @property
    def place(self) -> LocalPlace:
        """Where they are read from."""
        return LocalPlace(self.root)

    def folder(self, step: int) -> Path:
        """The folder of a step."""
        return self.root / step_folder(step)

    def numbers(self) -> set[int]:
        """Steps that have a manifest: all others are saves that did not end."""
        return {number for number, path in self._entries() if _is_plain(path / MANIFEST_NAME)}

    def unfinished(self) -> dict[int, str]:
        """Steps that have no manifest, and why they are none: their save did not end, or something was put there."""
        found = {}
        for number, path in self._entries():
            manifest = path / MANIFEST_NAME
            if not path.is_dir():
                found[number] = f"{path} is no folder"
            elif os.path.lexists(manifest) and not _is_plain(manifest):
                found[number] = f"{manifest} is no plain file"
            elif not _is_plain(manifest):
                found[number] = "the save did not end"
        return found

    def manifest(self, step: int) -> tuple[Step, str]:
        """What a step holds, and the sha256 of its manifest.

        Raises:
            FormatError: the manifest is damaged.
            IntegrityError: it cannot be read, or is that of another step.
            StoreError: this process may not read it, or has too many files open.
        """
        path = self.folder(step) / MANIFEST_NAME
        try:
            raw = path.read_bytes()
        except OSError as error:
            if error.errno in _HARMLESS:
                hint = hint_for(error) or "see why, and restore again"
                raise StoreError(
                    f"{path} cannot be read: {error.strerror}", hint=f"the step may be whole: {hint}"
                ) from error
            raise IntegrityError(f"{path} cannot be read: {error}", hint="restore an older step") from error
        found = decode_step(raw, path=str(path))
        if found.step != step:
            raise IntegrityError(f"{path} is the manifest of step {found.step}", hint="restore an older step")
        return found, hashlib.sha256(raw).hexdigest()

    def holds(self, step: OpenStep) -> bool:
        """Whether the disk holds the same save of a step.

        Raises:
            FormatError, IntegrityError, StoreError: as for `manifest`.
        """
        return step.step.step in self.numbers() and self.manifest(step.step.step)[1] == step.sha256

    def present(self, step: Step) -> frozenset[str]:
        """The files of a step that are here, with the right sizes; no links, nor what else is no plain file."""
        folder = self.folder(step.step)
        if not folder.is_dir():
            return frozenset()
        sizes = {path.name: path.lstat().st_size for path in folder.iterdir() if _is_plain(path)}
        return frozenset(file.name for file in step.files if sizes.get(file.name) == file.nbytes)

    def keep_only(self, kept: Collection[int], *, newest: int) -> list[int]:
        """Remove all other steps up to `newest`, and what saves that did not end have left. What cannot be, is said.

        Returns:
            The steps that were removed.
        """
        removed = []
        with _said(self.root):
            for number, path in self._entries():
                is_over = number <= newest or not _is_plain(path / MANIFEST_NAME)
                if number not in kept and is_over and self.drop(number):
                    removed.append(number)
        return sorted(removed)

    def remove_unfinished(self) -> None:
        """Remove what saves that did not end have left, so that it takes no room from the next one."""
        with _said(self.root):
            for number in self.unfinished():
                self.drop(number)

    def remove_files(self, step: int, names: Collection[str]) -> None:
        """Remove files of a step that was never shown; where one is shown, they may be part of it, and stay."""
        folder = self.folder(step)
        if _is_plain(folder / MANIFEST_NAME):
            return
        with suppress(OSError):  # another rank is not as far yet, or something of somebody else lies there
            for name in names:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()

    def remove_all(self, steps: Collection[int]) -> None:
        """Remove steps, the newest first, so that a kill on the way leaves none that is newer than one that is gone."""
        for step in sorted(steps, reverse=True):
            self.remove(step)

    def remove(self, step: int) -> None:
        """Remove a step. A kill on the way leaves a save that did not end, never a step that lacks files.

        Several threads may remove the same. What somebody put in its place is not removed: it gets another name.

        Raises:
            OSError: the disk refuses.
        """
        with suppress(FileNotFoundError):  # somebody else has just removed it
            self._remove(self.folder(step))

    def drop(self, step: int) -> bool:
        """Remove a step that is of no use any more; False where the disk refuses, which is said: no save fails of it.

        Windows removes no file that somebody reads, and nobody need hear of that: it goes after a later save.
        """
        try:
            self.remove(step)
        except OSError as error:
            if os.name != "nt" or not isinstance(error, PermissionError):
                _LOG.warning("step %d is of no use any more, and cannot be removed: %s", step, error)
            return False
        return True

    def files_of(self, step: int, rank: int) -> Mapping[str, Path]:
        """What a rank wrote, by name."""
        return {path.name: path for path in self.folder(step).glob(f"rank-{rank:05d}-*.safetensors")}

    def _remove(self, folder: Path) -> None:
        if os.path.lexists(folder) and (not folder.is_dir() or _is_folder(folder / MANIFEST_NAME)):
            aside = folder.with_name(f"not-a-{folder.name}-{uuid.uuid4().hex[:8]}")
            folder.rename(aside)
            _LOG.warning("%s is no step: it is called %s from now on", folder, aside.name)
            return
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        sync_folder(folder)
        for path in folder.iterdir():
            if _OURS.match(path.name) and not _is_folder(path):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # something of somebody else lies there: it stays
            folder.rmdir()

    def _entries(self) -> Iterator[tuple[int, Path]]:
        if self.root.is_dir():
            for path in list(self.root.iterdir()):
                number = step_number(path.name)
                if number is not None:
                    yield number, path


@contextmanager
def _said(root: Path) -> Iterator[None]:
    """Clean up: what comes in the way of that is a warning, whatever it is."""
    try:
        yield
    except OSError as error:
        _LOG.warning("%s: what is of no use any more cannot be removed: %s", root, error)


def _is_plain(path: Path) -> bool:
    """Whether it is a file, and no link to one: a step lies where it was written, and nobody waits for a FIFO."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
