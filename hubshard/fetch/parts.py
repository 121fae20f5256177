"""A file that is arriving: `<name>.part` holds its bytes, `<name>.map` says which of its pieces are there.

The map is a header of 24 bytes (magic, size of the file u64, bytes per piece u32, 0 u32), then one record of 8 bytes
per piece (its number u32, crc32 of every 509th of its bytes u32), all little-endian. A record is appended after its
bytes were written, so that a process killed at any point loses the pieces in flight alone. Whoever goes on, in another
process or on another machine, checks each piece by its record before it is used: blocks of the disk (4 KiB) that a
power cut has torn out are fetched again. Bits that flipped are found by the hash of the whole file.
"""

from __future__ import annotations

import os
import re
import struct
import sys
import threading
import zlib
from collections.abc import Collection
from contextlib import AbstractContextManager, ExitStack
from hashlib import sha256
from pathlib import Path

from hubshard.fetch.on_disk import refused_by_disk
from hubshard.protocols import Buffer

__all__ = ["PIECE_BYTES", "Part", "clean_parts", "missing_bytes", "name_of"]

PIECE_BYTES = 8 << 20
"""Bytes of a piece, the last one excepted. A constant of the format: another value starts the file anew."""

_MAGIC = b"HSPART1\n"
_STRIDE = 509  # prime, and eight of it to a block
_HEADER = struct.Struct("<8sQII")
_RECORD = struct.Struct("<II")
_PLAIN = re.compile(r"[0-9a-f]{40,64}\Z")
_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def name_of(content_id: str) -> str:
    """The name under which the content `content_id` arrives: a plain file name for whatever a store calls it."""
    return content_id if _PLAIN.match(content_id) else sha256(content_id.encode()).hexdigest()


def clean_parts(folder: Path, *, keep: Collection[str]) -> int:
    """Delete the parts in `folder` other than those of the names `keep`; bytes that were freed on the disk."""
    freed = 0
    for file in sorted(folder.glob("*")) if folder.is_dir() else ():
        is_kept = file.suffix in {".part", ".map"} and file.stem in keep
        if not is_kept or not file.with_suffix(".part").exists():
            freed += _disk_bytes(file)
            file.unlink(missing_ok=True)
    return freed


def missing_bytes(folder: Path, name: str, nbytes: int) -> int:
    """Bytes of disk that the part `name` will still take until it holds `nbytes`."""
    path = folder / f"{name}.part"
    return max(nbytes - (_disk_bytes(path) if path.exists() else 0), 0)


class Part:
    """A file that is arriving, open; it may be read and written by several threads at once.

    Attributes:
        path: of the bytes.
        nbytes: size of the file to be (bytes).
        count: number of its pieces.
    """

    def __init__(self, folder: Path, name: str, nbytes: int) -> None:
        """Go on with the part `name` in `folder`, or start it where none is there or it does not fit.

        Raises:
            StoreError: the disk refuses.
        """
        self.path = folder / f"{name}.part"
        self.nbytes = nbytes
        self.count = -(-nbytes // PIECE_BYTES)
        self._map_path = folder / f"{name}.map"
        self._lock = threading.Lock()
        self._crcs: dict[int, int] = {}
        with ExitStack() as stack, self._refused_by_disk():
            folder.mkdir(parents=True, exist_ok=True)
            crcs = self._read_map()
            self._crcs = crcs or {}
            self._data = os.open(self.path, _FLAGS, 0o666)
            stack.callback(os.close, self._data)
            self._map = os.open(self._map_path, _FLAGS | os.O_APPEND, 0o666)
            stack.callback(os.close, self._map)
            if crcs is None:
                self._start()
            stack.pop_all()
        self._is_open = True

    def _refused_by_disk(self) -> AbstractContextManager[None]:
        return refused_by_disk(self.path, lacking=lambda: self.nbytes - self.arrived_bytes)

    def _read_map(self) -> dict[int, int] | None:
        """The pieces that have arrived, or None where the part must start anew."""
        try:
            raw = self._map_path.read_bytes()
            fits = self.path.stat().st_size == self.nbytes
        except FileNotFoundError:
            return None
        if not fits or raw[: _HEADER.size] != self._header():
            return None
        whole = len(raw) - (len(raw) - _HEADER.size) % _RECORD.size
        if whole != len(raw):
            os.truncate(self._map_path, whole)  # a record that was cut short; the next one must not be glued to it
        return {piece: crc for piece, crc in _RECORD.iter_unpack(raw[_HEADER.size : whole]) if piece < self.count}

    def _header(self) -> bytes:
        return _HEADER.pack(_MAGIC, self.nbytes, PIECE_BYTES, 0)

    def span(self, piece: int) -> tuple[int, int]:
        """First byte of a piece, and the one after its last."""
        return piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, self.nbytes)

    @property
    def arrived_bytes(self) -> int:
        """Bytes of the pieces that have arrived."""
        with self._lock:
            spans = [self.span(piece) for piece in self._crcs]
        return sum(stop - start for start, stop in spans)

    def read(self, piece: int, into: memoryview) -> bool:
        """Read a piece that has arrived into memory of its size; False where it has not, or is not what was written."""
        with self._lock:
            if piece not in self._crcs:
                return False
        is_whole = _pread(self._data, into, self.span(piece)[0], self._lock) == len(into)
        with self._lock:
            if is_whole and _checksum(into) == self._crcs.get(piece):
                return True
            self._crcs.pop(piece, None)
        return False

    def write(self, piece: int, data: Buffer) -> None:
        """Put the bytes of a piece in their place, and then say so in the map.

        Raises:
            StoreError: the disk is full, or failed; names the file.
        """
        crc = _checksum(data)
        with self._refused_by_disk():
            _pwrite(self._data, memoryview(data), self.span(piece)[0], self._lock)
            os.write(self._map, _RECORD.pack(piece, crc))
        with self._lock:
            self._crcs[piece] = crc

    def _start(self) -> None:
        os.ftruncate(self._map, 0)
        os.ftruncate(self._data, 0)  # what is left of another file takes no room
        os.ftruncate(self._data, self.nbytes)
        os.write(self._map, self._header())

    def sync(self) -> None:
        """Make the bytes durable.

        Raises:
            StoreError: as for `write`.
        """
        with self._refused_by_disk():
            os.fsync(self._data)

    def close(self) -> None:
        """Close both files; they stay, for whoever goes on. Further calls do nothing."""
        if self._is_open:
            self._is_open = False
            os.close(self._data)
            os.close(self._map)

    def delete(self) -> None:
        """Delete both files; to be called when closed."""
        with self._refused_by_disk():
            self._map_path.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)

    def move(self, path: Path) -> None:
        """Give the bytes their final place, and drop the map; to be called when closed."""
        self.path.replace(path)
        self._map_path.unlink(missing_ok=True)


def _checksum(data: Buffer) -> int:
    return zlib.crc32(memoryview(data)[::_STRIDE].tobytes())


def _disk_bytes(file: Path) -> int:
    """Bytes that a file, which may have holes, takes on the disk."""
    status = file.stat()
    blocks: int | None = getattr(status, "st_blocks", None)
    return status.st_size if blocks is None else blocks * 512


def _pread(descriptor: int, into: memoryview, offset: int, lock: threading.Lock) -> int:
    if sys.platform != "win32":
        count = os.preadv(descriptor, [into], offset)
    else:
        with lock:
            os.lseek(descriptor, offset, os.SEEK_SET)
            data = os.read(descriptor, len(into))
        into[: len(data)] = data
        count = len(data)
    return count


def _pwrite(descriptor: int, data: memoryview, offset: int, lock: threading.Lock) -> None:
    while data:
        if sys.platform != "win32":
            count = os.pwrite(descriptor, data, offset)
        else:
            with lock:
                os.lseek(descriptor, offset, os.SEEK_SET)
                count = os.write(descriptor, data)
        data, offset = data[count:], offset + count
