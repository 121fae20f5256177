"""What ranks tell each other, as canonical JSON: values, and errors, which stay what they are. No torch.

Nothing of it is code, or names code to be run, as a pickle does: of classes, the dataclasses and errors of hubshard are
made anew, and no others.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from hubshard import errors
from hubshard.errors import FormatError, HubshardError, StoreError
from hubshard.steps.canonical import decode, encode
from hubshard.steps.step import Step
from hubshard.steps.step_json import decode_step, encode_step

__all__ = ["error_of", "plain_error", "told_bytes", "told_value"]

_PACKAGE = "hubshard"
_TAG = "told"


def told_bytes(value: object) -> bytes:
    """The bytes of a value.

    Args:
        value: such as `canonical.encode` takes, or in lists, tuples and dicts: dataclasses of hubshard whose fields are
            such, its errors, and arrays of integers. A `Step` goes as its manifest, which is small.

    Raises:
        FormatError: it is not such.
    """
    return encode(_plain(value), path="what is told to other ranks")


def told_value(raw: bytes) -> Any:
    """The value of some bytes.

    Raises:
        FormatError: they are not such as `told_bytes` makes.
    """
    return _value(decode(raw, path="what another rank tells"))


def plain_error(error: BaseException, rank: int | None = None) -> dict[str, Any]:
    """An error as plain data.

    Args:
        error: any; of one that is not ours, class and text are told.
        rank: that it comes from, for the message; None where that says nothing.
    """
    kinds = _kinds()
    kind = next((cls.__name__ for cls in type(error).__mro__ if kinds.get(cls.__name__) is cls), "")
    message = error.message if isinstance(error, HubshardError) else f"{type(error).__name__}: {error}"
    if rank is not None and not message.startswith("rank "):
        message = f"rank {rank}: {message}"
    hint = error.hint if isinstance(error, HubshardError) else None
    return {
        "type": kind,
        "message": _valid(message),
        "hint": None if hint is None else _valid(hint),
        "retryable": isinstance(error, StoreError) and error.retryable,
    }


def error_of(plain: Mapping[str, Any]) -> HubshardError:
    """What `plain_error` made, as an error of the same class; errors that are not ours become `StoreError`."""
    kind = _kinds().get(plain["type"], StoreError)
    if issubclass(kind, StoreError):
        return kind(plain["message"], hint=plain["hint"], retryable=plain["retryable"])
    return kind(plain["message"], hint=plain["hint"])


def _kinds() -> dict[str, type[HubshardError]]:
    """The classes of errors that can be made anew, by name: those that are made as the ones in `errors` are."""
    found: dict[str, type[HubshardError]] = {}
    rest: list[type[HubshardError]] = [HubshardError]
    while rest:
        kind = rest.pop()
        if kind.__module__ == errors.__name__ or (_is_ours(kind) and "__init__" not in vars(kind)):
            found[kind.__name__] = kind
            rest += kind.__subclasses__()
    return found


def _valid(text: str) -> str:
    # the name of a file may hold bytes that are no Unicode
    return text.encode("utf-8", "backslashreplace").decode()


# Values as plain data, and back


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(map(_plain, value))
    if kind is dict:
        table = {key: _plain(item) for key, item in value.items()}
        return {_TAG: ["dict", table]} if _TAG in table else table
    tagged = _tagged(value, kind)
    return value if tagged is None else {_TAG: tagged}


def _tagged(value: Any, kind: type[Any]) -> list[Any] | None:
    if kind is array:
        return ["array", value.typecode, value.tobytes()]
    if isinstance(value, HubshardError):
        return ["error", plain_error(value)]
    if kind is Step:
        return ["step", encode_step(value)]
    if is_dataclass(kind) and _is_ours(kind):
        facts = {each.name: _plain(getattr(value, each.name)) for each in fields(kind)}
        return ["data", kind.__module__, kind.__name__, facts]
    return None


def _value(plain: Any) -> Any:
    kind = type(plain)
    if kind is list or kind is tuple:
        return kind(map(_value, plain))
    if kind is not dict:
        return plain
    return _made(*plain[_TAG]) if _TAG in plain else _table(plain)


def _made(what: str, *rest: Any) -> Any:
    if what == "array":
        return array(*rest)
    if what == "error":
        return error_of(rest[0])
    if what == "step":
        return decode_step(*rest, path="a step that another rank tells")
    if what == "data":
        module, name, facts = rest
        return _dataclass(module, name)(**_table(facts))
    return _table(rest[0])


def _table(plain: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: _value(item) for key, item in plain.items()}


def _dataclass(module: str, name: str) -> type[Any]:
    # what is told is expected by whoever is told it, so the module was imported
    kind = getattr(sys.modules.get(module), name, None)
    if not isinstance(kind, type) or not is_dataclass(kind) or not _is_ours(kind):
        raise FormatError(f"another rank tells a {module}.{name}", hint="run the same version of hubshard on all ranks")
    return kind


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == _PACKAGE
