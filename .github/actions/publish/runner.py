"""What the runner gives to a step and takes from it: inputs, outputs, annotations, the summary."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

__all__ = ["ActionError", "annotate", "fail", "mask", "plain", "quietly", "set_outputs", "summarise"]

_SHOWN = "error", "warning", "notice"
_MAX_CHARACTERS = 2000


class ActionError(Exception):
    """What is wrong and what to do about it, in one or two sentences for the person who reads the job's log."""


def set_outputs(values: Mapping[str, str]) -> None:
    """Give outputs to the steps that follow.

    Each value stands between two lines that nobody can guess, so that no value can pass for another output.
    """
    with Path(os.environ["GITHUB_OUTPUT"]).open("a", encoding="utf-8", newline="\n") as file:
        for name, value in values.items():
            mark = f"end-{secrets.token_hex(16)}"
            file.write(f"{name}<<{mark}\n{value}\n{mark}\n")


def annotate(kind: str, text: str) -> None:
    """Say something that is shown on the run's page: an error, a warning or a notice."""
    if kind not in _SHOWN:
        raise ValueError(kind)
    print(f"::{kind} title=hubshard::{_escaped(text[:_MAX_CHARACTERS])}", flush=True)


def mask(secret: str) -> None:
    """Have the runner hide a secret wherever it is printed."""
    print(f"::add-mask::{_escaped(secret)}", flush=True)


def _escaped(text: str) -> str:
    # https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def fail(error: ActionError) -> NoReturn:
    """Say what is wrong, and end the step."""
    annotate("error", str(error))
    sys.exit(1)


@contextmanager
def quietly() -> Iterator[None]:
    """What is printed meanwhile is no command to the runner, whatever it says."""
    word = secrets.token_hex(16)
    print(f"::stop-commands::{word}", flush=True)
    try:
        yield
    finally:
        print(f"::{word}::", flush=True)


def plain(text: object, *, most: int = 300) -> str:
    """Text that Markdown and HTML show as it is, in one line: nothing in it is markup, a link or a mention."""
    line = "".join(character if character.isprintable() else " " for character in str(text))
    line = line if len(line) <= most else line[: most - 1] + "…"
    return "".join(c if c.isalnum() or c == " " or ord(c) > 127 else f"&#{ord(c)};" for c in line)


def summarise(text: str) -> None:
    """Append Markdown to the summary of the run."""
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    if place:
        with Path(place).open("a", encoding="utf-8", newline="\n") as file:
            file.write(text)
