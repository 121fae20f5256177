"""A torch tensor as a value of a state dict: which are refused, and how one gives its bytes piece by piece.

Imports torch: import this module only where a torch tensor is at hand.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch

from hubshard.errors import FormatError
from hubshard.protocols import Buffer
from hubshard.sources.dtypes import CASTABLE, TORCH_CODES
from hubshard.sources.stand_in import Placed, View, placed_of, view_of
from hubshard.tensors import Box, TensorSpec

__all__ = ["PlacedValue", "TorchValue", "torch_problem", "value_of"]

# an older torch lacks some of them
_CODE_OF = {getattr(torch, name): code for name, code in TORCH_CODES.items() if hasattr(torch, name)}


def torch_problem(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Why `tensor` cannot be stored and what to do, or None when it can."""
    placed = placed_of(tensor)
    if placed is not None:
        return _view_problem(tensor, placed) or _dtype_problem(tensor)
    return _type_problem(type(tensor)) or _layout_problem(tensor) or _dtype_problem(tensor)


def value_of(name: str, tensor: torch.Tensor, cast_to: str | None) -> TorchValue:
    """A tensor that `torch_problem` has nothing against, as a value of a state dict."""
    placed = placed_of(tensor)
    return TorchValue(name, tensor, cast_to) if placed is None else PlacedValue(name, tensor, cast_to, placed)


def _view_problem(tensor: torch.Tensor, placed: Placed) -> tuple[str, str] | None:
    if not tensor.numel() or view_of(tensor, placed) is not None:
        return None
    return (
        f"is no box of {placed.name!r}, which lies on several ranks",
        "gather the model first: get_model_state_dict with full_state_dict=True",
    )


def _type_problem(kind: type[torch.Tensor]) -> tuple[str, str] | None:
    if kind.__name__ == "DTensor":
        return "is distributed (a DTensor)", "publish it from all of its ranks, or gather it: full_state_dict=True"
    if kind.__name__.startswith("Uninitialized"):
        return "is not initialised yet", "run the module once, so that its shapes are known"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"is a {kind.__name__}, a wrapper without bytes of its own", "unwrap or dequantize it first"
    return None


def _layout_problem(tensor: torch.Tensor) -> tuple[str, str] | None:
    if tensor.is_meta:
        return "is on the meta device, without values", "load or materialise the weights first"
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "a nested tensor" if tensor.is_nested else tensor.layout
        return f"is {layout}, not dense", "make it dense with .to_dense()"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype})", "store its int_repr(), scale and zero point, or dequantize it"
    return None


def _dtype_problem(tensor: torch.Tensor) -> tuple[str, str] | None:
    code = _CODE_OF.get(tensor.dtype)
    if code is None:
        return (
            f"has dtype {tensor.dtype}, which safetensors cannot store",
            f"cast it to one of {', '.join(TORCH_CODES)}",
        )
    if code == "F4" and not tensor.shape:
        return "is a packed float4 scalar, half a pair", "give it a dimension"
    return None


@dataclass(frozen=True)
class TorchValue:
    """A tensor that `torch_problem` has nothing against.

    Attributes:
        name: its key.
        tensor: as given.
        cast_to: code that floating elements are cast to, or None.
    """

    name: str
    tensor: torch.Tensor
    cast_to: str | None

    @cached_property
    def spec(self) -> TensorSpec:
        """Packed float4 counts its logical elements, two per byte, as safetensors does."""
        code = _CODE_OF[self.tensor.dtype]
        shape = tuple(self.tensor.shape)
        if code == "F4":
            shape = (*shape[:-1], shape[-1] * 2)
        return TensorSpec(self.name, self.cast_to if self.cast_to and code in CASTABLE else code, shape)

    @cached_property
    def identity(self) -> Hashable | None:
        """The address and layout of its elements."""
        tensor = self.tensor
        if not tensor.numel():
            return None
        # the stride of a dimension of one element says nothing
        strides = tuple(stride for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
        view = (tensor.is_conj(), tensor.is_neg())
        placed = placed_of(tensor)
        address = tensor.data_ptr() if placed is None else (placed.number, tensor.storage_offset())
        return str(tensor.device), address, tensor.dtype, tuple(tensor.shape), strides, view

    def read(self, box: Box) -> Buffer:
        """A view of the tensor's own memory where its bytes lie together, else a copy of the box alone."""
        tensor = self.tensor.detach().as_subclass(torch.Tensor)
        part = tensor[self._slices(box)].resolve_conj().resolve_neg()
        if self.spec.dtype in CASTABLE:
            part = part.to(getattr(torch, CASTABLE[self.spec.dtype]), memory_format=torch.contiguous_format)
        # a lone element counts as contiguous whatever its stride, and as_strided settles it
        flat = part.contiguous().cpu().as_strided((part.numel(),), (1,)).view(torch.uint8)
        return memoryview(cast("Buffer", flat.numpy())).toreadonly()

    def _slices(self, box: Box) -> tuple[slice, ...]:
        ranges = list(zip(box.offset, box.stop, strict=True))
        if self.spec.dtype == "F4":
            start, stop = ranges[-1]
            if start % 2 or stop % 2:
                raise FormatError(
                    f"tensor {self.name!r}: {box.offset}+{box.shape} of packed F4 does not fall on whole bytes",
                    hint="ask for a box whose rows fill whole bytes",
                )
            ranges[-1] = start // 2, stop // 2
        return tuple(slice(start, stop) for start, stop in ranges)


@dataclass(frozen=True)
class PlacedValue(TorchValue):
    """A stand-in for a tensor that lies on several ranks, or a view of one.

    Attributes:
        placed: what it stands for.
    """

    placed: Placed

    def read(self, box: Box) -> Buffer:
        """A copy of the box alone, gathered from the ranks that hold it."""
        ranges, view = self._slices(box), self._view
        shape = [part.stop - part.start for part in ranges]
        cast_to = None
        if self.cast_to and self.spec.dtype == self.cast_to:
            cast_to = getattr(torch, CASTABLE[self.cast_to])
        part = self.placed.gather(self.placed, view.box([(part.start, part.stop) for part in ranges]), cast_to)
        flat = view.arranged(part, shape).contiguous().view(-1).view(torch.uint8)
        return memoryview(cast("Buffer", flat.numpy())).toreadonly()

    @cached_property
    def _view(self) -> View:
        view = view_of(self.tensor, self.placed)
        if view is None:
            raise FormatError(f"tensor {self.name!r} is no box of {self.placed.name!r}, which lies on several ranks")
        return view
