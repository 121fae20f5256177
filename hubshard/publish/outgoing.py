"""What is to be published: tensors and the plan of their shards, and what goes along. Nothing is written here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from hubshard.errors import FormatError
from hubshard.messages import brief, counted, listed, named
from hubshard.names import ADAPTER_STEM, MODEL_STEM, is_one_file, is_weight_file, parse_weight_name
from hubshard.paths import check_case, check_plain_path, check_store_path, file_and_folder, path_in
from hubshard.plan import MAX_INDEX_BYTES, MAX_SHARDS, ShardPlan, plan_shards
from hubshard.protocols import Buffer, Source
from hubshard.shardfile import stream_shard
from hubshard.sizes import READ_BYTES, format_size
from hubshard.sources.cast import CastSource
from hubshard.sources.model import ModelParts, Whole, parts_of
from hubshard.sources.model_config import ADAPTER_CONFIG
from hubshard.sources.state_dict import StateDictSource

__all__ = ["Component", "Layout", "OutFile", "Outgoing", "from_memory", "outgoing_of"]

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

    def content(self) -> bytes:
        """All of it in memory: for what is known to be small."""
        return b"".join(map(bytes, self.data()))  # a block may be valid only until the next one


@dataclass(frozen=True)
class Outgoing:
    """All that a publish will put into the repo.

    Attributes:
        plans: which tensor goes into which shard: one plan for each folder that holds a checkpoint.
        shards: the weight files, in the plans' order.
        files: the indexes and everything that goes along.
        notes: sentences for people: what was left out, what is unusual.
        title: of the commit, unless whoever publishes names another.
    """

    plans: tuple[ShardPlan, ...]
    shards: tuple[OutFile, ...]
    files: tuple[OutFile, ...]
    notes: tuple[str, ...] = ()
    title: str = ""

    @property
    def usual_title(self) -> str:
        """The title of the commit where none is asked for."""
        return self.title or f"Publish {counted(len(self.shards), 'shard')} with hubshard"

    @property
    def all_files(self) -> tuple[OutFile, ...]:
        """Shards first."""
        return (*self.shards, *self.files)

    @property
    def nbytes(self) -> int:
        """Bytes of everything."""
        return sum(file.nbytes for file in self.all_files)

    def replaces(self, path: str) -> bool:
        """Whether a file is a weight file, or an index, of which a publish of this leaves its own alone.

        Weights that go along as they are take the place of those of their folder, stem and variant, as planned ones do.
        An adapter gives way to a model that comes to lie beside it.
        """
        folder, _, name = path.rpartition("/")
        along = (each for each in self._along if each[0] == folder)
        return (
            any(plan.replaces(path) for plan in self.plans)
            or any(is_weight_file(name, variant=variant, stem=stem) for _, stem, variant in along)
            or self.hides(path)
        )

    def hides(self, path: str) -> bool:
        """Whether a file is of an adapter that would hide a model of this: loaders put it on what lies beside it.

        Where this brings an adapter beside the model, both are meant.
        """
        folder, _, name = path.rpartition("/")
        stems = self.stems.get(folder)
        if stems is None or ADAPTER_STEM in stems:
            return False
        found = parse_weight_name(name)
        return name == ADAPTER_CONFIG if found is None else found.stem == ADAPTER_STEM

    @cached_property
    def stems(self) -> Mapping[str, frozenset[str]]:
        """The stems of all weights by folder, "" of the root."""
        found: dict[str, set[str]] = {}
        for file in self.all_files:
            folder, _, name = file.path.rpartition("/")
            weights = parse_weight_name(name)
            if weights is not None:
                found.setdefault(folder, set()).add(weights.stem)
        return {folder: frozenset(stems) for folder, stems in found.items()}

    @cached_property
    def _along(self) -> frozenset[tuple[str, str, str | None]]:
        # folder, stem and variant of the weights among the files
        split = (file.path.rpartition("/") for file in self.files)
        found = ((folder, parse_weight_name(name)) for folder, _, name in split)
        return frozenset((folder, name.stem, name.variant) for folder, name in found if name is not None)


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

    @property
    def config_dtype(self) -> str | None:
        """What the configs are to tell of, or None to keep it: they are those of the other variants too."""
        return self.dtype if self.variant is None else None


@dataclass(frozen=True)
class Component:
    """The checkpoint of one folder.

    Attributes:
        plan: of its shards.
        tensors: gives what is in them.
        total_parameters: as its index tells; None to count what is stored.
    """

    plan: ShardPlan
    tensors: Source
    total_parameters: int | None = None

    @classmethod
    def of(
        cls,
        tensors: Source,
        layout: Layout,
        *,
        stem: str,
        folder: str,
        metadata: Mapping[str, str],
        total_parameters: int | None,
    ) -> Component:
        """Tensors, planned as `plan_shards` does."""
        plan = plan_shards(
            tensors.specs(),
            max_shard_bytes=layout.max_shard_bytes,
            variant=layout.variant,
            aliases=tensors.aliases(),
            metadata=metadata,
            stem=stem,
            folder=folder,
        )
        return cls(plan, tensors, total_parameters)


def from_memory(
    source: Any,
    layout: Layout,
    *,
    companions: Sequence[object] = (),
    whole: Whole | None = None,
    stem: str = MODEL_STEM,
) -> Outgoing:
    """A state dict, an `nn.Module`, a model of transformers, diffusers or peft, a pipeline, or any `Source`.

    Args:
        source: the tensors.
        layout: of the shards.
        companions: tokenizers, processors and the like: whatever has `save_pretrained` and holds no weights.
        whole: makes the state dict of the whole model of that of this process, where it holds but a part.
        stem: of the names of a state dict or `Source`; a model knows its own.

    Raises:
        FormatError: something in it that cannot be published, by name.
    """
    given: Source | None = None
    if isinstance(source, Mapping) or hasattr(source, "specs"):
        parts = replace(parts_of(*companions) if companions else ModelParts(), stem=stem)
        if whole is not None and isinstance(source, Mapping):
            source = whole(dict(source))
        given = _source(source, layout.dtype)
    else:
        parts = parts_of(source, *companions, dtype=layout.config_dtype, whole=whole)
    every = {"": parts} | dict(parts.folders)
    holding = [] if given is not None else [folder for folder, each in sorted(every.items()) if each.state_dict]
    components = [_component(every[folder], layout, folder, given) for folder in holding or [""]]
    files = [
        OutFile.of(path_in(folder, path), data) for folder, each in every.items() for path, data in each.files.items()
    ]
    files += [OutFile.of(path, data, default=True) for path, data in parts.default_files.items()]
    return outgoing_of(components, files, layout)


def _source(source: Any, dtype: str | None) -> Source:
    if isinstance(source, Mapping) and not hasattr(source, "specs"):
        return StateDictSource(source, dtype=dtype)
    return CastSource(source, dtype) if dtype else source


def _component(parts: ModelParts, layout: Layout, folder: str, given: Source | None) -> Component:
    with named(folder):
        tensors = given
        if tensors is None:
            tensors = StateDictSource(parts.state_dict, dtype=layout.dtype, keep=parts.keep)
        return Component.of(
            tensors,
            layout,
            stem=parts.stem,
            folder=folder,
            metadata=parts.metadata,
            total_parameters=parts.total_parameters,
        )


def outgoing_of(
    components: Sequence[Component], files: Sequence[OutFile], layout: Layout, *, notes: Sequence[str] = ()
) -> Outgoing:
    """Checkpoints, their indexes and what goes along, with all that is to be said of them.

    Raises:
        FormatError: a file name that cannot be published, or a variant of an adapter.
    """
    if layout.variant is not None:
        _refuse_variant_of_adapter([component.plan for component in components], layout.variant)
    shards: list[OutFile] = []
    indexes: list[OutFile] = []
    said = list(notes)
    for component in components:
        plan = component.plan
        shards += [
            OutFile(
                shard.path, shard.nbytes, partial(stream_shard, shard, component.tensors, max_read_bytes=READ_BYTES)
            )
            for shard in plan.shards
        ]
        said += _notes_on(plan, layout)
        if plan.index_path is not None:
            index = plan.index(total_parameters=component.total_parameters)
            indexes.append(OutFile.of(plan.index_path, index))
            if len(index) > MAX_INDEX_BYTES:
                said.append(f"{plan.index_path} has {format_size(len(index))}: {_LARGE_INDEX}")
    out = Outgoing(tuple(component.plan for component in components), tuple(shards), (*indexes, *files), tuple(said))
    paths = [file.path for file in out.all_files]
    for path in paths:
        check_plain_path(path, path="the files to publish", hint="rename it, or leave it out with `exclude`")
        check_store_path(path)
    check_case(paths, path="the files to publish")
    found = file_and_folder(paths)
    if found is not None:
        raise FormatError(
            f"the files to publish: {found[0]!r} would be a file and, for {found[1]!r}, a folder",
            hint="rename one of them, or leave it out with `exclude`",
        )
    return out


def _refuse_variant_of_adapter(plans: Iterable[ShardPlan], variant: str) -> None:
    for plan in plans:
        if plan.stem == ADAPTER_STEM:
            raise FormatError(
                f"{plan.shards[0].path}: peft loads no variant of an adapter, so nothing could read this one",
                hint=f"leave the variant {variant!r} out, and publish to another repo or branch; a dtype needs none",
            )


def _notes_on(plan: ShardPlan, layout: Layout) -> Iterator[str]:
    place = f"{plan.folder}: " if plan.folder else ""
    if plan.oversized:
        these = "this tensor is" if len(plan.oversized) == 1 else f"each of these {len(plan.oversized)} tensors is"
        yield f"{place}{these} larger than the bound of a shard: {listed([brief(name) for name in plan.oversized])}"
    if len(plan.shards) > MAX_SHARDS:
        yield f"{place}there are {len(plan.shards)} shards: {_MANY_SHARDS}"
    if is_one_file(plan.stem) and plan.nbytes > layout.max_shard_bytes:
        [shard] = plan.shards
        yield f"{shard.path} has {format_size(shard.nbytes)}, more than the bound of a shard: peft reads one file alone"
