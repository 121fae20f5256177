"""The files that make a directory of safetensors a checkpoint: their names, and `model.safetensors.index.json`.

Names and layout are those of transformers and huggingface_hub: `model.safetensors` alone, or
`model-00001-of-00002.safetensors` with an index; a variant stands before the number
(`model.fp16-00001-of-00002.safetensors`) and after `index` (`model.safetensors.index.fp16.json`).
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hubshard.errors import FormatError, UnsafeFormatError
from hubshard.header import check_name, decode_json
from hubshard.messages import brief

__all__ = [
    "Index",
    "check_case",
    "check_path",
    "check_variant",
    "decode_index",
    "encode_index",
    "index_name",
    "is_pickled",
    "is_weight_file",
    "shard_name",
    "variant_of",
]

_VARIANT = re.compile(r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*\Z")
_NUMBER = re.compile(r"(?:\A|-)[0-9]+-of-[0-9]+(?:\Z|[.-])")
_WEIGHTS = re.compile(
    # the variant before the number, or after it
    r"(?P<stem>model|pytorch_model)"
    r"(?:(?:\.(?P<before>[A-Za-z0-9_.-]+?))?(?:-[0-9]+-of-[0-9]+)?|-[0-9]+-of-[0-9]+\.(?P<after>[A-Za-z0-9_.-]+?))"
    r"\.(?P<suffix>safetensors|bin)(?P<index>\.index(?:\.(?P<of_index>[A-Za-z0-9_.-]+))?\.json)?\Z"
)
_SUFFIX_OF = {"model": "safetensors", "pytorch_model": "bin"}
_CONSOLIDATED = re.compile(
    r"consolidated(?:\.[0-9]+|-[0-9]+-of-[0-9]+)?\.(?:safetensors|bin|pth|pt)\Z"
    r"|consolidated\.(?:safetensors|bin)\.index\.json\Z"
)
_PICKLED = frozenset({"bin", "pt", "pth", "ckpt", "pkl", "pickle", "joblib", "distcp", "ot"})
_MAX_PART_BYTES = 255  # of a file name on all common file systems
_RESERVED_ON_WINDOWS = re.compile(
    r"(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9\u00b9\u00b2\u00b3])\s*(?:\.|\Z)", re.IGNORECASE
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
    """Refuse a variant that cannot stand in a file name, or that would be read as a shard's number.

    Raises:
        FormatError: it has other characters than letters, digits and `_`, with `.` and `-` between them.
    """
    if variant is not None and (not _VARIANT.match(variant) or _NUMBER.search(variant)):
        raise FormatError(f"the variant {variant!r} must be letters, digits, '_', '.' and '-', as in 'fp16'")


def shard_name(number: int, count: int, *, variant: str | None = None) -> str:
    """Name of shard `number` (from 1) of `count`; a lone shard has no number."""
    stem = f"model.{variant}" if variant else "model"
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors"


def index_name(variant: str | None = None) -> str:
    """Name of the index of `variant`."""
    return f"model.safetensors.index.{variant}.json" if variant else "model.safetensors.index.json"


def variant_of(name: str) -> str | None:
    """The variant that the weight or index file `name` belongs to; None for the plain one, and for other files.

    Both orders of variant and number are read, `model.fp16-00001-of-00002` and `model-00001-of-00002.fp16`, and both
    of variant and index.
    """
    match = _weights(name)
    if match is None:
        return None
    return match["before"] or match["after"] or match["of_index"]


def is_weight_file(name: str, *, variant: str | None) -> bool:
    """Whether `name` (no folder) is a weight file or an index of `variant`: what a publish of that variant replaces.

    These are `model*.safetensors`, `pytorch_model*.bin`, their indexes, and for the plain variant `consolidated*`.
    Files of other variants, adapters, optimizer states and whatever lies in a folder are never among them.
    """
    if _weights(name):
        return variant_of(name) == variant
    return variant is None and _CONSOLIDATED.match(name) is not None


def is_pickled(name: str) -> bool:
    """Whether the suffix of `name` is one of torch.save, pickle or joblib: reading such a file runs code in it."""
    return name.rpartition(".")[2].lower() in _PICKLED


def _weights(name: str) -> re.Match[str] | None:
    match = _WEIGHTS.match(name)
    if match is None or _SUFFIX_OF[match["stem"]] != match["suffix"]:
        return None
    named_twice = match["of_index"] and (match["before"] or match["after"])
    return None if named_twice else match


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
        check_path(file, path=path)
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


def check_path(file: str, *, path: str, hint: str = "do not load this checkpoint") -> None:
    """Refuse a file name that, on any system, may lie outside the folder it is relative to, or be no file at all.

    Args:
        file: the name.
        path: where it stands.
        hint: what to do about it.

    Raises:
        FormatError: absolute, with a drive, a backslash, `..`, an empty part, a control character, or a part that
            Windows reads as another one or as a device; names `path` as where it stands.
    """
    if "\\" in file or ":" in file or not file.isprintable() or not all(map(_is_plain_part, file.split("/"))):
        raise FormatError(
            f"{path}: the file name {brief(file)} is not a plain path within its folder",
            hint=hint,
        )


def _is_plain_part(part: str) -> bool:
    # Windows drops dots and spaces at the end, so that "..  " is ".."
    if not part or part[-1] in ". " or len(part.encode()) > _MAX_PART_BYTES:
        return False
    return not _RESERVED_ON_WINDOWS.match(part)


def check_case(files: Iterable[str], *, path: str) -> None:
    """Refuse file names that some file system would hold to be one: without regard to case, or to Unicode's forms.

    Raises:
        FormatError: naming both.
    """
    seen: dict[str, str] = {}
    for file in sorted(files):
        key = file if file.isascii() else unicodedata.normalize("NFC", file)
        other = seen.setdefault(key.casefold(), file)
        if other != file:
            raise FormatError(
                f"{path}: {other!r} and {file!r} are one file on a disk without regard to case",
                hint="rename one of them",
            )
