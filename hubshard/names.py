"""The names of the files that make a checkpoint: one grammar for what is written, replaced, looked for and pulled.

They are those of transformers, diffusers, peft and huggingface_hub. A variant stands before the number or after it, and
in an index before the suffix or after `index`:

    model.safetensors                           model.fp16.safetensors
    model-00001-of-00002.safetensors            model.fp16-00001-of-00002.safetensors, model-00001-of-00002.fp16.…
    model.safetensors.index.json                model.safetensors.index.fp16.json, model.fp16.safetensors.index.json

What comes first is the stem: transformers looks for `model`, diffusers for `diffusion_pytorch_model`, peft for
`adapter_model`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hubshard.errors import FormatError

__all__ = [
    "ADAPTER_STEM",
    "DIFFUSERS_STEM",
    "MODEL_STEM",
    "STEMS",
    "WeightName",
    "check_variant",
    "index_name",
    "index_names",
    "indexed_suffix",
    "is_consolidated",
    "is_numbered",
    "is_of_training",
    "is_one_file",
    "is_pickled",
    "is_training_folder",
    "is_weight_file",
    "parse_weight_name",
    "shard_name",
    "shard_set",
    "stem_of",
    "variant_of",
]

MODEL_STEM = "model"
"""The stem of transformers, and of whatever asks for no other."""
DIFFUSERS_STEM = "diffusion_pytorch_model"
"""That of diffusers."""
ADAPTER_STEM = "adapter_model"
"""That of peft."""
STEMS = (MODEL_STEM, DIFFUSERS_STEM, ADAPTER_STEM)
"""Stems of safetensors; where a folder holds several, the first of them is its checkpoint."""
_PICKLED_MODEL = "pytorch_model"  # of transformers
_SUFFIXES_OF = {
    MODEL_STEM: {"safetensors"},
    _PICKLED_MODEL: {"bin"},
    DIFFUSERS_STEM: {"safetensors", "bin"},
    ADAPTER_STEM: {"safetensors", "bin"},
}
_OF_MODEL = frozenset({MODEL_STEM, _PICKLED_MODEL})
_VARIANT = re.compile(r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*\Z")
_SOME_VARIANT = r"[A-Za-z0-9_.-]+"  # what others may have written
_NUMBER = r"-[0-9]+-of-[0-9]+"
_LIKE_A_NUMBER = re.compile(r"(?:\A|-)[0-9]+-of-[0-9]+(?:\Z|[.-])")
_NUMBERED = re.compile(r"-[0-9]+-of-(?P<count>[0-9]+)(?=\.)")
_WEIGHTS = re.compile(
    rf"(?P<stem>{'|'.join(_SUFFIXES_OF)})"
    rf"(?:\.(?P<before>{_SOME_VARIANT}?))?(?:(?P<number>{_NUMBER})(?:\.(?P<after>{_SOME_VARIANT}?))?)?"
    rf"\.(?P<suffix>safetensors|bin)(?P<index>\.index(?:\.(?P<of_index>{_SOME_VARIANT}))?\.json)?\Z"
)
_INDEX = re.compile(rf".+\.(?P<suffix>safetensors|bin|h5|msgpack)\.index(?:\.{_SOME_VARIANT})?\.json\Z")
_CONSOLIDATED = re.compile(
    r"consolidated(?:\.[0-9]+|-[0-9]+-of-[0-9]+)?\.(?:safetensors|bin|pth|pt)\Z"
    r"|consolidated\.(?:safetensors|bin)\.index\.json\Z"
)
_PICKLED = frozenset({"bin", "pt", "pth", "ckpt", "pkl", "pickle", "joblib", "distcp", "ot"})
_OF_TRAINING = re.compile(
    r"(?:training_args\.bin|trainer_state\.json|(?:optimizer|scheduler|scaler)\.(?:pt|bin)|rng_state.*\.pth)\Z"
)
_TRAINING_FOLDER = re.compile(r"(?:checkpoint|step|global_step)-?[0-9]+\Z")


@dataclass(frozen=True, slots=True)
class WeightName:
    """What the name of a weight file, or of an index of some, says.

    Attributes:
        stem: "model", "adapter_model", ….
        variant: as in `model.fp16.safetensors`, or None.
        is_numbered: it is one of several shards.
        is_index: it is no weight file, but says which file each tensor is in.
        suffix: "safetensors", or "bin" of pickles; an index has that of its files.
    """

    stem: str
    variant: str | None
    is_numbered: bool
    is_index: bool
    suffix: str


def parse_weight_name(name: str) -> WeightName | None:
    """What `name` (no folder) says; None where it is no usual name of weights, or names two variants."""
    match = _WEIGHTS.match(name)
    if match is None or match["suffix"] not in _SUFFIXES_OF[match["stem"]]:
        return None
    variants = [variant for variant in (match["before"], match["after"], match["of_index"]) if variant]
    if len(variants) > 1:
        return None
    return WeightName(
        match["stem"],
        variants[0] if variants else None,
        is_numbered=match["number"] is not None,
        is_index=match["index"] is not None,
        suffix=match["suffix"],
    )


def check_variant(variant: str | None) -> None:
    """Refuse a variant that cannot stand in a file name, or that would be read as a shard's number.

    Raises:
        FormatError: it has other characters than letters, digits and `_`, with `.` and `-` between them.
    """
    if variant is not None and (not _VARIANT.match(variant) or _LIKE_A_NUMBER.search(variant)):
        raise FormatError(f"the variant {variant!r} must be letters, digits, '_', '.' and '-', as in 'fp16'")


def shard_name(number: int, count: int, *, variant: str | None = None, stem: str = MODEL_STEM) -> str:
    """Name of shard `number` (from 1) of `count`; a lone shard has no number."""
    stem = f"{stem}.{variant}" if variant else stem
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors"


def index_name(variant: str | None = None, *, stem: str = MODEL_STEM) -> str:
    """Name of the index of `variant`, as we write it."""
    return index_names(variant, stem=stem)[0]


def index_names(variant: str | None = None, *, stem: str = MODEL_STEM) -> tuple[str, ...]:
    """Names that the index of `variant` may have, the usual one first."""
    if variant is None:
        return (f"{stem}.safetensors.index.json",)
    return (f"{stem}.safetensors.index.{variant}.json", f"{stem}.{variant}.safetensors.index.json")


def variant_of(name: str) -> str | None:
    """The variant that the weight or index file `name` belongs to; None for the plain one, and for other files."""
    found = parse_weight_name(name)
    return found.variant if found is not None else None


def stem_of(name: str) -> str | None:
    """The stem of the safetensors file, or index of some, `name` (no folder); None where it is none of the usual."""
    found = parse_weight_name(name)
    return found.stem if found is not None and found.suffix == "safetensors" else None


def is_weight_file(name: str, *, variant: str | None, stem: str = MODEL_STEM) -> bool:
    """Whether `name` (no folder) is a weight file or index of `stem` and `variant`: what a publish of those replaces.

    These are `model*.safetensors`, `pytorch_model*.bin`, their indexes, and for the plain variant `consolidated*`; of
    another stem, its safetensors and pickles (`adapter_model.bin`) and their indexes. Files of other variants and
    stems, optimizer states and whatever lies in a folder are never among them.
    """
    found = parse_weight_name(name)
    if found is not None:
        return found.variant == variant and (found.stem == stem or {found.stem, stem} == _OF_MODEL)
    return stem == MODEL_STEM and variant is None and is_consolidated(name)


def is_one_file(stem: str) -> bool:
    """Whether weights of `stem` are never cut into shards: peft reads one file, and no index."""
    return stem == ADAPTER_STEM


def is_consolidated(name: str) -> bool:
    """Whether `name` (no folder) is of the layout `consolidated*`, which some repos hold beside the usual one."""
    return _CONSOLIDATED.match(name) is not None


def is_numbered(name: str) -> bool:
    """Whether `name` is that of one of several shards, whatever stands before the number."""
    return _NUMBERED.search(name) is not None


def shard_set(name: str) -> str | None:
    """What the names of all shards of one checkpoint have in common; None where `name` has no number."""
    found = _NUMBERED.search(name)
    return None if found is None else f"{name[: found.start()]}-of-{found['count']}{name[found.end() :]}"


def indexed_suffix(name: str) -> str | None:
    """The suffix of the files that the index `name` is of, whatever they are called; None where it is no index."""
    match = _INDEX.match(name)
    return None if match is None else match["suffix"]


def is_pickled(name: str) -> bool:
    """Whether the suffix of `name` is one of torch.save, pickle or joblib: reading such a file runs code in it."""
    return name.rpartition(".")[2].lower() in _PICKLED


def is_of_training(name: str) -> bool:
    """Whether `name` (no folder) is a file that a trainer keeps to go on from, such as `optimizer.pt`."""
    return _OF_TRAINING.match(name) is not None


def is_training_folder(name: str) -> bool:
    """Whether a folder of this name is that of one step of a training run, such as `checkpoint-500`."""
    return _TRAINING_FOLDER.match(name) is not None
