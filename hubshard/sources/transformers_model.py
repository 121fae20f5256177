"""What `save_pretrained` of a transformers model writes, found without writing the weights.

Follows `PreTrainedModel.save_pretrained` of transformers 5 (modeling_utils.py). Imports transformers: import this
module only where a model of it is at hand.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from hubshard.errors import FormatError
from hubshard.plan import natural_key
from hubshard.sources.state_dict import StateDictSource
from hubshard.sources.torch_value import TorchValue

__all__ = ["Weights", "weights_of", "write_files"]


class Weights(NamedTuple):
    """Tensors by the names they are stored under, which of the tied names to store, and metadata of the headers."""

    state_dict: Mapping[str, Any]
    keep: frozenset[str]
    metadata: Mapping[str, str]


def weights_of(model: Any, state_dict: dict[str, Any], *, is_whole: bool = False) -> Weights:
    """The tensors of `model` as checkpoints of its kind hold them.

    Conversions that transformers applied when it loaded the model, such as the fusion of experts, are reverted. Where
    that only splits or moves axes, the tensors are views of the model's own.

    Args:
        model: a `PreTrainedModel`.
        state_dict: its own.
        is_whole: the state dict is of the whole model, although this process may hold but a part.

    Raises:
        FormatError: its kind of quantisation, or its parallelism, cannot be saved.
    """
    quantized, metadata = _quantized(model, is_whole=is_whole)
    state_dict = dict(state_dict if quantized is None else quantized)
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state_dict.pop(name, None)
    StateDictSource(state_dict)  # refuses by name what cannot be stored
    kept_of = _tied(state_dict, _tied_patterns(model))
    stored = {name: value for name, value in state_dict.items() if kept_of.get(name, name) == name}
    reverted = _reverted(model, stored)
    # an alias keeps its meaning only where the conversion renamed nothing
    if reverted.keys() == stored.keys():
        reverted |= {alias: reverted[kept] for alias, kept in kept_of.items() if reverted[kept] is stored[kept]}
    return Weights(reverted, frozenset(kept_of.values()) & reverted.keys(), metadata)


def write_files(model: Any, folder: Path, *, dtype: str | None) -> None:
    """Write the config, the generation config and the code of a custom model into `folder`.

    Args:
        model: a `PreTrainedModel`; it stays as it is.
        folder: is there already.
        dtype: torch name of the dtype that the config is to tell; None for that of the weights.
    """
    config = copy.deepcopy(model.config)
    config.dtype = dtype or str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if getattr(model, "_auto_class", None) is not None:
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _reverted(model: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
    if getattr(model, "hf_quantizer", None) is not None:
        return dict(revert_weight_conversion(model, dict(stored)))
    inputs = {name: tensor.as_subclass(_InPlace) for name, tensor in stored.items()}
    originals = {id(inputs[name]): tensor for name, tensor in stored.items()}
    reverted = revert_weight_conversion(model, dict(inputs))
    return {
        name: originals[id(tensor)] if id(tensor) in originals else tensor.as_subclass(torch.Tensor)
        for name, tensor in reverted.items()
    }


class _InPlace(torch.Tensor):
    """A tensor that is not copied to be made contiguous, since its reader does that block by block.

    transformers calls `contiguous` on each part of a fused tensor, which would hold a second copy of most of a model.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous and len(args) == 1 and not kwargs:
            return args[0]
        if func is torch.Tensor.view and all(isinstance(size, (int, tuple)) for size in args[1:]) and not kwargs:
            func = torch.Tensor.reshape  # what was to be contiguous need not be now
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch has no types here


def _quantized(model: Any, *, is_whole: bool) -> tuple[Mapping[str, Any] | None, Mapping[str, str]]:
    if getattr(model, "_tp_size", None) is not None and not is_whole:
        raise FormatError(
            f"{type(model).__name__} is split over {model._tp_size} ranks by tensor parallelism",  # noqa: SLF001  # there is no public one
            hint="call it on all of these ranks, or load the model on one device",
        )
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return None, {}
    if is_whole:
        raise FormatError(
            f"{type(model).__name__} is quantized and split over several ranks",
            hint="publish the model before quantisation, or load it on one device",
        )
    if not quantizer.is_serializable():
        method = getattr(quantizer.quantization_config, "quant_method", "unknown")
        method = getattr(method, "value", method)
        raise FormatError(
            f"{type(model).__name__} is quantized with {method}, which transformers cannot save",
            hint="publish the model before quantisation, or dequantize it",
        )
    state_dict, metadata = quantizer.get_state_dict_and_metadata(model)
    return state_dict, {key: str(value) for key, value in metadata.items() if key != "format"}


def _tied_patterns(model: Any) -> Collection[str]:
    # names that a model of this class ties to another one, and therefore does not expect in a file
    return [
        f"{prefix}.{pattern}" if prefix else pattern
        for prefix, module in model.named_modules()
        for pattern in getattr(module, "_tied_weights_keys", None) or ()
    ]


def _tied(state_dict: Mapping[str, Any], patterns: Collection[str]) -> dict[str, str]:
    """Every name of a group of tied tensors, and which name of it is stored: the one the model expects in a file."""
    groups: dict[Hashable, list[str]] = {}
    for name, value in state_dict.items():
        identity = TorchValue(name, value, None).identity
        if identity is not None:
            groups.setdefault(identity, []).append(name)
    kept_of: dict[str, str] = {}
    for names in groups.values():
        if len(names) > 1:
            expected = [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]
            kept = min(expected, key=lambda name: (natural_key(name), name)) if expected else max(names)
            kept_of |= dict.fromkeys(names, kept)
    return kept_of
