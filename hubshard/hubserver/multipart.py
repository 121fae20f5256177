"""Large uploads in parts: each part a file of its own, joined when all are there.

Parts lie in ``root/parts/<upload>/<number>``; a part appears under its number only when it is whole and on disk.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from typing import TYPE_CHECKING

from hubshard.errors import FormatError
from hubshard.hubserver.durable import make_dir, sync_dir, temp_path

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hubshard.hubserver.objects import ObjectStore, Stored

__all__ = ["PartWriter", "join_parts", "sweep_parts"]

_UPLOAD = re.compile(r"[0-9a-f]{32}")
_COPY_BYTES = 4 << 20


class PartWriter:
    """One part on its way in. ``commit`` gives its ETag, the sha256 of its bytes."""

    def __init__(self, root: Path, upload: str, number: int) -> None:
        self._folder = _folder(root, upload)
        self._final = self._folder / str(number)
        make_dir(self._folder)
        self._temp = temp_path(self._folder)
        self._file = self._temp.open("xb")
        self._hash = hashlib.sha256()
        self.nbytes = 0

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        self._file.write(data)
        self._hash.update(data)
        self.nbytes += len(data)

    def commit(self) -> str:
        """Make the part durable."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temp.replace(self._final)
        sync_dir(self._folder)
        return self._hash.hexdigest()

    def abort(self) -> None:
        """Drop what was written, unless it was committed."""
        self._file.close()
        self._temp.unlink(missing_ok=True)


def join_parts(
    root: Path, objects: ObjectStore, upload: str, etags: Mapping[int, str], sha256: str, nbytes: int
) -> Stored:
    """Make an object of the parts 1, 2, … of an upload, then remove them.

    Args:
        root: the directory of the server.
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
    with objects.writer() as writer:
        for number in range(1, len(etags) + 1):
            part = hashlib.sha256()
            try:
                with (folder / str(number)).open("rb", buffering=0) as file:
                    while data := file.read(_COPY_BYTES):
                        part.update(data)
                        writer.write(data)
            except FileNotFoundError as error:
                raise FormatError(f"part {number} of the upload of {sha256} is missing") from error
            if etags.get(number) != part.hexdigest():
                raise FormatError(f"part {number} of the upload of {sha256} is not the one that its ETag names")
        stored = writer.commit(sha256, nbytes)
    shutil.rmtree(folder, ignore_errors=True)
    return stored


def sweep_parts(root: Path, *, older_than: float) -> int:
    """Remove uploads whose last part came before ``older_than`` (seconds since the epoch); the bytes freed."""
    freed = 0
    parts = root / "parts"
    for folder in list(parts.iterdir()) if parts.is_dir() else []:
        files = list(folder.iterdir())
        if max(path.stat().st_mtime for path in [folder, *files]) < older_than:
            freed += sum(path.stat().st_size for path in files)
            shutil.rmtree(folder, ignore_errors=True)
    return freed


def _folder(root: Path, upload: str) -> Path:
    if not _UPLOAD.fullmatch(upload):
        raise FormatError(f"{upload!r} is not an upload")
    return root / "parts" / upload
