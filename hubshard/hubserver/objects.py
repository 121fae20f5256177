"""Content-addressed objects: durable files `root/objects/<aa>/<sha256>`, or content kept in Xet storage.

Everything here is synchronous, and safe with several threads and processes on one root: a file appears under
its sha256 only when all its bytes are on disk. Call it from worker threads, not from an event loop.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hubshard.disk import write_all
from hubshard.errors import FormatError, IntegrityError, NotFoundError
from hubshard.hubserver.durable import insert, make_dir, remove, temp_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["READ_BYTES", "ObjectStore", "ObjectWriter", "Stored", "StoredObject", "XetBackend"]

READ_BYTES = 1 << 20
"""The largest piece that `ObjectStore.read` yields."""

_LEAVING = "leaving-"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Stored:
    """One object that the store can read.

    Attributes:
        sha256: of the whole content, lower-case hex.
        nbytes: size of the content.
        xet_hash: its Xet file hash, or None when it was not uploaded through Xet.
        path: the plain file that holds it, or None when it is rebuilt from xorbs.
    """

    sha256: str
    nbytes: int
    xet_hash: str | None
    path: Path | None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One plain file of the store, as garbage collection sees it.

    Attributes:
        sha256: its name.
        nbytes: its size.
        modified: when it was last uploaded, in seconds since the epoch.
    """

    sha256: str
    nbytes: int
    modified: float


class XetBackend(Protocol):
    """The second place where content may live: chunks in xorbs, put together on reading."""

    def find(self, sha256: str) -> tuple[str, int] | None:
        """The Xet file hash and the size in bytes of the content, or None."""

    def read(self, xet_hash: str, start: int, stop: int) -> Iterator[bytes]:
        """Bytes [start, stop) of a file, in bounded pieces."""


class ObjectWriter:
    """One upload: bytes go to a temporary file and are hashed on the way; `commit` makes them an object.

    Use it as a context manager: leaving it without `commit` removes the temporary file. `OSError` (a full
    disk) passes through from `write` and `commit`.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._temp = temp_path(store.temp_dir)
        self._file = self._temp.open("xb", buffering=0)
        self._hash = hashlib.sha256()
        self._open = True
        self.nbytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Appends `data`."""
        write_all(self._file.fileno(), memoryview(data))
        self._hash.update(data)
        self.nbytes += len(data)

    def commit(self, expected_sha256: str | None = None, expected_bytes: int | None = None) -> Stored:
        """Checks the content, makes it durable, and files it under its sha256.

        Doing so for content that is already there changes nothing but its age.

        Raises:
            IntegrityError: the content is not what was announced; nothing is kept.
        """
        sha256 = self._hash.hexdigest()
        try:
            self._check(sha256, expected_sha256, expected_bytes)
            os.fsync(self._file.fileno())
            self._file.close()
            insert(self._temp, self._store.path(sha256))
        finally:
            self.abort()
        return Stored(sha256, self.nbytes, self._store.xet_hash(sha256), self._store.path(sha256))

    def abort(self) -> None:
        """Drops what was written, unless it was committed. Calling it twice is fine."""
        if self._open:
            self._open = False
            self._file.close()
            self._temp.unlink(missing_ok=True)

    def _check(self, sha256: str, expected_sha256: str | None, expected_bytes: int | None) -> None:
        if expected_bytes is not None and expected_bytes != self.nbytes:
            raise IntegrityError(f"object {sha256}: {self.nbytes} bytes arrived, {expected_bytes} announced")
        if expected_sha256 is not None and expected_sha256 != sha256:
            raise IntegrityError(f"object {expected_sha256}: the bytes that arrived have sha256 {sha256}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class ObjectStore:
    """Objects by sha256, in plain files under `root`, and behind them whatever `xet` can rebuild.

    Args:
        root: the directory of the server; `objects/` and `tmp/` in it belong to this class.
        xet: answers for content that was uploaded through Xet; may also be set later.
    """

    def __init__(self, root: Path, xet: XetBackend | None = None) -> None:
        self.objects_dir = root / "objects"
        self.temp_dir = root / "tmp"
        self.xet = xet
        make_dir(self.objects_dir)
        make_dir(self.temp_dir)

    def path(self, sha256: str) -> Path:
        """Where the plain file of `sha256` is, or would be.

        Raises:
            FormatError: not a sha256 in lower-case hex (so that no request can name another path).
        """
        if not _SHA256.fullmatch(sha256):
            raise FormatError(f"{sha256!r} is not a sha256: 64 lower-case hex digits are expected")
        return self.objects_dir / sha256[:2] / sha256

    def xet_hash(self, sha256: str) -> str | None:
        """The Xet file hash of `sha256`, or None when it was never uploaded through Xet."""
        found = self.xet.find(sha256) if self.xet is not None else None
        return found[0] if found is not None else None

    def writer(self) -> ObjectWriter:
        """Starts one upload."""
        return ObjectWriter(self)

    def put(self, data: bytes) -> Stored:
        """Stores small content that is in memory."""
        with self.writer() as writer:
            writer.write(data)
            return writer.commit()

    def stat(self, sha256: str) -> Stored | None:
        """What is known of `sha256`, or None when the store cannot read it."""
        path = self.path(sha256)
        found = self.xet.find(sha256) if self.xet is not None else None
        try:
            nbytes = path.stat().st_size
        except FileNotFoundError:
            return Stored(sha256, found[1], found[0], None) if found is not None else None
        return Stored(sha256, nbytes, found[0] if found is not None else None, path)

    def read(self, sha256: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Bytes [start, stop) of an object in pieces of at most `READ_BYTES`.

        Args:
            sha256: the object.
            start: first byte.
            stop: one past the last byte; None for the end.

        Raises:
            NotFoundError: the store does not have it.
            FormatError: the range does not lie in the object.
        """
        stored = self.stat(sha256)
        if stored is None:
            raise NotFoundError(f"object {sha256} is not in the store")
        end = stored.nbytes if stop is None else stop
        if not 0 <= start <= end <= stored.nbytes:
            raise FormatError(f"object {sha256} has {stored.nbytes} bytes; [{start}, {end}) is no part of it")
        if stored.path is not None:
            return _read_file(stored.path, start, end)
        if self.xet is None or stored.xet_hash is None:
            raise NotFoundError(f"object {sha256} is not in the store")
        return self.xet.read(stored.xet_hash, start, end)

    def delete(self, sha256: str, *, older_than: float | None = None) -> int:
        """Removes the plain file of `sha256`; content in Xet storage stays.

        Args:
            sha256: the object.
            older_than: seconds since the epoch; an object uploaded at or after it is spared, also when that
                upload is going on right now.

        Returns:
            The bytes freed; 0 when there was nothing to remove.
        """
        trash = temp_path(self.temp_dir, prefix=f"{_LEAVING}{sha256}")
        return remove(self.path(sha256), trash, older_than=older_than)

    def listing(self) -> Iterator[StoredObject]:
        """Every plain file with its size and age, in order of sha256."""
        for folder in sorted(self.objects_dir.iterdir()):
            for entry in sorted(os.scandir(folder), key=lambda item: item.name):
                try:
                    status = entry.stat()
                except FileNotFoundError:  # removed since
                    continue
                yield StoredObject(entry.name, status.st_size, status.st_mtime)

    def sweep(self, *, older_than: float) -> int:
        """Cleans up after killed processes: temporary files last written before `older_than` go.

        An object that was on its way out when the process died goes back to its place: its judge never spoke.

        Returns:
            The bytes freed.
        """
        return sum(self._sweep_one(path, older_than) for path in list(self.temp_dir.iterdir()))

    def _sweep_one(self, path: Path, older_than: float) -> int:
        try:
            status = path.stat()
            if status.st_mtime >= older_than or not path.is_file():
                return 0
            if path.name.startswith(_LEAVING):
                path.replace(self.path(path.name.split("-")[1]))
                return 0
            path.unlink()
        except FileNotFoundError:  # somebody else's file, finished since
            return 0
        return status.st_size


def _read_file(path: Path, start: int, stop: int) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = stop - start
        while left:
            data = file.read(min(left, READ_BYTES))
            if not data:
                raise IntegrityError(f"{path.name}: the file ends {left} bytes early; the disk has lost data")
            left -= len(data)
            yield data
