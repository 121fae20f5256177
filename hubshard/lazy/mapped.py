"""Local files mapped into memory: tensors that are the file's pages, private to this process, without a copy."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterable
from io import FileIO
from typing import TYPE_CHECKING, Protocol

from hubshard.engine import run
from hubshard.errors import IntegrityError
from hubshard.lazy.pages import populate
from hubshard.lazy.torch_dtypes import torch_dtype, torch_shape
from hubshard.manifest import Manifest, Piece
from hubshard.protocols import Revision
from hubshard.store.local_tree import AT_REST
from hubshard.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["LocalFiles", "MappedFiles"]

_POPULATE_BYTES = 16 * 2**20
_ALIGNMENT = 8


class LocalFiles(Protocol):
    """A store whose files are local."""

    def open_file(self, at: Revision, path: str) -> FileIO:
        """A file, open to be read, if it is still that of the revision."""

    def check_unchanged(self, at: Revision, path: str) -> None:
        """Raise where it is not."""


class MappedFiles:
    """The files of a manifest on a local disk, mapped when first asked for.

    The mappings are copy-on-write: who writes to such a tensor changes neither the file nor what anybody else sees. For
    that, a tensor that is asked for again comes from a new mapping of its file.
    A mapping lives as long as a tensor that stands on it, also after `close`.

    Args:
        store: holds the files.
        at: the revision whose headers were read.
        manifest: what is in its files.
        shares: whether the same pages may be given again, for those who never write.
    """

    def __init__(self, store: LocalFiles, at: Revision, manifest: Manifest, *, shares: bool = False) -> None:
        self._store = store
        self._at = at
        self._manifest = manifest
        self._shares = shares
        self._maps: dict[str, mmap.mmap] = {}
        # of each mapping, the tensors that somebody may have written to, and what they were called
        self._given: dict[str, dict[str, set[str | None]]] = {}
        self._lock = threading.Lock()

    def sharing(self) -> MappedFiles:
        """The same files, in mappings apart from these, for those who never write."""
        return MappedFiles(self._store, self._at, self._manifest, shares=True)

    def tensor(self, spec: TensorSpec, called: str | None = None) -> torch.Tensor | None:
        """The whole tensor as pages of its file; None where it is in parts, empty or not aligned.

        Args:
            spec: of the stored tensor.
            called: by which of its names it is asked for, so that tied weights share their pages once; None shares
                with nobody.

        Raises:
            NotFoundError, IntegrityError: the file is gone, or is another than when its header was read.
        """
        import torch  # noqa: PLC0415  # slow, and optional

        piece = self._whole(spec)
        if piece is None:
            return None
        start, nbytes = piece.at.start, piece.at.nbytes
        flat = torch.frombuffer(self._map(piece, called), dtype=torch.uint8, count=nbytes, offset=start)
        return flat.view(torch_dtype(spec)).reshape(torch_shape(spec))

    def can_map(self, spec: TensorSpec) -> bool:
        """Whether `tensor` returns one."""
        return self._whole(spec) is not None

    def populate(self, tensors: Iterable[torch.Tensor], *, workers: int) -> None:
        """Bring the pages of such tensors into memory from several threads, where the system can; else do nothing."""
        _populate(sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors), workers)

    def populate_within(self, tensors: Iterable[torch.Tensor], *, workers: int) -> None:
        """As `populate`, for those of the tensors that are pages of the newest mappings."""
        with self._lock:
            starts = {path: _address(memory) for path, memory in self._maps.items()}
        maps = [(start, start + self._manifest.files[path].nbytes) for path, start in starts.items()]
        ranges = sorted({(tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor.device.type == "cpu"})
        _populate([found for found in ranges if any(start <= found[0] < stop for start, stop in maps)], workers)

    def close(self) -> None:
        """Let go of the mappings; those under a tensor stay until it is gone."""
        with self._lock:
            self._maps.clear()
            self._given.clear()

    def _whole(self, spec: TensorSpec) -> Piece | None:
        pieces = self._manifest.pieces_of[spec.name]
        if len(pieces) != 1 or not spec.numel or pieces[0].at.start % _ALIGNMENT:
            return None
        return pieces[0]

    def _map(self, piece: Piece, called: str | None) -> mmap.mmap:
        path = piece.at.path
        with self._lock:
            given = self._given.setdefault(path, {})
            names = given.get(piece.tensor, set())
            if names and (called is None or names & {called, None}) and not self._shares:
                del self._maps[path]
                given.clear()
            found = self._maps.get(path)
            if found is None:
                found = self._maps[path] = self._mapped(path)
            else:  # written in place, it changes under the mapping
                self._store.check_unchanged(self._at, path)
            given.setdefault(piece.tensor, set()).add(called)
            return found

    def _mapped(self, path: str) -> mmap.mmap:
        with self._store.open_file(self._at, path) as file:
            found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if len(found) != self._manifest.files[path].nbytes:
            raise IntegrityError(
                f"{path}: has {len(found)} bytes now, {self._manifest.files[path].nbytes} when it was opened",
                hint=AT_REST,
            )
        return found


def _populate(ranges: Iterable[tuple[int, int]], workers: int) -> None:
    parts = [
        (at, min(_POPULATE_BYTES, address + nbytes - at))
        for address, nbytes in ranges
        for at in range(address, address + nbytes, _POPULATE_BYTES)
    ]
    for _ in run(parts, cost=lambda _: 0, work=lambda part: populate(*part), budget_bytes=1, workers=workers):
        pass


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
