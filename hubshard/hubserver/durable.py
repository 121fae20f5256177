"""Files that are whole or absent: written beside their place, synced, then renamed into it."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

from hubshard.disk import sync_folder

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["insert", "insert_once", "make_dir", "remove", "temp_path"]


def temp_path(folder: Path, *, prefix: str = "new") -> Path:
    """A name that nobody else uses, in `folder`, which must be on the file system of the final place.

    Open it with mode "xb": that gives the usual permissions (0666 less the umask), which `tempfile` does not.
    """
    return folder / f"{prefix}-{os.getpid()}-{secrets.token_hex(8)}"


def make_dir(folder: Path) -> None:
    """Makes `folder` and its parents, durably."""
    if folder.is_dir():
        return
    make_dir(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    sync_folder(folder.parent)


def insert(temp: Path, final: Path) -> None:
    """Moves a synced temporary file to its content-addressed place, durably.

    A file of the same size that is already there holds the same bytes: it is kept, and made young again so
    that a garbage collection running now spares it.
    """
    make_dir(final.parent)
    if _refresh(final, nbytes=temp.stat().st_size):
        temp.unlink()
    else:
        temp.replace(final)
    sync_folder(final.parent)


def insert_once(temp: Path, final: Path) -> bool:
    """Moves a synced temporary file to `final` unless something is there, which is never replaced.

    Of several callers at once, in any process, exactly one inserts. What was there is made young again.

    Returns:
        True when `temp` took the place.
    """
    make_dir(final.parent)
    inserted = _link(temp, final)
    temp.unlink(missing_ok=True)
    sync_folder(final.parent)
    return inserted


def remove(final: Path, trash: Path, *, older_than: float | None) -> int:
    """Removes a file from its place, unless it was made young again at or after `older_than` (seconds since 1970).

    It is moved to `trash` first and judged there: somebody who inserts the same content right now either
    makes it young before that, which is seen, or finds the place empty and fills it.

    Returns:
        The bytes freed; 0 when there was nothing to remove or it was spared.
    """
    try:
        final.replace(trash)
    except FileNotFoundError:
        return 0
    except PermissionError:
        if os.name == "nt":  # somebody reads it: Windows keeps it until then, and so do we
            return 0
        raise
    status = trash.stat()
    if older_than is not None and status.st_mtime >= older_than:
        _link(trash, final)
        trash.unlink(missing_ok=True)
        return 0
    trash.unlink()
    return status.st_size


def _link(temp: Path, final: Path) -> bool:
    """Gives `temp` the second name `final` unless that is taken; False when it is."""
    while True:
        try:
            os.link(temp, final)
        except FileExistsError:
            try:
                os.utime(final)
            except FileNotFoundError:  # removed between the two calls
                continue
            return False
        except OSError:  # a file system without hard links: not exact, but no less safe
            if final.exists():
                return False
            temp.replace(final)
        return True


def _refresh(path: Path, *, nbytes: int) -> bool:
    """True when `path` has `nbytes` bytes and could be made young before anybody removed it."""
    try:
        os.utime(path)
        return path.stat().st_size == nbytes
    except FileNotFoundError:
        return False
