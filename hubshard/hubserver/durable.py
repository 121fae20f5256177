"""Files that are whole or absent: written beside their place, synced, then renamed into it."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["make_dir", "publish", "sync_dir", "temp_path"]


def temp_path(folder: Path, *, prefix: str = "new") -> Path:
    """A name that nobody else uses, in `folder`, which must be on the file system of the final place.

    Open it with mode "xb": that gives the usual permissions (0666 less the umask), which `tempfile` does not.
    """
    return folder / f"{prefix}-{os.getpid()}-{secrets.token_hex(8)}"


def sync_dir(folder: Path) -> None:
    """Makes the names in `folder` durable, where the system can sync a directory (Windows cannot)."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows opens no directories; its renames are journalled
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_dir(folder: Path) -> None:
    """Makes `folder` and its parents, durably."""
    if folder.is_dir():
        return
    make_dir(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    sync_dir(folder.parent)


def publish(temp: Path, final: Path) -> bool:
    """Moves a synced temporary file to its content-addressed place, durably.

    A file of the same size that is already there holds the same bytes: it is kept, and made young again so
    that a garbage collection running now spares it.

    Returns:
        True when `temp` took the place, False when the content was there before.
    """
    make_dir(final.parent)
    inserted = not _refresh(final, nbytes=temp.stat().st_size)
    if inserted:
        temp.replace(final)
    else:
        temp.unlink()
    sync_dir(final.parent)
    return inserted


def _refresh(path: Path, *, nbytes: int) -> bool:
    """True when `path` has `nbytes` bytes and could be made young before anybody removed it."""
    try:
        os.utime(path)
        return path.stat().st_size == nbytes
    except FileNotFoundError:
        return False
