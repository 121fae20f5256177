"""Running a module that does not fit into memory: its layers come when they run, and a little before."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hubshard.errors import FormatError
from hubshard.lazy.byte_cache import CachedReader
from hubshard.lazy.checkpoint import Checkpoint
from hubshard.lazy.matching import Match, Rename
from hubshard.lazy.module_slots import META_HINT, ModuleSlot, check_match, match_slots, meta_buffers, slots_of
from hubshard.lazy.offload_layers import Layer, LayerLoader, Part, Placed, layers_of, least_budget
from hubshard.lazy.opening import opened
from hubshard.lazy.placing import TensorTarget
from hubshard.lazy.reading import FileReader, TensorReader, execute
from hubshard.lazy.steps import WhichStep
from hubshard.lazy.streaming import Order, Streamer
from hubshard.lazy.torch_dtypes import torch_dtype, torch_shape
from hubshard.protocols import Source
from hubshard.sizes import format_size, parse_size
from hubshard.sources.dtypes import CASTABLE, parse_float_dtype

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

__all__ = ["Offloaded", "offload"]

_KIBI = 2**10
_LEAST_READ_BYTES = 64 * _KIBI
_STAGING_SHARE = 8  # a cast may take one part in so many of the budget for staging


class Offloaded:
    """A module whose parameters are in memory only while they are needed.

    Attributes:
        module: itself; run it as ever.
        budget_bytes: the most that its parameters, buffers and their staging may take.
    """

    def __init__(
        self, module: torch.nn.Module, layers: Sequence[Layer], streamer: Streamer, *, resources: ExitStack
    ) -> None:
        """Hook a module up; `offload` is what does it."""
        self.module = module
        self.budget_bytes = streamer.budget_bytes
        self._streamer = streamer
        self._resources = resources
        self._hooks: list[Any] = [module.register_forward_pre_hook(self._begin, prepend=True)]
        for number, layer in enumerate(layers):
            for part in layer.parts:
                part.put_nothing()
            self._hooks.append(layer.module.register_forward_pre_hook(self._enter(number), prepend=True))
            self._hooks.append(layer.module.register_forward_hook(self._leave(number), always_call=True))

    def __repr__(self) -> str:
        return f"Offloaded({type(self.module).__name__}, budget {format_size(self.budget_bytes)})"

    @property
    def nbytes(self) -> int:
        """Bytes that are held now: parameters, buffers, staging."""
        return self._streamer.loader.nbytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were ever held."""
        return self._streamer.peak_bytes

    @property
    def bytes_read(self) -> int:
        """Bytes that were read into memory so far; pages of local files do not count."""
        return self._streamer.bytes_read

    def close(self) -> None:
        """Let go of all memory and files; the module's parameters stay on the meta device. Again is fine."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._streamer.close()
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, *_: object) -> None:
        self._streamer.begin_pass()

    def _enter(self, number: int) -> Any:
        def before(*_: object) -> None:
            loaded: list[tuple[Part, torch.nn.Parameter]] = self._streamer.enter(number)
            for part, parameter in loaded:
                part.put(parameter)

        return before

    def _leave(self, number: int) -> Any:
        def after(*_: object) -> None:
            self._streamer.leave(number, _take_out)

        return after


def _take_out(loaded: Sequence[tuple[Part, torch.nn.Parameter]]) -> None:
    for part, _ in loaded:
        part.put_nothing()


def offload(
    module: torch.nn.Module,
    source: str | os.PathLike[str] | Source | Checkpoint,
    *,
    budget: int | str,
    prefix: str = "",
    rename: Rename | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | int | torch.device = "cpu",
    whole: Collection[type[torch.nn.Module]] = (),
    strict: bool = True,
    cache_size: int | str = "10GB",
    cache_dir: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    step: WhichStep | None = None,
    variant: str | None = None,
    subfolder: str = "",
    token: str | bool | None = None,
    endpoint: str | None = None,
) -> Offloaded:
    """Take a module's parameters out of memory, and bring each in, from its checkpoint, when it is about to be used.

    While one layer runs, those that ran after it the last time are on their way, as many as the budget lets. What has
    run stays until its room is wanted. Outputs are those of the whole module in memory, bit by bit.

    A layer is a module that has parameters of its own; `whole` names classes whose forward uses the parameters of the
    modules within, such as `torch.nn.MultiheadAttention`, which is known. The parameters are for reading: they do not
    ask for gradients, and what is written to them is lost. Persistent buffers are loaded at once, and stay.

    Args:
        module: any module; its parameters may be on the meta device. They lose what they hold.
        source: what `open_checkpoint` takes, or an open checkpoint, which must stay open.
        budget: the most that parameters and buffers may take together, as bytes or as in "2GB". It must hold the
            largest layer; to hide the reading behind the computing, the two largest in a row.
        prefix: only stored names that begin with it are used, under the rest of their name.
        rename: stored names (without the prefix) to the module's: a table or a function; None skips one.
        dtype: floating parameters become this; None keeps what is stored.
        device: where parameters are used; inputs must be there.
        whole: classes of modules that are loaded with all that they contain.
        strict: anything missing, unexpected or mismatched is an error; otherwise what is not stored stays as it is.
        cache_size: of a remote checkpoint, so much is kept in a temporary file (at most half of the free space), so
            that the next pass does not fetch it again: bytes, or as in "10GB".
        cache_dir: the folder of that file; None for the system's folder of temporary files.
        revision: of a repo.
        step: of a training run, as `open_checkpoint` takes it.
        variant: as in `model.fp16.safetensors`.
        subfolder: of the repo or directory, where the checkpoint is, such as "unet" of a pipeline.
        token: for the Hub.
        endpoint: of the Hub.

    Returns:
        A handle to see what is held, and to end it.

    Raises:
        FormatError: the checkpoint does not fit the module, a layer exceeds the budget, or a buffer of the module is
            on the meta device and not stored.
        NotFoundError: there is no such checkpoint.
    """
    import torch  # noqa: PLC0415  # slow, and optional

    budget_bytes, cache_bytes = parse_size(budget), parse_size(cache_size)
    code = None if dtype is None else parse_float_dtype(dtype)
    slots = slots_of(module)
    with ExitStack() as stack:
        asked: dict[str, Any] = {"revision": revision, "step": step, "variant": variant, "subfolder": subfolder}
        checkpoint = stack.enter_context(opened(source, token=token, endpoint=endpoint, **asked))
        found = match_slots(slots, checkpoint, prefix, rename)
        if strict:
            check_match(found, module)
        placed = _placed(slots, found, checkpoint, code=code)
        on_meta = meta_buffers(module, slots)
        if on_meta:
            what = f"the buffer {on_meta[0]!r} is on the meta device, and no checkpoint stores it"
            raise FormatError(what, hint=META_HINT)
        parameters = {
            name: placed[number]
            for number, slot in enumerate(slots)
            if number in placed and isinstance(slot.tensor, torch.nn.Parameter)
            for name in slot.slot.names
        }
        layers = layers_of(module, parameters, {*whole, *_known_whole()})
        reader, staging_bytes = _reader(checkpoint, budget_bytes, layers)
        cached = _cached(checkpoint, reader, cache_bytes, cache_dir, stack)
        fixed = staging_bytes + _fixed_bytes(slots, placed)
        where = torch.device(device)
        loader = LayerLoader(checkpoint, cached, layers, device=where, fixed_bytes=fixed)
        stack.callback(loader.close)
        _check_budget(layers, loader, budget_bytes)
        _load_fixed(slots, placed, cached, where)
        ahead_bytes = min(cached.policy.budget_bytes, budget_bytes // 2)
        streamer = Streamer(loader, budget_bytes, ahead_bytes, cached.policy.workers, Order(range(len(layers))))
        return Offloaded(module, layers, streamer, resources=stack.pop_all())


def _placed(
    slots: Sequence[ModuleSlot], found: Match, checkpoint: Checkpoint, *, code: str | None
) -> Mapping[int, Placed]:
    """What fills which slot, by its number."""
    import torch  # noqa: PLC0415  # slow, and optional

    placed = {}
    for number, (slot, name) in enumerate(zip(slots, found.stored, strict=True)):
        if name is None and slot.tensor.is_meta:
            raise FormatError(f"{slot.slot.names[0]!r} is on the meta device, and nothing stored fills it")
        if name is not None:
            spec = checkpoint.specs[name]
            cast = code is not None and spec.dtype in CASTABLE
            placed[number] = Placed(spec, getattr(torch, CASTABLE[code]) if cast and code else torch_dtype(spec))
    return placed


def _known_whole() -> set[type[torch.nn.Module]]:
    from torch import nn  # noqa: PLC0415  # slow, and optional

    return {nn.MultiheadAttention, nn.TransformerEncoderLayer}


def _reader(checkpoint: Checkpoint, budget_bytes: int, layers: Sequence[Layer]) -> tuple[TensorReader, int]:
    """A reader whose staging is a small part of the budget, and how much that is."""
    reader = checkpoint.reader
    is_cast = any(part.dtype != torch_dtype(part.spec) for layer in layers for part in layer.parts)
    if not isinstance(reader, FileReader) or not is_cast:
        return reader, 0
    policy = reader.policy
    share = budget_bytes // _STAGING_SHARE // policy.workers
    policy = replace(policy, max_read_bytes=min(policy.max_read_bytes, max(_LEAST_READ_BYTES, share)))
    return FileReader(reader.store, reader.at, reader.manifest, policy), policy.workers * policy.max_read_bytes


def _cached(
    checkpoint: Checkpoint,
    reader: TensorReader,
    cache_bytes: int,
    cache_dir: str | os.PathLike[str] | None,
    stack: ExitStack,
) -> TensorReader:
    if not isinstance(reader, FileReader) or checkpoint.root is not None:
        return reader
    store = CachedReader(reader.store, cap_bytes=cache_bytes, folder=None if cache_dir is None else Path(cache_dir))
    stack.callback(store.close)
    return FileReader(store, reader.at, reader.manifest, reader.policy)


def _fixed_bytes(slots: Sequence[ModuleSlot], placed: Mapping[int, Placed]) -> int:
    # buffers, and parameters that nothing stored fills
    import torch  # noqa: PLC0415  # slow, and optional

    return sum(
        slot.tensor.nbytes
        for number, slot in enumerate(slots)
        if number not in placed or not isinstance(slot.tensor, torch.nn.Parameter)
    )


def _check_budget(layers: Sequence[Layer], loader: LayerLoader, budget_bytes: int) -> None:
    if not layers:
        raise FormatError("this module has no parameters that the checkpoint stores", hint="use load_into")
    least, path = least_budget(layers, [loader.cost(number) for number in range(len(layers))])
    if loader.nbytes + least > budget_bytes:
        raise FormatError(
            f"a budget of {format_size(budget_bytes)} is too small: {path or 'the module'!r}, what is around it, "
            f"buffers and staging need {format_size(loader.nbytes + least)}",
            hint="raise the budget",
        )


def _load_fixed(
    slots: Sequence[ModuleSlot], placed: Mapping[int, Placed], reader: TensorReader, device: torch.device
) -> None:
    import torch  # noqa: PLC0415  # slow, and optional

    new: list[tuple[ModuleSlot, torch.Tensor]] = []
    for number, slot in enumerate(slots):
        if number in placed and not isinstance(slot.tensor, torch.nn.Parameter):
            spec = placed[number].spec
            tensor = torch.empty(torch_shape(spec), dtype=placed[number].dtype)
            execute(
                reader.jobs({spec.name: spec.box}, {spec.name: TensorTarget(tensor, spec, spec.box)}), reader.policy
            )
            new.append((slot, tensor.to(device)))
    for slot, tensor in new:
        slot.put(tensor)
