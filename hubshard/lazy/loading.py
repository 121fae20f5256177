"""Filling the parameters and buffers of a module from a checkpoint, with few reads and without a second copy."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from hubshard.errors import FormatError
from hubshard.events import OnEvent, Operation, ignore, operation
from hubshard.lazy.checkpoint import Checkpoint
from hubshard.lazy.matching import Match, Mismatch, Rename
from hubshard.lazy.module_slots import META_HINT, ModuleSlot, check_match, match_slots, meta_buffers, slots_of
from hubshard.lazy.opening import opened
from hubshard.lazy.placing import TensorTarget
from hubshard.lazy.reading import FileReader, Job, Target, TensorReader, execute, told
from hubshard.lazy.staging import PinnedStaging, Staging
from hubshard.lazy.steps import WhichStep
from hubshard.lazy.torch_dtypes import torch_dtype, torch_shape
from hubshard.lazy.verifying import VerifyingReader, promised, with_the_rest
from hubshard.messages import listed
from hubshard.protocols import Source
from hubshard.sources.dtypes import CASTABLE, parse_float_dtype
from hubshard.steps.source import StepSource
from hubshard.tensors import Box, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceMap", "LoadReport", "load_into"]

DeviceMap = str | int | Mapping[str, Any]
"""A device (what `torch.device` takes) for all, or one per prefix of names; "" is the rest, "meta" is not loaded."""

_LOG = logging.getLogger("hubshard")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did.

    Attributes:
        missing: names of the module that nothing filled.
        unexpected: stored names that filled nothing.
        mismatched: what had another shape or an incompatible dtype, and was left alone.
        bytes_read: bytes that reads moved.
        bytes_mapped: bytes that became pages of local files instead.
        on_meta: buffers that are on the meta device still, as no checkpoint stores them; said with a warning.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]
    bytes_read: int
    bytes_mapped: int
    on_meta: tuple[str, ...] = ()


def load_into(
    module: torch.nn.Module,
    source: str | os.PathLike[str] | Source | Checkpoint,
    *,
    prefix: str = "",
    rename: Rename | None = None,
    device_map: DeviceMap | None = None,
    dtype: str | torch.dtype | None = None,
    strict: bool = True,
    assign: bool | None = None,
    verify: bool = False,
    revision: str | None = None,
    step: WhichStep | None = None,
    variant: str | None = None,
    subfolder: str = "",
    token: str | bool | None = None,
    endpoint: str | None = None,
    on_event: OnEvent = ignore,
) -> LoadReport:
    """Fill a module's parameters and persistent buffers.

    Everything is compared before anything is changed. A parameter that is assigned gets new memory (pages of the file,
    where it is local, on the CPU and of the stored dtype), and only after all reads succeeded; one that is copied into
    keeps its memory. Casts go piece by piece, so that no second copy of a tensor is ever held. Of a DTensor, each rank
    reads its own part. Buffers that are not persistent are left as they are.

    Args:
        module: any module; its parameters may be on the meta device, or tied.
        source: what `open_checkpoint` takes, or an open checkpoint, which stays open.
        prefix: only stored names that begin with it are loaded, under the rest of their name.
        rename: stored names (without the prefix) to the module's: a table or a function; None skips one.
        device_map: where parameters go; None leaves them on their device, and takes the CPU for those on meta.
        dtype: floating parameters become this; None leaves those that are copied into as they are, and gives those that
            are assigned the stored dtype.
        strict: anything missing, unexpected or mismatched is an error.
        assign: give parameters new memory (True), or copy into what they have (False); None assigns those on meta.
        verify: hash the files while they are loaded, all of their bytes, and compare with the sha256 that the Hub, or
            its cache, promises for them. Where they differ, no parameter is assigned; what is copied into has changed.
        revision: of a repo.
        step: of a training run, as `open_checkpoint` takes it; all that is read of one is verified in any case.
        variant: as in `model.fp16.safetensors`.
        subfolder: of the repo or directory, where the checkpoint is, such as "unet" of a pipeline.
        token: for the Hub.
        endpoint: of the Hub.
        on_event: is told of progress.

    Raises:
        FormatError: the checkpoint does not fit and `strict` is set; names what is missing, unexpected or mismatched.
            Or `verify` is set, and nothing is promised to verify against.
        IntegrityError: a file has another size or sha256 than promised.
        NotFoundError: there is no such checkpoint.
    """
    code = None if dtype is None else parse_float_dtype(dtype)
    slots = slots_of(module)
    name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else ""
    with operation("load", name, on_event) as op:
        where: dict[str, Any] = {"revision": revision, "step": step, "variant": variant, "subfolder": subfolder}
        with opened(source, token=token, endpoint=endpoint, on_event=op, **where) as checkpoint:
            matched = match_slots(slots, checkpoint, prefix, rename)
            if strict:
                check_match(matched, module)
            placements = list(_placements(slots, matched, checkpoint, device_map=device_map, code=code, assign=assign))
            verifying = _verifying(checkpoint) if verify else None
            bytes_read, bytes_mapped = _load(checkpoint, placements, op, verifying)
    on_meta = meta_buffers(module, slots)
    if on_meta:
        _LOG.warning("still on the meta device, as no checkpoint stores them: %s; %s", listed(on_meta), META_HINT)
    return LoadReport(matched.missing, matched.unexpected, matched.mismatched, bytes_read, bytes_mapped, on_meta)


@dataclass(frozen=True, slots=True)
class _Placement:
    # a stored tensor on its way into a slot; `into` is what is filled, `device` where it goes in the end
    slot: ModuleSlot
    spec: TensorSpec
    box: Box
    into: torch.Tensor
    is_mapped: bool
    is_new: bool
    device: torch.device


def _placements(
    slots: Sequence[ModuleSlot],
    matched: Match,
    checkpoint: Checkpoint,
    *,
    device_map: DeviceMap | None,
    code: str | None,
    assign: bool | None,
) -> Iterator[_Placement]:
    device_of = _devices(device_map)
    for slot, name in zip(slots, matched.stored, strict=True):
        device = device_of(slot)
        if name is None or device.type == "meta":
            continue
        spec = checkpoint.specs[name]
        yield _place(slot, spec, checkpoint, device=device, code=code, assign=assign)


def _place(
    slot: ModuleSlot,
    spec: TensorSpec,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    code: str | None,
    assign: bool | None,
) -> _Placement:
    import torch  # noqa: PLC0415  # slow, and optional

    local, box = slot.local, slot.box(spec)
    if assign is False and local.is_meta:
        raise FormatError(
            f"{slot.slot.names[0]!r} is on the meta device, which cannot be copied into", hint="assign it"
        )
    new = bool(assign) or local.is_meta
    wanted = torch_dtype(spec) if new else local.dtype
    if code is not None and spec.dtype in CASTABLE:
        wanted = getattr(torch, CASTABLE[code])
    if not new and wanted == local.dtype and device == local.device:
        return _Placement(slot, spec, box, local, is_mapped=False, is_new=False, device=device)
    if checkpoint.mapped and box == spec.box and device.type == "cpu" and wanted == torch_dtype(spec):
        whole = checkpoint.mapped.tensor(spec)
        if whole is not None:
            return _Placement(slot, spec, box, whole, is_mapped=True, is_new=True, device=device)
    # packed floats are read into CPU memory and moved as a whole
    memory = torch.device("cpu") if spec.bits < 8 else device
    shape = torch_shape(TensorSpec(spec.name, spec.dtype, box.shape))
    into = torch.empty(shape, dtype=wanted, device=memory)
    return _Placement(slot, spec, box, into, is_mapped=False, is_new=True, device=device)


def _devices(device_map: DeviceMap | None) -> Callable[[ModuleSlot], torch.device]:
    if device_map is None:
        return lambda slot: slot.default_device
    if not isinstance(device_map, Mapping):
        device = _device(device_map)
        return lambda _: device
    table = {prefix: _device(device) for prefix, device in device_map.items()}

    def device_of(slot: ModuleSlot) -> torch.device:
        name = slot.slot.names[0]
        while name and name not in table:
            name = name.rpartition(".")[0]
        if name not in table:
            raise FormatError(f"device_map says nothing of {slot.slot.names[0]!r}", hint='add "" for the rest')
        return table[name]

    return device_of


def _device(device: Any) -> torch.device:
    import torch  # noqa: PLC0415  # slow, and optional

    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise FormatError(f"{device!r} is no device", hint='give one that torch knows, such as "cpu" or 0') from error


def _verifying(checkpoint: Checkpoint) -> VerifyingReader | None:
    if isinstance(checkpoint.source, StepSource):
        return None  # it verifies all that it reads
    if checkpoint.manifest is None or checkpoint.store is None:
        raise FormatError("a Source has no files to verify", hint="leave verify out")
    return VerifyingReader(checkpoint.store, promised(checkpoint.manifest, checkpoint.root))


def _load(
    checkpoint: Checkpoint,
    placements: Sequence[_Placement],
    op: Operation,
    verifying: VerifyingReader | None,
) -> tuple[int, int]:
    """Bytes that were read, and that were mapped."""
    read = [placement for placement in placements if not placement.is_mapped]
    mapped = [placement.into for placement in placements if placement.is_mapped]
    bytes_mapped = sum(tensor.nbytes for tensor in mapped)
    op.start(bytes_mapped + sum(p.box.numel * p.spec.bits // 8 for p in read))
    reader = checkpoint.reader.through(verifying) if verifying else checkpoint.reader
    staging = _staging(read, reader)
    if staging and isinstance(reader, FileReader):
        reader = replace(reader, staging=staging)
    jobs: Sequence[Job] = [job for wanted in _rounds(read) for job in _jobs(reader, wanted)]
    if verifying and checkpoint.manifest and checkpoint.at:
        jobs = with_the_rest(
            jobs, checkpoint.manifest, verifying, checkpoint.at, max_read_bytes=reader.policy.max_read_bytes
        )
    bytes_read = execute([told(job, partial(op.tell, "received", "")) for job in jobs], reader.policy)
    if staging:
        staging.finish()
    if verifying:
        verifying.check()
    if mapped and checkpoint.mapped:
        checkpoint.mapped.populate(mapped, workers=checkpoint.reader.policy.workers)
        op.tell("received", nbytes=bytes_mapped)
    for placement in placements:
        if placement.is_new:
            placement.slot.put(placement.into.to(placement.device))
    op.end()
    return bytes_read, bytes_mapped


def _staging(placements: Sequence[_Placement], reader: TensorReader) -> Staging | None:
    # one ring per device and thread would pin much memory: with several devices the copies wait
    devices = {placement.into.device for placement in placements if placement.into.device.type == "cuda"}
    return PinnedStaging(devices.pop(), reader.policy.max_read_bytes) if len(devices) == 1 else None


def _rounds(placements: Sequence[_Placement]) -> Iterator[Sequence[_Placement]]:
    # a plan takes each stored tensor once; what several parameters want is read again for each further one
    for number in count():
        seen: dict[str, int] = {}
        some = []
        for placement in placements:
            use = seen[placement.spec.name] = seen.get(placement.spec.name, -1) + 1
            if use == number:
                some.append(placement)
        if not some:
            return
        yield some


def _jobs(reader: TensorReader, placements: Sequence[_Placement]) -> Iterator[Job]:
    targets: dict[str, Target] = {p.spec.name: TensorTarget(p.into, p.spec, p.box) for p in placements}
    return reader.jobs({p.spec.name: p.box for p in placements}, targets)
