"""What Windows lacks or does in another way, written once: types are checked for it as well."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["KILLED", "fork", "kill_group", "make_pipe", "open_terminal", "posix_only"]

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="signals, forks, links, pipes or modes of POSIX")

KILLED = 9 if sys.platform == "win32" else -9
"""The exit status of a process that has ended itself by ``os.kill(os.getpid(), 9)``."""


def fork() -> int:
    """Fork this process: 0 in the child, the number of the child here."""
    child = -1
    if sys.platform != "win32":
        child = os.fork()
    return child


def kill_group(leader: int) -> None:
    """Kill a process and all that it has started."""
    if sys.platform != "win32":
        os.killpg(leader, 9)


def open_terminal() -> tuple[int, int]:
    """Two descriptors of a pseudo-terminal: the side that shows, and the one that a program writes to."""
    ends = (-1, -1)
    if sys.platform != "win32":
        ends = os.openpty()
    return ends


def make_pipe(path: Path) -> None:
    """Make a named pipe."""
    if sys.platform != "win32":
        os.mkfifo(path)
