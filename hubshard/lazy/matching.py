"""Which stored tensor goes where in a module, and what does not fit. Pure: names, shapes and dtypes only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hubshard.errors import FormatError
from hubshard.messages import listed
from hubshard.sources.dtypes import CASTABLE
from hubshard.tensors import TensorSpec

__all__ = ["Match", "Mismatch", "Rename", "Slot", "match"]

Rename = Mapping[str, str] | Callable[[str], str | None]
"""Stored name to the module's name: a table of those that differ, or a function; None from it skips the tensor."""

_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter or buffer of a module.

    Attributes:
        names: all its names, in the module's order; tied parameters have several.
        shape: elements per dimension, as torch counts them.
        dtype: its safetensors code, or None where the format has none.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A stored tensor that does not fit where its name says.

    Attributes:
        name: in the module.
        stored_shape: elements per dimension in the checkpoint.
        stored_dtype: its safetensors code.
        shape: elements per dimension in the module.
        dtype: the module's code, or None where the format has none.
    """

    name: str
    stored_shape: tuple[int, ...]
    stored_dtype: str
    shape: tuple[int, ...]
    dtype: str | None

    def __str__(self) -> str:
        return f"{self.name} (stored {self.stored_dtype} {self.stored_shape}, wanted {self.dtype} {self.shape})"


@dataclass(frozen=True, slots=True)
class Match:
    """What goes where.

    Attributes:
        stored: per slot, the name of the stored tensor that fills it, or None.
        missing: the module's names that nothing fills.
        unexpected: stored names (those of `prefix` alone) that fill nothing.
        mismatched: what has another shape, or a dtype that is not cast to the module's.
    """

    stored: tuple[str | None, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]

    def check(self, *, hint: str = "correct prefix or rename, or pass strict=False to load what fits") -> None:
        """Raise where anything is missing, unexpected or mismatched.

        Args:
            hint: what to do about it.

        Raises:
            FormatError: says all three.
        """
        parts = [
            f"{len(names)} {kind}: {listed([str(name) for name in names], most=_SHOWN)}"
            for kind, names in (
                ("missing from the checkpoint", self.missing),
                ("unexpected in the checkpoint", self.unexpected),
                ("that do not fit", self.mismatched),
            )
            if names
        ]
        if parts:
            raise FormatError(f"the checkpoint does not fit the module; {'; '.join(parts)}", hint=hint)


def match(
    slots: Sequence[Slot],
    specs: Mapping[str, TensorSpec],
    aliases: Mapping[str, str],
    *,
    shape_of: Callable[[TensorSpec], tuple[int, ...]],
    prefix: str = "",
    rename: Rename | None = None,
) -> Match:
    """Find the stored tensor of each slot.

    A tied parameter is filled from the first of its names that is stored. A stored tensor with several names is
    expected as soon as one of them is.

    Args:
        slots: of the module.
        specs: the stored tensors by name.
        aliases: further names of them.
        shape_of: the shape that the module would give a stored tensor.
        prefix: only stored names that begin so are looked at, without it.
        rename: see `Rename`; it sees the names without the prefix.

    Raises:
        FormatError: two stored tensors get one name.
    """
    stored_as = _renamed([*specs, *aliases], aliases, prefix, rename)
    filled = [next((stored_as[name] for name in slot.names if name in stored_as), None) for slot in slots]
    known = {name for slot in slots for name in slot.names}
    expected = {stored for name, stored in stored_as.items() if name in known}
    mismatched = list(_mismatches(slots, filled, specs, shape_of))
    unfit = {mismatch.name for mismatch in mismatched}
    return Match(
        stored=tuple(None if slot.names[0] in unfit else name for slot, name in zip(slots, filled, strict=True)),
        missing=tuple(name for slot, found in zip(slots, filled, strict=True) if found is None for name in slot.names),
        unexpected=tuple(sorted({stored for stored in stored_as.values() if stored not in expected})),
        mismatched=tuple(mismatched),
    )


def _renamed(names: Sequence[str], aliases: Mapping[str, str], prefix: str, rename: Rename | None) -> Mapping[str, str]:
    """The module's name to the stored one."""
    table: dict[str, str] = {}
    for name in names:
        if not name.startswith(prefix):
            continue
        local: str | None = name.removeprefix(prefix)
        if rename is not None and local is not None:
            local = rename(local) if callable(rename) else rename.get(local, local)
        if local is None:
            continue
        stored = aliases.get(name, name)
        if table.setdefault(local, stored) != stored:
            raise FormatError(
                f"the tensors {table[local]!r} and {stored!r} would both be {local!r} in the module",
                hint="correct rename",
            )
    return table


def _mismatches(
    slots: Sequence[Slot],
    filled: Sequence[str | None],
    specs: Mapping[str, TensorSpec],
    shape_of: Callable[[TensorSpec], tuple[int, ...]],
) -> Iterator[Mismatch]:
    for slot, name in zip(slots, filled, strict=True):
        if name is None:
            continue
        spec = specs[name]
        # narrow floats and integers mean something else after a cast
        fits = spec.dtype == slot.dtype or (spec.dtype in CASTABLE and slot.dtype in CASTABLE)
        if shape_of(spec) != slot.shape or not fits:
            yield Mismatch(slot.names[0], shape_of(spec), spec.dtype, slot.shape, slot.dtype)
