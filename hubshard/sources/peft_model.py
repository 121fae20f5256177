"""The adapters of a peft model, as its `save_pretrained` writes them, found without writing the weights.

Follows `PeftModel.save_pretrained` of peft 0.21 (peft_model.py). Imports peft: import this module only where a model of
it is at hand.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict

from hubshard.errors import FormatError
from hubshard.sources.state_dict import StateDictSource
from hubshard.target import check_repo_id

__all__ = ["Adapter", "adapters_of", "base_model_of"]

_DEFAULT = "default"  # the adapter that lies in the root


@dataclass(frozen=True)
class Adapter:
    """One adapter.

    Attributes:
        state_dict: its tensors, by the names in its file.
        config: a `PeftConfig` of its own.
        auto_mapping: which class the adapter stands on, where its task does not tell.
    """

    state_dict: Mapping[str, Any]
    config: Any
    auto_mapping: Mapping[str, str] | None

    def write_config(self, folder: Path) -> None:
        """Write `adapter_config.json`."""
        self.config.save_pretrained(folder, auto_mapping_dict=self.auto_mapping)


def adapters_of(model: Any, state_dict: dict[str, Any]) -> Mapping[str, Adapter]:
    """Every adapter by the folder that it lies in: "" of the one called "default", else its name.

    Args:
        model: a `PeftModel`; it stays as it is.
        state_dict: its own.

    Raises:
        FormatError: an adapter holds something that cannot be stored, or names no folder.
    """
    found = {}
    for name in model.peft_config:
        if "/" in name or not name:
            raise FormatError(f"the adapter {name!r} would lie in a folder of its name", hint="rename it")
        found["" if name == _DEFAULT else name] = _adapter(model, state_dict, name)
    return dict(sorted(found.items()))


def base_model_of(model: Any) -> str | None:
    """The repo of the model that the adapters stand on; None where the configs name none, or a folder."""
    for config in model.peft_config.values():
        name = config.base_model_name_or_path or _name_of_base(model, config)
        try:
            if isinstance(name, str) and not Path(name).exists():
                return check_repo_id(name)
        except FormatError:
            continue
    return None


def _adapter(model: Any, state_dict: dict[str, Any], name: str) -> Adapter:
    tensors = dict(get_peft_model_state_dict(model, state_dict=dict(state_dict), adapter_name=name))
    for alias in StateDictSource(tensors).aliases():  # peft knows no tied names in a file: each has a copy
        tensors[alias] = tensors[alias].clone()
    config = copy.copy(model.peft_config[name])  # its sets are written in their own order, which a deep copy changes
    config.base_model_name_or_path = config.base_model_name_or_path or _name_of_base(model, config)
    config.inference_mode = True
    return Adapter(tensors, config, _auto_mapping(model, config))


def _name_of_base(model: Any, config: Any) -> str | None:
    base = model.base_model if config.is_prompt_learning else model.base_model.model
    return vars(base).get("name_or_path") or None


def _auto_mapping(model: Any, config: Any) -> Mapping[str, str] | None:
    if config.task_type is not None:
        return None
    base: type = model._get_base_model_class(is_prompt_tuning=config.is_prompt_learning)  # noqa: SLF001  # no public one
    if base.__bases__[0].__name__ == "FSDPModule":  # fully_shard derives a class of its own
        base = base.__bases__[1]
    return {"base_model_class": base.__name__, "parent_library": base.__module__}
