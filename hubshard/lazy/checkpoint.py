"""A checkpoint that is open: its tensors by name, none of them read before it is asked for."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hubshard.errors import FormatError
from hubshard.extras import needing
from hubshard.lazy.drop_behind import DropBehind, available_memory
from hubshard.lazy.indexing import Selection, select
from hubshard.lazy.mapped import MappedFiles
from hubshard.lazy.placing import TensorTarget, bytes_of
from hubshard.lazy.reading import (
    LOCAL,
    REMOTE,
    FileReader,
    Job,
    Policy,
    SourceReader,
    TensorReader,
    ToldReader,
    execute,
    read_box,
)
from hubshard.lazy.torch_dtypes import torch_dtype, torch_shape
from hubshard.manifest import Manifest
from hubshard.paths import path_in
from hubshard.protocols import Reader, Revision, Source
from hubshard.readers import read_bytes
from hubshard.sources.safetensors import SafetensorsSource
from hubshard.store.local import LocalStore
from hubshard.store.lone_file import LoneFile
from hubshard.tensors import Box, TensorSpec

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

__all__ = ["Checkpoint", "LazyTensor"]

_MAX_SMALL_BYTES = 256 * 2**20
_INTEGERS = {8: "U8", 16: "I16", 32: "I32", 64: "I64"}


class LazyTensor:
    """A tensor that is stored: its shape and dtype at once, its values when it is indexed.

    It answers what the slices of safetensors answer, so that it can stand for one in a state dict.
    """

    __slots__ = ("_checkpoint", "_spec", "name")

    def __init__(self, checkpoint: Checkpoint, name: str, spec: TensorSpec) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self.name = name

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, {self._spec.dtype}, {self._spec.shape})"

    @property
    def spec(self) -> TensorSpec:
        """What is stored; its name is that of the stored tensor where this one is an alias."""
        return self._spec

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dimension, as torch counts them: two packed F4 elements are one."""
        return torch_shape(self._spec)

    @property
    def ndim(self) -> int:
        """Dimensions."""
        return len(self._spec.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor as it is stored."""
        return self._spec.nbytes

    @property
    def dtype(self) -> Any:
        """The torch dtype; the safetensors code where torch is not installed."""
        try:
            return torch_dtype(self._spec)
        except ImportError:
            return self._spec.dtype

    def numel(self) -> int:
        """Elements in all, as torch counts them."""
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        """Whether its elements are floating-point numbers."""
        return self._spec.dtype == "BF16" or (self._spec.dtype.startswith("F") and self._spec.dtype != "F4")

    def get_shape(self) -> list[int]:
        """Elements per dimension, as stored."""
        return list(self._spec.shape)

    def get_dtype(self) -> str:
        """The safetensors code, such as "BF16"."""
        return self._spec.dtype

    def read(self, box: Box | None = None) -> bytearray:
        """The row-major little-endian bytes of `box` (of the whole tensor where None), without torch.

        Raises:
            FormatError: the box lies outside the tensor, or a packed dtype does not fall on whole bytes there.
        """
        return read_box(self._checkpoint.reader, self._spec, self._spec.box if box is None else box)

    @needing("reading a tensor as one of torch", otherwise="its bytes are to be had without, by .read()")
    def __getitem__(self, index: Any) -> torch.Tensor:
        """The elements that `index` picks, as a CPU tensor; only their bytes are read, and small gaps between them.

        A whole tensor of a local file comes as pages of that file (copy-on-write), without a copy. Asked for again, it
        is others: what was written to the first is not seen. The names of tied weights share theirs.

        Args:
            index: as numpy's basic indexing: integers, slices with any step, Ellipsis, None.

        Raises:
            IndexError: out of bounds, or too many indices.
            TypeError: a list, mask or tensor as an index.
            FormatError: torch is not installed, or has no such dtype, or a packed dtype is not cut at whole bytes.
        """
        spec = self._spec
        selection = select(index, spec.shape)
        if spec.bits < 8:
            return _packed(self, selection)
        if selection.picked_shape == spec.shape and not selection.reversed_dims:
            mapped = self._checkpoint.mapped
            whole = mapped.tensor(spec, self.name) if mapped else None
            if whole is not None:
                self._checkpoint.on_mapped(spec.nbytes)
                return whole.reshape(selection.shape)
        return _elements(self._checkpoint.reader, spec, selection)


class Checkpoint(Mapping[str, LazyTensor]):
    """The tensors of a checkpoint by name, further names of tied weights included.

    Attributes:
        source: where its bytes come from.
        specs: the stored tensors by name, without further names.
        aliases: further names: alias to stored name.
        manifest: which bytes of which files are what; None where the source is not one of files.
        store: the store of those files, or None.
        at: the revision of the store, or None.
        folder: where in the store, "" for its root.
        root: the local folder that the store shows, or None.
        on_mapped: is told of the bytes of each tensor that is given as pages of a file.
    """

    def __init__(
        self,
        source: Source,
        *,
        reader: TensorReader | None = None,
        mapped: MappedFiles | None = None,
        store: Reader | None = None,
        at: Revision | None = None,
        folder: str = "",
        root: Path | None = None,
    ) -> None:
        """Wrap a source; `open_checkpoint` is what opens one.

        Args:
            source: answers for names, shapes and values.
            reader: reads from the files of the source directly; None to ask the source.
            mapped: the files mapped into memory, where they are local.
            store: holds the files.
            at: the revision of `store`.
            folder: where in the store.
            root: the local folder that the store shows.
        """
        self.source = source
        self.specs: Mapping[str, TensorSpec] = {spec.name: spec for spec in source.specs()}
        self.aliases: Mapping[str, str] = dict(source.aliases())
        self.manifest: Manifest | None = getattr(source, "manifest", None)
        self.store, self.at, self.folder, self.root = store, at, folder, root
        self._reader = reader or SourceReader(source, self.specs, LOCAL)
        self._mapped = mapped
        self._closed = False
        self.on_mapped: Callable[[int], None] = lambda _: None

    @classmethod
    def of_store(
        cls,
        store: Reader,
        at: Revision,
        *,
        folder: str = "",
        path: str | None = None,
        variant: str | None = None,
        root: Path | None = None,
        policy: Policy | None = None,
    ) -> Checkpoint:
        """Open the safetensors checkpoint in a folder of a store.

        Args:
            store: holds it.
            at: the revision to read.
            folder: from the root of the store.
            path: its index or only file, relative to `folder`; None to look for the usual names.
            variant: as in `model.fp16.safetensors`.
            root: the local folder that the store shows, whose files may be mapped; None where it is not one.
            policy: how to read; None to choose by the kind of store.

        Raises:
            NotFoundError, FormatError, IncompleteError: as `SafetensorsSource` says.
        """
        policy = policy or (LOCAL if root else REMOTE)
        source = SafetensorsSource(store, at, folder=folder, path=path, variant=variant, workers=policy.workers)
        reader = FileReader(_for_reading(store, source.manifest, root), at, source.manifest, policy)
        # on Windows a private mapping counts against memory as if it were all written
        can_map = root is not None and sys.platform != "win32" and sys.byteorder == "little"
        files = store if can_map and isinstance(store, (LocalStore, LoneFile)) else None
        mapped = MappedFiles(files, at, source.manifest) if files is not None else None
        return cls(source, reader=reader, mapped=mapped, store=store, at=at, folder=folder, root=root)

    def __getitem__(self, name: str) -> LazyTensor:
        self._check_open()
        return LazyTensor(self, name, self.specs[self.aliases.get(name, name)])

    def __iter__(self) -> Iterator[str]:
        yield from self.specs
        yield from self.aliases

    def __len__(self) -> int:
        return len(self.specs) + len(self.aliases)

    def __repr__(self) -> str:
        return f"Checkpoint({len(self.specs)} tensors, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors; what has several names counts once."""
        return sum(spec.nbytes for spec in self.specs.values())

    @property
    def reader(self) -> TensorReader:
        """What its tensors are read with."""
        self._check_open()
        return self._reader

    @property
    def mapped(self) -> MappedFiles | None:
        """Its files mapped into memory, or None where they are not local."""
        self._check_open()
        return self._mapped

    def told(self, on_bytes: Callable[[int], None]) -> Checkpoint:
        """The same checkpoint, which tells of the bytes of each read; it is open as long as this one is."""
        made = Checkpoint(
            self.source,
            reader=ToldReader(self.reader, on_bytes),
            mapped=self._mapped,
            store=self.store,
            at=self.at,
            folder=self.folder,
            root=self.root,
        )
        made.on_mapped = on_bytes
        return made

    def read_file(self, name: str) -> bytes | None:
        """The bytes of a small file beside the weights, such as "config.json"; None where there is none.

        Raises:
            FormatError: it is larger than 256 MiB.
            NotFoundError, IntegrityError: it is another than when the checkpoint was opened.
        """
        self._check_open()
        if self.root is not None and not isinstance(self.store, LocalStore):  # a lone file knows none beside it
            path = self.root / self.folder / name
            if not path.is_file():
                return None
            _check_small(name, path.stat().st_size)
            return path.read_bytes()
        if self.store is None or self.at is None:
            return None
        path_in_store = path_in(self.folder, name)
        for entry in self.store.list(self.at):
            if entry.path == path_in_store:
                _check_small(name, entry.nbytes)
                return read_bytes(self.store, self.at, entry.path, 0, entry.nbytes)
        return None

    def close(self) -> None:
        """Let go of files and connections; tensors that were returned stay valid."""
        if self._mapped:
            self._mapped.close()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this checkpoint is closed")


def _check_small(name: str, nbytes: int) -> None:
    if nbytes > _MAX_SMALL_BYTES:
        raise FormatError(f"{name} has {nbytes} bytes, too many for a file that is read whole")


def _for_reading(store: Reader, manifest: Manifest, root: Path | None) -> Reader:
    if isinstance(store, LocalStore):
        store = store.for_ranges()
    memory = available_memory()
    is_larger = memory is not None and sum(file.nbytes for file in manifest.files.values()) > memory
    return DropBehind(store, root) if root is not None and is_larger else store


def _elements(reader: TensorReader, spec: TensorSpec, selection: Selection) -> torch.Tensor:
    import torch  # noqa: PLC0415  # slow, and optional

    dtype = torch_dtype(spec)
    # moved as integers: torch does not reverse every narrow float
    spec = TensorSpec(spec.name, _INTEGERS[spec.bits], spec.shape)
    gap = reader.policy.max_gap_bytes
    shape = selection.staged_shape(tensor_shape=spec.shape, bits=spec.bits, max_gap_bytes=gap)
    staged = torch.empty(shape, dtype=torch_dtype(spec))
    jobs: list[Job] = []
    start = 0
    for box in selection.boxes(tensor_shape=spec.shape, bits=spec.bits, max_gap_bytes=gap):
        part = staged.view(-1)[start : start + box.numel].view(box.shape)
        jobs += reader.jobs({spec.name: box}, {spec.name: TensorTarget(part, spec, box)})
        start += box.numel
    execute(jobs, reader.policy)
    picked = staged[selection.thinning(shape)]
    if selection.reversed_dims:
        picked = picked.flip(selection.reversed_dims)
    return picked.contiguous().reshape(selection.shape).view(dtype)


def _packed(tensor: LazyTensor, selection: Selection) -> torch.Tensor:
    # elements share bytes: boxes of whole bytes are all that can be cut
    import torch  # noqa: PLC0415  # slow, and optional

    dtype, spec = torch_dtype(tensor.spec), tensor.spec
    if not selection.is_box() or selection.reversed_dims or len(selection.shape) != len(spec.shape):
        raise TypeError(f"packed {spec.dtype} of tensor {tensor.name!r} is read by slices of step 1 alone")
    staged = torch.empty(torch_shape(TensorSpec(spec.name, spec.dtype, selection.shape)), dtype=dtype)
    raw = tensor.read(selection.box)
    bytes_of(staged)[:] = raw
    return staged
