"""Large uploads in parts: every part is written to its place in one file, which becomes the object at the end.

An upload is the folder `root/parts/<upload>`: the file `content`, and for each part that is whole and on disk a
file named by its number, which holds its ETag. Parts that come in order are hashed as one while they come; the whole
is read again at the end only where they did not, or where the server was started anew in between. So that what was
hashed is what stays, a part has one writer, the last that came for it, and none is left when the parts are joined.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blake3 import blake3

from hubshard.disk import sync_folder, write_all
from hubshard.errors import FormatError, IntegrityError
from hubshard.hubserver.durable import insert, make_dir, temp_path
from hubshard.hubserver.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from hashlib import _Hash
    from io import FileIO
    from pathlib import Path

    from hubshard.hubserver.objects import ObjectStore

__all__ = ["PartWriter", "Prefixes", "join_parts", "sweep_parts"]

_UPLOAD = re.compile(r"[0-9a-f]{32}")
_READ_BYTES = 1 << 20
_KEPT_PREFIXES = 256
_BINARY: int = getattr(os, "O_BINARY", 0)  # Windows translates line ends without it


@dataclass(slots=True)
class _Prefix:
    """The first parts of an upload, hashed as one.

    Attributes:
        turn: of the upload's parts begun so far, which one it was given to.
        etags: of the parts that are in it.
        sha256: of their bytes; None once a part came out of order.
    """

    turn: int = 0
    etags: dict[int, str] = field(default_factory=dict)
    sha256: _Hash | None = None


class Prefixes:
    """What is known of the beginnings of uploads, and who writes them; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, _Prefix] = {}
        self._writers: dict[tuple[str, int], PartWriter] = {}
        self._joining: set[str] = set()

    def enter(self, upload: str, number: int, writer: PartWriter) -> None:
        """Make `writer` the one that may write a part; the one before it ends.

        Raises:
            ApiError: 503: the parts are being joined.
        """
        with self._lock:
            self._refuse_while_joining(upload)
            last = self._writers.get((upload, number))
            self._writers[upload, number] = writer
        if last is not None:
            last.close()

    def leave(self, upload: str, number: int, writer: PartWriter) -> None:
        """Take note that a writer has ended."""
        with self._lock:
            if self._writers.get((upload, number)) is writer:
                del self._writers[upload, number]

    @contextmanager
    def joining(self, upload: str) -> Iterator[None]:
        """Let nobody write to an upload; who does so now ends.

        Raises:
            ApiError: 503: somebody else joins its parts.
        """
        with self._lock:
            self._refuse_while_joining(upload)
            self._joining.add(upload)
            writers = [writer for (other, _), writer in self._writers.items() if other == upload]
        try:
            for writer in writers:
                writer.close()
            yield
        finally:
            with self._lock:
                self._joining.remove(upload)

    def _refuse_while_joining(self, upload: str) -> None:
        if upload in self._joining:
            raise ApiError(503, "the parts of this upload are being joined; try again")

    def begin(self, upload: str, number: int) -> _Prefix:
        """What part `number` adds to. Whoever has begun another part of the upload finds out in `keep`."""
        with self._lock:
            last = self._found.pop(upload, _Prefix())
            fits = list(last.etags) == list(range(1, number))
            prefix = last if fits and last.sha256 is not None else _Prefix()
            if number == 1:
                prefix = _Prefix(sha256=hashlib.sha256())
            prefix.turn = last.turn + 1
            self._found[upload] = _Prefix(prefix.turn)
            for oldest in list(self._found)[:-_KEPT_PREFIXES]:
                del self._found[oldest]
            return prefix

    def keep(self, upload: str, prefix: _Prefix) -> None:
        """Take note of a prefix that has grown by one part, unless another part was begun meanwhile."""
        with self._lock:
            last = self._found.get(upload)
            if last is not None and last.turn == prefix.turn:
                self._found[upload] = prefix

    def end(self, upload: str, etags: Mapping[int, str]) -> str | None:
        """The sha256 of the parts of these ETags together, where it is known."""
        with self._lock:
            found = self._found.pop(upload, _Prefix())
        return found.sha256.hexdigest() if found.sha256 is not None and found.etags == etags else None


class PartWriter:
    """One part on its way in, written from byte `offset` of the whole on.

    Args:
        root: the directory of the server.
        prefixes: of all uploads.
        upload: 32 hexadecimal digits.
        number: of the part, from 1.
        offset: in bytes.

    Raises:
        ApiError: 409: somebody else came to write the part just now. 503: the parts are being joined.
    """

    def __init__(self, root: Path, prefixes: Prefixes, upload: str, number: int, offset: int) -> None:
        self._folder = _folder(root, upload)
        self._prefixes = prefixes
        self._upload = upload
        self._number = number
        self._marker = self._folder / str(number)
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self._ended = False
        self.nbytes = 0
        make_dir(self._folder)
        prefixes.enter(upload, number, self)
        try:
            self._begin(offset)
        except BaseException:
            self.close()
            raise
        # where the hash of all parts before it is known, that goes on and serves for the ETag too: one hash is enough
        self._hash = self._prefix.sha256 or blake3()

    def _begin(self, offset: int) -> None:
        with self._lock:  # the one that comes next waits for that, and its part is not taken for an old one
            if self._ended:
                raise self._late()
            self._prefix = self._prefixes.begin(self._upload, self._number)
            self._marker.unlink(missing_ok=True)
            content = os.open(self._folder / "content", os.O_RDWR | os.O_CREAT | _BINARY, 0o666)
            self._file = os.fdopen(content, "r+b", 0)
            self._file.seek(offset)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data` to the part.

        Raises:
            ApiError: 409: somebody else writes the part now, or its upload was completed.
        """
        with self._lock:
            write_all(self._open_file().fileno(), memoryview(data))
        self._hash.update(data)
        self.nbytes += len(data)

    def commit(self) -> str:
        """Make the part durable; its ETag, a hash of its bytes, or of all bytes up to its end.

        Raises:
            ApiError: 409: somebody else writes the part now, or its upload was completed.
        """
        etag, temp = self._hash.hexdigest(), temp_path(self._folder)
        with self._lock:
            os.fsync(self._open_file().fileno())
            with temp.open("x") as file:
                file.write(etag)
                file.flush()
                os.fsync(file.fileno())
            temp.replace(self._marker)
            sync_folder(self._folder)
            self._prefix.etags[self._number] = etag
            self._prefixes.keep(self._upload, self._prefix)
        return etag

    def close(self) -> None:
        """Let go of the file; a part that was not committed counts for nothing."""
        with self._lock:
            self._ended = True
            if self._file is not None:
                self._file.close()
        self._prefixes.leave(self._upload, self._number, self)

    def _open_file(self) -> FileIO:
        if self._ended or self._file is None:
            raise self._late()
        return self._file

    def _late(self) -> ApiError:
        return ApiError(409, f"part {self._number} was sent again, or its upload was completed, meanwhile")


def join_parts(
    root: Path,
    prefixes: Prefixes,
    objects: ObjectStore,
    upload: str,
    etags: Mapping[int, str],
    sha256: str,
    nbytes: int,
) -> None:
    """Check an upload whose parts are all there, and make it an object.

    Args:
        root: the directory of the server.
        prefixes: of all uploads.
        objects: where the object goes.
        upload: the upload.
        etags: part number → its ETag.
        sha256: of the whole.
        nbytes: of the whole.

    Raises:
        FormatError: a part is missing, or is not the one that the ETag names.
        IntegrityError: the whole is not what was announced.
    """
    folder = _folder(root, upload)
    for number, etag in sorted(etags.items()):
        _check_part(folder / str(number), number, etag, sha256)
    content = folder / "content"
    found = prefixes.end(upload, etags) or _sha256(content)
    if found != sha256 or content.stat().st_size != nbytes:
        raise IntegrityError(f"object {sha256}: the parts that arrived have sha256 {found}")
    insert(content, objects.path(sha256))
    shutil.rmtree(folder, ignore_errors=True)


def sweep_parts(root: Path, *, older_than: float) -> int:
    """Remove uploads whose last part came before `older_than` (seconds since the epoch); the bytes freed."""
    freed = 0
    parts = root / "parts"
    for folder in list(parts.iterdir()) if parts.is_dir() else []:
        files = [path.stat() for path in folder.iterdir()]
        if max([folder.stat().st_mtime, *(status.st_mtime for status in files)]) < older_than:
            freed += sum(status.st_size for status in files)
            shutil.rmtree(folder, ignore_errors=True)
    return freed


def _check_part(marker: Path, number: int, etag: str, sha256: str) -> None:
    try:
        found = marker.read_text()
    except FileNotFoundError as error:
        raise FormatError(f"part {number} of the upload of {sha256} is missing") from error
    if found != etag:
        raise FormatError(f"part {number} of the upload of {sha256} is not the one that its ETag names")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _folder(root: Path, upload: str) -> Path:
    if not _UPLOAD.fullmatch(upload):
        raise FormatError(f"{upload!r} is not an upload")
    return root / "parts" / upload
