"""Canonical JSON: everything in a training state that is no tensor, exactly, in one way only, and without any code.

What JSON has is JSON: None, booleans, text, lists, finite floats (the shortest digits that give the same float back),
integers below 2**53 and objects whose keys are text. All else is an object with one key, its tag:

| value | JSON |
|---|---|
| an integer from 2**53 | `{"int": "0x20000000000000"}` |
| an infinity or NaN | `{"float": "inf"}`, `"-inf"`, `"nan"`; another NaN than the usual by its bits, `"nan:fff8..."` |
| bytes, bytearray | `{"bytes": base64}`, `{"bytearray": base64}` |
| tuple | `{"tuple": [...]}` |
| set, frozenset | `{"set": [...]}`, `{"frozenset": [...]}`, sorted by their items' JSON |
| OrderedDict | `{"ordereddict": [[key, value], ...]}`, in its order |
| Counter | `{"counter": [[key, value], ...]}`, sorted by the keys' JSON |
| a dict with other keys than text, or with a tag as its only key | `{"dict": [[key, value], ...]}`, sorted likewise |

Objects are sorted by key, there is no white space, and all is ASCII. So equal values give equal bytes, and
`encode(decode(raw)) == raw`. The order of a plain dict is not kept: equality does not know it either.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hubshard.errors import FormatError

__all__ = ["MAX_DEPTH", "decode", "encode"]

MAX_DEPTH = 100
"""Levels of containers within containers that are stored and read."""

_EXACT = 2**53  # integers below are exact in every JSON reader
_NAN = 0x7FF8000000000000
_HEX = re.compile(r"-?0x[1-9a-f][0-9a-f]*\Z")
_NAN_BITS = re.compile(r"nan:[7f]ff[0-9a-f]{13}\Z")
_SCALARS = (bool, type(None))


def encode(value: object, *, path: str = "the value") -> bytes:
    """The canonical JSON of a value.

    Args:
        value: of the types in the table above, exactly; of their subclasses only numpy's float64 is taken, as a float.
        path: what the value is called in errors.

    Raises:
        FormatError: something in it cannot be stored: names its path and type.
    """
    return _dumps(_to_json(value, path, 0)).encode("ascii")


def decode(raw: bytes, *, path: str) -> Any:
    """The value of some canonical JSON.

    Args:
        raw: the JSON.
        path: named in errors.

    Raises:
        FormatError: no JSON, or not such as `encode` writes.
    """
    try:
        # digits are counted: no float, and no integer that `encode` writes, has more
        return json.loads(raw.decode("ascii"), object_pairs_hook=_from_object, parse_constant=_refuse, parse_int=_int)
    except (ValueError, RecursionError, TypeError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise FormatError(
            f"{path}: this is no canonical JSON: {reason}", hint="it is damaged: fetch it again"
        ) from error


def _dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


# To JSON


def _to_json(value: Any, path: str, depth: int) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is int:
        return value if -_EXACT < value < _EXACT else {"int": hex(value)}
    if kind is float or (isinstance(value, float) and kind.__module__ == "numpy"):
        return _float_to_json(float(value))
    if kind is str:
        return _text(value, path)
    if depth >= MAX_DEPTH:
        raise FormatError(f"{path}: nested deeper than {MAX_DEPTH} levels", hint="does it contain itself?")
    to_json = _CONTAINERS.get(kind)
    if to_json is None:
        raise FormatError(f"{path}: {_named(kind)} cannot be stored", hint=_hint_for(value, kind))
    return to_json(value, path, depth + 1)


def _float_to_json(value: float) -> Any:
    if math.isfinite(value):
        return value
    if math.isinf(value):
        return {"float": "inf" if value > 0 else "-inf"}
    (bits,) = struct.unpack("<Q", struct.pack("<d", value))
    return {"float": "nan" if bits == _NAN else f"nan:{bits:016x}"}


def _text(value: str, path: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise FormatError(f"{path}: {value[:50]!r} is no valid Unicode", hint="store it as bytes") from error
    return value


def _list_to_json(value: Sequence[Any], path: str, depth: int) -> list[Any]:
    if _is_all_small(value):
        return list(value)
    return [_to_json(item, f"{path}[{number}]", depth) for number, item in enumerate(value)]


def _is_all_small(value: Sequence[Any]) -> bool:
    # long lists of integers, such as permutations, are checked at the speed of C
    return {*map(type, value)} == {int} and min(value) > -_EXACT and max(value) < _EXACT


def _set_to_json(value: Iterable[Any], path: str, depth: int) -> list[Any]:
    return sorted((_to_json(item, f"{path}{{{_brief(item)}}}", depth) for item in value), key=_dumps)


def _dict_to_json(value: Mapping[Any, Any], path: str, depth: int) -> Any:
    if not {*map(type, value)} <= {str} or (len(value) == 1 and next(iter(value)) in _TAGS):
        return {"dict": _pairs_to_json(value, path, depth, sort=True)}
    return {_text(key, f"a key of {path}"): _to_json(item, f"{path}.{key}", depth) for key, item in value.items()}


def _pairs_to_json(value: Mapping[Any, Any], path: str, depth: int, *, sort: bool) -> list[Any]:
    pairs = [
        [_to_json(key, f"the key {_brief(key)} of {path}", depth), _to_json(item, f"{path}[{_brief(key)}]", depth)]
        for key, item in value.items()
    ]
    return sorted(pairs, key=lambda pair: _dumps(pair[0])) if sort else pairs


_CONTAINERS: Mapping[type, Callable[[Any, str, int], Any]] = {
    list: _list_to_json,
    tuple: lambda value, path, depth: {"tuple": _list_to_json(value, path, depth)},
    dict: _dict_to_json,
    OrderedDict: lambda value, path, depth: {"ordereddict": _pairs_to_json(value, path, depth, sort=False)},
    Counter: lambda value, path, depth: {"counter": _pairs_to_json(value, path, depth, sort=True)},
    set: lambda value, path, depth: {"set": _set_to_json(value, path, depth)},
    frozenset: lambda value, path, depth: {"frozenset": _set_to_json(value, path, depth)},
    bytes: lambda value, _path, _depth: {"bytes": base64.b64encode(value).decode("ascii")},
    bytearray: lambda value, _path, _depth: {"bytearray": base64.b64encode(value).decode("ascii")},
}


def _named(kind: type) -> str:
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _hint_for(value: object, kind: type) -> str:
    if kind.__module__.split(".")[0] == "torch" and hasattr(value, "get_state"):
        return "store what its get_state() gives"
    if kind.__module__.split(".")[0] == "torch" and hasattr(value, "untyped_storage"):
        return "tensors are stored where they stand in dicts or lists, not in tuples, sets or objects"
    if kind.__module__.split(".")[0] == "numpy":
        return "make it a tensor with torch.from_numpy, or a Python number with .item()"
    base = next((base for base in kind.__mro__[1:] if base in _CONTAINERS or base in {int, str, float}), None)
    if base is not None:
        return f"make it a plain {base.__name__}"
    return "leave it out of the state, or turn it into numbers, text, lists and dicts"


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 50 else f"{text[:50]}..."


# From JSON


def _from_object(pairs: Sequence[tuple[str, Any]]) -> Any:
    if len(pairs) == 1 and pairs[0][0] in _TAGS:
        return _TAGS[pairs[0][0]](pairs[0][1])
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return table


def _int(digits: str) -> int:
    if len(digits) > 17 or digits == "-0" or abs(int(digits)) >= _EXACT:
        raise ValueError(f"{digits[:40]} should have been written in hexadecimal, with its tag")
    return int(digits)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _big_int(value: Any) -> int:
    if not isinstance(value, str) or not _HEX.match(value) or abs(int(value, 16)) < _EXACT:
        raise ValueError("an integer that is not written as it should be")
    return int(value, 16)


def _special_float(value: Any) -> float:
    if value in {"inf", "-inf", "nan"}:
        return float(value)
    if not isinstance(value, str) or not _NAN_BITS.match(value):
        raise ValueError("a float that is not written as it should be")
    (number,) = struct.unpack("<d", struct.pack("<Q", int(value[4:], 16)))
    if not math.isnan(number) or int(value[4:], 16) == _NAN:
        raise ValueError("a NaN that is not written as it should be")
    return float(number)


def _bytes(value: Any) -> bytes:
    return base64.b64decode(value, validate=True)


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a container that is no list")  # noqa: TRY004  # it is the JSON that is wrong
    return value


def _pairs(value: Any) -> dict[Any, Any]:
    table = {key: item for key, item in map(_items, _items(value))}  # noqa: C416  # dict() would take text as pairs
    if len(table) != len(value):
        raise ValueError("a key stands twice in one dict")
    return table


def _distinct(value: Any) -> frozenset[Any]:
    found = frozenset(_items(value))
    if len(found) != len(value):
        raise ValueError("an item stands twice in one set")
    return found


_TAGS: Mapping[str, Callable[[Any], Any]] = {
    "int": _big_int,
    "float": _special_float,
    "bytes": _bytes,
    "bytearray": lambda value: bytearray(_bytes(value)),
    "tuple": lambda value: tuple(_items(value)),
    "set": lambda value: set(_distinct(value)),
    "frozenset": _distinct,
    "ordereddict": lambda value: OrderedDict(_pairs(value)),
    "counter": lambda value: Counter(_pairs(value)),
    "dict": _pairs,
}
