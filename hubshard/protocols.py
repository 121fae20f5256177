"""The two things that the rest is written against: a `Source` of tensors, and a `Store` of revisions.

Both come with a contract suite in `tests/contract/` that every implementation inherits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hubshard.tensors import Box, TensorSpec

__all__ = ["Buffer", "Content", "Entry", "Reader", "Revision", "Source", "Staged", "Store"]

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes; a memoryview is of bytes (format "B", one dimension)."""

Content = Path | Callable[[], Iterable[Buffer]]
"""The bytes of a file to be: a file, or a function that starts them anew each time it is called.

Each buffer is valid until the next is asked for."""


class Source(Protocol):
    """Tensors by name. The only place where data appears; every read may be repeated."""

    def specs(self) -> Sequence[TensorSpec]:
        """All stored tensors, each name once."""

    def aliases(self) -> Mapping[str, str]:
        """Further names that share a stored tensor: alias to stored name."""

    def read(self, name: str, box: Box) -> Buffer:
        """The row-major little-endian bytes of `box` of the tensor `name`.

        Called from several threads at once. The caller is done with the buffer before it asks this thread for the next.
        """


@dataclass(frozen=True, slots=True)
class Revision:
    """An immutable state of a branch.

    Attributes:
        branch: as given; a tag or a commit stands for itself.
        commit: its immutable id.
    """

    branch: str
    commit: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a revision.

    Attributes:
        path: POSIX, relative to the root.
        nbytes: its size (bytes).
        sha256: of its content in hex, or None where the store does not know it without reading.
        blob_id: the store's own id of the content, equal for equal content.
    """

    path: str
    nbytes: int
    sha256: str | None
    blob_id: str


@dataclass(frozen=True, slots=True)
class Staged:
    """Content that is durable in the store and invisible to readers until a commit names it.

    Plain data: it may be written as JSON and travel from rank to rank. One with an empty receipt names content that
    some revision of the same store already holds under this sha256.

    Attributes:
        path: where the commit will put it.
        nbytes: its size (bytes).
        sha256: of its content, in hex.
        receipt: the store's own, as JSON values.
        blob_id: what `Entry.blob_id` will be, or "" where only `sha256` tells.
        nbytes_sent: bytes that crossed the network for it; 0 where the store had them.
    """

    path: str
    nbytes: int
    sha256: str
    receipt: Mapping[str, Any] = field(default_factory=dict)
    blob_id: str = ""
    nbytes_sent: int = 0

    def is_same(self, entry: Entry | None) -> bool:
        """Whether `entry` has this content."""
        if entry is None or entry.nbytes != self.nbytes:
            return False
        return entry.sha256 == self.sha256 or (self.blob_id != "" and entry.blob_id == self.blob_id)


class Reader(Protocol):
    """Revisions of a tree of files, to be read.

    Readers see a commit whole or not at all. Errors: `NotFoundError` for what is not there, `ConflictError` for a
    branch that moved, `StoreError` for the rest.
    """

    def head(self, branch: str) -> Revision | None:
        """The newest commit of `branch` (or of a tag, or a commit id itself); None where there is no such branch."""

    def list(self, at: Revision) -> Sequence[Entry]:
        """All files of a revision, sorted by path."""

    def read(self, at: Revision, path: str, start: int, stop: int, into: memoryview) -> None:
        """Fill `into` with bytes `start` to `stop` of a file; never fewer.

        Raises:
            IntegrityError: the store delivered other bytes than asked for.
        """


class Store(Reader, Protocol):
    """Revisions of a tree of files, and new ones made all at once."""

    def stage(self, branch: str, path: str, data: Content, *, nbytes: int, sha256: str | None = None) -> Staged:
        """Make content durable without showing it; the same content again costs no transfer where the store can tell.

        Args:
            branch: the branch whose commit will name it.
            path: where it will be.
            data: its content; asked for again where a transfer is tried again.
            nbytes: bytes in all.
            sha256: of the content, where the caller knows it; saves a pass over it in some stores.

        Raises:
            IntegrityError: `data` has another size or hash than said.
            StoreError: refused, or tried again in vain.
        """

    def commit(
        self,
        branch: str,
        *,
        parent: Revision | None,
        add: Sequence[Staged],
        remove: Sequence[str],
        message: str,
        publish_id: str,
    ) -> Revision:
        """Make one new revision: all or nothing.

        A lost answer is told from a failure by `publish_id`, which the new revision carries.

        Args:
            branch: what moves.
            parent: the head that this commit builds on; None makes the branch.
            add: files that it adds or replaces.
            remove: files that it deletes; those that are not there are left out.
            message: first line is the title.
            publish_id: unique per commit.

        Raises:
            ConflictError: the head is not `parent`.
        """
