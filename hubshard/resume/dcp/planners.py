"""DCP's default planners, with canonical JSON where those pickle."""

from __future__ import annotations

import io
from collections.abc import Mapping, MutableMapping
from typing import Any, TypeGuard

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlanner as AnyLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner

from hubshard.errors import FormatError
from hubshard.steps.canonical import decode, encode
from hubshard.steps.step import TreePath

__all__ = ["LoadPlanner", "SavePlanner", "encoded_value", "has_default_placing", "place_value"]


class SavePlanner(DefaultSavePlanner):
    """DCP's `DefaultSavePlanner`, whose items that are no tensors become canonical JSON instead of pickles.

    What cannot be stored is refused, by its path, before anything is written.
    """

    def create_local_plan(self) -> SavePlan:
        """Plan what this rank would save.

        Raises:
            FormatError: an item cannot be stored.
        """
        plan = super().create_local_plan()
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                encode(self.lookup_object(item.index), path=item.index.fqn)
        return plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # the name is the base's
        """The canonical JSON of what is no tensor; all else as it is."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(encode(object, path=write_item.index.fqn))
        return object


class LoadPlanner(DefaultLoadPlanner):
    """DCP's `DefaultLoadPlanner` for what `SavePlanner` saved. It runs no code of the checkpoint."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put what is no tensor in its place in the state dict."""
        name = read_item.dest_index.fqn
        place_value(self, name, decode(value.read(), path=name))


def encoded_value(planner: AnySavePlanner, item: WriteItem) -> bytes:
    """The canonical JSON of an item that is no tensor, under any planner that does not pickle on its own account.

    Raises:
        FormatError: it cannot be stored, or the planner made something else of it.
    """
    name = item.index.fqn
    if isinstance(planner, DefaultSavePlanner) and _keeps(planner, DefaultSavePlanner, "transform_object"):
        return encode(planner.lookup_object(item.index), path=name)
    data = planner.resolve_data(item)
    raw = data.getvalue() if isinstance(data, io.BytesIO) else b""
    try:
        return encode(decode(raw, path=name), path=name)
    except FormatError as error:
        raise FormatError(
            f"{name}: the planner {type(planner).__name__} made no canonical JSON of it, perhaps a pickle",
            hint="derive it from hubshard.dcp.SavePlanner",
        ) from error


def place_value(planner: DefaultLoadPlanner, name: str, value: object) -> None:
    """Put a value where the default planner would: into the nested state dict that is being loaded."""
    if planner.flatten_state_dict:
        _set(planner.original_state_dict, planner.mappings[name], value)
    else:  # the planner's own may be a flattened copy, which the caller never sees
        planner.state_dict[name] = planner.original_state_dict[name] = value


def has_default_placing(planner: AnyLoadPlanner) -> TypeGuard[DefaultLoadPlanner]:
    """Whether a load planner puts values in their places as the default one does."""
    return isinstance(planner, DefaultLoadPlanner) and _keeps(planner, DefaultLoadPlanner, "load_bytes")


def _keeps(planner: object, base: type, method: str) -> bool:
    return getattr(type(planner), method) is getattr(base, method)


def _set(root: Any, path: TreePath, value: object) -> None:
    container = root
    for key in path[:-1]:
        container = container[_own_key(container, key)]
    container[_own_key(container, path[-1])] = value


def _own_key(container: MutableMapping[Any, Any] | list[Any], key: str | int) -> Any:
    # DCP flattens with str() of every key: an integer key must be found again, not joined by its text
    if isinstance(container, Mapping) and key not in container:
        return next((own for own in container if str(own) == key), key)
    return key
