"""Nested states taken apart into tensors and what is none, and put together again.

What is no tensor becomes one value of canonical JSON, in which `{"$tensor": name}` stands for each tensor. A dict of
the state whose only key is "$tensor" is wrapped into another one, so that nothing is mistaken for a tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hubshard.errors import FormatError
from hubshard.steps.canonical import MAX_DEPTH, encode

__all__ = ["assign", "fill", "join", "split", "tensor_names"]

_MARK = "$tensor"
_DICTS = (dict, OrderedDict)
_Tensors = dict[str, torch.Tensor]


def split(tree: object, *, path: str) -> tuple[object, _Tensors]:
    """A state as a value of canonical JSON and the tensors by name: the keys that lead to them, joined by dots.

    Args:
        tree: tensors in dicts, lists and tuples, and what canonical JSON stores.
        path: what it is called in errors.

    Raises:
        FormatError: something in it cannot be stored: names its path and type.
    """
    tensors: _Tensors = {}
    value = _split(tree, (), tensors, path)
    encode(value, path=path)
    return value, tensors


def _split(tree: object, keys: tuple[object, ...], tensors: _Tensors, path: str) -> object:
    if len(keys) >= MAX_DEPTH:
        raise FormatError(f"{path}: nested deeper than {MAX_DEPTH} levels", hint="does it contain itself?")
    if isinstance(tree, torch.Tensor):
        if tree.is_nested:
            where = ".".join([path, *map(str, keys)])
            raise FormatError(f"{where}: a nested tensor cannot be stored", hint="store its parts, from unbind()")
        name = ".".join(map(str, keys)) or "value"
        while name in tensors:  # keys that hold dots, or that are equal as text
            name += "'"
        tensors[name] = tree
        return {_MARK: name}
    kind = type(tree)
    if kind in _DICTS and isinstance(tree, dict):
        table = kind((key, _split(item, (*keys, key), tensors, path)) for key, item in tree.items())
        return {_MARK: table} if table.keys() == {_MARK} else table
    if kind in (list, tuple) and isinstance(tree, list | tuple):
        return kind(_split(item, (*keys, number), tensors, path) for number, item in enumerate(tree))
    return tree


def join(value: object, tensors: Mapping[str, torch.Tensor], *, path: str) -> Any:
    """The state that was taken apart.

    Raises:
        FormatError: a tensor is missing.
    """

    def tensor(name: str) -> torch.Tensor:
        if name not in tensors:
            raise FormatError(
                f"{path}: the state to be loaded lacks the tensor {name!r}",
                hint="load into what prepare_load() gives, as ResumeBranch.restore does",
            )
        return tensors[name]

    return _mapped(value, tensor)


def _mapped(value: Any, tensor: Callable[[str], object]) -> object:
    kind = type(value)
    if kind in _DICTS and isinstance(value, dict):
        if value.keys() == {_MARK}:
            marked = value[_MARK]
            if isinstance(marked, str):
                return tensor(marked)
            value, kind = marked, type(marked)  # one that was wrapped
        return kind((key, _mapped(item, tensor)) for key, item in value.items())
    if kind in (list, tuple) and isinstance(value, list | tuple):
        return kind(_mapped(item, tensor) for item in value)
    return value


def tensor_names(value: object) -> Iterator[str]:
    """The names of the tensors that a value stands for."""
    names: list[str] = []
    _mapped(value, names.append)
    return iter(names)


def fill(live: torch.Tensor | None, loaded: torch.Tensor) -> torch.Tensor:
    """The tensor of the run with what was loaded, the same object where it fits; copies nothing onto itself."""
    if live is None or live.shape != loaded.shape or live.dtype != loaded.dtype:
        return loaded
    with torch.no_grad():
        live.copy_(loaded)
    return live


def assign(old: Any, new: Any) -> Any:
    """The new value, within the old dict or list where both are one, so that who holds it sees it."""
    if type(old) is type(new) and isinstance(old, _DICTS):
        merged = {key: assign(old.get(key), item) for key, item in new.items()}
        old.clear()
        old.update(merged)
        return old
    if type(old) is type(new) is list:
        old[:] = new
        return old
    return new
