"""Long, regular columns of integers in few numbers: the offsets, sizes and places of the pieces of thousands of ranks.

Written as JSON, a column is a list of integers and of runs `[first, step, count]`. What sharding makes is a run or two
for thousands of ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, overload

from hubshard.errors import FormatError

__all__ = ["MAX_LENGTH", "Column"]

MAX_LENGTH = 2**24
"""Longest column that is read: a column of few characters must not fill the memory."""

_LARGEST = 2**63 - 1
_SHORTEST_RUN = 4

Run = tuple[int, int, int]
"""First value, step from one to the next, and how many."""


@dataclass(frozen=True)
class Column(Sequence[int]):
    """An immutable sequence of integers, kept as runs.

    Attributes:
        runs: one after the other; equal columns have equal runs.
    """

    runs: tuple[Run, ...]

    @classmethod
    def of(cls, values: Sequence[int]) -> Column:
        """The column of some values."""
        return cls(tuple(_runs_of(values)))

    @classmethod
    def from_json(cls, value: Any, *, path: str) -> Column:
        """Read what `to_json` wrote.

        Raises:
            FormatError: something else, negative values, or more than `MAX_LENGTH` of them; names `path`.
        """
        if not isinstance(value, list) or not all(map(_is_item, value)):
            raise FormatError(f"{path}: not a column of integers")
        column = cls(tuple((item, 0, 1) if isinstance(item, int) else (item[0], item[1], item[2]) for item in value))
        if len(column) > MAX_LENGTH:
            raise FormatError(f"{path}: a column of {len(column)} integers; at most {MAX_LENGTH} are read")
        return column

    def to_json(self) -> list[int | list[int]]:
        """A list of integers and of runs `[first, step, count]`."""
        table: list[int | list[int]] = []
        for first, step, count in self.runs:
            table.extend([first] if count == 1 else [[first, step, count]])
        return table

    @cached_property
    def _stops(self) -> list[int]:
        return list(accumulate(count for _, _, count in self.runs))

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            return list(self)[at]
        if not 0 <= at < len(self):
            raise IndexError(at)
        number = bisect_right(self._stops, at)
        first, step, count = self.runs[number]
        return first + step * (at - self._stops[number] + count)

    def __iter__(self) -> Iterator[int]:
        for first, step, count in self.runs:
            if step:
                yield from range(first, first + step * count, step)
            else:
                yield from [first] * count


def _runs_of(values: Sequence[int]) -> Iterator[Run]:
    values = list(values)
    position = 0
    while position < len(values):
        count, step = _regular(values) if position == 0 else (0, 0)
        if not count:
            count, step = _run_at(values, position)
        if count < _SHORTEST_RUN:
            yield values[position], 0, 1
            position += 1
        else:
            yield values[position], step, count
            position += count


def _regular(values: list[int]) -> tuple[int, int]:
    """Length and step of the run that is all of `values`, or all but an odd last, at the speed of C; else (0, 0)."""
    if len(values) <= _SHORTEST_RUN:
        return 0, 0
    first, step = values[0], values[1] - values[0]
    for count in (len(values), len(values) - 1):
        last = first + step * (count - 1)
        if values[count - 1] == last:
            regular = range(first, last + (1 if step > 0 else -1), step) if step else [first] * count
            if values[:count] == list(regular):
                return count, step
    return 0, 0


def _run_at(values: list[int], start: int) -> tuple[int, int]:
    """Length and step of the longest run that begins at `start`."""
    rest = len(values) - start
    if rest < _SHORTEST_RUN:
        return rest, 0
    step = values[start + 1] - values[start]
    count = 2
    while count < rest and values[start + count] - values[start + count - 1] == step:
        count += 1
    return count, step


def _is_item(item: Any) -> bool:
    if type(item) is int:
        return 0 <= item <= _LARGEST
    if not isinstance(item, list) or len(item) != 3 or {*map(type, item)} != {int}:
        return False
    first, step, count = item
    last: int = first + step * (count - 1)
    return bool(count > 1 and 0 <= first <= _LARGEST and 0 <= last <= _LARGEST)
