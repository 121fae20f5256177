"""Torch tensors as the places that bytes are read into, cast and moved to a device on the way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hubshard.errors import FormatError
from hubshard.lazy.reading import BytesTarget, single_run
from hubshard.lazy.torch_dtypes import torch_dtype
from hubshard.reads import Copy
from hubshard.tensors import Box, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["TensorTarget", "bytes_of"]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in CPU memory, writable."""
    import torch  # noqa: PLC0415  # slow, and optional

    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy().data).cast("B")


@dataclass(frozen=True)
class TensorTarget:
    """A tensor of any dtype, layout and device that takes the elements of a box.

    Attributes:
        tensor: of the shape of the box (of packed F4, half of it in the last dimension).
        spec: of the tensor that is stored.
        box: what of it goes here.
    """

    tensor: torch.Tensor
    spec: TensorSpec
    box: Box

    @cached_property
    def _memory(self) -> BytesTarget | None:
        # where the bytes that are stored are the bytes that are wanted, in this order
        tensor = self.tensor
        same = tensor.dtype == torch_dtype(self.spec) and tensor.device.type == "cpu" and tensor.is_contiguous()
        return BytesTarget(bytes_of(tensor)) if same else None

    def place(self, copy: Copy, nbytes: int) -> memoryview | None:
        """The tensor's own memory, where nothing is cast or moved and the read is one contiguous part of it."""
        return self._memory.place(copy, nbytes) if self._memory else None

    def take(self, copy: Copy, raw: memoryview) -> None:
        """Copy, cast and move the elements of `copy`."""
        import torch  # noqa: PLC0415  # slow, and optional

        packed = self.spec.bits < 8
        if self._memory and (packed or single_run(copy)):
            self._memory.take(copy, raw)
            return
        if packed:
            raise FormatError(f"tensor {self.spec.name!r}: packed {self.spec.dtype} needs contiguous CPU memory")
        # threads do not inherit the caller's inference mode, outside of which its tensors cannot be written to
        with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
            self._region(copy).copy_(self._elements(copy, raw, self.tensor.device))

    def _elements(self, copy: Copy, raw: memoryview, device: torch.device) -> torch.Tensor:
        import torch  # noqa: PLC0415  # slow, and optional

        if raw.readonly:  # torch warns of memory that it might write to
            raw = memoryview(bytearray(raw))
        itemsize = copy.bits // 8
        count = (raw.nbytes - copy.source) // itemsize
        flat = torch.frombuffer(raw, dtype=torch_dtype(self.spec), count=count, offset=copy.source)
        if device.type == "cuda":  # as it is stored, gaps and all: picking and casting are the device's work
            flat = flat.to(device, non_blocking=True)
        return flat.as_strided(copy.shape, [stride // copy.bits for stride in copy.source_strides])

    def _region(self, copy: Copy) -> torch.Tensor:
        position = copy.target * 8 // copy.bits
        slices = []
        for stride, length in zip(copy.target_strides, copy.shape, strict=True):
            start, position = divmod(position, stride // copy.bits)
            slices.append(slice(start, start + length))
        return self.tensor.detach()[tuple(slices)]
