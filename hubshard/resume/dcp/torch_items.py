"""DCP's items as boxes of tensors, and tensors as places that bytes are read into."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType

from hubshard.errors import FormatError
from hubshard.header import check_spec
from hubshard.reads import Copy
from hubshard.sources.dtypes import TORCH_CODES
from hubshard.steps.parts import Part
from hubshard.steps.reading import copy_runs
from hubshard.steps.step import Step
from hubshard.tensors import Box, TensorSpec

__all__ = ["Destination", "box_to_read", "item_of", "metadata_of", "part_to_write", "plain_item"]

_CODE_OF = {getattr(torch, name): code for name, code in TORCH_CODES.items() if hasattr(torch, name)}
_DTYPE_OF = {code: dtype for dtype, code in _CODE_OF.items()}
_FEW_BYTES = 4096


def part_to_write(item: WriteItem) -> Part:
    """The box that an item of a save plan is.

    Raises:
        FormatError: safetensors cannot store its name, dtype or shape.
    """
    name, data = item.index.fqn, item.tensor_data
    if data is None:
        raise FormatError(f"{name}: the planner says nothing of its shape", hint="use hubshard.dcp.SavePlanner")
    code = _CODE_OF.get(data.properties.dtype)
    if code is None:
        raise FormatError(
            f"tensor {name!r} has dtype {data.properties.dtype}, which safetensors cannot store",
            hint=f"cast it to one of {', '.join(TORCH_CODES)}",
        )
    spec = TensorSpec(name, code, _logical(code, data.size))
    check_spec(spec if name != "__metadata__" else TensorSpec("", code, spec.shape))
    return Part(spec, Box(_logical(code, data.chunk.offsets), _logical(code, data.chunk.sizes)))


def plain_item(item: WriteItem) -> list[Any]:
    """An item of a save plan as plain data, for another rank; one that `part_to_write` takes, or no tensor."""
    name, offset, data = item.index.fqn, item.index.offset, item.tensor_data
    if data is None:
        return [name]
    sizes = [list(each) for each in (data.size, data.chunk.offsets, data.chunk.sizes)]
    return [name, item.type.name, None if offset is None else list(offset), _CODE_OF[data.properties.dtype], *sizes]


def item_of(plain: list[Any]) -> WriteItem:
    """The item of another rank."""
    name, *rest = plain
    if not rest:
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
    kind, offset, code, size, offsets, sizes = rest
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=_DTYPE_OF[code]), torch.Size(size))
    return WriteItem(MetadataIndex(name, offset), WriteItemType[kind], tensor_data=data)


def box_to_read(item: ReadItem, step: Step) -> Box:
    """The box of the whole tensor that an item of a load plan asks for."""
    code = step.tensors[item.storage_index.fqn].spec.dtype
    return Box(_logical(code, item.storage_offsets), _logical(code, item.lengths))


def metadata_of(step: Step) -> Metadata:
    """A step as DCP's planners see it: each tensor as one chunk, since where its pieces lie is our own concern.

    Raises:
        FormatError: the installed torch lacks a dtype.
    """
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, placement in step.tensors.items():
        dtype = _DTYPE_OF.get(placement.spec.dtype)
        if dtype is None:
            raise FormatError(f"tensor {name!r} has dtype {placement.spec.dtype}, which this torch does not have")
        size = torch.Size(_physical(placement.spec))
        chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])
    entries |= {name: BytesStorageMetadata() for name in step.scalars}
    paths = {name: placement.path for name, placement in step.tensors.items()} | dict(step.scalar_paths)
    return Metadata(entries, planner_data=paths)


def _logical(code: str, sizes: torch.Size) -> tuple[int, ...]:
    # torch counts pairs of packed float4, safetensors its elements
    shape = tuple(sizes)
    return (*shape[:-1], shape[-1] * 2) if code == "F4" and shape else shape


def _physical(spec: TensorSpec) -> tuple[int, ...]:
    return (*spec.shape[:-1], spec.shape[-1] // 2) if spec.dtype == "F4" and spec.shape else spec.shape


class Destination:
    """A tensor, or a part of one, that takes the bytes of a box.

    Its own memory where that is contiguous and on the CPU, else a copy that `finish` puts there.

    Args:
        tensor: as the planner resolved it.
        name: for errors.
        spec: of the stored tensor.
        box: what is read.
    """

    def __init__(self, tensor: torch.Tensor, *, name: str, spec: TensorSpec, box: Box) -> None:
        code = _CODE_OF.get(tensor.dtype)
        if code != spec.dtype:
            raise FormatError(
                f"tensor {name!r} was saved as {spec.dtype}, and is {tensor.dtype} in the state to be loaded",
                hint="make the state with the dtypes of the run that saved it",
            )
        if _logical(code, tensor.shape) != box.shape:
            raise FormatError(
                f"tensor {name!r}: {box.shape} is to be read into a tensor of shape {tuple(tensor.shape)}"
            )
        self.tensor = tensor
        self._own = tensor.detach()
        is_plain = not self._own.is_conj() and not self._own.is_neg()
        self.is_direct = is_plain and self._own.is_contiguous() and self._own.device.type == "cpu"
        self._staged: torch.Tensor | None = None

    @property
    def staged_bytes(self) -> int:
        """Bytes of the copy that `begin` makes; 0 for none."""
        return 0 if self.is_direct else self._own.nbytes

    def begin(self) -> None:
        """Get ready to take bytes."""
        held = self._own if self.is_direct else torch.empty(self._own.shape, dtype=self._own.dtype)
        self._staged = held.as_strided((held.numel(),), (1,)).view(torch.uint8)

    def take(self, copy: Copy, raw: memoryview) -> None:
        """Put bytes in their places; from several threads, for parts that do not meet."""
        flat = self._flat()
        runs = copy.shape[-1] * copy.bits // 8 if copy.shape else copy.bits // 8
        if runs >= _FEW_BYTES or copy.bits % 8 or len(copy.shape) < 2:
            copy_runs(copy, raw, memoryview(cast("bytearray", flat.numpy())))
            return
        # rows of few bytes: one strided copy instead of a Python loop
        shape, width = copy.shape, copy.bits // 8
        source = torch.frombuffer(raw, dtype=torch.uint8)
        flat.as_strided(
            (*shape, width), (*(stride // 8 for stride in copy.target_strides), 1), flat.storage_offset() + copy.target
        ).copy_(source.as_strided((*shape, width), (*(stride // 8 for stride in copy.source_strides), 1), copy.source))

    def finish(self) -> None:
        """Put the copy, if there is one, into the tensor."""
        if not self.is_direct and self._own.numel():
            staged = self._flat().view(self._own.dtype).reshape(self._own.shape)
            self._own.copy_(staged)
        self._staged = None

    def _flat(self) -> torch.Tensor:
        if self._staged is None:
            raise RuntimeError("begin was not called")
        return self._staged
