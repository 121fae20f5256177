"""What a pull left at its target, written down: so that the next one knows what is its own, also without a network."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hubshard.disk import sync_folder
from hubshard.jsonfile import read_json
from hubshard.protocols import Entry, Revision

__all__ = ["Record", "clean_scratch", "read_record", "scratch", "write_atomically", "write_record"]

_VERSION = 1
_MOST_BYTES = 2**28  # which list the files of any repo


@dataclass(frozen=True, slots=True)
class Record:
    """The state of a target.

    Attributes:
        repo_id: of the repo.
        at: the revision; its commit is "" while a pull is showing its files.
        listing: all files of the revision, also those that were not taken.
        placed: paths that pulls have put there.
        earlier: what pulls of the repo have put there that is not as the listing says; while files are exchanged, what
            was there and what is coming.
        foreign: what pulls of other repos have put there.
    """

    repo_id: str
    at: Revision
    listing: tuple[Entry, ...]
    placed: frozenset[str]
    earlier: tuple[Entry, ...] = ()
    foreign: tuple[Entry, ...] = ()

    def own(self) -> tuple[Entry, ...]:
        """What pulls of the repo have put there: usually one version of each path, the newest last."""
        told = {entry.path for entry in (*self.earlier, *self.foreign)}
        listed = (entry for entry in self.listing if entry.path in self.placed and entry.path not in told)
        return (*(entry for entry in self.earlier if entry.path in self.placed), *listed)

    def versions(self) -> Mapping[str, Sequence[Entry]]:
        """What pulls have put there, by path."""
        found: dict[str, list[Entry]] = {}
        for entry in (*self.foreign, *self.own()):
            found.setdefault(entry.path, []).append(entry)
        return found


def write_record(path: Path, record: Record, *, private: Path) -> None:
    """Write it, all or nothing; `private` is our own folder at the target."""
    table = {
        "version": _VERSION,
        "repo_id": record.repo_id,
        "revision": record.at.branch,
        "commit": record.at.commit,
        "listing": [asdict(entry) for entry in record.listing],
        "placed": sorted(record.placed),
        "earlier": [asdict(entry) for entry in record.earlier],
        "foreign": [asdict(entry) for entry in record.foreign],
    }
    write_atomically(path, json.dumps(table).encode(), private=private)


def read_record(path: Path) -> Record | None:
    """Read it; None where there is none, or one that is not understood."""
    try:
        table = read_json(path, what="record of a pull", most_bytes=_MOST_BYTES)
        if table["version"] != _VERSION:
            return None
        return Record(
            table["repo_id"],
            Revision(table["revision"], table["commit"]),
            tuple(Entry(**entry) for entry in table["listing"]),
            frozenset(table["placed"]),
            tuple(Entry(**entry) for entry in table.get("earlier", ())),
            tuple(Entry(**entry) for entry in table.get("foreign", ())),
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def scratch(private: Path) -> Path:
    """A path for a file that is going to be renamed."""
    return private / f"tmp-{os.getpid()}-{threading.get_ident()}"


def clean_scratch(private: Path) -> None:
    """Delete what runs that were killed have left of such files."""
    for file in private.glob("tmp-*"):
        file.unlink()


def write_atomically(path: Path, content: bytes, *, private: Path) -> None:
    """Make `path` have this content, durably; a reader sees the old or the new. Unchanged content is not written."""
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = scratch(private)
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)
