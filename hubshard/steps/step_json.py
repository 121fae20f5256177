"""The manifest of a step as bytes.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hubshard.errors import FormatError
from hubshard.steps.canonical import decode, encode
from hubshard.steps.columns import Column
from hubshard.steps.step import Placement, Step, StepFile, TreePath
from hubshard.steps.tiling import Tiling
from hubshard.tensors import TensorSpec

__all__ = ["NewerVersionError", "StepHead", "decode_head", "decode_step", "encode_step"]

_FORMAT = "hubshard-step"
_VERSION = 1
_KEYS = {"step", "world_size", "metadata", "files", "tilings", "tensors", "scalars"}


class NewerVersionError(FormatError):
    """A step of a later version of the format: whole perhaps, so not to be passed over or removed as if broken."""


@dataclass(frozen=True, slots=True)
class StepHead:
    """What a list of steps shows of one.

    Attributes:
        step: its number.
        world_size: ranks that saved it.
        files: sorted by name.
    """

    step: int
    world_size: int
    files: Sequence[StepFile]


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
    body = _body_of(raw, path)
    try:
        return _step_of(body, path).validate()
    except FormatError as error:
        if error.message.startswith(path):
            raise
        raise FormatError(f"{path}: {error.message}", hint=error.hint) from error


def decode_head(raw: bytes, *, path: str) -> StepHead:
    """Read of `manifest.json` what a list of steps shows; that it is as it was written is checked.

    Where the tensors lie is not looked at, which takes a hundred times as long where thousands of ranks saved them.

    Args:
        raw: its bytes.
        path: named in errors.

    Raises:
        FormatError: damaged, or of another format.
        NewerVersionError: of another version.
    """
    body = _body_of(raw, path)
    return StepHead(body["step"], body["world_size"], [_file_of(row, path) for row in body["files"]])


def _body_of(raw: bytes, path: str) -> dict[str, Any]:
    """The object "step", with the right keys, and the right kinds of values where a head needs them."""
    table = decode(raw, path=path)
    if not isinstance(table, dict) or table.get("format") != _FORMAT or type(table.get("version")) is not int:
        raise FormatError(f"{path}: this is no manifest of a step", hint="it is something else, or damaged")
    if table["version"] != _VERSION:
        raise NewerVersionError(
            f"{path}: written in version {table['version']} of the step format; this is version {_VERSION}",
            hint="update hubshard, or name an older step",
        )
    held = raw.partition(b'","step":')[2].removesuffix(b',"version":1}\n')
    if table.keys() != {"format", "sha256", "step", "version"} or hashlib.sha256(held).hexdigest() != table["sha256"]:
        raise FormatError(f"{path}: the manifest is not as it was written", hint="it is damaged: use another step")
    body = table["step"]
    _expect(isinstance(body, dict) and body.keys() == _KEYS, path, "the keys of a step")
    _expect(_is_count(body["step"]) and _is_count(body["world_size"]), path, "a step and a world size")
    _expect(isinstance(body["files"], list), path, "a list of files")
    return dict(body)


def _step_of(body: Mapping[str, Any], path: str) -> Step:
    _expect(all(isinstance(body[key], dict) for key in ("metadata", "tensors", "scalars")), path, "objects")
    _expect(isinstance(body["tilings"], list), path, "a list of tilings")
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
