"""`ShardedHubMixin`: `save_pretrained`, `push_to_hub` and `from_pretrained` for any module, with shards.

The files are those of huggingface_hub's `ModelHubMixin`: `config.json` holds the arguments of `__init__`, the weights
are safetensors; either reads what the other wrote, as far as it is not sharded.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from hubshard.errors import FormatError
from hubshard.lazy import load_into, open_checkpoint
from hubshard.messages import named
from hubshard.names import check_variant
from hubshard.publish import Published, push_to_hub
from hubshard.publish.outgoing import Layout, Outgoing, from_memory
from hubshard.sizes import parse_size
from hubshard.sources.dtypes import parse_float_dtype
from hubshard.sources.model_config import CONFIG, config_of
from hubshard.store.local import LocalStore

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Self

__all__ = ["ShardedHubMixin"]


class ShardedHubMixin:
    """Gives a module what transformers models have: `class Net(nn.Module, ShardedHubMixin)`.

    The arguments of `__init__` are kept, and must be JSON values to be saved.
    """

    _init_arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the arguments of `__init__`."""
        module = super().__new__(cls)
        bound = inspect.signature(cls.__init__).bind(module, *args, **kwargs)
        bound.apply_defaults()
        given: dict[str, Any] = {}
        for (name, value), parameter in zip(bound.arguments.items(), bound.signature.parameters.values(), strict=True):
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= value
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                given[name] = value
        # past nn.Module, which takes no attributes before its own __init__
        object.__setattr__(module, "_init_arguments", dict(list(given.items())[1:]))
        return module

    def hubshard_files(self) -> Mapping[str, bytes]:
        """What is stored beside the weights.

        Raises:
            FormatError: an argument of `__init__` is no JSON value.
        """
        for name, value in self._init_arguments.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise FormatError(
                    f"{type(self).__name__}: the argument {name!r} is no JSON value ({error})",
                    hint="take plain values in __init__, and build from them",
                ) from error
        return {CONFIG: (json.dumps(self._init_arguments, indent=2, sort_keys=True) + "\n").encode()}

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        max_shard_size: int | str = "5GB",
        variant: str | None = None,
        dtype: Any = None,
    ) -> Path:
        """Write config and weights into a directory, which changes as a whole or not at all.

        Files that are there stay, but for weights of the same variant that the new index does not name.

        Args:
            save_directory: made if it does not exist.
            max_shard_size: bound per shard, header included: bytes, or as in "5GB".
            variant: as in `model.fp16.safetensors`.
            dtype: cast floating tensors to it.

        Raises:
            FormatError: something that cannot be stored, by name; nothing was written.
        """
        check_variant(variant)
        code = None if dtype is None else parse_float_dtype(dtype)
        outgoing = from_memory(self, Layout(parse_size(max_shard_size), variant, code))
        folder = Path(save_directory)
        _write(outgoing, folder)
        return folder

    def push_to_hub(self, repo_id: str, **options: Any) -> Published:
        """Publish config and weights in one commit; `options` are those of `hubshard.push_to_hub`."""
        return push_to_hub(self, repo_id, **options)

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        revision: str | None = None,
        variant: str | None = None,
        subfolder: str = "",
        token: str | bool | None = None,
        endpoint: str | None = None,
        device_map: Any = None,
        dtype: Any = None,
        strict: bool = True,
        **arguments: Any,
    ) -> Self:
        """Build the module from `config.json`, and load its weights; of a repo, nothing else is fetched.

        Args:
            source: a directory, `org/name[@revision]` or `hf://org/name[@revision]`.
            revision: branch, tag or commit of a repo.
            variant: as in `model.fp16.safetensors`.
            subfolder: of the repo or directory, where the checkpoint is.
            token: for the Hub.
            endpoint: of the Hub.
            device_map: a device, or one per prefix of names.
            dtype: floating parameters become this; None keeps what is stored.
            strict: anything missing, unexpected or mismatched is an error.
            **arguments: of `__init__`, which go before those in the config.

        Raises:
            NotFoundError: there is no such checkpoint.
            FormatError: it does not fit the module.
        """
        with open_checkpoint(
            source, revision=revision, variant=variant, subfolder=subfolder, token=token, endpoint=endpoint
        ) as checkpoint:
            with named(os.fspath(source)):
                told = _arguments(cls, checkpoint.read_file(CONFIG))
            module: Any = cls(**told | arguments)
            load_into(module, checkpoint, device_map=device_map, dtype=dtype, strict=strict, assign=True)
        loaded: nn.Module = module.eval()
        return loaded  # type: ignore[return-value]  # a module of this class


def _arguments(cls: type[Any], raw: bytes | None) -> dict[str, Any]:
    # a config that another tool wrote may say more than __init__ takes
    if raw is None:
        return {}
    config = config_of(raw)
    parameters = inspect.signature(cls.__init__).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return config
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in config.items() if name in names}


def _write(outgoing: Outgoing, folder: Path) -> None:
    store = LocalStore(folder)
    parent = store.head("main")
    there = {entry.path for entry in store.list(parent)} if parent else set()
    files = [file for file in outgoing.all_files if not (file.default and file.path in there)]
    staged = [store.stage("main", file.path, file.data, nbytes=file.nbytes) for file in files]
    new = {file.path for file in files}
    stale = [path for path in there - new if outgoing.replaces(path)]
    store.commit("main", parent=parent, add=staged, remove=sorted(stale), message="Save", publish_id=uuid4().hex)
