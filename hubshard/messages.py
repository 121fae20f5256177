"""Names in messages: a line stays a line, however long they are, and however many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hubshard.errors import HubshardError

__all__ = ["brief", "counted", "hinted", "listed", "named", "one_line"]

_MOST_CHARACTERS = 200


def brief(text: str) -> str:
    """`text` in quotes, cut after 200 characters."""
    return repr(text) if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]!r}..."


@contextmanager
def named(place: str) -> Iterator[None]:
    """Errors of ours within name the place where they happen, such as the folder of a component; "" is none."""
    try:
        yield
    except HubshardError as error:
        error.add_place(place, known_by=place)
        raise


@contextmanager
def hinted(hint: str) -> Iterator[None]:
    """Errors of ours within that do not say what to do say this."""
    try:
        yield
    except HubshardError as error:
        if error.hint is None:
            error.add_hint(hint)
        raise


def one_line(text: str) -> str:
    """`text` for a terminal: no line breaks, and what it would obey rather than show is escaped."""
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def counted(number: int, what: str) -> str:
    """How many of something: "1 file", "2,000 files"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def listed(names: Sequence[str], *, most: int = 8) -> str:
    """The first `most` of `names`, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
