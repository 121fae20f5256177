"""Which tensor goes into which shard: nothing but a plan. Pure: no I/O, the same answer for the same input."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from hubshard.errors import FormatError
from hubshard.header import (
    MAX_WRITE_HEADER_BYTES,
    RESERVED_KEYS,
    aliases_in,
    check_name,
    check_spec,
    encode_header,
    entry_nbytes,
    header_nbytes,
)
from hubshard.index import encode_index
from hubshard.messages import brief
from hubshard.names import MODEL_STEM, check_variant, index_name, is_one_file, is_weight_file, shard_name
from hubshard.paths import path_in
from hubshard.tensors import DTYPE_BITS, TensorSpec

__all__ = [
    "MAX_FILE_BYTES",
    "MAX_INDEX_BYTES",
    "MAX_SHARDS",
    "Shard",
    "ShardPlan",
    "bound_of",
    "natural_key",
    "plan_shards",
]

MAX_FILE_BYTES = 500 * 10**9
"""Largest file that the Hub takes (https://huggingface.co/docs/hub/storage-limits)."""
MAX_INDEX_BYTES = 10 * 10**6
"""Largest index that the Hub's own readers take; loaders know no bound."""
MAX_SHARDS = 10_000
"""Files that a folder should hold at most (https://huggingface.co/docs/hub/storage-limits)."""
_OFFSET_DIGITS = len(str(MAX_FILE_BYTES))
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Shard:
    """One file to be.

    Attributes:
        path: its name, with the folder that it lies in.
        specs: its tensors, in the order of their bytes: wide elements first, so that each is aligned.
        metadata: of its header.
    """

    path: str
    specs: tuple[TensorSpec, ...]
    metadata: Mapping[str, str]

    @cached_property
    def name(self) -> str:
        """Its path without the folder, as an index names it."""
        return self.path.rpartition("/")[2]

    @cached_property
    def header(self) -> bytes:
        """Its first bytes."""
        return encode_header(self.specs, self.metadata)

    @cached_property
    def nbytes(self) -> int:
        """Its size, header included (bytes)."""
        return len(self.header) + sum(spec.nbytes for spec in self.specs)


@dataclass(frozen=True)
class ShardPlan:
    """All files of a checkpoint to be.

    Attributes:
        shards: in the order of their numbers.
        variant: whose names they carry, or None.
        oversized: tensors that alone exceed the bound; each has a shard of its own.
        stem: with which their names begin, such as "model".
        folder: that they lie in; "" is the root.
    """

    shards: tuple[Shard, ...]
    variant: str | None
    oversized: tuple[str, ...]
    stem: str = MODEL_STEM
    folder: str = ""

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all shards, headers included."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def index_path(self) -> str | None:
        """Path of the index, or None where a lone shard needs none."""
        return self.path_of(index_name(self.variant, stem=self.stem)) if len(self.shards) > 1 else None

    def path_of(self, name: str) -> str:
        """The path of a file of its folder."""
        return path_in(self.folder, name)

    def replaces(self, path: str) -> bool:
        """Whether a file is one that these files take the place of: weights of that folder, stem and variant."""
        folder, _, name = path.rpartition("/")
        return folder == self.folder and is_weight_file(name, variant=self.variant, stem=self.stem)

    def index(self, *, total_parameters: int | None = None) -> bytes:
        """The bytes of the index.

        Args:
            total_parameters: logical parameters, where packed weights hold more than their elements; counted otherwise.
        """
        if total_parameters is None:
            total_parameters = sum(spec.numel for shard in self.shards for spec in shard.specs)
        weight_map = {spec.name: shard.name for shard in self.shards for spec in shard.specs}
        metadata: dict[str, object] = {
            "total_parameters": total_parameters,
            "total_size": self.nbytes - sum(len(shard.header) for shard in self.shards),
        }
        for shard in self.shards:
            metadata |= aliases_in(shard.metadata, weight_map)
        return encode_index(weight_map, metadata)


def bound_of(stem: str, max_shard_bytes: int) -> int:
    """How large a file of this stem may be, where `max_shard_bytes` was asked for (bytes)."""
    return MAX_FILE_BYTES if is_one_file(stem) else max_shard_bytes


def natural_key(name: str) -> str:
    """A sort key under which `layers.2` comes before `layers.10`."""
    return ".".join(map(_natural_part, name.split(".")))


@lru_cache(maxsize=65536)
def _natural_part(part: str) -> str:
    # the parts between the dots recur in nearly every name
    return _DIGITS.sub(lambda digits: f"{len(digits[0]):03d}{digits[0]}", part)


def plan_shards(
    specs: Sequence[TensorSpec],
    *,
    max_shard_bytes: int,
    variant: str | None = None,
    aliases: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    stem: str = MODEL_STEM,
    folder: str = "",
) -> ShardPlan:
    """Distribute tensors over files of at most `max_shard_bytes`, header included.

    Tensors are taken in natural order of their names, whatever order they come in, so that the same tensors give the
    same bytes, and neighbouring layers share a file. A tensor that is larger than the bound gets a file of its own. An
    adapter of peft is one file, whatever its size.

    Args:
        specs: what to store.
        max_shard_bytes: bound per file (bytes).
        variant: as in `model.fp16.safetensors`.
        aliases: further names of tensors in `specs`, alias to stored name; kept in the header's metadata.
        metadata: for every header; `{"format": "pt"}`, which loaders ask for, is added.
        stem: with which the names begin, one of `names.STEMS`.
        folder: that the files are to lie in; "" is the root.

    Raises:
        FormatError: nothing to store, a name that stands twice or is reserved, an unknown dtype, a file over the Hub's
            limit, an alias that the metadata cannot record, a header that is too large for any file.
    """
    check_variant(variant)
    if max_shard_bytes <= 0:
        raise FormatError(f"files of at most {max_shard_bytes} bytes hold nothing", hint="ask for 5GB, for example")
    aliases, common = aliases or {}, {"format": "pt"} | dict(metadata or {})
    ordered = _ordered(specs)
    if aliases or metadata:
        _check_aliases(aliases, common, {spec.name for spec in specs})
    aliases_of: dict[str, dict[str, str]] = {}
    for alias, name in sorted(aliases.items()):
        aliases_of.setdefault(name, {})[alias] = name
    bound = bound_of(stem, max_shard_bytes)
    groups = list(_groups(ordered, bound, common, aliases_of))
    if is_one_file(stem) and len(groups) > 1:
        raise FormatError(f"the tensors are too many, or too large, for one file, and peft reads but one {stem}")
    shards = []
    for number, group in enumerate(groups, start=1):
        own = _own_aliases(group, aliases_of) if aliases_of else {}
        in_file = tuple(sorted(group, key=lambda spec: -DTYPE_BITS[spec.dtype]))
        name = shard_name(number, len(groups), variant=variant, stem=stem)
        shards.append(Shard(path_in(folder, name), in_file, own | common))
    return ShardPlan(tuple(shards), variant, _oversized(shards, bound), stem, folder)


def _oversized(shards: Sequence[Shard], max_shard_bytes: int) -> tuple[str, ...]:
    alone = (shard for shard in shards if len(shard.specs) == 1)
    return tuple(shard.specs[0].name for shard in alone if shard.nbytes > max_shard_bytes)


def _own_aliases(specs: Sequence[TensorSpec], aliases_of: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    return {alias: name for spec in specs for alias, name in aliases_of.get(spec.name, {}).items()}


def _ordered(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    if not specs:
        raise FormatError("there is no tensor to store", hint="is this the right source?")
    for spec in specs:
        check_spec(spec)
    ordered = sorted(specs, key=lambda spec: natural_key(spec.name))
    for one, other in pairwise(ordered):
        if one.name == other.name:
            raise FormatError(f"the tensor name {one.name!r} stands twice")
    return ordered


def _check_aliases(aliases: Mapping[str, str], metadata: Mapping[str, str], names: Container[str]) -> None:
    for alias, name in aliases.items():
        check_name(alias)
        if name not in names or alias in names:
            raise FormatError(f"the alias {alias!r} of {name!r} names no stored tensor, or is one itself")
        if alias in RESERVED_KEYS or metadata.get(alias, name) != name:
            raise FormatError(
                f"{alias!r} cannot be recorded as a further name of {name!r}: the metadata holds something else there",
                hint=f"rename {alias!r}, give it a tensor of its own, or store the tensor under that name",
            )
    for key, name in aliases_in(metadata, names).items():
        if aliases.get(key) != name:
            raise FormatError(
                f"the metadata {key!r}: {name!r} would be read as a further name of the tensor {name!r}",
                hint="leave it out, or put it into the config",
            )


def _groups(
    specs: Sequence[TensorSpec],
    max_shard_bytes: int,
    common: Mapping[str, str],
    aliases_of: Mapping[str, Mapping[str, str]],
) -> Iterator[list[TensorSpec]]:
    bound = min(max_shard_bytes, MAX_FILE_BYTES)
    fixed = header_nbytes(0, common)
    group: list[TensorSpec] = []
    header, data = fixed, 0
    for spec in specs:
        entry = entry_nbytes(spec, offset_digits=_OFFSET_DIGITS)
        if spec.name in aliases_of:
            entry += header_nbytes(0, aliases_of[spec.name])
        nbytes = spec.nbytes
        if group and (header + entry + data + nbytes > bound or header + entry > MAX_WRITE_HEADER_BYTES):
            yield group
            group, header, data = [], fixed, 0
        if not group:
            _check_alone(spec, header + entry, nbytes)
        group.append(spec)
        header += entry
        data += nbytes
    yield group


def _check_alone(spec: TensorSpec, header_nbytes: int, nbytes: int) -> None:
    # a tensor that shares a file with others has passed this by being under the bounds
    if nbytes + header_nbytes > MAX_FILE_BYTES:
        raise FormatError(
            f"tensor {spec.name!r} has {nbytes} bytes; a file of the Hub holds at most {MAX_FILE_BYTES}",
            hint="store it in parts, under several names",
        )
    if header_nbytes > MAX_WRITE_HEADER_BYTES:
        raise FormatError(
            f"the header of a file with tensor {brief(spec.name)} alone needs {header_nbytes} bytes; readers take at "
            f"most {MAX_WRITE_HEADER_BYTES}",
            hint="shorten the metadata, the name or the aliases",
        )
