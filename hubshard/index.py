"""The files that make a directory of safetensors a checkpoint: their names, and `model.safetensors.index.json`.

Names and layout are those of transformers and huggingface_hub: `model.safetensors` alone, or
`model-00001-of-00002.safetensors` with an index; a variant stands before the number
(`model.fp16-00001-of-00002.safetensors`) and after `index` (`model.safetensors.index.fp16.json`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath

from hubshard.errors import FormatError

__all__ = [
    "Index",
    "check_path",
    "decode_index",
    "encode_index",
    "index_name",
    "is_weight_file",
    "shard_name",
    "variant_of",
]

_VARIANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]*\Z")
_WEIGHTS = re.compile(
    r"(?:model|pytorch_model)(?:\.(?P<variant>[A-Za-z0-9_.]+?))?"
    r"(?:-\d+-of-\d+)?(?:\.(?P<variant2>[A-Za-z0-9_.]+?))?\.(?:safetensors|bin)\Z"
)
_INDEX = re.compile(r"(?:model\.safetensors|pytorch_model\.bin)\.index(?:\.(?P<variant>[A-Za-z0-9_.]+))?\.json\Z")
_CONSOLIDATED = re.compile(
    r"consolidated(?:\.(?:\d+|safetensors|pth|\d+\.pth|\d+\.safetensors|safetensors\.index\.json|pt))\Z"
)


@dataclass(frozen=True, slots=True)
class Index:
    """A decoded index.

    Attributes:
        weight_map: tensor name to file name, relative to the index's folder.
        metadata: what else it says, as JSON values; {} where the key is missing.
    """

    weight_map: Mapping[str, str]
    metadata: Mapping[str, object]


def check_variant(variant: str | None) -> None:
    """Refuse a variant that cannot stand in a file name.

    Raises:
        FormatError: it has other characters than letters, digits, `_` and `.`.
    """
    if variant is not None and not _VARIANT.match(variant):
        raise FormatError(f"the variant {variant!r} must be letters, digits, '_' and '.', as in 'fp16'")


def shard_name(number: int, count: int, *, variant: str | None = None) -> str:
    """Name of shard `number` (from 1) of `count`; a lone shard has no number."""
    stem = f"model.{variant}" if variant else "model"
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors"


def index_name(variant: str | None = None) -> str:
    """Name of the index of `variant`."""
    return f"model.safetensors.index.{variant}.json" if variant else "model.safetensors.index.json"


def variant_of(name: str) -> str | None:
    """The variant that the weight or index file `name` belongs to; None for the plain one.

    Both orders of variant and number are read: `model.fp16-00001-of-00002` and `model-00001-of-00002.fp16`.
    """
    match = _INDEX.match(name) or _WEIGHTS.match(name)
    if match is None:
        return None
    groups = match.groupdict()
    return groups.get("variant") or groups.get("variant2")


def is_weight_file(name: str, *, variant: str | None) -> bool:
    """Whether `name` (no folder) is a weight file or an index of `variant`: what a publish of that variant replaces.

    `consolidated*` files hold the plain variant. Adapters, optimizer states and files of other variants are never among
    them.
    """
    if _INDEX.match(name) or _WEIGHTS.match(name):
        return variant_of(name) == variant
    return variant is None and _CONSOLIDATED.match(name) is not None


def encode_index(weight_map: Mapping[str, str], metadata: Mapping[str, object]) -> bytes:
    """The bytes of an index: keys sorted, indented by two, a newline at the end, as transformers writes it."""
    table = {"metadata": metadata, "weight_map": weight_map}
    return (json.dumps(table, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode("utf-8")


def decode_index(raw: bytes, *, path: str) -> Index:
    """Read and check an index.

    Raises:
        FormatError: not JSON, no weight_map, or a file name that leaves the folder; names `path`.
    """
    try:
        table = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: the index is no valid JSON: {error}") from error
    weight_map = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise FormatError(f"{path}: the index needs a weight_map of tensor names to file names")
    if not weight_map:
        raise FormatError(f"{path}: the weight_map of the index is empty")
    metadata = table.get("metadata", {})
    if not isinstance(metadata, dict):
        raise FormatError(f"{path}: the metadata of the index is no JSON object")
    for file in sorted(set(weight_map.values())):
        check_path(file, path=path)
        if not file.endswith(".safetensors"):
            raise FormatError(f"{path}: the weight_map names {file!r}, which is no .safetensors file")
    check_case(set(weight_map.values()), path=path)
    return Index(weight_map, metadata)


def check_path(file: str, *, path: str) -> None:
    """Refuse a file name that, on any system, may lie outside the folder it is relative to.

    Raises:
        FormatError: absolute, with a drive, a backslash, `..`, an empty part or a control character; names `path` as
            where it stands.
    """
    parts = file.split("/")
    windows = PureWindowsPath(file)
    bad = not file or "\\" in file or windows.drive or windows.root or ":" in file or not file.isprintable()
    if bad or PurePosixPath(file).is_absolute() or any(part in {"", ".", ".."} for part in parts):
        raise FormatError(
            f"{path}: the file name {file!r} is not a plain path within its folder",
            hint="do not load this checkpoint",
        )


def check_case(files: Iterable[str], *, path: str) -> None:
    """Refuse file names that a file system without regard to case would hold to be one.

    Raises:
        FormatError: naming both.
    """
    seen: dict[str, str] = {}
    for file in sorted(files):
        other = seen.setdefault(file.casefold(), file)
        if other != file:
            raise FormatError(
                f"{path}: {other!r} and {file!r} are one file on a disk without regard to case",
                hint="rename one of them",
            )
