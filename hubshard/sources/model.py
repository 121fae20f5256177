"""A model in memory, taken apart: the tensors to store, and the small files that go with them.

What a model of transformers, diffusers or peft gives is what its `save_pretrained` would write, key by key and byte by
byte, but nothing is written to disk besides small files in a temporary directory.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hubshard.errors import FormatError
from hubshard.messages import named
from hubshard.names import ADAPTER_STEM, DIFFUSERS_STEM, MODEL_STEM
from hubshard.sources.card import model_card
from hubshard.sources.dtypes import CASTABLE, parse_float_dtype
from hubshard.sources.model_config import CONFIG
from hubshard.sources.packed import logical_parameters
from hubshard.sources.state_dict import StateDictSource, check_values

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModelParts", "Whole", "parts_of"]

_MAX_FILE_BYTES = 256 * 2**20
# the attribute that holds the model, by class and package
_WRAPPERS = {
    ("torch", "OptimizedModule"): "_orig_mod",
    ("torch", "DistributedDataParallel"): "module",
    ("torch", "DataParallel"): "module",
    ("deepspeed", "DeepSpeedEngine"): "module",
}
_COMPILED = "_orig_mod."
# what a pipeline may have as components with weights, and what else holds some
_LOADABLE = (
    ("transformers.modeling_utils", "PreTrainedModel"),
    ("diffusers.models.modeling_utils", "ModelMixin"),
)
_OTHERS_WITH_WEIGHTS = (
    ("torch.nn.modules.module", "Module"),
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline"),
    ("diffusers.pipelines.onnx_utils", "OnnxRuntimeModel"),
)

Whole = Callable[[dict[str, Any]], dict[str, Any]]
"""Makes the state dict of a whole model of that of one process."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What is published of an object.

    Attributes:
        state_dict: tensors by the names they are stored under; tied names share their tensor.
        keep: of tied names, those that are stored.
        files: further files by path.
        default_files: files for a repo that lacks them, such as a model card.
        metadata: for the header of every shard.
        total_parameters: as the index tells; None to count what is stored.
        stem: of the names of the weight files.
        folders: parts that lie in folders of their own, by folder: further adapters, the components of a pipeline.
    """

    state_dict: Mapping[str, Any] = field(default_factory=dict)
    keep: frozenset[str] = frozenset()
    files: Mapping[str, bytes] = field(default_factory=dict)
    default_files: Mapping[str, bytes] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    total_parameters: int | None = None
    stem: str = MODEL_STEM
    folders: Mapping[str, ModelParts] = field(default_factory=dict)


def parts_of(obj: Any, *companions: Any, dtype: str | None = None, whole: Whole | None = None) -> ModelParts:
    """Take a model apart.

    Args:
        obj: an `nn.Module`, bare or within torch.compile or DistributedDataParallel; a model of transformers or
            diffusers; one of peft, whose adapters alone are meant; a pipeline of diffusers; or a tokenizer, processor
            or config of transformers, which has no tensors.
        companions: tokenizers, processors or configs whose files go along.
        dtype: what the weights will be cast to, so that the config tells it; nothing is cast here.
        whole: makes the state dict of the whole model of that of this process, where it holds but a part.

    Raises:
        FormatError: an object of another kind, a model that cannot be stored as it stands, or two companions with
            different files of one name.
    """
    parts = _parts(_unwrapped(obj), dtype, whole)
    files = dict(parts.files)
    for companion in companions:
        for path, data in _files_of(companion).items():
            if files.setdefault(path, data) != data:
                raise FormatError(f"{path}: {type(companion).__name__} writes another one than what it goes along with")
    return replace(parts, files=files)


def _parts(model: Any, dtype: str | None, whole: Whole | None) -> ModelParts:
    if _is_a(model, "transformers.modeling_utils", "PreTrainedModel"):
        return _transformers_parts(model, None if dtype is None else CASTABLE[parse_float_dtype(dtype)], whole)
    if _is_a(model, "peft.peft_model", "PeftModel"):
        return _adapter_parts(model, whole)
    if _is_a(model, "diffusers.models.modeling_utils", "ModelMixin"):
        return _diffusers_parts(model, whole)
    if _is_a(model, "diffusers.pipelines.pipeline_utils", "DiffusionPipeline"):
        return _pipeline_parts(model, dtype)
    if _is_a(model, "torch.nn.modules.module", "Module"):
        return _module_parts(model, whole)
    return ModelParts(files=_files_of(model))


def _is_a(obj: Any, module: str, name: str) -> bool:
    # by name, so that neither torch nor transformers is imported to look at something else
    return any((cls.__module__, cls.__name__) == (module, name) for cls in type(obj).__mro__)


def _unwrapped(obj: Any) -> Any:
    while attribute := _WRAPPERS.get((_package(obj), type(obj).__name__)):
        obj = getattr(obj, attribute)
    kind = type(obj)
    if kind.__name__ == "FullyShardedDataParallel":
        raise FormatError(
            "the model is wrapped in FullyShardedDataParallel, and each rank holds a part",
            hint="gather it with get_model_state_dict (full_state_dict=True), and give the state dict",
        )
    is_adapter = _is_a(obj, "peft.peft_model", "PeftModel")
    if _is_a(obj, "peft.mixed_model", "PeftMixedModel"):
        raise FormatError(
            f"{kind.__name__} holds adapters of several kinds, which have no form of their own on disk",
            hint="merge them into the weights with its merge_and_unload, and publish the model that gives",
        )
    if not is_adapter and (_package(obj) == "peft" or getattr(obj, "_hf_peft_config_loaded", False)):
        raise FormatError(
            f"{kind.__name__} has a PEFT adapter loaded",
            hint="merge it into the weights, or publish the directory that its save_pretrained writes the adapter to",
        )
    return obj


def _package(obj: Any) -> str:
    return type(obj).__module__.partition(".")[0]


def _module_parts(module: nn.Module, whole: Whole | None) -> ModelParts:
    state_dict = _state_dict(module, whole)
    check_values(state_dict)  # a parameter that is not initialised yet cannot be counted
    total = sum(parameter.numel() for parameter in module.parameters())
    card = model_card(_class_name(module), library="pytorch", parameters=total)
    files_of: Any = getattr(module, "hubshard_files", dict)  # ShardedHubMixin has it
    return ModelParts(state_dict, files=files_of(), default_files={"README.md": card}, total_parameters=total)


def _class_name(module: nn.Module) -> str:
    # fully_shard derives a class of its own from that of the module
    bases = type(module).__bases__
    return bases[1].__name__ if bases[0].__name__ == "FSDPModule" and len(bases) > 1 else type(module).__name__


def _state_dict(module: nn.Module, whole: Whole | None) -> dict[str, Any]:
    split = [name for name, parameter in module.named_parameters() if hasattr(parameter, "ds_tensor")]
    if split:
        raise FormatError(
            f"{type(module).__name__}: DeepSpeed ZeRO-3 holds {split[0]!r} and {len(split) - 1} more in parts",
            hint="gather them (deepspeed.zero.GatheredParameters), or convert its checkpoint",
        )
    _refuse_placeholders(module)
    # submodules that were compiled on their own carry the name of their wrapper
    state_dict = module.state_dict()
    renamed = {name.replace(_COMPILED, ""): value for name, value in state_dict.items()}
    if len(renamed) != len(state_dict):
        raise FormatError(f"{type(module).__name__}: two names differ only by the {_COMPILED!r} of a compiled module")
    return renamed if whole is None else whole(renamed)


def _refuse_placeholders(module: nn.Module) -> None:
    # hooks of group offloading in diffusers 0.34 and newer (hooks/group_offloading.py)
    for name, part in module.named_modules():
        hooks: Any = getattr(part, "_diffusers_hook", None)
        hook = None if hooks is None else hooks.get_hook("group_offloading")
        if hook is not None and getattr(hook.group, "offload_to_disk_path", None) is not None:
            raise FormatError(
                f"{type(module).__name__}: group offloading keeps the tensors of {name or 'the module'!r} on disk, and "
                "placeholders in their place",
                hint="publish it without `offload_to_disk_path`, or before `enable_group_offload`",
            )


def _transformers_parts(model: Any, dtype: str | None, whole: Whole | None) -> ModelParts:
    from hubshard.sources.transformers_model import weights_of, write_files  # noqa: PLC0415  # imports transformers

    state_dict, keep, metadata = weights_of(model, _state_dict(model, whole), is_whole=whole is not None)
    files = _written(lambda folder: write_files(model, folder, dtype=dtype))
    specs = StateDictSource(state_dict, keep=keep).specs()
    total = logical_parameters(specs, json.loads(files[CONFIG]))
    total = model.num_parameters() if total is None else total
    tags = [str(tag) for tag in getattr(model, "model_tags", None) or ()]
    card = model_card(_class_name(model), library="transformers", parameters=total, tags=tags)
    return ModelParts(state_dict, keep, files, {"README.md": card}, metadata, total)


def _adapter_parts(model: Any, whole: Whole | None) -> ModelParts:
    from hubshard.sources.peft_model import adapters_of, base_model_of  # noqa: PLC0415  # imports peft

    folders = {}
    for folder, adapter in adapters_of(model, _state_dict(model, whole)).items():
        files = _written(adapter.write_config)
        folders[folder] = ModelParts(adapter.state_dict, files=files, stem=ADAPTER_STEM)
    total = sum(value.numel() for parts in folders.values() for value in parts.state_dict.values())
    card = model_card(_class_name(model), library="peft", parameters=total, base_model=base_model_of(model))
    root = folders.pop("", ModelParts(stem=ADAPTER_STEM))
    return replace(root, default_files={"README.md": card}, folders=folders)


def _diffusers_parts(model: Any, whole: Whole | None) -> ModelParts:
    if not hasattr(model, "save_config"):
        raise _from_memory(model, "write it")
    if getattr(model, "hf_quantizer", None) is not None:
        raise FormatError(
            f"{type(model).__name__} is quantized", hint="write it with its save_pretrained, and publish the directory"
        )
    state_dict = _state_dict(model, whole)
    files = _written(model.save_config)
    name = _class_name(model)
    if name != type(model).__name__:  # save_config tells the name of the class that fully_shard has derived
        config = json.loads(files[CONFIG]) | {"_class_name": name}
        files[CONFIG] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    total = sum(parameter.numel() for parameter in model.parameters())
    card = model_card(name, library="diffusers", parameters=total)
    return ModelParts(
        state_dict,
        files=files,
        default_files={"README.md": card},
        total_parameters=total,
        stem=DIFFUSERS_STEM,
    )


def _pipeline_parts(pipeline: Any, dtype: str | None) -> ModelParts:
    """The components, each in a folder of its name, as `save_pretrained` of a pipeline lays them out."""
    folders = {}
    for name, component in pipeline.components.items():
        if component is not None:
            with named(name):
                folders[name] = replace(_component_parts(_unwrapped(component), dtype), default_files={})
    total = sum(parts.total_parameters or 0 for parts in folders.values())
    card = model_card(type(pipeline).__name__, library="diffusers", parameters=total)
    return ModelParts(files=_written(pipeline.save_config), default_files={"README.md": card}, folders=folders)


def _component_parts(component: Any, dtype: str | None) -> ModelParts:
    is_bare = _is_a(component, *_LOADABLE[1]) and not hasattr(component, "save_config")  # such as MultiControlNetModel
    if any(_is_a(component, *loadable) for loadable in _LOADABLE) and not is_bare:
        return _parts(component, dtype, None)
    others = (_is_a(component, *other) for other in _OTHERS_WITH_WEIGHTS)
    if any(others) or not hasattr(component, "save_pretrained"):
        raise _from_memory(component, "write the pipeline")
    return ModelParts(files=_written(component.save_pretrained))


def _from_memory(model: Any, way_out: str) -> FormatError:
    return FormatError(
        f"a {type(model).__name__} cannot be published from memory",
        hint=f"{way_out} with its save_pretrained, and publish the directory",
    )


def _files_of(obj: Any) -> dict[str, bytes]:
    """What a tokenizer, processor or config writes."""
    if not _is_a(obj, "transformers.utils.hub", "PushToHubMixin") or _is_a(
        obj, "transformers.modeling_utils", "PreTrainedModel"
    ):
        raise FormatError(
            f"a {type(obj).__name__} cannot be published",
            hint="give a directory, a state dict, an nn.Module, a pipeline of diffusers, or a tokenizer or processor",
        )
    return _written(obj.save_pretrained)


def _written(write: Callable[[Path], object]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="hubshard-") as folder:
        root = Path(folder)
        write(root)
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        return {path.relative_to(root).as_posix(): _small(path) for path in paths}


def _small(path: Path) -> bytes:
    nbytes = path.stat().st_size
    if nbytes > _MAX_FILE_BYTES:
        raise FormatError(f"{path.name} has {nbytes} bytes, too many for a file that goes along with a model")
    return path.read_bytes()
