"""Running the server: in this process until it is stopped, or in a process of its own for a while."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import uvicorn

from hubshard.errors import NotFoundError, StoreError
from hubshard.hubserver.app import SCHEMAS, create_app
from hubshard.hubserver.direct import DirectHttp
from hubshard.hubserver.gc import GcReport, collect
from hubshard.hubserver.state import DATABASE_NAME, Settings, open_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

__all__ = ["gc", "process", "running", "serve", "stop"]

_KEEP_ALIVE_SECONDS = 75  # clients close idle connections after 5: who closes first must not be the server

_STOP_SECONDS = 30.0


def serve(
    root: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings | None = None,
    on_ready: Callable[[str], None] = print,
    stop_at_eof: bool = False,
) -> None:
    """Serve a directory until the process is asked to stop (SIGINT, SIGTERM).

    Args:
        root: the directory; made when it is missing.
        host: the address to listen on. The default is for this machine only.
        port: 0 for any free one.
        settings: the operator's choices.
        on_ready: called with the URL once connections are accepted.
        stop_at_eof: stop, too, when stdin ends: when the process that holds its other end is gone, however it ended.

    Raises:
        StoreError: the port is taken, or the directory was written by a newer version.
    """
    state = open_state(root, settings, schemas=SCHEMAS)
    try:
        listener = _listen(host, port)
    except OSError as error:
        state.close()
        raise StoreError(f"{host}:{port} cannot be listened on: {error.strerror}") from error
    config = uvicorn.Config(
        create_app(state),
        http=DirectHttp,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        lifespan="on",
    )
    with listener:
        server = uvicorn.Server(config)
        if stop_at_eof:
            threading.Thread(target=_stop_at_eof, args=(server,), daemon=True).start()
        on_ready(f"http://{_host_in_url(host)}:{listener.getsockname()[1]}")
        server.run(sockets=[listener])


@contextlib.contextmanager
def running(
    root: Path, *, port: int = 0, tokens: Mapping[str, str] | None = None, settings: Settings | None = None
) -> Iterator[str]:
    """A server on a directory, in a process of its own; stopped at the end.

    Args:
        root: the directory; made when it is missing.
        port: 0 for any free one.
        tokens: token → user and role; see `state.Settings`.
        settings: all of an operator's choices, instead of `tokens`.

    Yields:
        Its URL.
    """
    started, url = process(root, port=port, settings=settings or Settings(tokens=tokens))
    try:
        yield url
    finally:
        stop(started)


def process(root: Path, *, port: int = 0, settings: Settings | None = None) -> tuple[subprocess.Popen[str], str]:
    """Start a server in a process of its own, and wait until it answers; it ends with this process at the latest.

    Returns:
        The process, and the URL.

    Raises:
        StoreError: it ended before it was ready; the message has what it wrote.
    """
    command = [sys.executable, "-m", "hubshard.hubserver", "--root", str(root), "--port", str(port), "--stop-at-eof"]
    command += _arguments(settings or Settings())
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    line = started.stdout.readline() if started.stdout is not None else ""
    if not line.startswith("http"):
        started.wait(_STOP_SECONDS)
        raise StoreError(f"the Hub on {root} did not start (exit code {started.returncode}): {line.strip()}")
    return started, line.strip()


def stop(started: subprocess.Popen[str]) -> None:
    """Ask a process to end, wait, and insist if need be."""
    started.terminate()
    try:
        started.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        started.kill()
        started.wait()
    for pipe in (started.stdin, started.stdout):
        if pipe is not None:
            pipe.close()


def gc(root: Path, grace_seconds: float) -> GcReport:
    """Collect the garbage of a directory, whether a server runs on it or not.

    Args:
        root: the directory of a server.
        grace_seconds: how long uploads that no commit names are spared.

    Raises:
        NotFoundError: no server ever ran there.
    """
    if not (root / DATABASE_NAME).is_file():
        raise NotFoundError(f"{root} holds no Hub", hint="give the directory of `hubshard hub serve --root`")
    state = open_state(root, schemas=SCHEMAS)
    try:
        return collect(state, grace_seconds=grace_seconds)
    finally:
        state.close()


def _stop_at_eof(server: uvicorn.Server) -> None:
    while os.read(0, 4096):
        continue
    server.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":  # there it would let two servers share one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _host_in_url(host: str) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  compared, not bound
    return f"[{shown}]" if ":" in shown else shown


def _arguments(settings: Settings) -> list[str]:
    found: list[str] = []
    for token, user in (settings.tokens or {}).items():
        found += ["--token", f"{user}={token}"]
    for name, members in (settings.organizations or {}).items():
        found += ["--organization", f"{name}={members}"]
    if settings.public_url is not None:
        found += ["--public-url", settings.public_url]
    if settings.oidc_secret is not None:
        found += ["--oidc-secret", settings.oidc_secret]
    return [*found, "--lfs-part-bytes", str(settings.lfs_part_bytes), "--page-size", str(settings.page_size)]
