"""The local folder of a run: a folder per step, its manifest last to come and first to go. No torch."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hubshard.disk import sync_folder
from hubshard.errors import IntegrityError, StoreError
from hubshard.resume.saves.seen_rollbacks import SeenRollbacks
from hubshard.steps.places import LocalPlace, OpenStep
from hubshard.steps.step import MANIFEST_NAME, Step, step_folder, step_number
from hubshard.steps.step_json import decode_step

__all__ = ["LocalSteps"]

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
        return {number for number, path in self._folders() if (path / MANIFEST_NAME).is_file()}

    def begun(self) -> set[int]:
        """Steps whose folder is there without a manifest: their save did not end."""
        return {number for number, path in self._folders() if not (path / MANIFEST_NAME).is_file()}

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
                raise StoreError(
                    f"{path} cannot be read: {error.strerror}", hint="the step may be whole: see why, and restore again"
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
        """The files of a step that are here, with the right sizes."""
        folder = self.folder(step.step)
        if not folder.is_dir():
            return frozenset()
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
        return frozenset(file.name for file in step.files if sizes.get(file.name) == file.nbytes)

    def keep_only(self, kept: Collection[int], *, newest: int) -> list[int]:
        """Remove all other steps up to `newest`, and what saves that did not end have left.

        Returns:
            The steps that were removed.
        """
        removed = []
        for number, path in self._folders():
            is_over = number <= newest or not (path / MANIFEST_NAME).exists()
            if number not in kept and is_over and self.remove_unless_read(number):
                removed.append(number)
        return sorted(removed)

    def remove_unfinished(self) -> None:
        """Remove what saves that did not end have left, so that it takes no room from the next one."""
        for number in self.begun():
            self.remove_unless_read(number)

    def remove_files(self, step: int, names: Collection[str]) -> None:
        """Remove files of a step that was never shown; where one is shown, they may be part of it, and stay."""
        folder = self.folder(step)
        if (folder / MANIFEST_NAME).exists():
            return
        for name in names:
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # another rank is not as far yet, or something of somebody else lies there
            folder.rmdir()

    def remove_all(self, steps: Collection[int]) -> None:
        """Remove steps, the newest first, so that a kill on the way leaves none that is newer than one that is gone."""
        for step in sorted(steps, reverse=True):
            self.remove(step)

    def remove(self, step: int) -> None:
        """Remove a step. A kill on the way leaves a save that did not end, never a step that lacks files."""
        folder = self.folder(step)
        if not folder.is_dir():
            return
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        sync_folder(folder)
        for path in folder.iterdir():
            if _OURS.match(path.name):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # something of somebody else lies there: it stays
            folder.rmdir()

    def remove_unless_read(self, step: int) -> bool:
        """Remove a step; False where somebody reads it, and that forbids it."""
        try:
            self.remove(step)
        except PermissionError:
            if os.name == "nt":  # which removes no file that somebody reads: it goes after a later save
                return False
            raise
        return True

    def files_of(self, step: int, rank: int) -> Mapping[str, Path]:
        """What a rank wrote, by name."""
        return {path.name: path for path in self.folder(step).glob(f"rank-{rank:05d}-*.safetensors")}

    def _folders(self) -> Iterator[tuple[int, Path]]:
        if self.root.is_dir():
            for path in list(self.root.iterdir()):
                number = step_number(path.name)
                if number is not None and path.is_dir():
                    yield number, path
