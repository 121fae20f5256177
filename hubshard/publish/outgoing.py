"""What is to be published: tensors and the plan of their shards, and what goes along. Nothing is written here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hubshard.errors import FormatError
from hubshard.messages import brief, counted, listed
from hubshard.names import is_weight_file, shard_name, variant_of
from hubshard.paths import check_case, check_plain_path, check_store_path
from hubshard.plan import MAX_INDEX_BYTES, MAX_SHARDS, Shard, ShardPlan, plan_shards
from hubshard.protocols import Buffer, Entry, Source
from hubshard.publish.left_out import Choice
from hubshard.shardfile import stream_shard
from hubshard.sizes import READ_BYTES, format_size
from hubshard.sources.cast import CastSource
from hubshard.sources.dtypes import CASTABLE
from hubshard.sources.model import ModelParts, Whole, parts_of
from hubshard.sources.model_config import config_of, config_with_dtype
from hubshard.sources.packed import logical_parameters
from hubshard.sources.safetensors import SafetensorsSource
from hubshard.sources.state_dict import StateDictSource
from hubshard.store.opening import Opened

__all__ = ["Layout", "OutFile", "Outgoing", "beside_weights", "from_memory", "from_store"]

_WORKERS = 8
# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
_MAX_POINTER_BYTES = 1024
_LARGE_INDEX = "the Hub's own readers take 10 MB at most; transformers reads it, the page of the repo may not"
_MANY_SHARDS = (
    "the Hub advises fewer than 10,000 files in a folder, and lists them page by page; make the shards larger"
)


@dataclass(frozen=True, slots=True)
class OutFile:
    """A file to be published.

    Attributes:
        path: in the repo.
        nbytes: its size (bytes).
        data: starts its content anew each time it is called.
        default: only for a repo that has no such file yet.
    """

    path: str
    nbytes: int
    data: Callable[[], Iterable[Buffer]]
    default: bool = False

    @classmethod
    def of(cls, path: str, content: bytes, *, default: bool = False) -> OutFile:
        """A file whose content is in memory."""
        return cls(path, len(content), lambda: [content], default)


@dataclass(frozen=True)
class Outgoing:
    """All that a publish will put into the repo.

    Attributes:
        plan: which tensor goes into which shard.
        shards: the weight files, in the plan's order.
        files: the index and everything that goes along.
        notes: sentences for people: what was left out, what is unusual.
        title: of the commit, unless whoever publishes names another.
    """

    plan: ShardPlan
    shards: tuple[OutFile, ...]
    files: tuple[OutFile, ...]
    notes: tuple[str, ...] = ()
    title: str = ""

    @property
    def usual_title(self) -> str:
        """The title of the commit where none is asked for."""
        return self.title or f"Publish {counted(len(self.plan.shards), 'shard')} with hubshard"

    @property
    def all_files(self) -> tuple[OutFile, ...]:
        """Shards first."""
        return (*self.shards, *self.files)

    @property
    def nbytes(self) -> int:
        """Bytes of everything."""
        return sum(file.nbytes for file in self.all_files)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the tensors are to be laid out.

    Attributes:
        max_shard_bytes: bound per file, header included (bytes).
        variant: as in `model.fp16.safetensors`, or None.
        dtype: to cast floating tensors to, a safetensors code, or None to keep them.
    """

    max_shard_bytes: int
    variant: str | None = None
    dtype: str | None = None


def from_memory(
    source: Any, layout: Layout, *, companions: Sequence[object] = (), whole: Whole | None = None
) -> Outgoing:
    """A state dict, an `nn.Module`, a transformers model, or any `Source`.

    Args:
        source: the tensors.
        layout: of the shards.
        companions: tokenizers, processors and the like: whatever has `save_pretrained` and holds no weights.
        whole: makes the state dict of the whole model of that of this process, where it holds but a part.

    Raises:
        FormatError: something in it that cannot be published, by name.
    """
    if isinstance(source, Mapping) or hasattr(source, "specs"):
        parts = parts_of(*companions) if companions else ModelParts()
        if whole is not None and isinstance(source, Mapping):
            source = whole(dict(source))
        tensors = _source(source, layout.dtype)
    else:
        parts = parts_of(source, *companions, dtype=layout.dtype, whole=whole)
        tensors = StateDictSource(parts.state_dict, dtype=layout.dtype, keep=parts.keep)
    plan = plan_shards(
        tensors.specs(),
        max_shard_bytes=layout.max_shard_bytes,
        variant=layout.variant,
        aliases=tensors.aliases(),
        metadata=parts.metadata,
    )
    files = [OutFile.of(path, data) for path, data in parts.files.items()]
    files += [OutFile.of(path, data, default=True) for path, data in parts.default_files.items()]
    return _outgoing(plan, tensors, files, total_parameters=parts.total_parameters)


def _source(source: Any, dtype: str | None) -> Source:
    if isinstance(source, Mapping) and not hasattr(source, "specs"):
        return StateDictSource(source, dtype=dtype)
    return CastSource(source, dtype) if dtype else source


def from_store(
    opened: Opened,
    layout: Layout,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Outgoing:
    """A revision of a store: a local directory or file, or a repo on a Hub. A weight file goes alone.

    Weights of the layout's variant are read where there are some, else the plain ones. Shards that already carry the
    right names and fit the bound keep their tensors; otherwise all are planned anew.

    Args:
        opened: the revision.
        layout: of the shards.
        include: patterns of files that go along; all by default.
        exclude: patterns of files that do not, besides those that `Choice` leaves out.

    Raises:
        FormatError: a checkpoint that does not hold together, or a file name that cannot be published.
    """
    store, at, path = opened.store, opened.at, opened.path
    entries = store.list(at)
    has_variant = path is None and any(is_weight_file(entry.path, variant=layout.variant) for entry in entries)
    variant = layout.variant if has_variant else None
    with opened.named():
        source = SafetensorsSource(store, at, path=path, variant=variant, workers=_WORKERS)
    tensors: Source = CastSource(source, layout.dtype) if layout.dtype else source
    plan = _kept_plan(source, layout) or plan_shards(
        tensors.specs(),
        max_shard_bytes=layout.max_shard_bytes,
        variant=layout.variant,
        aliases=tensors.aliases(),
        metadata=source.header_metadata,
    )
    if path is not None and source.index_path is None:
        return _outgoing(plan, tensors, [], notes=source.notes)
    along = [entry for entry in entries if entry.path not in source.weight_files]
    files, notes = beside_weights(opened, along, Choice(include, exclude))
    total_parameters = None
    for number, file in enumerate(files):
        if file.path == "config.json":
            raw = b"".join(file.data())
            total_parameters = logical_parameters(source.specs(), config_of(raw))
            if layout.dtype:
                files[number] = OutFile.of(file.path, config_with_dtype(raw, CASTABLE[layout.dtype]))
    return _outgoing(plan, tensors, files, notes=(*source.notes, *notes), total_parameters=total_parameters)


def _kept_plan(source: SafetensorsSource, layout: Layout) -> ShardPlan | None:
    names = list(source.weight_files)
    expected = [shard_name(n, len(names), variant=layout.variant) for n in range(1, len(names) + 1)]
    if layout.dtype or sorted(names) != expected or not source.specs():
        return None
    in_file: dict[str, list[tuple[int, str]]] = {name: [] for name in expected}
    for piece in source.manifest.pieces:
        in_file[piece.at.path].append((piece.at.start, piece.tensor))
    shards = []
    for name in expected:
        specs = tuple(source.manifest.tensors[tensor] for _, tensor in sorted(in_file[name]))
        own = {alias: kept for alias, kept in source.aliases().items() if kept in {spec.name for spec in specs}}
        shards.append(Shard(name, specs, own | dict(source.header_metadata) | {"format": "pt"}))
    if any(shard.nbytes > layout.max_shard_bytes and len(shard.specs) > 1 for shard in shards):
        return None
    oversized = tuple(shard.specs[0].name for shard in shards if shard.nbytes > layout.max_shard_bytes)
    return ShardPlan(tuple(shards), layout.variant, oversized)


def beside_weights(opened: Opened, entries: Iterable[Entry], choice: Choice) -> tuple[list[OutFile], list[str]]:
    """Of some files of a revision, those that go along with a model, and sentences on what does not."""
    files, notes = [], []
    for entry in entries:
        path = entry.path
        if not choice.takes(path):
            continue
        if is_weight_file(path, variant=variant_of(path)):
            if not path.endswith(".json"):
                notes.append(f"{path} is left out: it is no part of the checkpoint that is published")
            continue
        data = partial(opened.blocks, path, entry.nbytes, block_bytes=READ_BYTES)
        files.append(OutFile(path, entry.nbytes, data))
    for file in files:
        _refuse_pointer(file)
    return files, [*notes, *choice.notes()]


def _refuse_pointer(file: OutFile) -> None:
    # what a clone without git-lfs leaves in the place of a large file
    if file.nbytes < _MAX_POINTER_BYTES and b"".join(file.data()).startswith(_POINTER):
        raise FormatError(
            f"{file.path}: this is a Git LFS pointer, not the file itself",
            hint="fetch the content with `git lfs pull`, or leave the file out with `exclude`",
        )


def _outgoing(
    plan: ShardPlan,
    tensors: Source,
    files: Sequence[OutFile],
    *,
    notes: Sequence[str] = (),
    total_parameters: int | None = None,
) -> Outgoing:
    shards = tuple(
        OutFile(shard.path, shard.nbytes, partial(stream_shard, shard, tensors, max_read_bytes=READ_BYTES))
        for shard in plan.shards
    )
    notes = [*notes, *_notes_on(plan)]
    if plan.index_path is not None:
        index = plan.index(total_parameters=total_parameters)
        files = [OutFile.of(plan.index_path, index), *files]
        if len(index) > MAX_INDEX_BYTES:
            notes.append(f"{plan.index_path} has {format_size(len(index))}: {_LARGE_INDEX}")
    paths = [file.path for file in (*shards, *files)]
    for path in paths:
        check_plain_path(path, path="the files to publish", hint="rename it, or leave it out with `exclude`")
        check_store_path(path)
    check_case(paths, path="the files to publish")
    return Outgoing(plan, shards, tuple(files), tuple(notes))


def _notes_on(plan: ShardPlan) -> Iterator[str]:
    if plan.oversized:
        these = "this tensor is" if len(plan.oversized) == 1 else f"each of these {len(plan.oversized)} tensors is"
        yield f"{these} larger than the bound of a shard: {listed([brief(name) for name in plan.oversized])}"
    if len(plan.shards) > MAX_SHARDS:
        yield f"there are {len(plan.shards)} shards: {_MANY_SHARDS}"
