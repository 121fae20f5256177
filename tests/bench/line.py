"""A line of so many bytes per second between clients and a server on this machine, for the benchmarks."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

__all__ = ["line_to"]

_PIECE_BYTES = 2**18
_SHARE_SECONDS = 0.02  # what may pass at once, as the buffers of a real line let it


class _Pace:
    """One direction of the line: all connections share it."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, nbytes: int) -> None:
        """Wait until so many bytes have had their time on the line."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter() - _SHARE_SECONDS) + nbytes / self._rate
            rest = self._free_at - time.perf_counter()
        if rest > 0:
            time.sleep(rest)


def _carry(source: socket.socket, to: socket.socket, pace: _Pace) -> None:
    buffer = bytearray(_PIECE_BYTES)
    view = memoryview(buffer)
    with contextlib.suppress(OSError):  # whoever leaves ends the connection
        while nbytes := source.recv_into(buffer):
            pace.wait(nbytes)
            to.sendall(view[:nbytes])
    for end, how in ((to, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            end.shutdown(how)


def _join(client: socket.socket, port: int, up: _Pace, down: _Pace) -> None:
    with client, socket.create_connection(("127.0.0.1", port)) as server:
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers = threading.Thread(target=_carry, args=(server, client, down), daemon=True)
        answers.start()
        _carry(client, server, up)
        answers.join()


def _accept(listening: socket.socket, port: int, up: _Pace, down: _Pace) -> None:
    with contextlib.suppress(OSError):  # closed
        while True:
            client, _ = listening.accept()
            threading.Thread(target=_join, args=(client, port, up, down), daemon=True).start()


@contextlib.contextmanager
def line_to(url: str, bytes_per_second: float | None) -> Iterator[str]:
    """Another address of a server on this machine, behind a line; None for no line.

    Args:
        url: of the server, "http://host:port".
        bytes_per_second: of each direction, for all connections together.
    """
    if bytes_per_second is None:
        yield url
        return
    up, down = _Pace(bytes_per_second), _Pace(bytes_per_second)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        port = int(url.rpartition(":")[2])
        threading.Thread(target=_accept, args=(listening, port, up, down), daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
