"""What the files of a directory should hash to, as whoever downloaded them has noted there.

Three places are known: the record of our own pulls; what huggingface_hub keeps beside a `local_dir`, in
`.cache/huggingface/download/<path>.metadata` (three lines: commit, ETag, time; its `_local_folder.py`); and, in a
snapshot of its cache, the names of the blobs that the files are links to. An ETag, and the name of a blob, is the
sha256 of a large file, and git's blob id of a small one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hubshard.protocols import Entry
from hubshard.store.pull_record import read_record

__all__ = ["downloaded", "noted_entries"]

_CONTENT_ID = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?\Z")
_RESERVED = Path(".cache", "huggingface")


def noted_entries(root: Path, entries: Sequence[Entry]) -> Mapping[str, Entry]:
    """What is noted of the files of a directory, by path; of what the last pull has put there, also if it is gone.

    Args:
        root: the directory.
        entries: its files, as they are.
    """
    pulled, when = _pulled(root)
    found = dict(pulled)
    for entry in entries:
        noted, noted_when = downloaded(root, entry)
        if noted is not None and (entry.path not in pulled or noted_when > when):
            found[entry.path] = noted
    return found


def _pulled(root: Path) -> tuple[Mapping[str, Entry], float]:
    """Of the last pull into this directory, or snapshot: what it has put there, and when."""
    path = root / _RESERVED / "hubshard" / "pulled.json"
    record = read_record(path)
    if record is not None and record.at.commit:  # else its files are just being exchanged
        placed, listing = {path: entries[-1] for path, entries in record.versions().items()}, {*record.listing}
        # what earlier revisions have brought, and somebody has removed, is not missing
        there = {name: entry for name, entry in placed.items() if entry in listing or (root / name).exists()}
        return there, path.stat().st_mtime
    if root.parent.name == "snapshots":
        path = root.parent.parent / ".hubshard" / "listings" / f"{root.name}.json"
        record = read_record(path)
        if record is not None:
            there = {entry.path: entry for entry in record.listing if (root / entry.path).exists()}
            return there, path.stat().st_mtime
    return {}, 0.0


def downloaded(root: Path, entry: Entry) -> tuple[Entry | None, float]:
    """What huggingface_hub has noted of a file, and when; what lies behind a link is noted of another directory."""
    path, note = root / entry.path, root / _RESERVED / "download" / f"{entry.path}.metadata"
    name, when = "", 0.0
    is_own = Path(os.path.realpath(note)) == Path(os.path.realpath(root)) / note.relative_to(root)
    with suppress(OSError, ValueError, IndexError):
        text = note.read_text("utf-8") if is_own else ""
        name, when = text.splitlines()[1].strip(), note.stat().st_mtime
    if not name and root.parent.name == "snapshots" and path.is_symlink():
        with suppress(OSError):
            name = path.readlink().name
    if not _CONTENT_ID.match(name):
        return None, 0.0
    return Entry(entry.path, entry.nbytes, name if len(name) == 64 else None, name), when
