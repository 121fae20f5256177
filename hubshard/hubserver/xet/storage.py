"""Xorbs on disk: `root/xorbs/<aa>/<hash>`, the chunks as they came, then their index."""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hubshard.disk import read_exactly, write_all
from hubshard.errors import IntegrityError, NotFoundError
from hubshard.hubserver.durable import insert_once, make_dir, remove, temp_path
from hubshard.hubserver.xet.hashing import from_hex, to_hex
from hubshard.hubserver.xet.xorb import (
    CHUNK_HEADER_BYTES,
    MAX_CHUNK_BYTES,
    ChunkParser,
    XorbIndex,
    decode_chunks,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import RawIOBase
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["StoredXorb", "XorbStore", "XorbWriter"]

_CACHED_INDEXES = 128
_DECODE_BYTES = 1 << 20
_MOST_PACKED_BYTES = MAX_CHUNK_BYTES + CHUNK_HEADER_BYTES


@dataclass(frozen=True, slots=True)
class StoredXorb:
    """One xorb, as garbage collection sees it.

    Attributes:
        xorb: its hash.
        nbytes: size of its file.
        modified: when it was last uploaded or offered for deduplication, in seconds since the epoch.
    """

    xorb: bytes
    nbytes: int
    modified: float


class XorbWriter:
    """One xorb on its way in: every chunk is checked as it comes, then goes to a temporary file.

    Use it as a context manager: leaving it without `commit` removes the temporary file.
    """

    def __init__(self, store: XorbStore, xorb: bytes) -> None:
        self._store = store
        self._xorb = xorb
        self._parser = ChunkParser(to_hex(xorb))
        self._temp = temp_path(store.temp_dir, prefix="xorb")
        self._file = self._temp.open("xb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        """Takes the next bytes of the serialized xorb.

        Raises:
            FormatError: they are not chunks.
        """
        for part in self._parser.feed(data):
            write_all(self._file.fileno(), memoryview(part))

    def commit(self) -> tuple[bool, XorbIndex]:
        """Checks the hash of the whole, and makes the xorb durable.

        Returns:
            Whether it is new, and its index. Of several uploads at once exactly one is new.

        Raises:
            FormatError: the body ended inside a chunk.
            IntegrityError: the chunks are not those of the announced hash.
        """
        index = self._parser.finish()
        actual = index.merkle_hash()
        if actual != self._xorb:
            raise IntegrityError(f"xorb {to_hex(self._xorb)}: its chunks have the hash {to_hex(actual)}")
        write_all(self._file.fileno(), memoryview(index.to_bytes()))
        os.fsync(self._file.fileno())
        self._file.close()
        return insert_once(self._temp, self._store.path(self._xorb)), index

    def abort(self) -> None:
        """Drops what was not committed. Calling it twice is fine."""
        self._file.close()
        self._temp.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class XorbStore:
    """All xorbs of a server. Safe with several threads and processes; a stored xorb never changes.

    Args:
        root: the directory of the server.
    """

    def __init__(self, root: Path) -> None:
        self._dir = root / "xorbs"
        self.temp_dir = root / "tmp"
        make_dir(self._dir)
        make_dir(self.temp_dir)
        self._indexes = functools.lru_cache(_CACHED_INDEXES)(self._load_index)

    def path(self, xorb: bytes) -> Path:
        """Where the file of a xorb is, or would be. Its first `packed_bytes` bytes are the serialized chunks."""
        name = to_hex(xorb)
        return self._dir / name[:2] / name

    def writer(self, xorb: bytes) -> XorbWriter:
        """Starts the upload of the xorb with this hash."""
        return XorbWriter(self, xorb)

    def index(self, xorb: bytes) -> XorbIndex:
        """Where the chunks of a xorb are.

        Raises:
            NotFoundError: there is no such xorb.
            IntegrityError: its file is damaged.
        """
        try:
            status = self.path(xorb).stat()
        except FileNotFoundError as error:
            raise NotFoundError(f"xorb {to_hex(xorb)} is not in the store") from error
        # By file: a xorb that was removed and came back may be packed in another way.
        return self._indexes(xorb, (status.st_ino, status.st_size))

    def touch(self, xorb: bytes) -> bool:
        """Makes a xorb young again, so that garbage collection spares it; False when it is not there."""
        try:
            os.utime(self.path(xorb))
        except FileNotFoundError:
            return False
        return True

    def read(self, xorb: bytes, start: int, stop: int) -> Iterator[bytes | memoryview]:
        """Uncompressed bytes [start, stop) of a xorb, chunk by chunk; each is valid until the next is asked for.

        Raises:
            NotFoundError: there is no such xorb.
            IntegrityError: its file is damaged.
        """
        index = self.index(xorb)
        first, last = index.chunk_at(start), index.chunk_at(stop - 1) + 1
        offset = index.unpacked_offset(first)
        with self.path(xorb).open("rb", buffering=0) as file:
            for packed in _packed_runs(file, index, first, last, name=to_hex(xorb)):
                for chunk in decode_chunks(packed, name=to_hex(xorb)):
                    lead = max(start - offset, 0)
                    yield chunk[lead : stop - offset]
                    offset += len(chunk)

    def delete(self, xorb: bytes, *, older_than: float | None = None) -> int:
        """Removes a xorb unless it was made young at or after `older_than` (seconds since the epoch).

        Returns:
            The bytes freed.
        """
        return remove(self.path(xorb), temp_path(self.temp_dir, prefix="xorb"), older_than=older_than)

    def listing(self) -> Iterator[StoredXorb]:
        """Every xorb with its size and age, in order of hash."""
        for folder in sorted(self._dir.iterdir()):
            for entry in sorted(os.scandir(folder), key=lambda item: item.name):
                with contextlib.suppress(FileNotFoundError):  # removed since
                    status = entry.stat()
                    yield StoredXorb(from_hex(entry.name), status.st_size, status.st_mtime)

    def _load_index(self, xorb: bytes, _file: tuple[int, int]) -> XorbIndex:
        path = self.path(xorb)
        with path.open("rb") as file:
            file.seek(-XorbIndex.tail_bytes(), os.SEEK_END)
            nbytes = XorbIndex.bytes_for_tail(file.read(), name=str(path))
            file.seek(-nbytes, os.SEEK_END)
            return XorbIndex.from_bytes(file.read(), name=str(path))


def _packed_runs(file: RawIOBase, index: XorbIndex, first: int, last: int, *, name: str) -> Iterator[memoryview]:
    """The serialized chunks [first, last), in runs of about `_DECODE_BYTES`, all read into one buffer."""
    start, end = index.packed_offset(first), index.packed_offset(last)
    buffer = memoryview(bytearray(min(end - start, _DECODE_BYTES + _MOST_PACKED_BYTES)))
    file.seek(start)
    while first < last:
        start = index.packed_offset(first)
        while first < last and index.packed_offset(first + 1) - start <= len(buffer):
            first += 1
        run = buffer[: index.packed_offset(first) - start]
        lacking = read_exactly(file, run)
        if lacking:
            raise IntegrityError(f"xorb {name}: its file lacks {lacking} bytes; the disk has lost data")
        yield run
