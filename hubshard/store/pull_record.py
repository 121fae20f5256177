"""What a pull left at its target, written down: so that the next one knows what is its own, also without a network."""

from __future__ import annotations

import json
import os
import threading
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
        earlier: what pulls of other revisions of the repo have put there, and what the listing does not tell of.
    """

    repo_id: str
    at: Revision
    listing: tuple[Entry, ...]
    placed: frozenset[str]
    earlier: tuple[Entry, ...] = ()


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
