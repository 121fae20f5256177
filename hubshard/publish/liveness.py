"""Whether another process is there still: its end ends a connection, on this machine or another, at once.

Where no connection can be made, or the other machine itself is gone, nothing is learned here: signs of life that do not
come have to tell.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading

__all__ = ["Lifeline", "Peer"]

_CONNECT_SECONDS = 3.0
_MOST_CONNECTIONS = 256  # a process may have 1024 files open, as a rule; whoever comes later gets no answer
_GREETING_BYTES = 16


class Lifeline:
    """Takes connections, and keeps them for as long as this process lives, or until it is closed.

    Attributes:
        address: for `Peer`; "" where none can be taken.
    """

    def __init__(self) -> None:
        self.address = ""
        self._greeting = secrets.token_hex(_GREETING_BYTES // 2)
        self._has_ended = False
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, name="hubshard-lifeline", daemon=True)
        try:
            self._listener = _listener()
        except OSError:
            return
        host, port = self._listener.getsockname()[:2]
        self.address = json.dumps([host, port, self._greeting])
        self._thread.start()

    def close(self) -> None:
        """End all connections."""
        if not self.address:
            return
        self._has_ended = True
        with contextlib.suppress(OSError):  # which wakes the thread
            socket.create_connection(self._listener.getsockname()[:2], _CONNECT_SECONDS).close()
        self._thread.join(_CONNECT_SECONDS)
        for each in (self._listener, *self._kept):
            each.close()

    def _run(self) -> None:
        while not self._has_ended and len(self._kept) < _MOST_CONNECTIONS:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._kept.append(connection)
            with contextlib.suppress(OSError):
                connection.sendall(self._greeting.encode())


class Peer:
    """Another process, seen from the other end of its `Lifeline`.

    Args:
        address: of that.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection = _connection(address)
        self._has_ended = False

    def has_ended(self) -> bool:
        """Whether it, or its lifeline, is gone; False where that is not known."""
        if self._connection is None:
            return self._has_ended
        try:
            is_open = bool(self._connection.recv(1))
        except BlockingIOError:
            is_open = True
        except ConnectionError:
            is_open = False
        if not is_open:  # closed by the other end, or by what is between that forgets idle ones
            self._connection.close()
            self._connection = _connection(self._address)
            self._has_ended = self._connection is None
        return self._has_ended

    def close(self) -> None:
        """Look no more."""
        if self._connection is not None:
            self._connection.close()


def _listener() -> socket.socket:
    host = _own_host()
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, 0), family=family, backlog=_MOST_CONNECTIONS)


def _own_host() -> str:
    """The address of this machine on the way to the one where the processes meet, which the others reach too."""
    meeting = os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, kind, _, _, where = socket.getaddrinfo(meeting, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing
        return str(probe.getsockname()[0])


def _connection(address: str) -> socket.socket | None:
    if not address:
        return None
    host, port, greeting = json.loads(address)
    try:
        connection = socket.create_connection((host, port), _CONNECT_SECONDS)
    except OSError:
        return None
    said = b""
    with contextlib.suppress(OSError), connection.makefile("rb") as answer:
        said = answer.read(_GREETING_BYTES)
        connection.settimeout(0.0)
    if said != greeting.encode():  # nothing that we know of listens there
        connection.close()
        return None
    return connection
