"""What of a directory a pull may replace or remove: what a pull, or huggingface_hub, has put there, unchanged since."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from hubshard.digests import matches
from hubshard.engine import run
from hubshard.errors import FormatError
from hubshard.events import Event, Gathered, OnEvent
from hubshard.messages import listed
from hubshard.protocols import Entry
from hubshard.store.noted import downloaded
from hubshard.store.pull_record import Record

__all__ = ["State", "in_the_way", "state_of", "unchanged_among"]

_WORKERS = 8
_SHOWN = 20

State = tuple[int, int, int, int] | None
"""Of a file, what changes when it is written or replaced; None where there is none."""


def state_of(path: Path) -> State:
    """The state of what is at a path now; a link is not followed."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def unchanged_among(paths: Collection[str], root: Path, record: Record | None, *, on_event: OnEvent) -> Collection[str]:
    """Those files that have the content which a pull, or huggingface_hub, has put there: they are hashed.

    Args:
        paths: of files.
        root: the directory.
        record: of its pulls.
        on_event: is told of the bytes.
    """
    versions = record.versions() if record is not None else {}

    def is_unchanged(path: str) -> bool:
        hashed = Gathered(partial(_tell, on_event, path))
        known = _known(path, root, versions)
        found = any(matches(root / path, entry, on_bytes=hashed.add) for entry in known)
        hashed.flush()
        return found

    some = sorted(paths)
    results = run(some, cost=lambda _: 1, work=is_unchanged, budget_bytes=4 * _WORKERS, workers=_WORKERS)
    return {path for path, found in zip(some, results, strict=True) if found}


def in_the_way(root: Path, replaced: Sequence[str], loaded: Sequence[str]) -> FormatError:
    """The error about files that are somebody's.

    Args:
        root: the directory.
        replaced: those that would be replaced or removed.
        loaded: those that may be loaded instead of what is pulled.
    """
    whose = "not put there by a pull, or changed since"
    parts = []
    if replaced:
        parts.append(f"{listed(replaced, most=_SHOWN)}: {whose}, and would be lost")
    if loaded:
        parts.append(f"{listed(loaded, most=_SHOWN)}: {whose}, and may be loaded instead of what is pulled")
    return FormatError(
        f"{root}: {'; '.join(parts)}",
        hint="move them away, pull into another directory (--local-dir), or give them up: --overwrite, in Python "
        "overwrite=True",
    )


def _known(path: str, root: Path, versions: Mapping[str, Sequence[Entry]]) -> Sequence[Entry]:
    known = list(versions.get(path, ()))
    try:
        nbytes = (root / path).stat().st_size
    except OSError:
        return known
    noted, _ = downloaded(root, Entry(path, nbytes, None, ""))
    return known if noted is None else [*known, noted]


def _tell(on_event: OnEvent, path: str, nbytes: int) -> None:
    on_event(Event("pull", "hashed", path, nbytes))
