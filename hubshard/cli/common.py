"""What the verbs share: options that read the same everywhere, Ctrl-C, JSON on stdout."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer

from hubshard.errors import StoreError
from hubshard.sizes import parse_size
from hubshard.watch import LimitError, Limits

__all__ = [
    "Events",
    "ExpectedHead",
    "Json",
    "MaxRetries",
    "MinRate",
    "Note",
    "Quiet",
    "RepoType",
    "Revision",
    "StallSeconds",
    "Subfolder",
    "Token",
    "Variant",
    "a_directory",
    "a_path",
    "can_show",
    "echo_json",
    "give_up",
    "interruptible",
    "limits_of",
    "showing",
]

P = ParamSpec("P")

_BEYOND_CODE_PAGES = "\N{GRINNING FACE}"  # only encodings of all of Unicode have it


class Kind(str, Enum):
    """Kinds of repos that hold checkpoints."""

    model = "model"


def a_path(text: str) -> Path:
    """A path that an option takes; an empty text, as of a variable that is not set, would be the current directory."""
    if not text.strip():
        raise typer.BadParameter("an empty text is no path: is a variable not set?")
    return Path(text)


def a_directory(text: str) -> Path:
    """The path of a directory, which may be missing."""
    path = a_path(text)
    if path.exists() and not path.is_dir():
        raise typer.BadParameter(f"{text!r} is a file, not a directory")
    return path


Revision = Annotated[str | None, typer.Option(metavar="REV", help="Branch, tag or commit; main where it is not given.")]
Variant = Annotated[str | None, typer.Option(metavar="NAME", help="As in model.fp16.safetensors.")]
Subfolder = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="The checkpoint of this folder alone, such as unet; '.' for that of the root."),
]
ExpectedHead = Annotated[str | None, typer.Option(metavar="COMMIT", help="Refuse unless the branch is at this commit.")]
Token = Annotated[
    str | None, typer.Option(metavar="TOKEN", help="A User Access Token; otherwise HF_TOKEN or `hf auth login`.")
]
RepoType = Annotated[Kind, typer.Option("--repo-type", help="Models only; taken for likeness to `hf`.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress and no notes, but warnings; stdout has the result only.")
]
Events = Annotated[
    Path | None,
    typer.Option("--events", parser=a_path, metavar="FILE", help="Append each event as a line of JSON."),
]

MaxRetries = Annotated[
    int | None,
    typer.Option(metavar="N", help="Give up, with exit status 3, after more retries than this in all.", min=0),
]
StallSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Give up, with exit status 3, when no byte was sent, received, or read for the first time for so long.",
    ),
]
MinRate = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Give up, with exit status 3, when fewer bytes a second are sent, received, or read, over a minute: 10MB.",
    ),
]


def limits_of(max_retries: int | None, stall_seconds: float | None, min_rate: str | None) -> Limits | None:
    """What the three options say; None where none is given."""
    if max_retries is None and stall_seconds is None and min_rate is None:
        return None
    return Limits(max_retries, stall_seconds, None if min_rate is None else parse_size(min_rate))


class Note:
    """What is left of a verb that ends early, and what to do, as it stands now; `str` of it is the sentence."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    def becomes(self, text: str) -> None:
        """The verb has come to where this is true instead."""
        self._text = text


def give_up(error: LimitError, note: str | Note) -> NoReturn:
    """End the process with exit status 3 and one line, whatever hangs in its threads."""
    _leave(f"Error: gave up: {error}: {note}", 3)


def interruptible(note: str | Note, *, at_once: bool = False) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Ctrl-C ends the verb with exit status 130 and one line.

    Args:
        note: what is left, and what to do.
        at_once: do not wait for what runs in threads. For verbs that a kill does not harm: they may hold gigabytes that
            are still to be sent.
    """

    def decorate(verb: Callable[P, None]) -> Callable[P, None]:
        @wraps(verb)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            before = signal.getsignal(signal.SIGINT)
            if before is not signal.SIG_IGN:  # as for what a script has started in the background
                leave = partial(_leave_at_once, note) if at_once else signal.default_int_handler
                signal.signal(signal.SIGINT, leave)
            try:
                verb(*args, **kwargs)
            except KeyboardInterrupt:
                typer.echo(f"\nInterrupted: {note}", err=True)
                raise typer.Exit(130) from None
            finally:
                signal.signal(signal.SIGINT, before or signal.default_int_handler)

        return run

    return decorate


@contextmanager
def showing(done: str) -> Iterator[None]:
    """Around what prints the result of a verb that has changed something: it is done, though nobody can be told.

    Args:
        done: what was done, in a sentence.

    Raises:
        StoreError: stdout takes nothing. Of a reader that has left, nothing is said, as everywhere.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        raise StoreError(
            f"{done}; only its result cannot be written to stdout: {error.strerror or error}",
            hint="there is no need to run it again",
        ) from error


def _leave_at_once(note: str | Note, *_: object) -> NoReturn:
    _leave(f"Interrupted: {note}", 130)


def _leave(line: str, status: int) -> NoReturn:
    # past Python's own buffer, which may be in use where the signal arrived
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    with suppress(OSError):
        os.write(2, f"{show_cursor}\n{line}\n".encode(errors="replace"))
    os._exit(status)


def echo_json(value: object) -> None:
    """Print `value` to stdout; dataclasses become objects, paths strings."""
    typer.echo(json.dumps(value, default=_plain, indent=2, ensure_ascii=not can_show(_BEYOND_CODE_PAGES)))


def can_show(text: str) -> bool:
    """Whether stdout takes `text` as it is, not as escapes: to files and pipes, Windows writes in a code page."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value)
