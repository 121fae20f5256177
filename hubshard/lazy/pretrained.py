"""transformers' own loading, fed from an open checkpoint: what is downloaded is what is used.

`SomeModel.from_pretrained(None, config=…, state_dict=checkpoint)` keeps all that transformers does with weights: key
conversion, device maps, tensor parallelism, quantisation. What that call does not know, because it is given no name, is
put back here: the generation config, the name, custom generation code and adapters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hubshard.errors import FormatError, NotFoundError
from hubshard.events import OnEvent, Operation, ignore, operation
from hubshard.extras import needing
from hubshard.lazy.adapters import Adapter, find_adapter
from hubshard.lazy.checkpoint import Checkpoint
from hubshard.lazy.opening import opened
from hubshard.lazy.steps import WhichStep
from hubshard.messages import brief
from hubshard.paths import check_plain_path, path_in
from hubshard.protocols import Source
from hubshard.readers import read_bytes
from hubshard.sources.model_config import ADAPTER_CONFIG, CONFIG, MAX_CONFIG_BYTES, config_of
from hubshard.store.local import LocalStore
from hubshard.target import RepoTarget, parse_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["from_pretrained"]

_GENERATION_CONFIG = "generation_config.json"
_DIFFUSERS = "_diffusers_version"
_NO_NAME = "None"  # what transformers calls a model that is given no name
_MAPS_THAT_MAY_USE_DISK = {"auto", "balanced", "balanced_low_0", "sequential"}


@needing("building a model of transformers")
def from_pretrained(
    source: str | os.PathLike[str] | Source | Checkpoint,
    *,
    model_class: type[Any] | None = None,
    device_map: Any = None,
    dtype: Any = "auto",
    revision: str | None = None,
    step: WhichStep | None = None,
    variant: str | None = None,
    subfolder: str = "",
    token: str | bool | None = None,
    endpoint: str | None = None,
    trust_remote_code: bool = False,
    on_event: OnEvent = ignore,
    **kw: Any,
) -> PreTrainedModel:
    """Load a transformers model; of a repo, only the config and the bytes of the weights that are used are fetched.

    Index and headers are checked against each other before the model is built.

    Args:
        source: what `open_checkpoint` takes, or an open checkpoint, which stays open. A `Source` without files needs
            `config`. Where an adapter lies there, and peft is installed, its model is loaded with it, as transformers
            does.
        model_class: a model class, or one of the Auto classes; None for the first of the config's architectures.
        device_map: as transformers takes it, "auto" and "disk" included.
        dtype: "auto" for the config's, or else the stored one; else a torch dtype or its name.
        revision: branch, tag or commit of a repo.
        step: load the model of a saved training step, as `open_checkpoint` takes it; the config is that of the repo's
            main, or of the folder that holds the steps, or `config`.
        variant: as in `model.fp16.safetensors`.
        subfolder: of the repo or directory, where the checkpoint is.
        token: for the Hub.
        endpoint: of the Hub.
        trust_remote_code: run the model's own code, where it has some.
        on_event: is told of each step.
        **kw: what else the class's `from_pretrained` takes.

    Raises:
        NotFoundError: no such checkpoint, or no config.
        FormatError: index and shards do not agree, or no class can be told from the config.
    """
    called = os.fspath(source) if isinstance(source, (str, os.PathLike)) else ""
    where: dict[str, Any] = {"revision": revision, "subfolder": subfolder, "token": token, "endpoint": endpoint}
    options: dict[str, Any] = {"model_class": model_class, "variant": variant, "trust_remote_code": trust_remote_code}
    kw |= {"device_map": device_map, "dtype": dtype}
    name, adapter_kwargs = kw.get("adapter_name", "default"), kw.get("adapter_kwargs")
    with operation("load", called, on_event) as op:
        adapter = None if step is not None else find_adapter(source, **where)
        if adapter and adapter.base is not None:
            source, where = adapter.base, where | {"revision": None, "subfolder": ""}
        loaded: Any = _load(source, where | {"step": step}, kw, op, **options)
        if adapter:
            _adapt(loaded[0] if isinstance(loaded, tuple) else loaded, adapter, name, adapter_kwargs)
        op.end()
    model: PreTrainedModel = loaded
    return model


def _load(
    source: Any,
    where: Mapping[str, Any],
    kw: dict[str, Any],
    op: Operation,
    *,
    model_class: type[Any] | None,
    variant: str | None,
    trust_remote_code: bool,
) -> Any:
    with ExitStack() as stack:
        checkpoint = stack.enter_context(opened(source, variant=variant, on_event=op, **where))
        op.start(checkpoint.nbytes)
        folder = stack.enter_context(_small_files(checkpoint, with_code=trust_remote_code))
        home = _Home(folder, _name(source, checkpoint), _config(folder), trust_remote_code=trust_remote_code)
        _check_disk(checkpoint, home, kw)
        if _needs_files(checkpoint, home, kw["device_map"]):
            loaded = _from_files(checkpoint, home, model_class, variant, kw)
            op.tell("received", nbytes=checkpoint.nbytes)
            return loaded
        told = checkpoint.told(partial(op.tell, "received", ""))
        return _from_mapping(told, home, model_class, kw)


def _adapt(model: Any, adapter: Adapter, name: str, adapter_kwargs: Any) -> None:
    if name not in getattr(model, "peft_config", {}):  # where the files are local, transformers may have done it
        with adapter.folder() as folder:
            model.load_adapter(str(folder), adapter_name=name, adapter_kwargs=adapter_kwargs)


@dataclass(frozen=True, slots=True)
class _Home:
    # the model's small files: where they are, the name that the model gets, and what config.json says
    folder: Path | None
    name: str
    config: Mapping[str, Any]
    trust_remote_code: bool


def _name(source: Any, checkpoint: Checkpoint) -> str:
    # what transformers would call the model: the path as given, or the repo
    if not isinstance(source, (str, os.PathLike)):
        return str(checkpoint.root or "")
    target = parse_target(source if isinstance(source, str) else Path(source))
    return target.repo_id if isinstance(target, RepoTarget) else os.fspath(source)


def _from_mapping(checkpoint: Checkpoint, home: _Home, model_class: type[Any] | None, kw: dict[str, Any]) -> Any:
    config = kw.pop("config", None)
    if config is None and not (home.folder and (home.folder / CONFIG).is_file()):
        raise NotFoundError(f"{home.name or 'this source'} has no {CONFIG}", hint="pass config=")
    loader = _class(home, config, model_class)
    if _is_auto(loader):
        config, kw = _auto_config(home, config, kw)
        loader, config = _concrete(loader, config)
    loaded = loader.from_pretrained(
        None,
        config=str(home.folder) if config is None else config,
        state_dict=checkpoint,
        trust_remote_code=home.trust_remote_code,
        **kw,
    )
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if checkpoint.mapped:  # from several threads: transformers leaves them to come one by one when they are touched
        checkpoint.mapped.populate_within(model.parameters(), workers=checkpoint.reader.policy.workers)
    _put_back(model, home, kw)
    return loaded


def _from_files(
    checkpoint: Checkpoint, home: _Home, model_class: type[Any] | None, variant: str | None, kw: dict[str, Any]
) -> Any:
    # the weights stay where they are and are read again later, or the quantizer reads the headers itself
    if home.folder is None or not isinstance(checkpoint.store, LocalStore):
        raise FormatError(
            f"{home.name}: this quantization or device map needs the files on this machine",
            hint="fetch them first (hubshard pull), or leave it out",
        )
    loader = _class(home, kw.get("config"), model_class)
    loaded = loader.from_pretrained(
        str(home.folder), variant=variant, trust_remote_code=home.trust_remote_code, use_safetensors=True, **kw
    )
    _set_name(loaded[0] if isinstance(loaded, tuple) else loaded, home.name, instead_of=str(home.folder))
    return loaded


def _check_disk(checkpoint: Checkpoint, home: _Home, kw: Mapping[str, Any]) -> None:
    # what is to be on disk is written there, where the checkpoint is not
    device_map = kw["device_map"]
    to_disk = isinstance(device_map, Mapping) and "disk" in device_map.values()
    if to_disk and checkpoint.root is None and kw.get("offload_folder") is None:
        raise FormatError(
            f"{home.name}: parts of it are to be on disk, but it is not on this machine",
            hint="pass offload_folder= to have them written there, or fetch it first (hubshard pull)",
        )


def _needs_files(checkpoint: Checkpoint, home: _Home, device_map: Any) -> bool:
    if _table(home.config.get("quantization_config")).get("quant_method") == "torchao":
        return True
    local = isinstance(checkpoint.store, LocalStore)
    if isinstance(device_map, Mapping):
        return local and "disk" in device_map.values()
    return local and device_map in _MAPS_THAT_MAY_USE_DISK


def _class(home: _Home, config: Any, model_class: type[Any] | None) -> Any:
    of_diffusers = home.config.get("_class_name")
    if _DIFFUSERS in home.config and isinstance(of_diffusers, str):
        raise FormatError(
            f"{home.name}: its config is of {brief(of_diffusers)} of diffusers, and no model of transformers",
            hint="build it with its from_config, and fill it with hubshard.load_into",
        )
    auto_map = {key: ref for key, ref in _table(home.config.get("auto_map")).items() if isinstance(ref, str)}
    if model_class is not None:
        ref = auto_map.get(model_class.__name__) if _is_auto(model_class) else None
        return _remote_class(ref, home) if ref and home.trust_remote_code else model_class
    architectures = getattr(config, "architectures", None) or home.config.get("architectures")
    name = architectures[0] if isinstance(architectures, (list, tuple)) and architectures else None
    if not isinstance(name, str):
        raise FormatError(f"{home.name}: its config names no architecture", hint="pass model_class=")
    ref = next((ref for ref in auto_map.values() if ref.rpartition(".")[2] == name), None)
    if ref and home.trust_remote_code:
        return _remote_class(ref, home)
    import transformers  # noqa: PLC0415  # slow, and optional

    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        hint = "pass trust_remote_code=True to run its own code" if ref else "pass model_class=, or update transformers"
        raise FormatError(
            f"{home.name}: transformers {transformers.__version__} has no model class {brief(name)}", hint=hint
        )
    return found


def _remote_class(ref: str, home: _Home) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module  # noqa: PLC0415  # slow, and optional

    return get_class_from_dynamic_module(ref, str(home.folder))


def _is_auto(loader: Any) -> bool:
    return hasattr(loader, "_model_mapping")


def _auto_config(home: _Home, config: Any, kw: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    # an Auto class takes a config object; what it absorbs of the keyword arguments goes no further
    from transformers import AutoConfig  # noqa: PLC0415  # slow, and optional

    if config is not None and not isinstance(config, (str, os.PathLike)):
        return config, kw
    kept = {name: kw[name] for name in ("dtype", "device_map", "quantization_config") if name in kw}
    config, rest = AutoConfig.from_pretrained(
        str(home.folder if config is None else config),
        return_unused_kwargs=True,
        trust_remote_code=home.trust_remote_code,
        **{name: value for name, value in kw.items() if name not in kept},
    )
    return config, rest | kept


def _concrete(auto: Any, config: Any) -> tuple[Any, Any]:
    # an Auto class wants the name of a repo; what it would choose does not depend on one
    mapping = auto._model_mapping  # noqa: SLF001  # transformers offers no public way to it
    if type(config) not in mapping:
        raise FormatError(
            f"{auto.__name__} has no class for a {type(config).__name__}", hint="pass another model_class="
        )
    found = mapping[type(config)]
    if isinstance(found, (list, tuple)):
        names = config.architectures or []
        found = next((cls for cls in found if cls.__name__ in names), found[0])
    if config.sub_configs.get("text_config") is None or config.sub_configs["text_config"] != found.config_class:
        return found, config
    text = config.get_text_config()  # a text model of a model of several kinds
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    return found, text


def _put_back(model: Any, home: _Home, kw: Mapping[str, Any]) -> None:
    _set_name(model, home.name)
    if home.folder is None or not model.can_generate():
        return
    has_one = any((home.folder / name).is_file() for name in (_GENERATION_CONFIG, CONFIG))
    if has_one and kw.get("generation_config") is None:
        model.generation_config = _generation_config(home.folder, kw)
    if home.trust_remote_code and (home.folder / "custom_generate" / "generate.py").is_file():
        custom = model.load_custom_generate(str(home.folder), trust_remote_code=True)
        model.generate = partial(custom, model=model)


def _set_name(model: Any, name: str, *, instead_of: str = _NO_NAME) -> None:
    # parts of the model, and their configs, took the name from the model's config when they were built
    holders: list[Any] = [holder for module in model.modules() for holder in (module, getattr(module, "config", None))]
    for holder in holders:
        if getattr(holder, "name_or_path", None) == instead_of:
            holder.name_or_path = name


def _generation_config(folder: Path, kw: Mapping[str, Any]) -> Any:
    from transformers import GenerationConfig  # noqa: PLC0415  # slow, and optional

    known = vars(GenerationConfig.from_dict({}))
    given = {name: value for name, value in kw.items() if name in known}
    if (folder / _GENERATION_CONFIG).is_file():
        return GenerationConfig.from_pretrained(str(folder), **given)
    return GenerationConfig.from_pretrained(str(folder), config_file_name=CONFIG, _from_model_config=True, **given)


def _config(folder: Path | None) -> Mapping[str, Any]:
    if folder is None or not (folder / CONFIG).is_file():
        return {}
    return config_of((folder / CONFIG).read_bytes(), path=str(folder / CONFIG))


def _table(value: Any) -> Mapping[str, Any]:
    # what a config should have as an object, and may not
    return value if isinstance(value, Mapping) else {}


@contextmanager
def _small_files(checkpoint: Checkpoint, *, with_code: bool) -> Iterator[Path | None]:
    """A folder with the model's configs, and its code where that is to run: the checkpoint's own where it is local."""
    store, at, folder = checkpoint.store, checkpoint.at, checkpoint.folder
    if checkpoint.root is not None:
        yield checkpoint.root / folder
        return
    if store is None or at is None:
        yield None
        return
    prefix = path_in(folder, "")
    with TemporaryDirectory(prefix="hubshard-") as scratch:
        for entry in store.list(at):
            path = entry.path.removeprefix(prefix)
            wanted = _is_small_config(path) or (with_code and path.endswith(".py"))
            if entry.path.startswith(prefix) and wanted and entry.nbytes <= MAX_CONFIG_BYTES:
                check_plain_path(entry.path, path="the repo")
                target = Path(scratch) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(read_bytes(store, at, entry.path, 0, entry.nbytes))
        yield Path(scratch)


def _is_small_config(path: str) -> bool:
    return path in {CONFIG, _GENERATION_CONFIG, ADAPTER_CONFIG} or path.startswith("custom_generate/")
