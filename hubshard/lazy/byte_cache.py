"""Byte ranges of a slow store, kept in a local file up to a size, for those who read the same ranges again."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

from hubshard.protocols import Reader, Revision
from hubshard.readers import WrappedReader

__all__ = ["CachedReader"]

_FREE_SPACE_SHARE = 2  # at most one part in so many of the free space is taken


class CachedReader(WrappedReader):
    """A `Reader` that keeps what it has read, until `cap_bytes` are kept; nothing is thrown out for something newer.

    Who reads a model round after round, in the same order, finds the same part of it each time; throwing out the oldest
    would find nothing at all. The file has no name and goes with the process.
    """

    def __init__(self, store: Reader, *, cap_bytes: int, folder: Path | None = None) -> None:
        """Wrap a store.

        Args:
            store: what is read from.
            cap_bytes: of the file, at most half of the free space.
            folder: where the file is; None for the system's folder of temporary files.
        """
        super().__init__(store)
        place = folder or Path(tempfile.gettempdir())
        self._cap = min(cap_bytes, shutil.disk_usage(place).free // _FREE_SPACE_SHARE)
        self._file = tempfile.TemporaryFile(dir=place, buffering=0)  # noqa: SIM115  # closed by close()
        self._kept: dict[tuple[str, str, int, int], int] = {}
        self._stop = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self._stop

    def read(self, at: Revision, path: str, start: int, stop: int, into: memoryview) -> None:
        """Fill `into` with bytes `start` to `stop`: from the file where this very range was read before."""
        key = at.commit, path, start, stop
        with self._lock:
            position = self._kept.get(key)
        if position is not None:
            self._read(position, into[: stop - start])
            return
        super().read(at, path, start, stop, into)
        with self._lock:
            position = self._stop
            if position + stop - start > self._cap:
                return
            self._stop += stop - start
        try:
            self._write(position, into[: stop - start])
        except OSError:  # the disk has run full: what is kept stays, and nothing comes to it
            with self._lock:
                self._cap = 0
            return
        with self._lock:
            self._kept[key] = position

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def _read(self, position: int, into: memoryview) -> None:
        rest = into.cast("B")
        with self._lock:
            self._file.seek(position)
            while rest.nbytes:
                count = self._file.readinto(rest)
                if not count:
                    raise OSError(f"the cache file ends before byte {position + rest.nbytes}")
                rest = rest[count:]

    def _write(self, position: int, data: memoryview) -> None:
        rest = data.cast("B")
        with self._lock:
            self._file.seek(position)
            while rest.nbytes:
                rest = rest[self._file.write(rest) :]
