"""Whether the files that are read have the sha256 that is promised for them: found while their bytes pass by."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hubshard.engine import run
from hubshard.errors import FormatError, IntegrityError
from hubshard.lazy.reading import Job, Policy
from hubshard.manifest import Extent, Manifest
from hubshard.protocols import Reader, Revision
from hubshard.readers import WrappedReader

__all__ = ["VerifyingReader", "promised", "verify_files", "with_the_rest"]

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


def promised(manifest: Manifest, root: Path | None) -> Mapping[str, str]:
    """The sha256 (hex) that is promised for each file: by the Hub, or by the name that its cache gave the file.

    Raises:
        FormatError: none is promised for one of them.
    """
    found = {}
    for path, digest in manifest.files.items():
        found[path] = digest.sha256 or _sha256_of_blob(root, path)
        if not found[path]:
            raise FormatError(
                f"{path}: no sha256 is promised for it, so there is nothing to verify it against",
                hint="compare it with its repo (hubshard verify), or leave verify out",
            )
    return found


def verify_files(store: Reader, at: Revision, manifest: Manifest, sha256: Mapping[str, str], policy: Policy) -> None:
    """Read all files from end to end, several at once.

    Raises:
        IntegrityError: one has another sha256.
    """

    def work(path: str) -> None:
        hashed = VerifyingReader(store, {path: sha256[path]})
        buffer = memoryview(bytearray(policy.max_read_bytes))
        nbytes = manifest.files[path].nbytes
        for start in range(0, nbytes, policy.max_read_bytes):
            stop = min(nbytes, start + policy.max_read_bytes)
            hashed.read(at, path, start, stop, buffer[: stop - start])
        hashed.check()

    budget = policy.budget_bytes
    for _ in run(list(sha256), cost=lambda _: policy.max_read_bytes, work=work, budget_bytes=budget, workers=4):
        pass


@dataclass
class _Hasher:
    # takes pieces in any order, hashes them in that of the file; what came too early waits as a copy
    position: int = 0
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    early: dict[int, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, start: int, data: memoryview) -> None:
        with self.lock:
            if start > self.position:
                self.early[start] = bytes(data)
                return
            self._add(start, data)
            while (first := min(self.early, default=self.position + 1)) <= self.position:
                self._add(first, memoryview(self.early.pop(first)))

    def _add(self, start: int, data: memoryview) -> None:
        fresh = data[self.position - start :]
        self.digest.update(fresh)
        self.position += fresh.nbytes


class VerifyingReader(WrappedReader):
    """A `Reader` that hashes what it reads.

    Args:
        store: what is read from.
        sha256: what the files must have, by path.
    """

    def __init__(self, store: Reader, sha256: Mapping[str, str]) -> None:
        super().__init__(store)
        self._sha256 = sha256
        self._hashers = {path: _Hasher() for path in sha256}

    def read(self, at: Revision, path: str, start: int, stop: int, into: memoryview) -> None:
        """Fill `into`, and take its bytes into the file's hash."""
        super().read(at, path, start, stop, into)
        if path in self._hashers:
            self._hashers[path].take(start, into.cast("B")[: stop - start])

    def check(self) -> None:
        """Compare the files that were read; they must have been read from end to end.

        Raises:
            IntegrityError: one has another sha256.
        """
        for path, hasher in self._hashers.items():
            found = hasher.digest.hexdigest()
            if hasher.position and found != self._sha256[path]:
                raise IntegrityError(
                    f"{path}: has sha256 {found}, not {self._sha256[path]} as promised",
                    hint="it was damaged on its way or on this disk: fetch it again",
                )


def with_the_rest(
    jobs: Iterable[Job], manifest: Manifest, reader: VerifyingReader, at: Revision, *, max_read_bytes: int
) -> Sequence[Job]:
    """The jobs in the order of their files, and between them such that read what no job does."""
    covered: dict[str, int] = {}
    every: list[Job] = []
    for job in sorted(jobs, key=_place):
        if job.at is None:
            every.append(job)
            continue
        path, start = job.at.path, covered.get(job.at.path, 0)
        every += _fillers(Extent(path, start, job.at.start), reader, at, max_read_bytes)
        every.append(job)
        covered[path] = max(start, job.at.stop)
    for path, digest in manifest.files.items():
        every += _fillers(Extent(path, covered.get(path, 0), digest.nbytes), reader, at, max_read_bytes)
    return sorted(every, key=_place)


def _fillers(extent: Extent, reader: VerifyingReader, at: Revision, max_read_bytes: int) -> Iterator[Job]:
    for start in range(extent.start, extent.stop, max_read_bytes):
        part = Extent(extent.path, start, min(extent.stop, start + max_read_bytes))
        yield Job(part.nbytes, partial(_pass_by, reader, at, part), part)


def _pass_by(reader: VerifyingReader, at: Revision, extent: Extent) -> int:
    reader.read(at, extent.path, extent.start, extent.stop, memoryview(bytearray(extent.nbytes)))
    return extent.nbytes


def _place(job: Job) -> tuple[str, int]:
    return (job.at.path, job.at.start) if job.at else ("", 0)


def _sha256_of_blob(root: Path | None, path: str) -> str:
    # the cache of the Hub names a large file by its sha256, and links to it
    if root is None or not (root / path).is_symlink():
        return ""
    blob = (root / path).resolve()
    return blob.name if blob.parent.name == "blobs" and _SHA256.match(blob.name) else ""
