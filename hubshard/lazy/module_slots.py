"""The parameters and persistent buffers of a module, each once, with all the places where it is tied in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hubshard.errors import FormatError
from hubshard.lazy.matching import Match, Rename, Slot, match
from hubshard.lazy.torch_dtypes import code_of, torch_shape
from hubshard.sources.distributed_box import Cut, part_of
from hubshard.tensors import Box, TensorSpec

if TYPE_CHECKING:
    import torch

    from hubshard.lazy.checkpoint import Checkpoint

__all__ = ["META_HINT", "ModuleSlot", "check_match", "match_slots", "meta_buffers", "slots_of"]

META_HINT = "build the module under accelerate.init_empty_weights(), which leaves buffers as they are"


@dataclass(frozen=True)
class ModuleSlot:
    """A parameter or buffer.

    Attributes:
        slot: its names, shape and dtype.
        tensor: itself.
        places: the modules that hold it, and its name in each.
    """

    slot: Slot
    tensor: torch.Tensor
    places: tuple[tuple[torch.nn.Module, str], ...]

    @property
    def local(self) -> torch.Tensor:
        """What this process holds of it: of a DTensor its part, else all."""
        tensor: Any = self.tensor
        held: torch.Tensor = tensor.to_local() if _is_dtensor(tensor) else tensor
        return held.detach()

    @property
    def default_device(self) -> torch.device:
        """Where it is; where it should be, if it is on meta."""
        import torch  # noqa: PLC0415  # slow, and optional

        tensor: Any = self.tensor
        if not tensor.is_meta:
            device: torch.device = self.local.device
            return device
        return torch.device(tensor.device_mesh.device_type if _is_dtensor(tensor) else "cpu")

    def box(self, spec: TensorSpec) -> Box:
        """What of the stored tensor this process holds.

        Raises:
            FormatError: the placements of a DTensor are more than one box.
        """
        tensor: Any = self.tensor
        if not _is_dtensor(tensor):
            return spec.box
        return _box_of_dtensor(tensor, self.slot.names[0])

    def put(self, local: torch.Tensor) -> None:
        """Give it new memory, in all its places; a parameter that has memory stays the same object."""
        import torch  # noqa: PLC0415  # slow, and optional

        tensor = self.tensor
        value = _dtensor_like(tensor, local) if _is_dtensor(tensor) else local
        if not tensor.is_meta and not _is_dtensor(tensor):
            tensor.data = value
            return
        if isinstance(tensor, torch.nn.Parameter):
            value = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
        for owner, name in self.places:
            setattr(owner, name, value)


def slots_of(module: torch.nn.Module) -> Sequence[ModuleSlot]:
    """All parameters and persistent buffers, in the module's order; what is tied comes once, with all its names.

    Raises:
        FormatError: it is no module.
    """
    from torch import nn  # noqa: PLC0415  # slow, and optional

    if not isinstance(module, nn.Module):
        raise FormatError(f"a {type(module).__name__} holds no parameters to be filled", hint="give a torch.nn.Module")
    found: dict[int, list[tuple[str, torch.nn.Module, str, torch.Tensor]]] = {}
    for full, owner, name, tensor in _places(module):
        found.setdefault(id(tensor), []).append((full, owner, name, tensor))
    return [_slot(places) for places in found.values()]


def match_slots(slots: Sequence[ModuleSlot], checkpoint: Checkpoint, prefix: str, rename: Rename | None) -> Match:
    """Which stored tensor fills which slot; see `match`."""
    return match(
        [slot.slot for slot in slots],
        checkpoint.specs,
        checkpoint.aliases,
        shape_of=torch_shape,
        prefix=prefix,
        rename=rename,
    )


def check_match(found: Match, module: torch.nn.Module) -> None:
    """Raise where a module and a checkpoint do not fit; see `Match.check`.

    Raises:
        FormatError: says what is missing, unexpected and mismatched.
    """
    if found.missing and hasattr(module, "tie_weights"):  # building a model on meta may part what is tied
        found.check(hint="call the module's tie_weights() first; or correct prefix or rename, or pass strict=False")
    found.check()


def meta_buffers(module: torch.nn.Module, slots: Sequence[ModuleSlot]) -> tuple[str, ...]:
    """The buffers on the meta device that no checkpoint fills, since they are not persistent: their names."""
    stored = {name for slot in slots for name in slot.slot.names}
    buffers = module.named_buffers(remove_duplicate=False)
    return tuple(name for name, buffer in buffers if buffer.is_meta and name not in stored)


def _places(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    stored = set(module.state_dict(keep_vars=True))
    for path, owner in module.named_modules(remove_duplicate=False):
        dot = f"{path}." if path else ""
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield dot + name, owner, name, parameter
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            if dot + name in stored:  # those that are not persistent are not
                yield dot + name, owner, name, buffer


def _slot(places: Sequence[tuple[str, torch.nn.Module, str, torch.Tensor]]) -> ModuleSlot:
    tensor = places[0][3]
    slot = Slot(tuple(full for full, _, _, _ in places), tuple(tensor.shape), code_of(tensor.dtype))
    return ModuleSlot(slot, tensor, tuple((owner, name) for _, owner, name, _ in places))


def _is_dtensor(tensor: Any) -> bool:
    return type(tensor).__name__ == "DTensor" or type(getattr(tensor, "data", tensor)).__name__ == "DTensor"


def _box_of_dtensor(tensor: Any, name: str) -> Box:
    cuts: dict[int, list[Cut]] = {}
    coordinates = tensor.device_mesh.get_coordinate()
    for mesh_dim, placement in enumerate(tensor.placements):
        kind = type(placement).__name__
        if kind not in {"Shard", "_StridedShard", "Replicate"}:
            raise _no_box(tensor, name)
        if kind != "Replicate" and coordinates is not None:
            cut = Cut(tensor.device_mesh.size(mesh_dim), coordinates[mesh_dim], getattr(placement, "split_factor", 1))
            cuts.setdefault(placement.dim % tensor.ndim, []).append(cut)
    parts = [part_of(length, cuts.get(dim, ())) for dim, length in enumerate(tensor.shape)]
    if any(part is None for part in parts):
        raise _no_box(tensor, name)
    held = [part for part in parts if part is not None]
    if coordinates is None:  # this rank is not of the mesh
        held = [range(0) for _ in parts]
    return Box(tuple(part.start if part else 0 for part in held), tuple(map(len, held)))


def _no_box(tensor: Any, name: str) -> FormatError:
    return FormatError(
        f"{name!r} is placed as {tensor.placements}, which is no single box of it",
        hint="load it with placements of Shard and Replicate only",
    )


def _dtensor_like(tensor: Any, local: torch.Tensor) -> Any:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  # slow, and optional

    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
