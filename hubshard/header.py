"""The header of a safetensors file: eight bytes of length, then JSON, then the tensors' bytes without gaps.

Format: https://github.com/huggingface/safetensors#format. Encoding is deterministic: tensors in the order given,
    metadata keys sorted, spaces up to a multiple of eight so that the data is aligned. Decoding refuses whatever the
    reference reader refuses, and duplicate keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hubshard.errors import FormatError, UnsafeFormatError
from hubshard.tensors import DTYPE_BITS, TensorSpec

__all__ = [
    "MAX_READ_HEADER_BYTES",
    "MAX_WRITE_HEADER_BYTES",
    "METADATA_KEY",
    "PREFIX_BYTES",
    "Header",
    "decode_header",
    "encode_header",
    "entry_nbytes",
    "header_nbytes",
]

PREFIX_BYTES = 8
"""Bytes of the little-endian u64 that holds the length of the JSON."""
METADATA_KEY = "__metadata__"
MAX_WRITE_HEADER_BYTES = 25_000_000
"""Largest header we write: huggingface_hub's readers take no larger one."""
MAX_READ_HEADER_BYTES = 100_000_000
"""Largest header we read: the reference reader's limit."""
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded header.

    Attributes:
        specs: the tensors, in the order of their bytes.
        starts: where each tensor's bytes begin in the file, in the same order (bytes).
        metadata: the `__metadata__` map of strings.
        nbytes: bytes of prefix and JSON, that is, where the data begins.
        file_nbytes: bytes of the whole file that this header describes.
    """

    specs: tuple[TensorSpec, ...]
    starts: tuple[int, ...]
    metadata: Mapping[str, str]
    nbytes: int
    file_nbytes: int


def encode_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file that holds `specs` in this order, prefix included.

    Raises:
        FormatError: a reserved name or a dtype that safetensors cannot store.
    """
    table: dict[str, Any] = {METADATA_KEY: dict(sorted(metadata.items()))} if metadata else {}
    start = 0
    for spec in specs:
        check_name(spec.name)
        stop = start + spec.nbytes
        table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, stop]}
        start = stop
    text = _dumps(table)
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def check_name(name: str) -> None:
    """Refuse a tensor name that the format cannot hold.

    Raises:
        FormatError: the name is reserved, or is no valid Unicode.
    """
    if name == METADATA_KEY:
        raise FormatError(
            f"a tensor may not be named {METADATA_KEY!r}: safetensors keeps its own metadata there",
            hint="rename it in the state dict",
        )
    if not name.isascii() and name.encode("utf-8", "replace").decode("utf-8") != name:
        raise FormatError(f"the tensor name {name!r} is no valid Unicode", hint="rename it in the state dict")


def entry_nbytes(spec: TensorSpec, *, offset_digits: int) -> int:
    """Bytes that `spec` takes in a header at most, when its offsets have at most `offset_digits` digits."""
    fixed = len('"":{"dtype":"","shape":[],"data_offsets":[,]},')
    shape = ",".join(map(str, spec.shape))
    return fixed + _string_nbytes(spec.name) + len(spec.dtype) + len(shape) + 2 * offset_digits


def header_nbytes(entries_nbytes: int, metadata: Mapping[str, str]) -> int:
    """Bytes that a header takes at most, prefix and padding included, with entries of `entries_nbytes` in all."""
    meta = len(_dumps({METADATA_KEY: dict(metadata)})) if metadata else len("{}")
    return PREFIX_BYTES + meta + entries_nbytes + _ALIGNMENT - 1


def decode_header(raw: bytes, *, file_nbytes: int, path: str) -> Header:
    """Read and check a header completely.

    Args:
        raw: the file's first bytes, at least the whole header where the file is that long.
        file_nbytes: size of the file (bytes).
        path: named in errors.

    Raises:
        UnsafeFormatError: the file is a pickle or a zip of pickles.
        FormatError: anything else that is not a safetensors header, or that does not describe this file exactly.
    """
    nbytes = header_extent(raw, file_nbytes=file_nbytes, path=path)
    if len(raw) < nbytes:
        raise FormatError(f"{path}: the header has {nbytes} bytes, only {len(raw)} were given")
    table = _loads(raw[PREFIX_BYTES:nbytes], path)
    metadata = _metadata(table.pop(METADATA_KEY, None), path)
    entries = sorted((_entry(name, value, path) for name, value in table.items()), key=lambda e: (e[1], e[2]))
    starts: list[int] = []
    end = 0
    for spec, start, stop in entries:
        if start != end:
            raise FormatError(
                f"{path}: tensor {spec.name!r} starts at byte {start} of the data, expected {end}: overlap or gap"
            )
        starts.append(nbytes + start)
        end = stop
    if nbytes + end != file_nbytes:
        raise FormatError(
            f"{path}: the header describes {nbytes + end} bytes, the file has {file_nbytes}",
            hint="the file is truncated or was extended: fetch it again",
        )
    return Header(tuple(e[0] for e in entries), tuple(starts), metadata, nbytes, file_nbytes)


def header_extent(prefix: bytes, *, file_nbytes: int, path: str) -> int:
    """Bytes of prefix and JSON, from the file's first bytes (eight or more).

    Raises:
        UnsafeFormatError: the file is a pickle or a zip of pickles.
        FormatError: not a safetensors file, or a header that is too large or longer than the file.
    """
    _refuse_lookalikes(prefix, path)
    if len(prefix) < PREFIX_BYTES or file_nbytes < PREFIX_BYTES:
        raise FormatError(f"{path}: {file_nbytes} bytes are too few for a safetensors file", hint="fetch it again")
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if length > MAX_READ_HEADER_BYTES:
        raise FormatError(f"{path}: not a safetensors file (a header of {length} bytes)")
    if PREFIX_BYTES + length > file_nbytes:
        raise FormatError(
            f"{path}: the header ends at byte {PREFIX_BYTES + length}, past the file's {file_nbytes}",
            hint="the file is truncated, or no safetensors file",
        )
    return PREFIX_BYTES + length


def _refuse_lookalikes(prefix: bytes, path: str) -> None:
    head = prefix[:PREFIX_BYTES]
    if head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")) and not prefix[8:9] == b"{":
        raise UnsafeFormatError(
            f"{path}: this is a pickled file (torch.save), and reading it would run its code",
            hint="convert it to safetensors first",
        )
    if head.startswith(b"version "):
        raise FormatError(
            f"{path}: this is a Git LFS pointer, not the file itself",
            hint="fetch the content: `git lfs pull`, or `hubshard pull`",
        )
    if head.lstrip().lower().startswith((b"<!doct", b"<html", b"<?xml")):
        raise FormatError(f"{path}: this is an HTML or XML page, not a safetensors file", hint="fetch it again")


def _metadata(value: Any, path: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise FormatError(f"{path}: {METADATA_KEY} must map strings to strings")
    return value


def _entry(name: str, value: Any, path: str) -> tuple[TensorSpec, int, int]:
    check_name(name)
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{path}: tensor {name!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FormatError(f"{path}: tensor {name!r} has the unknown dtype {dtype!r}")
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise FormatError(f"{path}: tensor {name!r} has a shape or data_offsets that are no lists of counts")
    spec = TensorSpec(name, dtype, tuple(shape))
    nbytes = offsets[1] - offsets[0]
    if nbytes != spec.nbytes:
        raise FormatError(f"{path}: tensor {name!r} has {nbytes} bytes; {dtype} of shape {shape} needs {spec.nbytes}")
    return spec, offsets[0], offsets[1]


def _is_counts(value: Any) -> bool:
    # bool is an int in Python, not in JSON; the format's counts are u64
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**64 for n in value)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} stands twice")
    return table


def _loads(raw: bytes, path: str) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise FormatError(f"{path}: the header does not start with '{{'", hint="not a safetensors file, or damaged")
    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{path}: the header is no valid JSON: {error}", hint="not a safetensors file, or damaged"
        ) from error
    if not isinstance(table, dict):
        raise FormatError(f"{path}: the header is a JSON {type(table).__name__}, not an object")
    return table


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def _string_nbytes(text: str) -> int:
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return len(text)
    return len(_dumps(text)) - 2
