"""Local files mapped into memory: tensors that are the file's pages, private to this process, without a copy."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from hubshard.engine import run
from hubshard.errors import IntegrityError
from hubshard.lazy.pages import populate
from hubshard.lazy.torch_dtypes import torch_dtype, torch_shape
from hubshard.manifest import Extent, Manifest, Piece
from hubshard.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["MappedFiles"]

_POPULATE_BYTES = 16 * 2**20
_ALIGNMENT = 8


class MappedFiles:
    """The files of a manifest in a local folder, mapped when first asked for.

    The mappings are copy-on-write: who writes to such a tensor changes neither the file nor any other process's view.
    A mapping lives as long as a tensor that stands on it, also after `close`.
    """

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self._root = root
        self._manifest = manifest
        self._maps: dict[str, mmap.mmap] = {}
        self._lock = threading.Lock()

    def tensor(self, spec: TensorSpec) -> torch.Tensor | None:
        """The whole tensor as pages of its file; None where it is in parts, empty or not aligned.

        Raises:
            IntegrityError: the file has another size than when its header was read.
        """
        import torch  # noqa: PLC0415  # slow, and optional

        piece = self._whole(spec)
        if piece is None:
            return None
        start, nbytes = piece.at.start, piece.at.nbytes
        flat = torch.frombuffer(self._map(piece.at.path), dtype=torch.uint8, count=nbytes, offset=start)
        return flat.view(torch_dtype(spec)).reshape(torch_shape(spec))

    def can_map(self, spec: TensorSpec) -> bool:
        """Whether `tensor` returns one."""
        return self._whole(spec) is not None

    def populate(self, specs: Iterable[TensorSpec], *, workers: int) -> None:
        """Bring the pages of whole tensors into memory from several threads, where the system can; else do nothing."""
        extents = sorted(
            (piece.at for piece in map(self._whole, specs) if piece is not None), key=lambda at: (at.path, at.start)
        )
        parts = [
            Extent(at.path, start, min(at.stop, start + _POPULATE_BYTES))
            for at in extents
            for start in range(at.start, at.stop, _POPULATE_BYTES)
        ]
        for _ in run(parts, cost=lambda at: at.nbytes, work=self._populate, budget_bytes=2**62, workers=workers):
            pass

    def populate_within(self, tensors: Iterable[torch.Tensor], *, workers: int) -> None:
        """As `populate`, for those of the tensors that are pages of these files."""
        with self._lock:
            starts = {path: _address(memory) for path, memory in self._maps.items()}
        maps = [(start, start + self._manifest.files[path].nbytes) for path, start in starts.items()]
        ranges = sorted({(tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor.device.type == "cpu"})
        parts = [
            (at, min(_POPULATE_BYTES, address + nbytes - at))
            for address, nbytes in ranges
            if any(start <= address < stop for start, stop in maps)
            for at in range(address, address + nbytes, _POPULATE_BYTES)
        ]
        for _ in run(parts, cost=lambda _: 0, work=lambda part: populate(*part), budget_bytes=1, workers=workers):
            pass

    def close(self) -> None:
        """Let go of the mappings; those under a tensor stay until it is gone."""
        self._maps.clear()

    def _whole(self, spec: TensorSpec) -> Piece | None:
        pieces = self._manifest.pieces_of[spec.name]
        if len(pieces) != 1 or not spec.numel or pieces[0].at.start % _ALIGNMENT:
            return None
        return pieces[0]

    def _map(self, path: str) -> mmap.mmap:
        with self._lock:
            found = self._maps.get(path)
            if found is None:
                with (self._root / path).open("rb") as file:
                    found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                if len(found) != self._manifest.files[path].nbytes:
                    raise IntegrityError(
                        f"{path}: has {len(found)} bytes now, {self._manifest.files[path].nbytes} when it was opened",
                        hint="another program replaces it: open the checkpoint again",
                    )
                self._maps[path] = found
            return found

    def _populate(self, at: Extent) -> None:
        populate(_address(self._map(at.path)) + at.start, at.nbytes)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
