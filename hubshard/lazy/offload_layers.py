"""What of a module is loaded together, and how it comes into memory and into its place."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from hubshard.lazy import pages
from hubshard.lazy.checkpoint import Checkpoint
from hubshard.lazy.memory import MemoryPool
from hubshard.lazy.placing import TensorTarget
from hubshard.lazy.reading import Job, TensorReader
from hubshard.lazy.torch_dtypes import torch_dtype, torch_shape
from hubshard.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["Layer", "LayerLoader", "Part", "Placed", "layers_of", "least_budget"]

_ALIGNMENT = 64  # bytes; what vector instructions like


@dataclass(frozen=True)
class Placed:
    """What a parameter is filled with.

    Attributes:
        spec: of the stored tensor.
        dtype: that the parameter gets.
    """

    spec: TensorSpec
    dtype: torch.dtype


@dataclass(frozen=True)
class Part:
    """A stored tensor that is a parameter.

    Attributes:
        spec: of what is stored.
        dtype: that the parameter has.
        places: the modules that hold it, and its name in each.
    """

    spec: TensorSpec
    dtype: torch.dtype
    places: tuple[tuple[torch.nn.Module, str], ...]

    @property
    def nbytes(self) -> int:
        """Of the parameter, in its dtype."""
        return self.spec.numel * self.dtype.itemsize if self.spec.bits >= 8 else self.spec.nbytes

    def put(self, parameter: torch.nn.Parameter) -> None:
        """Set the parameter in all its places."""
        for owner, name in self.places:
            setattr(owner, name, parameter)

    def put_nothing(self) -> None:
        """Leave only shape and dtype in its places."""
        self.put(self._nothing)

    @cached_property
    def _nothing(self) -> torch.nn.Parameter:
        import torch  # noqa: PLC0415  # slow, and optional

        nothing = torch.empty(torch_shape(self.spec), dtype=self.dtype, device="meta")
        return torch.nn.Parameter(nothing, requires_grad=False)


@dataclass(frozen=True)
class Layer:
    """Parameters that are loaded together, because one module's forward needs them.

    Attributes:
        path: of the module.
        module: whose forward needs them.
        parts: the parameters.
    """

    path: str
    module: torch.nn.Module
    parts: tuple[Part, ...]


def layers_of(
    module: torch.nn.Module,
    slots: Mapping[str, Placed],
    whole: Collection[type[torch.nn.Module]],
) -> Sequence[Layer]:
    """One layer per module that has parameters of its own, or is of a class in `whole`, in the module's order.

    Args:
        module: all of it.
        slots: what fills each parameter, by all its names.
        whole: classes that use the parameters of the modules within themselves.
    """
    paths = dict(module.named_modules(remove_duplicate=False))
    homes: dict[int, tuple[str, dict[int, tuple[Placed, list[str]]]]] = {}
    for name, placed in slots.items():
        home = _home(name.rpartition(".")[0], paths, whole)
        _, parts = homes.setdefault(id(paths[home]), (home, {}))
        parts.setdefault(id(placed), (placed, []))[1].append(name)
    return [
        Layer(path, paths[path], tuple(_part(placed, names, paths) for placed, names in parts.values()))
        for path, parts in homes.values()
    ]


def least_budget(layers: Sequence[Layer], costs: Sequence[int]) -> tuple[int, str]:
    """The bytes of the layers that run at once, one within the other, where they are most; and the innermost's path."""
    cost_of = {layer.path: cost for layer, cost in zip(layers, costs, strict=True)}
    return max((sum(cost_of.get(outer, 0) for outer in _outwards(layer.path)), layer.path) for layer in layers)


def _home(path: str, paths: Mapping[str, torch.nn.Module], whole: Collection[type[torch.nn.Module]]) -> str:
    outermost = path
    for outer in _outwards(path):
        if isinstance(paths[outer], tuple(whole)):
            outermost = outer
    return outermost


def _outwards(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _part(placed: Placed, names: Sequence[str], paths: Mapping[str, torch.nn.Module]) -> Part:
    places = [(paths[path], name) for path, _, name in (full.rpartition(".") for full in names)]
    unique = {(id(owner), name): (owner, name) for owner, name in places}
    return Part(placed.spec, placed.dtype, tuple(unique.values()))


class LayerLoader:
    """Loads layers into memory that it counts: pages of local files where nothing is cast or moved, else buffers.

    Args:
        checkpoint: that they come from.
        reader: reads what is not mapped.
        layers: by number.
        device: where parameters go.
        fixed_bytes: bytes that are held besides, always.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        reader: TensorReader,
        layers: Sequence[Layer],
        *,
        device: torch.device,
        fixed_bytes: int,
    ) -> None:
        can_map = checkpoint.mapped is not None and device.type == "cpu" and pages.can_discard()
        # mappings of its own: dropping a layer takes back what was written to its pages
        self._mapped = checkpoint.mapped.sharing() if can_map and checkpoint.mapped else None
        self._reader = reader
        self._layers = layers
        self._device = device
        self._fixed = fixed_bytes
        self._pool = MemoryPool()
        self._other = 0  # pages that are mapped, and memory of another device

    @property
    def nbytes(self) -> int:
        """Bytes that are held now."""
        return self._fixed + self._pool.nbytes + self._other

    def size(self, layer: int) -> int:
        """Bytes that it takes."""
        return self._other_bytes(layer) + self._buffer_bytes(layer)

    def cost(self, layer: int) -> int:
        """Bytes by which loading it would let `nbytes` grow."""
        buffered = self._buffer_bytes(layer)
        return self._other_bytes(layer) + (self._pool.cost(buffered) if buffered else 0)

    def load(self, layer: int) -> tuple[list[tuple[Part, torch.nn.Parameter]], Sequence[Job]]:
        """The parameters of a layer, and the jobs that fill them."""
        import torch  # noqa: PLC0415  # slow, and optional

        with torch.inference_mode(mode=False):  # they outlive the caller's mode
            return self._load(layer)

    def _load(self, layer: int) -> tuple[list[tuple[Part, torch.nn.Parameter]], Sequence[Job]]:
        import torch  # noqa: PLC0415  # slow, and optional

        jobs: list[Job] = []
        loaded = []
        buffered = self._buffer_bytes(layer)
        buffer = torch.frombuffer(self._pool.take(buffered), dtype=torch.uint8) if buffered else None
        position = 0
        for part in self._layers[layer].parts:
            if self._is_mapped(part) and self._mapped:
                tensor = self._mapped.tensor(part.spec)
                assert tensor is not None  # noqa: S101  # can_map said so
                jobs.append(Job(part.nbytes, partial(_populate, tensor.data_ptr(), part.nbytes)))
            elif buffer is None:
                tensor = torch.empty(torch_shape(part.spec), dtype=part.dtype, device=self._device)
                jobs += self._jobs(part, tensor)
            else:
                flat = buffer[position : position + part.nbytes]
                tensor = flat.view(part.dtype).view(torch_shape(part.spec))
                position += _aligned(part.nbytes)
                jobs += self._jobs(part, tensor)
            loaded.append((part, torch.nn.Parameter(tensor, requires_grad=False)))
        self._other += self._other_bytes(layer)
        return loaded, jobs

    def drop(self, layer: int, loaded: list[tuple[Part, torch.nn.Parameter]]) -> None:
        """Let go of a layer; buffers come back when nothing else refers to them."""
        for part, parameter in loaded:
            if self._is_mapped(part):
                pages.discard(parameter.data_ptr(), part.nbytes)
        loaded.clear()
        self._other -= self._other_bytes(layer)

    def close(self) -> None:
        """Let go of the files."""
        if self._mapped:
            self._mapped.close()

    def trim(self, nbytes: int) -> None:
        """Give free buffers back to the system."""
        self._pool.trim(nbytes)

    def _jobs(self, part: Part, tensor: torch.Tensor) -> list[Job]:
        # one tensor at a time: what is read for one alone goes into its place without staging
        spec = part.spec
        return list(self._reader.jobs({spec.name: spec.box}, {spec.name: TensorTarget(tensor, spec, spec.box)}))

    def _is_mapped(self, part: Part) -> bool:
        return self._mapped is not None and part.dtype == torch_dtype(part.spec) and self._mapped.can_map(part.spec)

    def _buffer_bytes(self, layer: int) -> int:
        if self._device.type != "cpu":
            return 0
        return sum(_aligned(part.nbytes) for part in self._layers[layer].parts if not self._is_mapped(part))

    def _other_bytes(self, layer: int) -> int:
        parts = self._layers[layer].parts
        if self._device.type != "cpu":
            return sum(_aligned(part.nbytes) for part in parts)
        return sum(part.nbytes + 2 * mmap.PAGESIZE for part in parts if self._is_mapped(part))


def _populate(address: int, nbytes: int) -> int:
    pages.populate(address, nbytes)
    return 0  # nothing was read into memory of this process


def _aligned(nbytes: int) -> int:
    return max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT
