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

`manifest.json` is one line: `{"format":"hubshard-step","sha256":…,"step":…,"version":1}`, where "sha256" is that of the
canonical JSON of "step" (see `canonical`), an object of

- "step", "world_size": numbers; "metadata": anything that whoever saved the step wants to say of it;
- "files": a list of `[name, size, where the data begins, sha256, block size, sha256s of its blocks]`, sorted by name.
  The last is the digests one after the other, as bytes; empty for a file of one block;
- "tilings": a list of `[shape, offsets, sizes]`, the latter two with one column per dimension (see `columns`);
- "tensors": name to `[dtype, number of its tiling, files, starts, path]`: column of the file that holds each box of
  the tiling, by its number in "files", column of where in that file's data it begins (bytes), and the keys that lead
  to the tensor in the nested state, or null where that is its name alone;
- "scalars": name to `[value, path]` of what is no tensor.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any

from hubshard.errors import FormatError
from hubshard.header import check_name
from hubshard.manifest import Extent, FileDigest, Manifest, Piece
from hubshard.paths import check_case, check_plain_path
from hubshard.steps.canonical import decode, encode
from hubshard.steps.columns import Column
from hubshard.steps.tiling import Tiling
from hubshard.tensors import Box, TensorSpec, dtype_bits

__all__ = [
    "MANIFEST_NAME",
    "NewerVersionError",
    "Placement",
    "Step",
    "StepFile",
    "TreePath",
    "checked_number",
    "decode_step",
    "encode_step",
    "piece_key",
    "step_folder",
    "step_number",
]

MANIFEST_NAME = "manifest.json"
_FORMAT = "hubshard-step"
_VERSION = 1
_FOLDER = re.compile(r"step-([0-9]{8,18})\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_LOOKS_LIKE_A_PART = re.compile(r"@[0-9,]*\Z")
_SHA256_BYTES = 32
_MOST_BLOCK_BYTES = 2**30
_KEYS = {"step", "world_size", "metadata", "files", "tilings", "tensors", "scalars"}


class NewerVersionError(FormatError):
    """A step of a later version of the format: whole perhaps, so not to be passed over or removed as if broken."""


TreePath = tuple[str | int, ...]
"""The keys that lead to a value in nested dicts (text) and lists (numbers)."""


def checked_number(step: int) -> int:
    """The number of a step as a plain int, such as the manifest takes, out of one of NumPy or torch too.

    Raises:
        FormatError: it is none.
    """
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


# The manifest as bytes


def encode_step(step: Step) -> bytes:
    """The bytes of `manifest.json`."""
    tilings: dict[Tiling, int] = {}
    tensors = {
        name: [
            placement.spec.dtype,
            tilings.setdefault(placement.tiling, len(tilings)),
            placement.files.to_json(),
            placement.starts.to_json(),
            _path_to_json(placement.path, name),
        ]
        for name, placement in sorted(step.tensors.items())
    }
    body = {
        "step": step.step,
        "world_size": step.world_size,
        "metadata": dict(step.metadata),
        "files": [
            [file.name, file.nbytes, file.data_start, file.sha256, file.block_bytes, file.blocks] for file in step.files
        ],
        "tilings": [tiling.to_json() for tiling in tilings],
        "tensors": tensors,
        "scalars": {
            name: [value, _path_to_json(step.scalar_paths.get(name, (name,)), name)]
            for name, value in step.scalars.items()
        },
    }
    raw = encode(body, path="the step")
    sha256 = hashlib.sha256(raw).hexdigest()
    return b'{"format":"%b","sha256":"%b","step":%b,"version":%d}\n' % (
        _FORMAT.encode(),
        sha256.encode(),
        raw,
        _VERSION,
    )


def decode_step(raw: bytes, *, path: str) -> Step:
    """Read and check `manifest.json` completely.

    Args:
        raw: its bytes.
        path: named in errors.

    Raises:
        FormatError: damaged, of another format, or it describes no complete state.
        NewerVersionError: of another version.
    """
    table = decode(raw, path=path)
    if not isinstance(table, dict) or table.get("format") != _FORMAT or type(table.get("version")) is not int:
        raise FormatError(f"{path}: this is no manifest of a step", hint="it is something else, or damaged")
    if table["version"] != _VERSION:
        raise NewerVersionError(
            f"{path}: written in version {table['version']} of the step format; this is version {_VERSION}",
            hint="update hubshard, or name an older step",
        )
    body = raw.partition(b'","step":')[2].removesuffix(b',"version":1}\n')
    if table.keys() != {"format", "sha256", "step", "version"} or hashlib.sha256(body).hexdigest() != table["sha256"]:
        raise FormatError(f"{path}: the manifest is not as it was written", hint="it is damaged: use another step")
    try:
        return _step_of(table["step"], path).validate()
    except FormatError as error:
        if error.message.startswith(path):
            raise
        raise FormatError(f"{path}: {error.message}", hint=error.hint) from error


def _step_of(body: Any, path: str) -> Step:
    _expect(isinstance(body, dict) and body.keys() == _KEYS, path, "the keys of a step")
    _expect(_is_count(body["step"]) and _is_count(body["world_size"]), path, "a step and a world size")
    _expect(all(isinstance(body[key], dict) for key in ("metadata", "tensors", "scalars")), path, "objects")
    _expect(all(isinstance(body[key], list) for key in ("files", "tilings")), path, "lists")
    tilings = [Tiling.from_json(item, path=path) for item in body["tilings"]]
    _expect(all(_is_row(row, 2) for row in body["scalars"].values()), path, "a value and a path per scalar")
    return Step(
        step=body["step"],
        world_size=body["world_size"],
        files=[_file_of(row, path) for row in body["files"]],
        tensors={name: _placement_of(name, row, tilings, path) for name, row in sorted(body["tensors"].items())},
        scalars={name: row[0] for name, row in body["scalars"].items()},
        scalar_paths={name: _path_of(row[1], name, path) for name, row in body["scalars"].items()},
        metadata=body["metadata"],
    )


def _file_of(row: Any, path: str) -> StepFile:
    kinds: Sequence[Callable[[Any], bool]] = (_is_text, _is_count, _is_count, _is_text, _is_count, _is_bytes)
    _expect(
        _is_row(row, 6) and all(kind(item) for kind, item in zip(kinds, row, strict=True)), path, "six facts a file"
    )
    return StepFile(*row)


def _placement_of(name: str, row: Any, tilings: Sequence[Tiling], path: str) -> Placement:
    _expect(_is_row(row, 5) and _is_text(row[0]) and _is_count(row[1]), path, "five facts a tensor")
    _expect(row[1] < len(tilings), path, f"a tiling of {name!r}")
    tiling = tilings[row[1]]
    files, starts = (Column.from_json(column, path=path) for column in row[2:4])
    return Placement(TensorSpec(name, row[0], tiling.shape), tiling, files, starts, _path_of(row[4], name, path))


def _path_to_json(path: TreePath, name: str) -> list[str | int] | None:
    return None if path == (name,) else list(path)


def _path_of(value: Any, name: str, path: str) -> TreePath:
    if value is None:
        return (name,)
    _expect(isinstance(value, list) and {*map(type, value)} <= {str, int}, path, f"the path of {name!r}")
    return tuple(value)


def _expect(found: bool, path: str, what: str) -> None:  # noqa: FBT001  # it reads as an assertion
    if not found:
        raise FormatError(f"{path}: the manifest lacks {what}", hint="it is damaged: use another step")


def _is_row(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_bytes(value: Any) -> bool:
    return isinstance(value, bytes)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
