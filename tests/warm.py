"""Processes that are forked from one which has imported already what is slow to import; elsewhere plain ones.

Each is a process of its own in all that tests look at: environment, streams, signals, exit status. What it shares with
the others is what was imported, and the order in which sets of strings are iterated: a test of either starts
`sys.executable`. The Hub's client reads its environment when it is imported, so each process imports it by itself.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from hubshard.hubserver import process
from hubshard.hubserver.server import _arguments
from tests.systems import kill_group

if TYPE_CHECKING:
    from hubshard.hubserver import Settings

__all__ = ["Imports", "Started", "run", "start", "start_hub"]

Imports = Literal["client", "torch"]

_PROGRAM = Path(__file__).with_name("warm_program.py")
_RANKS = Path(__file__).with_name("ranks_program.py")
_CLIENT = ("filelock", "fsspec", "httpx2", "jinja2", "rich.console", "rich.progress", "tqdm.auto", "typer", "yaml")
_HUB = ("hubshard.hubserver.server", "httptools", "uvloop", "uvicorn.lifespan.on")
_TORCH = (
    "numpy",
    "psutil",
    "regex",
    "safetensors.torch",
    "tokenizers",
    "torch",
    "torch._dynamo",  # the first step of an optimizer would import it
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
)
_MODULES: dict[Imports, tuple[str, ...]] = {"client": _CLIENT + _HUB, "torch": _CLIENT + _TORCH}


class Started:
    """A process that was forked: as much of `subprocess.Popen` as is needed."""

    def __init__(self, told: IO[bytes]) -> None:
        self._told = told
        self.pid = int(told.readline())
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None  # a Hub ends when it is closed

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, or the negative number of the signal that ended it."""
        if self.returncode is None:
            if not self._has_ended(timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = int(self._told.readline())
            self._told.close()
            if self.stdin is not None:
                self.stdin.close()
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        return self.returncode is not None or bool(select.select([self._told], [], [], timeout)[0])

    def poll(self) -> int | None:
        return self.wait() if self._has_ended(0) else None

    def send_signal(self, number: int) -> None:
        if not self._has_ended(0):
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(9)

    def kill_all(self) -> None:
        """With all that it has started."""
        with suppress(ProcessLookupError):
            kill_group(self.pid)
        self.wait()


class Forker:
    """A program that has imported modules, and is asked for processes; it ends with this one."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._ours, theirs = _channel()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, _PROGRAM, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a thread would not outlive the fork
            )
        atexit.register(self.stop)

    def start(self, job: Mapping[str, object], streams: Sequence[int]) -> Started:
        told, tells = os.pipe()
        try:
            if sys.platform != "win32":
                socket.send_fds(self._ours, [json.dumps(job).encode()], [*streams, tells])
        finally:
            os.close(tells)
        return Started(os.fdopen(told, "rb", buffering=0))

    def stop(self) -> None:
        self._ours.close()
        self._process.kill()  # it has nothing to lose, and much to take down
        self._process.wait()


def _channel() -> tuple[socket.socket, socket.socket]:
    kind: dict[str, int] = {}
    if sys.platform != "win32":
        kind = {"family": socket.AF_UNIX, "type": socket.SOCK_SEQPACKET}
    return socket.socketpair(**kind)


_forkers: dict[Imports, Forker] = {}
_one_at_a_time = threading.Lock()


def _forker(imports: Imports) -> Forker:
    with _one_at_a_time:
        if imports not in _forkers:
            _forkers[imports] = Forker(_MODULES[imports])
        return _forkers[imports]


def start(
    argv: Sequence[object],
    log: Path,
    *,
    imports: Imports,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    ranks: int = 0,
) -> Started | subprocess.Popen[bytes]:
    """Start a program in a session of its own, as :func:`run` does; what it prints is appended to a file."""
    with log.open("ab") as out:
        if _can_fork(env):
            return _fork(argv, imports, env, cwd, ranks, (None, out, out))
        command = _command(argv, ranks)
        return subprocess.Popen(command, env=env, cwd=cwd, stdout=out, stderr=out, start_new_session=True)


def run(
    argv: Sequence[object],
    *,
    imports: Imports,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    ranks: int = 0,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` would `python` with these arguments.

    Args:
        argv: a script or `-c` and code or `-m` and a module, and arguments.
        imports: what it finds imported: what the Hub's client stands on, or torch besides.
        env: its environment; this one's by default.
        cwd: its working directory; this one by default.
        ranks: start so many of them, as torchrun would; 0 for one process without.
        timeout: in seconds.
    """
    if not _can_fork(env):
        command = _command(argv, ranks)
        return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        started = _fork(argv, imports, env, cwd, ranks, (None, out, errors))
        try:
            status = started.wait(timeout)
        except BaseException as error:
            started.kill_all()
            if isinstance(error, subprocess.TimeoutExpired):
                error.output, error.stderr = (_text(each).encode() for each in (out, errors))
            raise
        return subprocess.CompletedProcess(list(map(str, argv)), status, _text(out), _text(errors))


def start_hub(root: Path, *, port: int, settings: Settings) -> tuple[Started | subprocess.Popen[str], str]:
    """Start a Hub as `hubshard.hubserver.process` does; the process, and the URL."""
    if not _can_fork(None):
        return process(root, port=port, settings=settings)
    argv = ["-m", "hubshard.hubserver", "--root", root, "--port", str(port), "--stop-at-eof", *_arguments(settings)]
    stdin, holds_it = os.pipe()
    reads_it, stdout = os.pipe()
    with os.fdopen(stdin) as its_stdin, os.fdopen(stdout, "w") as its_stdout:
        started = _fork(argv, "client", None, None, 0, (its_stdin, its_stdout, None))
    started.stdin = os.fdopen(holds_it, "wb")
    with os.fdopen(reads_it) as told:
        url = told.readline().strip()
    assert url.startswith("http"), f"the Hub on {root} did not start: {started.wait()}"
    return started, url


def _can_fork(env: Mapping[str, str] | None) -> bool:
    """Whether a fork would be like a new process: what Python reads when it starts is the same."""
    both = (env or os.environ, os.environ)
    theirs, ours = ({key: value for key, value in each.items() if key.startswith("PYTHON")} for each in both)
    return sys.platform == "linux" and theirs == ours


def _fork(
    argv: Sequence[object],
    imports: Imports,
    env: Mapping[str, str] | None,
    cwd: Path | None,
    ranks: int,
    streams: tuple[IO[Any] | None, IO[Any] | None, IO[Any] | None],
) -> Started:
    job = {
        "argv": list(map(str, argv)),
        "env": dict(os.environ if env is None else env),
        "cwd": str(cwd or Path.cwd()),
        "ranks": ranks,
    }
    with Path(os.devnull).open("r+b") as nothing:
        return _forker(imports).start(job, [(stream or nothing).fileno() for stream in streams])


def _command(argv: Sequence[object], ranks: int) -> list[str]:
    launch = [str(_RANKS), str(ranks)] if ranks else []
    return [sys.executable, *launch, *map(str, argv)]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
