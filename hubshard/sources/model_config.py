"""A model's `config.json`: what it tells of the weights, and how it changes with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hubshard.errors import FormatError
from hubshard.names import DIFFUSERS_STEM, MODEL_STEM
from hubshard.protocols import Entry, Reader, Revision
from hubshard.readers import read_bytes

__all__ = [
    "ADAPTER_CONFIG",
    "CONFIG",
    "MAX_CONFIG_BYTES",
    "config_of",
    "config_with_dtype",
    "read_config",
    "stem_for",
    "stem_told",
]

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 16 * 2**20
"""No config, generation config or code file of a model is larger."""

_WRONG = "it is damaged, or something else: correct it, or fetch it again"
_KEYS = ("dtype", "torch_dtype")  # older transformers wrote the second


def config_of(raw: bytes, *, path: str = CONFIG) -> dict[str, Any]:
    """The decoded config.

    Raises:
        FormatError: no JSON object; names `path`.
    """
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: the config is no valid JSON: {error}", hint=_WRONG) from error
    if not isinstance(config, dict):
        raise FormatError(f"{path}: the config is no JSON object", hint=_WRONG)
    return config


def read_config(store: Reader, at: Revision, entry: Entry) -> dict[str, Any]:
    """The decoded config that lies in a store.

    Raises:
        FormatError: no JSON object, or too large to be a config; names its path.
        StoreError: it cannot be read.
    """
    if entry.nbytes > MAX_CONFIG_BYTES:
        raise FormatError(f"{entry.path} has {entry.nbytes} bytes, too many for a config", hint=_WRONG)
    return config_of(read_bytes(store, at, entry.path, 0, entry.nbytes), path=entry.path)


def stem_told(config: Mapping[str, Any]) -> str | None:
    """The stem under which the loader that a `config.json` is for looks for weights; None where that is not clear.

    The configs of diffusers tell their class and the version that wrote them, those of transformers the type of model
    and its classes. Some models of diffusers have a `model_type` of their own.
    """
    of_diffusers = "_diffusers_version" in config or "_class_name" in config
    of_transformers = "architectures" in config or ("model_type" in config and "_diffusers_version" not in config)
    if of_diffusers == of_transformers:
        return None
    return DIFFUSERS_STEM if of_diffusers else MODEL_STEM


def stem_for(config: Mapping[str, Any]) -> str:
    """The stem that `stem_told` tells, or else that of transformers."""
    return stem_told(config) or MODEL_STEM


def config_with_dtype(raw: bytes, dtype: str, *, path: str = CONFIG) -> bytes:
    """The config with every dtype that it tells, its own and those of its parts, replaced.

    transformers loads weights in the dtype that the config tells, whatever dtype they are stored in.

    Args:
        raw: the bytes of the config.
        dtype: torch name, such as "bfloat16".
        path: named in errors.

    Returns:
        `raw` itself where it tells no other dtype.

    Raises:
        FormatError: no JSON object.
    """
    config = config_of(raw, path=path)
    changed = _replaced(config, dtype)
    if changed == config:
        return raw
    return (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def _replaced(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    changed = dict(config)
    for key, value in config.items():
        if key in _KEYS and isinstance(value, str):
            changed[key] = dtype
        # parts of a config are configs themselves, such as text_config; a quantisation speaks of other dtypes
        elif key.endswith("_config") and key != "quantization_config" and isinstance(value, dict):
            changed[key] = _replaced(value, dtype)
    return changed
