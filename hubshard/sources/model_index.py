"""`model_index.json`: of which components a pipeline of diffusers is made, each in a folder of its name.

The format is that of diffusers (https://huggingface.co/docs/diffusers/main/en/using-diffusers/loading): an object that
gives each component a library and a class, and further settings of other kinds; a component that is null is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from hubshard.protocols import Entry, Reader, Revision
from hubshard.sources.model_config import CONFIG, read_config

__all__ = ["MODEL_INDEX", "component_names", "components_of", "models_among", "without_folder"]

MODEL_INDEX = "model_index.json"
_CONFIGS_WITHOUT_WEIGHTS = ("scheduler_config.json", "tokenizer_config.json", "preprocessor_config.json")


def component_names(store: Reader, at: Revision, entries: Sequence[Entry]) -> Sequence[str]:
    """The components that the pipeline in the root names; none where there is no pipeline.

    Args:
        store: where it lies.
        at: the revision to read.
        entries: all files of that revision.

    Raises:
        FormatError: its `model_index.json` is no JSON object, or too large to be one.
        StoreError: it cannot be read.
    """
    entry = next((entry for entry in entries if entry.path == MODEL_INDEX), None)
    if entry is None:
        return ()
    return components_of(read_config(store, at, entry))


def components_of(table: Mapping[str, object]) -> Sequence[str]:
    """The components that a decoded `model_index.json` names."""
    return [name for name, value in table.items() if not name.startswith("_") and _is_component(value)]


def without_folder(names: Iterable[str], paths: Iterable[str]) -> Sequence[str]:
    """The components, of those named, that have no folder among the files `paths`."""
    folders = {path.partition("/")[0] for path in paths if "/" in path}
    return [name for name in names if name not in folders]


def models_among(names: Iterable[str], paths: Collection[str]) -> Sequence[str]:
    """The components, of those named, that should have weights: schedulers, tokenizers and the like have none."""
    return [
        name
        for name in names
        if f"{name}/{CONFIG}" in paths and not any(f"{name}/{file}" in paths for file in _CONFIGS_WITHOUT_WEIGHTS)
    ]


def _is_component(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
