"""A directory as a target.

All files arrive and are checked in `.cache/huggingface/hubshard/`, where neither huggingface_hub nor a publish of the
directory looks. Then, in this order: what makes a loader take files for whole (indexes, single files, the list of a
pipeline's components), old and new, leaves the directory; small files and weights get their names; then the new
indexes and single files, and the list. So a run killed in between leaves a directory that no loader takes for whole,
and the next run fetches nothing of it again. Last go the weights of an older pull that the revision no longer has:
those of the same stem and variant, in a folder that was pulled, that a pull had put there; and where the whole revision
is pulled, in any folder, what earlier revisions of the repo had brought. Other files stay.

Nothing is replaced or removed that no pull has put there, or that somebody has changed since, unless it is to be
overwritten: the pull is refused before it writes, and once more before it exchanges files.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from pathlib import Path, PurePosixPath

from hubshard.digests import content_id, matches
from hubshard.disk import sync_folder
from hubshard.errors import FormatError
from hubshard.events import Event, OnEvent
from hubshard.fetch.layout import LOCK, Recalled
from hubshard.fetch.on_disk import check_own_folder
from hubshard.fetch.parts import Part, clean_parts, name_of
from hubshard.fetch.placed import State, in_the_way, state_of, unchanged_among
from hubshard.names import MODEL_STEM, is_weight_file, parse_weight_name
from hubshard.protocols import Entry, Revision
from hubshard.sources.selection import Selection, holds_weights, is_entry_point
from hubshard.store.pull_record import Record, clean_scratch, read_record, scratch, write_record

__all__ = ["FolderLayout"]

_RESERVED = (".cache", "huggingface")
_Kind = tuple[str, str | None]  # stem and variant


class FolderLayout:
    """A directory that holds the files of one revision.

    Attributes:
        root: the directory.
    """

    def __init__(
        self, root: Path, repo_id: str, *, variant: str | None, on_event: OnEvent, overwrite: bool = False
    ) -> None:
        """Look at the directory; nothing is written.

        Args:
            root: the directory; made where it is missing.
            repo_id: what is pulled.
            variant: the variant whose old weights go.
            on_event: told of what stays, and what is replaced.
            overwrite: whether to replace and remove also what is somebody's.

        Raises:
            FormatError: the folder of our own is none, or leads out of the directory.
        """
        self.root = root
        self._repo_id = repo_id
        self._variant = variant
        self._on_event = on_event
        self._overwrite = overwrite
        self._stale: Sequence[str] = ()
        self._instead: Sequence[str] = ()
        self._states: dict[str, State] = {}
        aside = (self._record_path.name, LOCK)
        check_own_folder(root, self.private, folders=("parts", "kept"), files=aside)

    @property
    def private(self) -> Path:
        """The folder of our own."""
        return self.root.joinpath(*_RESERVED, "hubshard")

    def recall(self, revision: str) -> Recalled | None:
        """The revision that was pulled last, if it is this one."""
        record = read_record(self._record_path)  # without the lock
        if record is None or record.repo_id != self._repo_id or not record.at.commit:
            return None
        if revision not in {record.at.branch, record.at.commit}:
            return None
        return Recalled(Revision(revision, record.at.commit), record.listing, self.root)

    def begin(self, at: Revision, selection: Selection, listing: Sequence[Entry]) -> None:  # noqa: ARG002  # the layout of the cache needs it
        """Check that every file has a place, and find what goes for the new files, and what may be loaded instead.

        Raises:
            FormatError: a path leads out of the directory through a link, or into our own folder.
        """
        real = self.root.resolve()
        self._note_states(entry.path for entry in selection.files)
        for entry in selection.files:
            path = self.root / entry.path
            if tuple(part.casefold() for part in PurePosixPath(entry.path).parts[:2]) == _RESERVED:
                raise FormatError(
                    f"{self._repo_id}: {entry.path} would be among the files that a pull keeps for itself"
                )
            if not path.parent.resolve().is_relative_to(real):
                raise FormatError(f"{path.parent} leads out of {self.root}", hint="remove the link, or pull elsewhere")
            if path.is_dir() and not path.is_symlink():
                raise FormatError(f"{path} is a folder, and would be a file", hint="remove it, or pull elsewhere")
        self._stale, others = self._find_stale(selection, listing)
        if selection.is_whole:
            self._stale = [*self._stale, *self._find_dropped(listing, {*self._stale, *others})]
        self._instead = [name for name in others if is_entry_point(name)]
        for name in others:
            if not is_entry_point(name):
                what = "weights that no pull has put there, or that were changed since: left as they are"
                self._on_event(Event("pull", "warning", name, 0, what))

    def protect(self, selection: Selection, content: Mapping[str, Path]) -> None:
        """See that nothing is lost that is somebody's, unless it is to be overwritten.

        Raises:
            FormatError: something would be; names all of it.
        """
        coming = [entry.path for entry in selection.files if content.get(entry.path) != self.root / entry.path]
        there = [path for path in coming if os.path.lexists(self.root / path)]
        ours = unchanged_among(there, self.root, self._record, on_event=self._on_event)
        theirs = [path for path in there if path not in ours]
        if self._overwrite:
            for path, what in (*zip(theirs, repeat("replaced")), *zip(self._instead, repeat("removed"))):
                told = f"not put there by a pull, or changed since: {what}"
                self._on_event(Event("pull", "warning", path, 0, told))
            self._stale = [*self._stale, *self._instead]
        elif theirs or self._instead:
            raise in_the_way(self.root, theirs, self._instead)

    def candidates(self, at: Revision, entry: Entry) -> Sequence[Path]:  # noqa: ARG002  # the layout of the cache needs it
        """Its place, or where a run that was killed had put it."""
        return self.root / entry.path, self._kept(entry)

    def keep(self, entry: Entry, part: Part) -> Path:
        """Put it aside until all are there."""
        kept = self._kept(entry)
        kept.parent.mkdir(exist_ok=True)
        part.move(kept)
        return kept

    def clean(self, known: Collection[str], there: Collection[str]) -> None:
        """Delete what runs that were killed have left: all but parts of this revision that are not whole yet."""
        clean_parts(self.private / "parts", keep={*known} - {*there})
        clean_scratch(self.private)
        for file in self._kept_folder.glob("*"):
            if file.name not in known:
                file.unlink()

    def show(self, at: Revision, selection: Selection, listing: Sequence[Entry], content: Mapping[str, Path]) -> Path:
        """Swap the files.

        Raises:
            FormatError: what was to be replaced or removed was changed while files were fetched.
        """
        moves = {entry.path for entry in selection.files if content[entry.path] != self.root / entry.path}
        if moves or self._stale:
            moved = {*moves, *filter(is_entry_point, (entry.path for entry in selection.files))}
            self._check_states({*moved, *self._stale})
        taken = {entry.path for entry in selection.files}
        placed = (self._record.placed if self._record is not None else frozenset()) | taken
        own, foreign = self._earlier()
        if moves or self._stale:
            either = tuple(dict.fromkeys((*own, *selection.files)))  # until all are in their places
            record = Record(self._repo_id, Revision(at.branch, ""), (), placed, either, foreign)
            write_record(self._record_path, record, private=self.private)
            self._swap(selection, moves, dict(content))
        placed -= {*self._stale}
        known = {*listing}
        unlike = {entry.path for entry in (*own, *foreign) if entry not in known} & placed - taken
        left = (tuple(entry for entry in some if entry.path in unlike) for some in (own, foreign))
        write_record(self._record_path, Record(self._repo_id, at, tuple(listing), placed, *left), private=self.private)
        for aside in ("parts", "kept"):
            shutil.rmtree(self.private / aside, ignore_errors=True)
        return self.root

    def _note_states(self, paths: Iterable[str]) -> None:
        """Before a file is hashed: what is written after that is somebody's, though the hash says otherwise."""
        for path in paths:
            self._states.setdefault(path, state_of(self.root / path))

    def _check_states(self, paths: Collection[str]) -> None:
        changed = [path for path in sorted(paths) if state_of(self.root / path) != self._states.get(path)]
        if changed and not self._overwrite:
            raise in_the_way(self.root, changed, ())

    def _swap(self, selection: Selection, moves: Collection[str], content: dict[str, Path]) -> None:
        """Take away what looks whole, put the files in their places, then take away old weights."""
        hidden = self._hide(selection, moves, content)
        waiting = [entry for entry in selection.files if entry.path in moves or entry.path in hidden]
        uses = Counter(content[entry.path] for entry in waiting)
        for entry in waiting:
            source = content[entry.path]
            uses[source] -= 1
            self._place(
                source, self.root / entry.path, may_move=source.parent == self._kept_folder and not uses[source]
            )
        for path in self._stale:
            (self.root / path).unlink(missing_ok=True)
        changed = (*(entry.path for entry in selection.files), *self._stale)
        sync_folder(*sorted({(self.root / path).parent for path in changed}))

    def _hide(self, selection: Selection, moves: Collection[str], content: dict[str, Path]) -> Collection[str]:
        """Take indexes and single files out of the directory; paths of those that are right, and come back."""
        hidden = set()
        self._kept_folder.mkdir(parents=True, exist_ok=True)
        for entry in selection.files:
            path = self.root / entry.path
            if is_entry_point(entry.path) and entry.path not in moves:
                kept = path.replace(self._kept(entry))
                content |= {name: kept for name, source in content.items() if source == path}
                hidden.add(entry.path)
            elif is_entry_point(entry.path):
                path.unlink(missing_ok=True)
        for name in filter(is_entry_point, self._stale):
            (self.root / name).unlink(missing_ok=True)
        changed = {*hidden, *filter(is_entry_point, self._stale)}
        sync_folder(*sorted({self.root, *((self.root / name).parent for name in changed)}), self._kept_folder)
        return hidden

    def _place(self, source: Path, path: Path, *, may_move: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not may_move:  # another file has the same content
            source = shutil.copyfile(source, scratch(self.private))
        source.replace(path)

    def _find_stale(self, selection: Selection, listing: Sequence[Entry]) -> tuple[Sequence[str], Sequence[str]]:
        """Old weight files in the folders that get weights: those of earlier pulls, and those of others."""
        by_path = {entry.path: entry for entry in listing}
        taken = {entry.path for entry in selection.files}
        found: list[str] = []
        for folder, kinds in sorted(self._kinds(taken).items()):
            for name in self._weight_files_in(folder, kinds):
                path = (folder / name).as_posix()
                self._note_states([path])
                if path not in taken and not (path in by_path and matches(self.root / path, by_path[path])):
                    found.append(path)
        ours = unchanged_among(found, self.root, self._record, on_event=self._on_event)
        return [path for path in found if path in ours], [path for path in found if path not in ours]

    def _find_dropped(self, listing: Sequence[Entry], known: Collection[str]) -> Sequence[str]:
        """What a loader would take for a model of an earlier revision, as that had brought it."""
        paths = {*known, *(entry.path for entry in listing)}
        versions: dict[str, list[Entry]] = {}
        for entry in self._earlier()[0]:
            if entry.path not in paths and (holds_weights(entry.path) or is_entry_point(entry.path)):
                versions.setdefault(entry.path, []).append(entry)
        found: list[str] = []
        self._note_states(versions)
        for path, entries in sorted(versions.items()):
            if any(matches(self.root / path, entry) for entry in entries) and self._is_inside(path):
                found.append(path)
            elif (self.root / path).exists():
                what = "an earlier revision brought it, and it is another now: left as it is"
                self._on_event(Event("pull", "warning", path, 0, what))
        return found

    def _is_inside(self, path: str) -> bool:
        # through a link it would be a file of another directory
        return Path(os.path.realpath(self.root / path)) == Path(os.path.realpath(self.root)) / path

    def _kinds(self, taken: Collection[str]) -> Mapping[PurePosixPath, Collection[_Kind]]:
        """The weights that may be stale, of each folder that gets some: of the stems and variants that it gets."""
        kinds: dict[PurePosixPath, set[_Kind]] = {}
        for path in map(PurePosixPath, filter(holds_weights, taken)):
            of_folder = kinds.setdefault(path.parent, {(MODEL_STEM, self._variant)})
            name = parse_weight_name(path.name)
            if name is not None:  # a folder without the variant gets its plain weights
                of_folder |= {(name.stem, self._variant), (name.stem, name.variant)}
        return kinds

    def _weight_files_in(self, folder: PurePosixPath, kinds: Collection[_Kind]) -> Sequence[str]:
        there = self.root / folder
        names = sorted(path.name for path in there.iterdir()) if there.is_dir() else []
        return [
            name for name in names if any(is_weight_file(name, stem=stem, variant=variant) for stem, variant in kinds)
        ]

    def _earlier(self) -> tuple[Sequence[Entry], tuple[Entry, ...]]:
        """What pulls have put there, of this repo and of others."""
        record = self._record
        if record is None:
            return (), ()
        if record.repo_id != self._repo_id:
            return (), (*record.foreign, *record.own())
        return record.own(), record.foreign

    @cached_property
    def _record(self) -> Record | None:
        """As it was when this pull held the lock first."""
        return read_record(self._record_path)

    @property
    def _record_path(self) -> Path:
        return self.private / "pulled.json"

    @property
    def _kept_folder(self) -> Path:
        return self.private / "kept"

    def _kept(self, entry: Entry) -> Path:
        return self._kept_folder / name_of(content_id(entry))
