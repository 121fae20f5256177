"""The step format, version 1: one saved state of a training run, as a folder.

```
step-00001000/
    rank-00000-00001-5f3a....safetensors     pieces of tensors that rank 0 held; bounded in size
    rank-00001-00001-90c2....safetensors
    manifest.json                            written last: what it does not name is not part of the step
```

A file holds pieces, each a tensor under its name where it is whole and under `name@offset,offset` (elements) where it
is a part (see `piece_key`). Its own name ends with the first digits of its sha256, so a step that is saved again never
writes over a file that an older manifest names.

The bytes of `manifest.json` are those of `hubshard.steps.step_json`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index

from hubshard.errors import FormatError
from hubshard.header import check_name
from hubshard.manifest import Extent, FileDigest, Manifest, Piece
from hubshard.paths import check_case, check_plain_path
from hubshard.steps.columns import Column
from hubshard.steps.tiling import Tiling
from hubshard.tensors import Box, TensorSpec, dtype_bits

__all__ = [
    "MANIFEST_NAME",
    "Placement",
    "Step",
    "StepFile",
    "TreePath",
    "checked_number",
    "piece_key",
    "step_folder",
    "step_number",
]

MANIFEST_NAME = "manifest.json"
_FOLDER = re.compile(r"step-([0-9]{8,18})\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_LOOKS_LIKE_A_PART = re.compile(r"@[0-9,]*\Z")
_SHA256_BYTES = 32
_MOST_BLOCK_BYTES = 2**30


TreePath = tuple[str | int, ...]
"""The keys that lead to a value in nested dicts (text) and lists (numbers)."""


def checked_number(step: int) -> int:
    """The number of a step as a plain int, such as the manifest takes, out of one of NumPy or torch too.

    Raises:
        FormatError: it is none.
    """
    if isinstance(step, bool):  # an argument that slipped
        raise FormatError(f"{step!r} is no number of a step", hint="give an int")
    try:
        number = index(step)
    except TypeError as error:
        raise FormatError(f"{step!r} is no number of a step", hint="give an int") from error
    step_folder(number)
    return number


def step_folder(step: int) -> str:
    """The name of the folder of a step."""
    if not 0 <= step < 10**18:
        raise FormatError(f"{step} is no number of a step", hint="count the steps from 0")
    return f"step-{step:08d}"


def step_number(folder: str) -> int | None:
    """The step whose folder has this name, or None."""
    match = _FOLDER.match(folder)
    number = int(match[1]) if match else None
    return number if number is not None and step_folder(number) == folder else None


def piece_key(spec: TensorSpec, box: Box) -> str:
    """The name of a piece in its file: no two pieces share one, and none is reserved."""
    if box.shape == spec.shape and spec.name != "__metadata__" and not _LOOKS_LIKE_A_PART.search(spec.name):
        return spec.name
    return f"{spec.name}@{','.join(map(str, box.offset))}"


@dataclass(frozen=True, slots=True)
class StepFile:
    """A file of a step.

    Attributes:
        name: within the folder.
        nbytes: its size (bytes).
        data_start: where its header ends (bytes).
        sha256: of the whole, in hex.
        block_bytes: bytes per block, the last one shorter.
        blocks: the sha256 digests of its blocks, one after the other; b"" where one block is all.
    """

    name: str
    nbytes: int
    data_start: int
    sha256: str
    block_bytes: int
    blocks: bytes

    def is_block(self, number: int, content: bytes | bytearray | memoryview) -> bool:
        """Whether `content` is block `number`."""
        digest = hashlib.sha256(content).digest()
        start = number * _SHA256_BYTES
        return digest == (self.blocks[start : start + _SHA256_BYTES] or bytes.fromhex(self.sha256))


@dataclass(frozen=True, slots=True)
class Placement:
    """A tensor, and where its pieces lie.

    Attributes:
        spec: the whole tensor.
        tiling: its boxes.
        files: the file of each box, by its number.
        starts: where in that file's data it begins (bytes).
        path: of the tensor in the nested state.
    """

    spec: TensorSpec
    tiling: Tiling
    files: Column
    starts: Column
    path: TreePath


@dataclass(frozen=True)
class Step:
    """What is in a step, and where.

    Attributes:
        step: its number.
        world_size: ranks that saved it.
        files: sorted by name.
        tensors: by name, sorted.
        scalars: what is no tensor, by name.
        scalar_paths: of the scalars in the nested state.
        metadata: what whoever saved it says of it.
    """

    step: int
    world_size: int
    files: Sequence[StepFile]
    tensors: Mapping[str, Placement]
    scalars: Mapping[str, object] = field(default_factory=dict)
    scalar_paths: Mapping[str, TreePath] = field(default_factory=dict)
    metadata: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def file_of(self) -> Mapping[str, StepFile]:
        """The files by name."""
        return {file.name: file for file in self.files}

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    def pieces(self, name: str, box: Box | None = None) -> list[Piece]:
        """The pieces of a tensor, or those that share an element with `box`."""
        placement = self.tensors[name]
        tiling, bits = placement.tiling, placement.spec.bits
        found = range(len(tiling)) if box is None else tiling.touching(box)
        pieces = []
        for at in found:
            file, held = self.files[placement.files[at]], tiling.box(at)
            start = file.data_start + placement.starts[at]
            pieces.append(Piece(name, held, Extent(file.name, start, start + held.numel * bits // 8)))
        return pieces

    def manifest(self, names: Sequence[str] | None = None) -> Manifest:
        """The step as a `Manifest`, with an object per piece: all of it, or some tensors and all files."""
        chosen = self.tensors if names is None else names
        files = {file.name: FileDigest(file.nbytes, file.sha256) for file in self.files}
        pieces = [piece for name in chosen for piece in self.pieces(name)]
        return Manifest({name: self.tensors[name].spec for name in chosen}, pieces, files, dict(self.scalars))

    def validate(self) -> Step:
        """Check that the pieces tile every tensor exactly and lie within their files; returns self.

        Raises:
            FormatError: naming the tensor or file at fault.
        """
        for file in self.files:
            _check_file(file)
        names = [file.name for file in self.files]
        if names != sorted(set(names)) or MANIFEST_NAME in names:
            raise FormatError("the manifest's files are not sorted by name, or one is named twice")
        check_case(names, path="the manifest")
        limits = [file.nbytes - file.data_start for file in self.files]
        for name, placement in self.tensors.items():
            check_name(name if name != "__metadata__" else "")
            _check_placement(name, placement, limits)
            if not placement.tiling.is_grid:
                self.manifest([name]).validate()
        both = self.tensors.keys() & self.scalars.keys()
        if both:
            raise FormatError(f"{min(both)!r} is a tensor and none")
        return self


def _check_file(file: StepFile) -> None:
    check_plain_path(file.name, path="the manifest")
    # a block is read whole: one of any size would fill the memory of whoever wants a part of it
    sized = 8 <= file.data_start <= file.nbytes and 1 <= file.block_bytes <= _MOST_BLOCK_BYTES
    if "/" in file.name or not sized or not _SHA256.match(file.sha256):
        raise FormatError(f"{file.name}: the manifest describes no file of a step", hint="the manifest is damaged")
    count = -(-file.nbytes // file.block_bytes)
    if len(file.blocks) != (_SHA256_BYTES * count if count > 1 else 0):
        raise FormatError(f"{file.name}: the manifest does not have one hash per block", hint="it is damaged")


def _check_placement(name: str, placement: Placement, limits: Sequence[int]) -> None:
    spec, tiling = placement.spec, placement.tiling
    bits = dtype_bits(spec.dtype, tensor=name)
    if spec.shape != tiling.shape or not len(tiling) == len(placement.files) == len(placement.starts):
        raise FormatError(f"tensor {name!r} has no place for each of its {len(tiling)} pieces")
    if bits % 8 and any(numel * bits % 8 for numel in tiling.numels):
        raise FormatError(f"tensor {name!r}: a piece of {spec.dtype} does not fill whole bytes")
    if max(placement.files, default=0) >= len(limits):
        raise FormatError(f"tensor {name!r} lies in a file that the manifest does not name")
    rooms = map(limits.__getitem__, placement.files)
    if any(
        start + numel * bits // 8 > room
        for start, numel, room in zip(placement.starts, tiling.numels, rooms, strict=True)
    ):
        raise FormatError(f"tensor {name!r}: a piece lies outside its file")
