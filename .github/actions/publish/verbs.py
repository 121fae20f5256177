"""Running hubshard's command line."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from runner import ActionError, quietly

__all__ = ["run_hubshard"]

_LAST_LINES = 40


def run_hubshard(*arguments: str) -> dict[str, Any]:
    """Run a verb of hubshard with `--json`; its progress goes to the log.

    Args:
        arguments: of the command line. Options are written `--name=value`, so that no value passes for another option.

    Returns:
        What it printed.

    Raises:
        ActionError: it failed; with its own words.
    """
    # -I: nothing in the workspace or in PYTHONPATH passes for hubshard or for what it imports
    command = [sys.executable, "-I", "-X", "utf8", "-m", "hubshard", *arguments]
    with quietly():
        print("hubshard", shlex.join(arguments), flush=True)
        started = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
        )
        said: list[str] = []
        reader = threading.Thread(target=_copy, args=(started.stderr, said))
        reader.start()
        printed = started.stdout.read() if started.stdout else ""
        status = started.wait()
        reader.join()
    if status != 0:
        raise ActionError(_reason(arguments[0], status, said, printed))
    found = json.loads(printed)
    return found if isinstance(found, dict) else {}


def _copy(lines: IO[str] | None, into: list[str]) -> None:
    for line in lines or ():
        print(line.rstrip("\n"), flush=True)  # where the lines stand that keep it from being a command
        into.append(line.strip())
        del into[:-_LAST_LINES]


def _reason(verb: str, status: int, said: Sequence[str], printed: str) -> str:
    words = [line for line in said if line.startswith(("Error: ", "Hint: "))]
    if verb == "verify" and printed.strip():
        problems = json.loads(printed).get("problems", [])
        words = [f"{problem.get('path')}: {problem.get('what')}" for problem in problems[:5]]
    return f"hubshard {verb} ended with status {status}: " + (
        "; ".join(words) or " ".join(said[-3:]) or "no reason given"
    )
