"""The header of a safetensors file: eight bytes of length, then JSON, then the tensors' bytes without gaps.

Format: https://github.com/huggingface/safetensors#format. Encoding is deterministic: tensors in the order given,
metadata keys sorted, spaces up to a multiple of eight so that the data is aligned. Decoding refuses whatever the
reference reader refuses, duplicate keys, and more dimensions than numpy or torch can hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

from hubshard.errors import FormatError, UnsafeFormatError
from hubshard.messages import brief, hinted
from hubshard.tensors import DTYPE_BITS, MAX_DIMENSIONS, TensorSpec

__all__ = [
    "MAX_READ_HEADER_BYTES",
    "MAX_WRITE_HEADER_BYTES",
    "METADATA_KEY",
    "PREFIX_BYTES",
    "RESERVED_KEYS",
    "Header",
    "aliases_in",
    "check_framing",
    "check_name",
    "check_spec",
    "decode_header",
    "encode_header",
    "entry_nbytes",
    "header_extent",
    "header_nbytes",
]

PREFIX_BYTES = 8
"""Bytes of the little-endian u64 that holds the length of the JSON."""
METADATA_KEY = "__metadata__"
RESERVED_KEYS = frozenset({"format", "total_size", "total_parameters"})
"""Metadata keys of headers and indexes that have a meaning of their own, and so never record an alias."""
MAX_WRITE_HEADER_BYTES = 25_000_000
"""Largest header we write: huggingface_hub's readers take no larger one."""
MAX_READ_HEADER_BYTES = 100_000_000
"""Largest header we read: the reference reader's limit."""
_DAMAGED = "it is damaged, or was written wrong: fetch it again, or save it anew"
_ALIGNMENT = 8
_ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})
_ENTRY_FIXED_BYTES = len('"":{,"data_offsets":[,]},')
_SURROGATE = re.compile("[\ud800-\udfff]")
_MINUS_ZERO = re.compile(rb"-0\b")
_quoted = json.encoder.encode_basestring  # what json.dumps makes of a string with ensure_ascii=False


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
        FormatError: a reserved name, a dtype or a shape that safetensors cannot store, or metadata that is no text.
    """
    entries = [f"{_quoted(METADATA_KEY)}:{_dumps_metadata(metadata)}"] if metadata else []
    start = 0
    for spec in specs:
        check_spec(spec)
        stop = start + spec.nbytes
        kind = _kind(spec.dtype, spec.shape)
        entries.append(f'{_quoted(spec.name)}:{{{kind},"data_offsets":[{start},{stop}]}}')
        start = stop
    text = f"{{{','.join(entries)}}}".encode()
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
    if not name.isascii() and not _is_text(name):
        raise FormatError(f"the tensor name {brief(name)} is no valid Unicode", hint="rename it in the state dict")


def check_spec(spec: TensorSpec) -> None:
    """Refuse a tensor that the format cannot hold; `spec.nbytes` refuses unknown dtypes.

    Raises:
        FormatError: its name (see `check_name`) or its shape.
    """
    check_name(spec.name)
    shape = spec.shape
    if len(shape) > MAX_DIMENSIONS:
        raise FormatError(
            f"tensor {brief(spec.name)} has {len(shape)} dimensions, more than {MAX_DIMENSIONS}", hint="reshape it"
        )
    if shape and min(shape) < 0:
        raise FormatError(f"tensor {brief(spec.name)} has the negative shape {shape}")


def aliases_in(metadata: Mapping[str, str], names: Container[str]) -> dict[str, str]:
    """The aliases that a header's metadata records: keys with a meaning of their own left out.

    A key whose value is a tensor of the same file is a further name of it: the convention of safetensors' and
    huggingface_hub's writers for shared tensors.

    Args:
        metadata: of the header.
        names: the tensors of the same file.
    """
    return {alias: name for alias, name in metadata.items() if name in names and alias not in RESERVED_KEYS}


@lru_cache(maxsize=4096)
def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    # most tensors of a model share their dtype and shape with others
    return f'"dtype":"{dtype}","shape":[{",".join(map(str, shape))}]'


def entry_nbytes(spec: TensorSpec, *, offset_digits: int) -> int:
    """Bytes that `spec` takes in a header at most, when its offsets have at most `offset_digits` digits."""
    return _ENTRY_FIXED_BYTES + _string_nbytes(spec.name) + len(_kind(spec.dtype, spec.shape)) + 2 * offset_digits


def header_nbytes(entries_nbytes: int, metadata: Mapping[str, str]) -> int:
    """Bytes that a header takes at most, prefix and padding included, with entries of `entries_nbytes` in all."""
    meta = len(f"{{{_quoted(METADATA_KEY)}:{_dumps_metadata(metadata)}}}".encode()) if metadata else len("{}")
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
    with hinted(_DAMAGED):
        return _decoded(raw, file_nbytes, path)


def _decoded(raw: bytes, file_nbytes: int, path: str) -> Header:
    nbytes = header_extent(raw, file_nbytes=file_nbytes, path=path)
    if len(raw) < nbytes:
        raise FormatError(f"{path}: the header has {nbytes} bytes, only {len(raw)} were given")
    table = decode_json(raw[PREFIX_BYTES:nbytes], path=path, what="header")
    metadata = _metadata(table.pop(METADATA_KEY, None), path)
    entries = sorted((_entry(name, value, path) for name, value in table.items()), key=itemgetter(1, 2))
    _check_spans([(spec.name, start, stop) for spec, start, stop in entries], nbytes, file_nbytes, path)
    starts = tuple(nbytes + start for _, start, _ in entries)
    return Header(tuple(e[0] for e in entries), starts, metadata, nbytes, file_nbytes)


def check_framing(raw: bytes, *, file_nbytes: int, path: str) -> None:
    """Check that a file is safetensors and as long as its header says; not what is in it, such as unknown dtypes.

    Args:
        raw: the file's first bytes, at least the whole header.
        file_nbytes: size of the file (bytes).
        path: named in errors.

    Raises:
        UnsafeFormatError: the file is a pickle or a zip of pickles.
        FormatError: anything else that is not safetensors, or that is not as long as it says.
    """
    nbytes = header_extent(raw, file_nbytes=file_nbytes, path=path)
    table = decode_json(raw[PREFIX_BYTES:nbytes], path=path, what="header")
    table.pop(METADATA_KEY, None)
    spans: list[tuple[str, int, int]] = []
    for name, value in table.items():
        offsets: Any = value.get("data_offsets") if isinstance(value, dict) else None
        if not _is_counts(offsets, 2) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise FormatError(f"{path}: tensor {brief(name)} has no data_offsets that are two counts")
        spans.append((name, *offsets))
    _check_spans(sorted(spans, key=itemgetter(1, 2)), nbytes, file_nbytes, path)


def _check_spans(spans: Iterable[tuple[str, int, int]], nbytes: int, file_nbytes: int, path: str) -> None:
    """See that tensors, in the order of their bytes, fill the file behind its header."""
    end = 0
    for name, start, stop in spans:
        if start != end:
            raise FormatError(
                f"{path}: tensor {brief(name)} starts at byte {start} of the data, expected {end}: overlap or gap"
            )
        end = stop
    if nbytes + end != file_nbytes:
        raise FormatError(
            f"{path}: the header describes {nbytes + end} bytes, the file has {file_nbytes}",
            hint="the file is truncated or was extended: fetch it again",
        )


def header_extent(prefix: bytes, *, file_nbytes: int, path: str) -> int:
    """Bytes of prefix and JSON, from the file's first bytes (eight or more; more make a better error).

    Raises:
        UnsafeFormatError: the file is a pickle or a zip of pickles.
        FormatError: not a safetensors file, or a header that is too large or longer than the file.
    """
    if min(len(prefix), file_nbytes) < PREFIX_BYTES:
        _refuse_lookalikes(prefix, path)
        raise FormatError(f"{path}: {file_nbytes} bytes are too few for a safetensors file", hint="fetch it again")
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    begins_wrong = prefix[PREFIX_BYTES : PREFIX_BYTES + 1] not in {b"", b"{"}
    if length > MAX_READ_HEADER_BYTES or PREFIX_BYTES + length > file_nbytes or begins_wrong:
        _refuse_lookalikes(prefix, path)
    if length > MAX_READ_HEADER_BYTES:
        raise FormatError(f"{path}: not a safetensors file (a header of {length} bytes)", hint=_DAMAGED)
    if PREFIX_BYTES + length > file_nbytes:
        raise FormatError(
            f"{path}: the header ends at byte {PREFIX_BYTES + length}, past the file's {file_nbytes}",
            hint="the file is truncated, or no safetensors file",
        )
    if begins_wrong:
        raise FormatError(f"{path}: the header does not start with '{{'", hint="not a safetensors file, or damaged")
    return PREFIX_BYTES + length


_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_PAGES = (b"<!doct", b"<html", b"<?xml")


def _refuse_lookalikes(prefix: bytes, path: str) -> None:
    # Asked only when the header is wrong already: a good header of 640 bytes begins as a pickle does.
    text = prefix.removeprefix(b"\xef\xbb\xbf").lstrip()
    if prefix.startswith(_PICKLES):
        raise UnsafeFormatError(
            f"{path}: this is a pickled file (torch.save), and reading it would run its code",
            hint="convert it to safetensors first",
        )
    if prefix.startswith(b"version "):
        raise FormatError(
            f"{path}: this is a Git LFS pointer, not the file itself",
            hint="fetch the content: `git lfs pull`, or `hubshard pull`",
        )
    if text[:6].lower().startswith(_PAGES):
        raise FormatError(f"{path}: this is an HTML or XML page, not a safetensors file", hint="fetch it again")
    if text.startswith(b"{"):
        raise FormatError(f"{path}: this is JSON text, not a safetensors file", hint="fetch it again")


def decode_json(raw: bytes, *, path: str, what: str) -> dict[str, Any]:
    """A JSON object in UTF-8, strictly: each key once, no NaN.

    Args:
        raw: the text.
        path: named in errors.
        what: it is, for errors.

    Raises:
        FormatError: anything else.
    """
    hint = "fetch it again: it is damaged, or something else"
    parse_int = _no_minus_zero if _MINUS_ZERO.search(raw) else None  # seldom needed, and slow
    try:
        text = raw.decode("utf-8")
        table = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=parse_int)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise FormatError(f"{path}: the {what} is no valid JSON: {reason}", hint=hint) from error
    if not isinstance(table, dict):
        raise FormatError(f"{path}: the {what} is a JSON {type(table).__name__}, not an object", hint=hint)
    return table


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {brief(key)} stands twice")
            seen.add(key)
    return table


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _no_minus_zero(text: str) -> int:
    # a float in the reference reader, an int in Python
    if text == "-0":
        raise ValueError("-0 is no integer")
    return int(text)


def _metadata(value: Any, path: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise FormatError(f"{path}: {METADATA_KEY} must map strings to strings")
    if not all(_is_text(key) and _is_text(item) for key, item in value.items()):
        raise FormatError(f"{path}: {METADATA_KEY} holds text that is no valid Unicode")
    return value


def _entry(name: str, value: Any, path: str) -> tuple[TensorSpec, int, int]:
    if not isinstance(value, dict) or value.keys() != _ENTRY_KEYS:
        raise FormatError(f"{path}: tensor {brief(name)} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        found = brief(dtype) if isinstance(dtype, str) else f"a JSON {type(dtype).__name__}"
        raise FormatError(f"{path}: tensor {brief(name)} has the unknown dtype {found}")
    if not _is_counts(shape, MAX_DIMENSIONS) or not _is_counts(offsets, 2) or len(offsets) != 2:
        raise FormatError(f"{path}: tensor {brief(name)} has a shape or data_offsets that are no lists of counts")
    spec = TensorSpec(name, dtype, tuple(shape))
    try:
        check_name(name)
        needed = spec.nbytes
    except FormatError as error:
        raise FormatError(f"{path}: {error.message}") from error
    start, stop = offsets
    if stop - start != needed:
        raise FormatError(
            f"{path}: tensor {brief(name)} has {stop - start} bytes; {dtype} of shape {shape} needs {needed}"
        )
    return spec, start, stop


def _is_counts(value: Any, most: int) -> bool:
    # bool is an int in Python, not in JSON; the format's counts are u64
    if not isinstance(value, list) or len(value) > most or not {*map(type, value)} <= {int}:
        return False
    return not value or (min(value) >= 0 and max(value) < 2**64)


def _is_text(text: str) -> bool:
    # a lone surrogate is no character; JSON can escape one, UTF-8 cannot hold it
    return not _SURROGATE.search(text)


def _dumps_metadata(metadata: Mapping[str, str]) -> str:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str) or not _is_text(key) or not _is_text(value):
            raise FormatError(f"the metadata {brief(str(key))} must map a string to a string of valid Unicode")
    return f"{{{','.join(f'{_quoted(key)}:{_quoted(value)}' for key, value in sorted(metadata.items()))}}}"


def _string_nbytes(text: str) -> int:
    quoted = _quoted(text)
    return (len(quoted) if quoted.isascii() else len(quoted.encode())) - 2
