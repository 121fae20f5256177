"""A directory as a target.

All files arrive and are checked in `.cache/huggingface/hubshard/`, where neither huggingface_hub nor a publish of the
directory looks. Then, in this order: what makes a loader take files for whole (indexes, single files, the list of a
pipeline's components), old and new, leaves the directory; small files and weights get their names; then the new
indexes and single files, and the list. So a run killed in between leaves a directory that no loader takes for whole,
and the next run fetches nothing of it again. Last go the weights of an older pull that the revision no longer has:
those of the same stem and variant, in a folder that was pulled, that a pull had put there; and where the whole revision
is pulled, in any folder, what earlier revisions of the repo had brought, if nobody has changed it. Other files stay.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

from hubshard.digests import content_id, matches
from hubshard.disk import sync_folder
from hubshard.errors import FormatError
from hubshard.events import Event, OnEvent
from hubshard.fetch.layout import LOCK, Recalled
from hubshard.fetch.on_disk import check_own_folder
from hubshard.fetch.parts import Part, clean_parts, name_of
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

    def __init__(self, root: Path, repo_id: str, *, variant: str | None, on_event: OnEvent) -> None:
        """Look at the directory; nothing is written.

        Args:
            root: the directory; made where it is missing.
            repo_id: what is pulled.
            variant: the variant whose old weights go.
            on_event: told of what stays, and what is replaced.

        Raises:
            FormatError: the folder of our own is none, or leads out of the directory.
        """
        self.root = root
        self._repo_id = repo_id
        self._variant = variant
        self._on_event = on_event
        self._stale: Sequence[str] = ()
        aside = (self._record_path.name, LOCK)
        check_own_folder(root, self.private, folders=("parts", "kept"), files=aside)

    @property
    def private(self) -> Path:
        """The folder of our own."""
        return self.root.joinpath(*_RESERVED, "hubshard")

    def recall(self, revision: str) -> Recalled | None:
        """The revision that was pulled last, if it is this one."""
        record = read_record(self._record_path)
        if record is None or record.repo_id != self._repo_id or not record.at.commit:
            return None
        if revision not in {record.at.branch, record.at.commit}:
            return None
        return Recalled(Revision(revision, record.at.commit), record.listing, self.root)

    def begin(self, at: Revision, selection: Selection, listing: Sequence[Entry]) -> None:  # noqa: ARG002  # the layout of the cache needs it
        """Check that every file has a place, and that what is not ours will not be loaded instead.

        Raises:
            FormatError: a path leads out of the directory through a link, or into our own folder; or a file that no
                pull has put there would be loaded instead of what is pulled.
        """
        real = self.root.resolve()
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
        for name in others:
            if is_entry_point(name):
                raise FormatError(
                    f"{self.root / name} was not put there by a pull, and may be loaded instead of what is pulled",
                    hint="move it away, or pull into an empty directory",
                )
            self._on_event(Event("pull", "warning", name, 0, "weights that no pull has put there: left as they are"))

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
        """Swap the files."""
        moves = {entry.path for entry in selection.files if content[entry.path] != self.root / entry.path}
        placed = self._placed() | {entry.path for entry in selection.files}
        earlier = self._earlier()
        if moves or self._stale:
            self._warn_of_edits(moves, at)
            either = tuple(dict.fromkeys((*earlier, *selection.files)))  # until all are in their places
            record = Record(self._repo_id, Revision(at.branch, ""), (), placed, either)
            write_record(self._record_path, record, private=self.private)
            self._swap(selection, moves, dict(content))
        placed -= {*self._stale}
        paths = {entry.path for entry in listing}
        left = tuple(entry for entry in earlier if entry.path in placed and entry.path not in paths)
        record = Record(self._repo_id, at, tuple(listing), placed, left)
        write_record(self._record_path, record, private=self.private)
        for aside in ("parts", "kept"):
            shutil.rmtree(self.private / aside, ignore_errors=True)
        return self.root

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
        placed = self._placed()
        ours: list[str] = []
        others: list[str] = []
        for folder, kinds in sorted(self._kinds(taken).items()):
            for name in self._weight_files_in(folder, kinds):
                path = (folder / name).as_posix()
                if path in taken or (path in by_path and matches(self.root / path, by_path[path])):
                    continue
                (ours if path in placed or self._is_of_huggingface_hub(path) else others).append(path)
        return ours, others

    def _find_dropped(self, listing: Sequence[Entry], known: Collection[str]) -> Sequence[str]:
        """What a loader would take for a model of an earlier revision, as that had brought it."""
        paths = {*known, *(entry.path for entry in listing)}
        versions: dict[str, list[Entry]] = {}
        for entry in self._earlier():
            if entry.path not in paths and (holds_weights(entry.path) or is_entry_point(entry.path)):
                versions.setdefault(entry.path, []).append(entry)
        found: list[str] = []
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

    def _is_of_huggingface_hub(self, path: str) -> bool:
        # it notes what it has downloaded into a directory
        note = PurePosixPath(*_RESERVED, "download", f"{path}.metadata")
        return (self.root / note).is_file() and self._is_inside(note.as_posix())

    def _warn_of_edits(self, moves: Collection[str], at: Revision) -> None:
        record = read_record(self._record_path)
        for path in sorted(moves):
            known = record is not None and path in record.placed and record.at.commit != at.commit
            if not known and (self.root / path).exists():
                self._on_event(Event("pull", "warning", path, 0, "its content was not that of the revision: replaced"))

    def _placed(self) -> frozenset[str]:
        record = read_record(self._record_path)
        return record.placed if record is not None else frozenset()

    def _earlier(self) -> Sequence[Entry]:
        """What pulls of this repo have put there, as the record tells: before a swap is over, in two versions."""
        record = read_record(self._record_path)
        if record is None or record.repo_id != self._repo_id:
            return ()
        return [entry for entry in (*record.earlier, *record.listing) if entry.path in record.placed]

    @property
    def _record_path(self) -> Path:
        return self.private / "pulled.json"

    @property
    def _kept_folder(self) -> Path:
        return self.private / "kept"

    def _kept(self, entry: Entry) -> Path:
        return self._kept_folder / name_of(content_id(entry))
