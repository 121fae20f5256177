"""Which weights of a folder are its checkpoint, where those of several loaders lie side by side: its configs tell."""

from __future__ import annotations

from collections.abc import Mapping

from hubshard.names import ADAPTER_STEM, stem_of
from hubshard.paths import path_in
from hubshard.protocols import Entry, Reader, Revision
from hubshard.sources.model_config import ADAPTER_CONFIG, CONFIG, read_config, stem_for

__all__ = ["stem_by_config"]


def stem_by_config(store: Reader, at: Revision, entries: Mapping[str, Entry], folder: str) -> str | None:
    """The stem that the loader of a folder looks for; None where its weights have but one, or no config tells.

    That is the one its `config.json` is for, or without such a file `adapter_model` if there is an
    `adapter_config.json`. A folder with both is a model with an adapter beside it.

    Args:
        store: where it lies.
        at: the revision to read.
        entries: the files of the revision, by path.
        folder: from the root, without a slash at its end; "" is the root.

    Raises:
        FormatError: its config is no JSON object, or too large to be one; names it.
    """
    prefix = path_in(folder, "")
    here = {path.removeprefix(prefix) for path in entries if path.startswith(prefix)}
    if len({stem_of(name) for name in here if "/" not in name} - {None}) < 2:
        return None
    if CONFIG not in here:
        return ADAPTER_STEM if ADAPTER_CONFIG in here else None
    return stem_for(read_config(store, at, entries[prefix + CONFIG]))
