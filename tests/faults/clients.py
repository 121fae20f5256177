"""Clients in processes of their own, to be killed: the other end of `forker.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.proxy import Answer, Exchange, Fault, Proxy
from tests.systems import KILLED

__all__ = ["Clients", "Ended", "Victim", "clients"]

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How a client ended, and the events that it told: kind, path, bytes."""

    status: int
    events: list[tuple[str, str, int]]

    @property
    def is_killed(self) -> bool:
        return self.status == KILLED

    def nbytes(self, kind: str) -> int:
        """Bytes that its events of a kind speak of."""
        return sum(nbytes for told, _, nbytes in self.events if told == kind)


class Victim:
    """A client that runs, or is about to."""

    def __init__(self) -> None:
        self._known = threading.Event()
        self._pid = 0

    def is_(self, pid: int) -> None:
        """Tell who it is."""
        self._pid = pid
        self._known.set()

    def kill(self) -> None:
        """End it now, whatever it does."""
        self._known.wait(60)
        with suppress(ProcessLookupError):
            os.kill(self._pid, 9)

    def dies_at(self, proxy: Proxy, pattern: str, number: int, *, when: str) -> None:
        """Have it die at the request of that number (from 1) which a proxy gets of a kind, "before" or "after" it."""
        proxy.fail(pattern, *[Exchange.done] * (number - 1), self.before() if when == "before" else self.after())

    def before(self) -> Fault:
        """It dies, and the request is never done."""

        def fault(_: Exchange) -> Answer:
            self.kill()
            return Answer(0)

        return fault

    def after(self) -> Fault:
        """It dies when the request is done, and never hears of it."""

        def fault(exchange: Exchange) -> Answer:
            exchange.forward()
            self.kill()
            return Answer(0)

        return fault


class Clients:
    """Runs clients one after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self, do: str, home: Path, *, victim: Victim | None = None, then: Callable[[], object] | None = None, **job: Any
    ) -> Ended:
        """Run one client to its end.

        Args:
            do: "push" or "pull".
            home: its HF_HOME.
            victim: told which process it is.
            then: called when it has begun.
            job: `arguments`, and `die_at_event` or `die_at_step`.
        """
        (home / "tmp").mkdir(parents=True, exist_ok=True)
        self._write(json.dumps({"do": do, "home": str(home), **job}))
        pid = int(self._read())
        if victim is not None:
            victim.is_(pid)
        self._write("go")
        if then is not None:
            then()
        ended = json.loads(self._read())
        return Ended(ended["status"], [tuple(event) for event in ended["events"]])

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextmanager
def clients(env: dict[str, str]) -> Iterator[Clients]:
    """A program that forks them.

    Args:
        env: of the program: that of a Hub's clients.
    """
    command = [sys.executable, str(Path(__file__).with_name("forker.py"))]
    path = os.pathsep.join([str(_ROOT), *filter(None, [env.get("PYTHONPATH")])])
    with subprocess.Popen(
        command, env=env | {"PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Clients(process)
        assert process.stdin is not None
        process.stdin.close()
