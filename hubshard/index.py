"""`model.safetensors.index.json`: which file of a checkpoint holds each tensor, in the format of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from hubshard.errors import FormatError, UnsafeFormatError
from hubshard.header import check_name, decode_json
from hubshard.messages import hinted
from hubshard.names import is_pickled
from hubshard.paths import check_case, check_plain_path

__all__ = ["Index", "decode_index", "encode_index"]


@dataclass(frozen=True, slots=True)
class Index:
    """A decoded index.

    Attributes:
        weight_map: tensor name to file name, relative to the index's folder.
        metadata: what else it says, as JSON values; {} where the key is missing.
    """

    weight_map: Mapping[str, str]
    metadata: Mapping[str, object]


def encode_index(weight_map: Mapping[str, str], metadata: Mapping[str, object]) -> bytes:
    """The bytes of an index: keys sorted, indented by two, ASCII, a newline at the end, as transformers writes it."""
    quoted = json.encoder.encode_basestring_ascii
    head = json.dumps({"metadata": metadata}, indent=2, sort_keys=True)[: -len("\n}")]
    # json.dumps with an indent runs in Python throughout: too slow for a million names
    lines = ",\n".join([f"    {quoted(name)}: {quoted(weight_map[name])}" for name in sorted(weight_map)])
    body = f"{{\n{lines}\n  }}" if lines else "{}"
    return f'{head},\n  "weight_map": {body}\n}}\n'.encode("ascii")


def decode_index(raw: bytes, *, path: str) -> Index:
    """Read and check an index.

    Raises:
        UnsafeFormatError: an index of pickled files.
        FormatError: not JSON, no weight_map, or a file name that leaves the folder; names `path`.
    """
    with hinted("it is damaged, or was written wrong: fetch or publish the checkpoint again"):
        return _decoded(raw, path)


def _decoded(raw: bytes, path: str) -> Index:
    table = decode_json(raw, path=path, what="index")
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise FormatError(f"{path}: the index needs a weight_map of tensor names to file names")
    if not weight_map:
        raise FormatError(f"{path}: the weight_map of the index is empty")
    metadata = table.get("metadata", {})
    if not isinstance(metadata, dict):
        raise FormatError(f"{path}: the metadata of the index is no JSON object")
    files = set(weight_map.values())
    for file in sorted(files):
        check_plain_path(file, path=path)
        _check_suffix(file, path)
    check_case(files, path=path)
    for name in weight_map:
        try:
            check_name(name)
        except FormatError as error:
            raise FormatError(f"{path}: {error.message}") from error
    return Index(weight_map, metadata)


def _check_suffix(file: str, path: str) -> None:
    if is_pickled(file):
        raise UnsafeFormatError(
            f"{path}: the weight_map names {file!r}, a pickled file, and reading it would run its code",
            hint="convert the checkpoint to safetensors first",
        )
    if not file.endswith(".safetensors"):
        raise FormatError(f"{path}: the weight_map names {file!r}, which is no .safetensors file")
