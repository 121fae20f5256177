"""The cache of huggingface_hub as a target, so that everything built on that library finds what was pulled.

Layout (https://huggingface.co/docs/huggingface_hub/guides/manage-cache): `blobs/<sha256, or git's blob id>`,
`snapshots/<commit>/<path>` links to blobs, `refs/<branch or tag>` holds a commit. Our own files are in `.hubshard/`.

A snapshot is made aside and renamed, so that it appears whole. One that is there already, in part, since some tool has
fetched single files, is completed: small files first, then weights, and last what makes a loader take them for whole.
The ref is written last.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hubshard.digests import content_id
from hubshard.disk import sync_folder
from hubshard.errors import FormatError
from hubshard.fetch.layout import Recalled
from hubshard.fetch.parts import Part, clean_parts
from hubshard.paths import check_plain_path
from hubshard.protocols import Entry, Revision
from hubshard.sources.selection import Selection
from hubshard.store.pull_record import (
    Record,
    clean_scratch,
    read_record,
    scratch,
    write_atomically,
    write_record,
)

__all__ = ["CacheLayout"]

_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_BLOB = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?\Z")


class CacheLayout:
    """The folder of one repo in the cache.

    Attributes:
        root: that folder.
    """

    def __init__(self, cache_dir: Path, repo_id: str, *, symlinks: bool = True) -> None:
        """Look at the cache; nothing is written.

        Args:
            cache_dir: the cache.
            repo_id: the repo, of the type model.
            symlinks: False to make do without them, as huggingface_hub does when it is told so.
        """
        self.root = cache_dir / "--".join(["models", *repo_id.split("/")])
        self._repo_id = repo_id
        self._symlinks = symlinks

    @property
    def private(self) -> Path:
        """The folder of our own."""
        return self.root / ".hubshard"

    def recall(self, revision: str) -> Recalled | None:
        """The snapshot of a commit, or of the commit that a branch or tag was at when it was fetched last."""
        commit = revision if _COMMIT.match(revision) else self._ref(revision)
        folder = self._snapshot(commit) if commit else None
        if commit is None or folder is None or not folder.is_dir():
            return None
        record = read_record(self._record_path(commit))
        listing = record.listing if record is not None else tuple(_found_in(folder))
        return Recalled(Revision(revision, commit), listing, folder)

    def begin(self, at: Revision, selection: Selection, listing: Sequence[Entry]) -> None:  # noqa: ARG002  # a directory needs it
        """Check the names that are going to be made.

        Raises:
            FormatError: a revision or content id that is no plain name.
        """
        check_plain_path(at.branch, path=f"{self._repo_id}: the revision")
        for name in [at.commit, *map(content_id, selection.files)]:
            if "/" in name:
                raise FormatError(f"{self._repo_id}: the server calls a commit or a content {name!r}")
            check_plain_path(name, path=f"{self._repo_id}: the revision {at.branch}")

    def candidates(self, at: Revision, entry: Entry) -> Sequence[Path]:
        """Its blob, or, where links are not possible, the file in the snapshot."""
        return self._blob(entry), self._snapshot(at.commit) / entry.path

    def protect(self, selection: Selection, content: Mapping[str, Path]) -> None:
        """Nothing here is anybody's: the cache is for what can be fetched again."""

    def clean(self, known: Collection[str], there: Collection[str]) -> None:
        """Delete what runs that were killed have left: all but parts of this revision that are not whole yet."""
        clean_parts(self.private / "parts", keep={*known} - {*there})
        for folder in self.private.glob("new-*"):
            shutil.rmtree(folder, ignore_errors=True)
        clean_scratch(self.private)

    def keep(self, entry: Entry, part: Part) -> Path:
        """Make it a blob."""
        blob = self._blob(entry)
        blob.parent.mkdir(parents=True, exist_ok=True)
        part.move(blob)
        return blob

    def show(self, at: Revision, selection: Selection, listing: Sequence[Entry], content: Mapping[str, Path]) -> Path:
        """Make the snapshot, then the ref."""
        snapshot = self._snapshot(at.commit)
        if (self.root / "blobs").is_dir():
            sync_folder(self.root / "blobs")  # no link is durable before what it leads to
        if snapshot.is_dir():
            self._complete(snapshot, selection, content)
        else:
            self._make(snapshot, selection, content)
        write_record(
            self._record_path(at.commit),
            Record(self._repo_id, Revision(at.commit, at.commit), tuple(listing), frozenset()),
            private=self.private,
        )
        if at.branch != at.commit:
            write_atomically(self.root / "refs" / at.branch, at.commit.encode(), private=self.private)
        with suppress(OSError):  # parts of the revision that were not asked for this time
            (self.private / "parts").rmdir()
        return snapshot

    def _make(self, snapshot: Path, selection: Selection, content: Mapping[str, Path]) -> None:
        fresh = self.private / f"new-{snapshot.name}"
        shutil.rmtree(fresh, ignore_errors=True)  # of a run that was killed; as deep as a snapshot, so links are right
        fresh.mkdir(parents=True)
        self._complete(fresh, selection, content)
        snapshot.parent.mkdir(parents=True, exist_ok=True)
        try:
            fresh.rename(snapshot)
        except OSError:
            if not snapshot.is_dir():
                raise
            self._complete(snapshot, selection, content)  # another tool has begun it meanwhile
            shutil.rmtree(fresh, ignore_errors=True)
        sync_folder(snapshot.parent)

    def _complete(self, folder: Path, selection: Selection, content: Mapping[str, Path]) -> None:
        changed = set()
        for entry in selection.files:
            path, source = folder / entry.path, content[entry.path]
            if not _is_same(path, source):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._link(source, path)
                changed.add(path.parent)
        sync_folder(*sorted(changed))

    def _link(self, source: Path, path: Path) -> None:
        fresh = scratch(self.private)
        if self._symlinks and source.parent == self.root / "blobs":
            with suppress(OSError):  # Windows, without the right to make them
                fresh.symlink_to(os.path.relpath(source, path.parent))
                fresh.replace(path)
                return
        try:
            fresh.hardlink_to(source)
        except OSError:
            shutil.copyfile(source, fresh)
        fresh.replace(path)

    def _blob(self, entry: Entry) -> Path:
        return self.root / "blobs" / content_id(entry)

    def _snapshot(self, commit: str) -> Path:
        return self.root / "snapshots" / commit

    def _record_path(self, commit: str) -> Path:
        return self.private / "listings" / f"{commit}.json"

    def _ref(self, revision: str) -> str | None:
        with suppress(OSError, FormatError):
            check_plain_path(revision, path="the revision")
            commit = (self.root / "refs" / revision).read_text("utf-8").strip()
            return commit if _COMMIT.match(commit) else None
        return None


def _is_same(path: Path, source: Path) -> bool:
    """Whether `path` gives the content of `source`, which is checked: as the same file."""
    with suppress(OSError):
        return path.samefile(source)
    return False


def _found_in(folder: Path) -> list[Entry]:
    """The files of a snapshot that another tool has made; the blobs that they link to are named by their hash."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.readlink().name if path.is_symlink() else ""
            blob = name if _BLOB.match(name) else ""
            sha256 = blob if len(blob) == 64 else None
            found.append(Entry(path.relative_to(folder).as_posix(), path.stat().st_size, sha256, blob))
    return found
