"""Where saved steps are found: a local folder, a branch on the Hub. A step is opened only if it is whole. No torch."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hubshard.errors import FormatError, HubshardError, IncompleteError, IntegrityError, NotFoundError
from hubshard.messages import listed
from hubshard.protocols import Entry, Reader, Revision
from hubshard.readers import read_bytes
from hubshard.steps.reading import LOCAL, REMOTE, StepFolder
from hubshard.steps.rollbacks import ROLLBACKS_NAME, Rollback, decode_rollbacks
from hubshard.steps.step import MANIFEST_NAME, Step, StepFile, step_folder, step_number
from hubshard.steps.step_json import NewerVersionError, StepHead, decode_head, decode_step
from hubshard.store.local import LocalStore

if TYPE_CHECKING:
    from hubshard.store.hub import HubStore
    from hubshard.store.hub_client import Token

__all__ = [
    "BranchPlace",
    "LocalPlace",
    "OpenStep",
    "Place",
    "check_places",
    "find_step",
    "hub_store",
    "no_branch",
    "refuse_id",
]

_LOG = logging.getLogger("hubshard")
_MOST_NAMED = 5
_MOST_MANIFEST_BYTES = 2**30
_MOST_ROLLBACKS_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step whose manifest is valid and whose files are all there, with the right sizes.

    Attributes:
        folder: where its files lie.
        step: what is in them.
        sha256: of its manifest, in hex: equal for equal steps, wherever they lie.
        ignored: files of the folder that the manifest does not name.
    """

    folder: StepFolder
    step: Step
    sha256: str
    ignored: tuple[str, ...]


class Place(Protocol):
    """Something that holds steps."""

    def steps(self) -> Collection[int]:
        """The numbers of the steps it may hold, whole or not."""

    def open(self, step: int) -> OpenStep:
        """Open a step.

        Raises:
            IncompleteError: the manifest or a file is missing.
            IntegrityError: a file has another size or hash than the manifest says.
            FormatError: the manifest is damaged, or of another version.
            NotFoundError: there is no such step.
        """


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """A local folder of steps.

    Attributes:
        root: the folder; it need not exist.
        ignored: steps that do not count.
    """

    root: Path
    ignored: Collection[int] = ()

    def steps(self) -> Collection[int]:
        """See `Place`."""
        if not self.root.is_dir():
            return []
        found = {number for path in self.root.iterdir() if (number := step_number(path.name)) is not None}
        return found - {*self.ignored}

    def open(self, step: int) -> OpenStep:
        """See `Place`."""
        path = self.root / step_folder(step)
        store = LocalStore(path)
        at = store.head("main")
        if at is None:
            raise NotFoundError(f"{path} does not exist", hint="see `hubshard resume list`")
        return _opened(StepFolder(store, at, "", str(path), LOCAL), {entry.path: entry for entry in store.list(at)})


class BranchPlace:
    """The steps at a revision of a repo.

    Args:
        store: the repo.
        at: the revision.
        where: the repo and branch, for people.
    """

    def __init__(self, store: Reader, at: Revision, where: str) -> None:
        self.at = at
        self._store = store
        self.where = where
        self._folders: dict[int, dict[str, Entry]] = {}
        self._rollbacks_entry: Entry | None = None
        for entry in store.list(at):
            if entry.path == ROLLBACKS_NAME:
                self._rollbacks_entry = entry
            folder, _, name = entry.path.partition("/")
            number = step_number(folder)
            if number is not None and name:
                self._folders.setdefault(number, {})[name] = entry

    def steps(self) -> Collection[int]:
        """See `Place`."""
        return self._folders.keys()

    def entries(self, step: int) -> Mapping[str, Entry]:
        """What lies in the folder of a step, by its name there."""
        return self._folders.get(step, {})

    def files(self, step: int) -> Collection[str]:
        """The files in the folder of a step, as paths in the repo."""
        return [entry.path for entry in self._folders.get(step, {}).values()]

    @cached_property
    def rollbacks(self) -> tuple[Rollback, ...]:
        """What the branch was rolled back to, oldest first.

        Raises:
            FormatError: what tells it is damaged, or of a later version.
        """
        entry, path = self._rollbacks_entry, f"{self.where}/{ROLLBACKS_NAME}"
        if entry is None:
            return ()
        if entry.nbytes > _MOST_ROLLBACKS_BYTES:
            raise FormatError(
                f"{path} has {entry.nbytes} bytes, too many for a list of rollbacks", hint="it is damaged"
            )
        return decode_rollbacks(read_bytes(self._store, self.at, ROLLBACKS_NAME, 0, entry.nbytes), path=path)

    def is_part_of(self, other: BranchPlace) -> bool:
        """Whether every file of every step here is there too, with the same content."""
        return all(
            entry == other._folders.get(step, {}).get(name)
            for step, entries in self._folders.items()
            for name, entry in entries.items()
        )

    def open(self, step: int) -> OpenStep:
        """See `Place`."""
        return _opened(self._folder(step), self.entries(step))

    def glance(self, step: int) -> StepHead:
        """What is in a step, as far as a list shows it. Fails as `open` does, but for where its tensors lie."""
        folder, entries = self._folder(step), self.entries(step)
        raw, where = _manifest(folder, entries)
        head = decode_head(raw, path=where)
        _check_files(folder, head.files, entries)
        return head

    def _folder(self, step: int) -> StepFolder:
        folder = step_folder(step)
        if step not in self._folders:
            raise NotFoundError(f"{self.where}: there is no {folder}", hint="see `hubshard resume list`")
        return StepFolder(self._store, self.at, f"{folder}/", f"{self.where}/{folder}", REMOTE)


def find_step(places: Sequence[Place], step: int | None) -> OpenStep:
    """The step to restore: the one that is asked for, or the newest that is whole. Says which it steps over, and why.

    Args:
        places: the first that holds it is taken.
        step: its number; None for the newest.

    Raises:
        NotFoundError: no place has it, or any.
        HubshardError: what is wrong with it, or with the newest of those that are all broken; or the newest was written
            by a later version of hubshard.
    """
    steps = {number for place in places for number in place.steps()}
    if step is not None and step not in steps:
        there = f"there are {', '.join(map(str, sorted(steps)[-_MOST_NAMED:]))}" if steps else "there are none"
        raise NotFoundError(f"no step {step} is saved; {there}", hint="look at the branch and the folder")
    first_error: HubshardError | None = None
    for number in sorted(steps, reverse=True) if step is None else [step]:
        for place in places:
            if number in place.steps():
                try:
                    return place.open(number)
                except NewerVersionError:
                    raise
                except (IncompleteError, IntegrityError, FormatError, NotFoundError) as error:
                    _LOG.warning("step %d is passed over: %s", number, error)
                    first_error = first_error or error
    raise first_error or NotFoundError("no step is saved here yet", hint="begin from the start")


def _opened(folder: StepFolder, entries: Mapping[str, Entry]) -> OpenStep:
    raw, where = _manifest(folder, entries)
    step = decode_step(raw, path=where)
    _check_files(folder, step.files, entries)
    ignored = tuple(sorted(entries.keys() - step.file_of.keys() - {MANIFEST_NAME}))
    if ignored:
        _LOG.warning("%s: not part of the step, and ignored: %s", folder.where, listed(ignored, most=_MOST_NAMED))
    return OpenStep(folder, step, hashlib.sha256(raw).hexdigest(), ignored)


def _manifest(folder: StepFolder, entries: Mapping[str, Entry]) -> tuple[bytes, str]:
    """The bytes of a manifest, and what it is called in errors."""
    entry = entries.get(MANIFEST_NAME)
    if entry is None:
        raise IncompleteError(
            f"{folder.where}: there is no {MANIFEST_NAME}: the save did not end", hint="restore an older step"
        )
    if entry.nbytes > _MOST_MANIFEST_BYTES:
        raise FormatError(
            f"{folder.where}/{MANIFEST_NAME} has {entry.nbytes} bytes, too many for a manifest", hint="it is damaged"
        )
    raw = bytearray(entry.nbytes)
    folder.read(MANIFEST_NAME, 0, entry.nbytes, memoryview(raw))
    return bytes(raw), f"{folder.where}/{MANIFEST_NAME}"


def _check_files(folder: StepFolder, files: Sequence[StepFile], entries: Mapping[str, Entry]) -> None:
    missing = [file.name for file in files if file.name not in entries]
    if missing:
        raise IncompleteError(
            f"{folder.where}: missing: {listed(missing, most=_MOST_NAMED)}", hint="restore an older step"
        )
    for file in files:
        entry = entries[file.name]
        if entry.nbytes != file.nbytes:
            raise IntegrityError(
                f"{folder.where}/{file.name} has {entry.nbytes} bytes, not the {file.nbytes} of the manifest",
                hint="restore an older step",
            )
        if entry.sha256 is not None and entry.sha256 != file.sha256:
            raise IntegrityError(
                f"{folder.where}/{file.name} has the sha256 {entry.sha256}, not {file.sha256} as the manifest says",
                hint="restore an older step",
            )


# Where a writer or reader was told to go


def check_places(repo_id: str | None, local_dir: str | os.PathLike[str] | None) -> None:
    """Refuse to go nowhere.

    Raises:
        FormatError: no place is named.
    """
    if repo_id is None and local_dir is None:
        raise FormatError("neither a repo nor a local folder is named", hint="give repo_id, local_dir or both")


def refuse_id(checkpoint_id: str | os.PathLike[str] | None) -> None:
    """Refuse the id that DCP passes on.

    Raises:
        FormatError: there is one.
    """
    if checkpoint_id is not None:
        raise FormatError(
            f"checkpoint_id={os.fspath(checkpoint_id)!r} means nothing here", hint="give repo_id, step and local_dir"
        )


def no_branch(where: str, branch: str) -> NotFoundError:
    """The error for a repo without the branch of the steps."""
    hint = "has the run saved a step? If to a branch of another name, give that"
    return NotFoundError(f"{where} has no branch {branch!r}", hint=hint)


def hub_store(repo_id: str, token: Token, endpoint: str | None) -> HubStore:
    """The repo, opened."""
    from hubshard.store.hub import HubStore  # noqa: PLC0415  # the client is slow to import, and not always needed

    return HubStore(repo_id, token=token, endpoint=endpoint)
