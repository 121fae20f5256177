"""What can be made of any `Reader`: bytes of a file at once, and readers that change one thing of another one."""

from __future__ import annotations

from collections.abc import Sequence

from hubshard.protocols import Entry, Reader, Revision

__all__ = ["ListedReader", "WrappedReader", "read_bytes"]


def read_bytes(store: Reader, at: Revision, path: str, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of a file, in memory: for what is known to be small.

    Raises:
        HubshardError: as `Reader.read`.
    """
    content = bytearray(stop - start)
    if content:
        store.read(at, path, start, stop, memoryview(content))
    return bytes(content)


class WrappedReader:
    """A `Reader` that passes all on to another one; whoever inherits from it changes what it is there for.

    Args:
        store: what is read from.
    """

    def __init__(self, store: Reader) -> None:
        self._store = store

    def head(self, branch: str) -> Revision | None:
        """As the store says."""
        return self._store.head(branch)

    def list(self, at: Revision) -> Sequence[Entry]:
        """As the store says."""
        return self._store.list(at)

    def read(self, at: Revision, path: str, start: int, stop: int, into: memoryview) -> None:
        """As the store does."""
        self._store.read(at, path, start, stop, into)


class ListedReader(WrappedReader):
    """A `Reader` that asks for the files of a revision once."""

    def __init__(self, store: Reader) -> None:
        super().__init__(store)
        self._listed: dict[Revision, Sequence[Entry]] = {}

    def list(self, at: Revision) -> Sequence[Entry]:
        """As the store said when it was asked first."""
        if at not in self._listed:
            self._listed[at] = self._store.list(at)
        return self._listed[at]
