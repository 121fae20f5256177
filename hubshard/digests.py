"""What the content of a file of a revision must hash to, and whether it does.

The Hub names large files by the sha256 of their content, and all others by git's blob id: the sha1 of `blob <size>`, a
zero byte and the content (https://git-scm.com/book/en/v2/Git-Internals-Git-Objects).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hubshard.protocols import Buffer, Entry

__all__ = ["Hash", "can_verify", "content_id", "git_blob_id", "matches", "new_hash"]

_GIT_BLOB_ID = re.compile(r"[0-9a-f]{40}\Z")
_READ_BYTES = 1 << 20


class Hash(Protocol):
    """What `hashlib` returns."""

    def update(self, data: Buffer, /) -> None:
        """Take in more bytes."""

    def hexdigest(self) -> str:
        """Of all bytes so far."""


def content_id(entry: Entry) -> str:
    """The hash that the store promises for the content of `entry`; equal for equal content."""
    return entry.sha256 or entry.blob_id


def can_verify(entry: Entry) -> bool:
    """Whether the store promises a hash that is known here."""
    return entry.sha256 is not None or _GIT_BLOB_ID.match(entry.blob_id) is not None


def new_hash(entry: Entry) -> Hash:
    """A hash that has `content_id(entry)` as its digest once it has seen the content of `entry`."""
    if entry.sha256 is not None:
        return hashlib.sha256()
    return _new_git_hash(entry.nbytes)


def git_blob_id(content: bytes) -> str:
    """The id that git, and so the Hub's tree, gives to a file of this content."""
    digest = _new_git_hash(len(content))
    digest.update(content)
    return digest.hexdigest()


def _new_git_hash(nbytes: int) -> Hash:
    return hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False)


def matches(path: Path, entry: Entry, *, on_bytes: Callable[[int], None] = lambda _: None) -> bool:
    """Whether the file `path` has the content of `entry`; its size alone counts where no hash is promised.

    False also where it is no file, or cannot be read.

    Args:
        path: the file.
        entry: what it should be.
        on_bytes: is told of the bytes that were hashed since its last call.
    """
    try:
        if not path.is_file() or path.stat().st_size != entry.nbytes:
            return False
        return not can_verify(entry) or _digest(path, entry, on_bytes) == content_id(entry)
    except OSError:
        return False


def _digest(path: Path, entry: Entry, on_bytes: Callable[[int], None]) -> str:
    digest = new_hash(entry)
    buffer = memoryview(bytearray(min(_READ_BYTES, max(entry.nbytes, 1))))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            on_bytes(count)
    return digest.hexdigest()
