"""Files in Xet storage: what they are made of, how to get at their bytes, and how they become known."""

from __future__ import annotations

import functools
import struct
import threading
import time
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from hubshard.errors import FormatError, IntegrityError, NotFoundError
from hubshard.hubserver.registry import hold
from hubshard.hubserver.xet.ahead import Ahead
from hubshard.hubserver.xet.dedup import note_chunk
from hubshard.hubserver.xet.hashing import file_hash, from_hex, range_hash, to_hex
from hubshard.hubserver.xet.storage import XorbStore

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hubshard.hubserver.db import Database
    from hubshard.hubserver.xet.shard import ShardFile, ShardTerm
    from hubshard.hubserver.xet.xorb import XorbIndex

__all__ = ["FileMap", "Term", "XetFiles"]

_CACHED_FILES = 64
_PIECE_BYTES = 1 << 20
_TERM = struct.Struct("<32sIIIII")


@dataclass(frozen=True, slots=True)
class Term:
    """A run of chunks of one xorb, as a part of a file.

    Attributes:
        xorb: hash of the xorb.
        start: first chunk.
        stop: one past the last chunk.
        nbytes: uncompressed size.
        packed_start: where the run starts in the serialized xorb.
        packed_stop: one past its last byte there.
    """

    xorb: bytes
    start: int
    stop: int
    nbytes: int
    packed_start: int
    packed_stop: int


@dataclass(frozen=True, slots=True)
class FileMap:
    """What one file is made of.

    Attributes:
        terms: its parts, in order.
        ends: for each term, one past its last byte in the file.
    """

    terms: tuple[Term, ...]
    ends: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.ends[-1] if self.ends else 0

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[int, Term]]:
        """(file offset, term) of the terms that hold some of the bytes [start, stop)."""
        for number in range(bisect_right(self.ends, start), len(self.terms)):
            offset = self.ends[number] - self.terms[number].nbytes
            if offset >= stop:
                return
            yield offset, self.terms[number]


class XetFiles:
    """The files of a server that were uploaded through Xet.

    Args:
        root: the directory of the server.
        db: the database; the tables of `XET` are in it.
    """

    def __init__(self, root: Path, db: Database) -> None:
        self.db = db
        self.xorbs = XorbStore(root)
        self.ahead = Ahead(self.xorbs)
        self._maps = functools.lru_cache(_CACHED_FILES)(self._load_map)
        self._checking: dict[bytes, threading.Lock] = {}
        self._checking_lock = threading.Lock()

    def find(self, sha256: str) -> tuple[str, int] | None:
        """The Xet file hash, as in URLs, and the size in bytes of the content with this sha256, or None."""
        row = (
            self.db.connection()
            .execute(
                "SELECT file_hash, nbytes FROM xet_sha256 JOIN xet_files USING (file_hash)"
                " WHERE sha256 = ? ORDER BY file_hash LIMIT 1",
                (sha256,),
            )
            .fetchone()
        )
        return None if row is None else (to_hex(row["file_hash"]), int(row["nbytes"]))

    def file_map(self, value: bytes) -> FileMap:
        """What the file with this hash is made of.

        Raises:
            NotFoundError: no such file.
        """
        row = self.db.connection().execute("SELECT number FROM xet_files WHERE file_hash = ?", (value,)).fetchone()
        if row is None:
            raise NotFoundError(f"file {to_hex(value)} is not in Xet storage")
        # By number: a file that was removed and came back may be packed in another way.
        return self._maps(row["number"])

    def held_by(self, value: bytes, repo_id: int) -> bool:
        """Whether a repo holds the content of the file with this hash."""
        row = (
            self.db.connection()
            .execute(
                "SELECT 1 FROM xet_sha256 JOIN lfs_files USING (sha256) WHERE file_hash = ? AND repo_id = ?",
                (value, repo_id),
            )
            .fetchone()
        )
        return row is not None

    def read(self, xet_hash: str, start: int, stop: int) -> Iterator[bytes]:
        """Bytes [start, stop) of a file, in pieces of at most 1 MiB and one chunk.

        Raises:
            NotFoundError: there is no such file.
            IntegrityError: a xorb is damaged.
        """
        return _in_pieces(self._read(self.file_map(from_hex(xet_hash)), start, stop))

    def register(self, file: ShardFile, repo_id: int) -> bool:
        """Checks a file that a shard names, and makes it known; the repo then holds its content.

        The sha256 is computed here from the bytes themselves, so that what is served under it is right.

        Returns:
            False when the file was known and the repo held it before.

        Raises:
            FormatError: a xorb is missing, or the chunk ranges, sizes, proofs or file hash are wrong.
            IntegrityError: the content has another sha256.
        """
        terms = self._check_terms(file)
        with self._one_at_a_time(file.hash):
            if file.sha256 is not None and not self._is_checked(file):
                self._check_sha256(file, _map_of(terms), repo_id)
            return self._record(file, terms, repo_id)

    def _check_terms(self, file: ShardFile) -> tuple[Term, ...]:
        nodes: list[tuple[bytes, int]] = []
        terms = []
        for term in file.terms:
            index = self._index(term.xorb)
            terms.append(_check_term(term, index))
            nodes += index.nodes(term.start, term.stop)
        actual = file_hash(nodes)
        if actual != file.hash:
            raise FormatError(f"file {to_hex(file.hash)}: its chunks have the file hash {to_hex(actual)}")
        return tuple(terms)

    def _index(self, xorb: bytes) -> XorbIndex:
        try:
            return self.xorbs.index(xorb)
        except NotFoundError as error:
            raise FormatError(f"xorb {to_hex(xorb)} was not uploaded; upload it before the shard") from error

    def _one_at_a_time(self, value: bytes) -> threading.Lock:
        # A client that lost patience asks again while the first check still runs: it waits for that one.
        with self._checking_lock:
            if len(self._checking) > 4 * _CACHED_FILES:
                self._checking = {key: lock for key, lock in self._checking.items() if lock.locked()}
            return self._checking.setdefault(value, threading.Lock())

    def _is_checked(self, file: ShardFile) -> bool:
        row = (
            self.db.connection()
            .execute("SELECT 1 FROM xet_sha256 WHERE sha256 = ? AND file_hash = ?", (file.sha256, file.hash))
            .fetchone()
        )
        return row is not None

    def _check_sha256(self, file: ShardFile, made_of: FileMap, repo_id: int) -> None:
        digest, done = self.ahead.beginning(repo_id, file.terms)
        for piece in self._read(made_of, made_of.ends[done - 1] if done else 0, made_of.nbytes):
            digest.update(piece)
        if digest.hexdigest() != file.sha256:
            raise IntegrityError(
                f"file {to_hex(file.hash)}: its content has sha256 {digest.hexdigest()}, the shard says {file.sha256}"
            )

    def _record(self, file: ShardFile, terms: Sequence[Term], repo_id: int) -> bool:
        with self.db.write() as connection:
            if connection.execute("SELECT 1 FROM repos WHERE id = ?", (repo_id,)).fetchone() is None:
                raise NotFoundError("the repo was deleted while files were uploaded to it")
            # Garbage collection removes xorbs in write transactions, so what is there now stays.
            for xorb in {term.xorb for term in terms}:
                if not self.xorbs.touch(xorb):
                    raise FormatError(f"xorb {to_hex(xorb)} is gone; upload it again before the shard")
            known = _insert_file(connection, file, terms)
            if terms:
                note_chunk(connection, self._index(terms[0].xorb).hash_of(terms[0].start), terms[0].xorb)
            if file.sha256 is None:
                return not known
            held = connection.execute(
                "SELECT 1 FROM lfs_files WHERE repo_id = ? AND sha256 = ?", (repo_id, file.sha256)
            ).fetchone()
            hold(connection, repo_id, file.sha256, sum(term.nbytes for term in terms))
            return held is None or not known

    def _read(self, file: FileMap, start: int, stop: int) -> Iterator[bytes | memoryview]:
        for offset, term in file.overlapping(start, stop):
            base = self.xorbs.index(term.xorb).unpacked_offset(term.start) - offset
            yield from self.xorbs.read(term.xorb, base + max(start, offset), base + min(stop, offset + term.nbytes))

    def _load_map(self, number: int) -> FileMap:
        row = self.db.connection().execute("SELECT terms FROM xet_files WHERE number = ?", (number,)).fetchone()
        if row is None:
            raise NotFoundError("the file was removed from Xet storage just now")
        return _map_of([Term(*fields) for fields in _TERM.iter_unpack(row["terms"])])


def _map_of(terms: Sequence[Term]) -> FileMap:
    return FileMap(tuple(terms), tuple(accumulate(term.nbytes for term in terms)))


def _check_term(term: ShardTerm, index: XorbIndex) -> Term:
    where = f"xorb {to_hex(term.xorb)}, chunks [{term.start}, {term.stop})"
    if not 0 <= term.start < term.stop <= len(index):
        raise FormatError(f"{where}: the xorb has {len(index)} chunks")
    nbytes = index.unpacked_offset(term.stop) - index.unpacked_offset(term.start)
    if nbytes != term.nbytes:
        raise FormatError(f"{where}: they have {nbytes} bytes, the shard says {term.nbytes}")
    if range_hash(index.hash_of(chunk) for chunk in range(term.start, term.stop)) != term.proof:
        raise FormatError(f"{where}: the verification hash is wrong")
    start, stop = index.packed_offset(term.start), index.packed_offset(term.stop)
    return Term(term.xorb, term.start, term.stop, nbytes, start, stop)


def _insert_file(connection: sqlite3.Connection, file: ShardFile, terms: Sequence[Term]) -> bool:
    """Records a file; False when it is new. A known file keeps its first terms: they say the same."""
    blob = b"".join(
        _TERM.pack(term.xorb, term.start, term.stop, term.nbytes, term.packed_start, term.packed_stop) for term in terms
    )
    cursor = connection.execute(
        "INSERT INTO xet_files (file_hash, nbytes, terms, touched_at) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (file_hash) DO NOTHING",
        (file.hash, sum(term.nbytes for term in terms), blob, time.time()),
    )
    known = cursor.rowcount == 0
    if known:
        connection.execute("UPDATE xet_files SET touched_at = ? WHERE file_hash = ?", (time.time(), file.hash))
    else:
        connection.executemany(
            "INSERT OR IGNORE INTO xet_file_xorbs VALUES (?, ?)", [(term.xorb, file.hash) for term in terms]
        )
    if file.sha256 is not None:
        connection.execute("INSERT OR IGNORE INTO xet_sha256 VALUES (?, ?)", (file.sha256, file.hash))
    return known


def _in_pieces(chunks: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    """The same bytes in larger pieces, so that each is worth a system call."""
    held: list[bytes] = []
    nbytes = 0
    for chunk in chunks:
        held.append(bytes(chunk))  # it is valid for now only
        nbytes += len(chunk)
        if nbytes >= _PIECE_BYTES:
            yield b"".join(held)
            held, nbytes = [], 0
    if held:
        yield b"".join(held)
