"""Plain connections of HTTP/1.1 for long answers, whose bytes the kernel puts where the caller wants them.

A general client hands out each piece of an answer as new `bytes`, which costs several times what the network does.
"""

from __future__ import annotations

import http.client
import io
import os
import select
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

__all__ = ["Answer", "Connections", "NotConnectedError", "Origin"]


class NotConnectedError(OSError):
    """Nobody took the connection, or the other side is not who it should be; says why."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A server.

    Attributes:
        is_tls: whether it is spoken to by TLS.
        host: its name or address.
        port: of TCP.
    """

    is_tls: bool
    host: str
    port: int


class Answer:
    """An answer whose body is still to come.

    Attributes:
        status: of HTTP.
        headers: as they came.
    """

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers: Sequence[tuple[str, str]] = response.getheaders()
        self._response = response
        self._nbytes: int | None = response.length  # None for a body in chunks, or one that ends with the connection
        self._position = 0
        self._is_complete = self._nbytes == 0

    @property
    def may_stay(self) -> bool:
        """Whether the connection can take the next request: the whole answer was read, and the server keeps it."""
        is_last = self._response.will_close or self.status == http.HTTPStatus.SWITCHING_PROTOCOLS
        return self._is_complete and not is_last

    def readinto(self, into: memoryview) -> int:
        """Put the next bytes of the body, as many as have come and fit, into `into`; 0 at its end.

        Raises:
            TimeoutError: nothing came for too long.
            OSError, http.client.HTTPException: the connection broke, or ended before the body did.
        """
        if self._is_complete:
            return 0
        if self._nbytes is None:
            data = self._response.read1(len(into))
            if len(data) > len(into):
                raise http.client.HTTPException("a chunk has a negative size")
            into[: len(data)] = data
            self._is_complete = not data
            return len(data)
        # not `HTTPResponse.readinto`, which waits until all is full, and tells nobody how much came before a failure
        count = self._response.fp.readinto1(into[: self._nbytes - self._position])
        if not count:
            raise http.client.IncompleteRead(b"", self._nbytes - self._position)
        self._position += count
        self._is_complete = self._position == self._nbytes
        return count

    def close(self) -> None:
        """Let go of it, read or not."""
        self._response.close()


class Connections:
    """Connections of one process to any servers; those that are not in use are kept for a while. Thread-safe.

    Args:
        tls: makes the context of TLS, when it is first needed.
        idle_seconds: how long one that nobody uses is good for.
        most_idle: how many such are kept.
    """

    def __init__(self, tls: Callable[[], ssl.SSLContext], *, idle_seconds: float = 5.0, most_idle: int = 32) -> None:
        self._make_tls = tls
        self._idle_seconds = idle_seconds
        self._most_idle = most_idle
        self._lock = threading.Lock()
        self._idle: list[tuple[Origin, http.client.HTTPConnection, float]] = []
        self._tls: ssl.SSLContext | None = None
        if hasattr(os, "register_at_fork"):  # Windows does not fork
            os.register_at_fork(after_in_child=self._start_anew)

    def _start_anew(self) -> None:
        # the parent uses its connections on, and the thread that may hold its lock does not exist in the child
        self._lock = threading.Lock()
        self.close()  # the child's ends of them: nothing is sent

    @contextmanager
    def get(
        self,
        origin: Origin,
        target: str,
        headers: Sequence[tuple[bytes, bytes]],
        *,
        connect_seconds: float | None,
        stall_seconds: float | None,
    ) -> Iterator[Answer]:
        """The answer to a GET request; redirects are the caller's business.

        A connection that the server has closed since its last use is replaced by a new one.

        Args:
            origin: the server.
            target: path and query, quoted.
            headers: all of them, `Host` too.
            connect_seconds: how long it may take to connect; None for ever.
            stall_seconds: how long nothing may come; None for ever.

        Raises:
            NotConnectedError: there is no connection to be had.
            OSError, http.client.HTTPException: the connection broke, or what came is no HTTP.
        """
        send = partial(_send, target=target, headers=headers, stall_seconds=stall_seconds)
        connection, answer = self._ask(origin, send, connect_seconds)
        may_stay = False
        try:
            yield answer
            may_stay = answer.may_stay
        finally:
            answer.close()
            if may_stay:
                self._put_back(origin, connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close what is not in use. Later requests connect anew."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection, _ in idle:
            connection.close()

    def _ask(
        self, origin: Origin, send: Callable[[http.client.HTTPConnection], Answer], connect_seconds: float | None
    ) -> tuple[http.client.HTTPConnection, Answer]:
        kept = self._take(origin)
        if kept is not None:
            try:
                return kept, send(kept)
            except (ConnectionError, ssl.SSLError, http.client.HTTPException):  # the server closed it in this moment
                pass
        connection = self._connect(origin, connect_seconds)
        return connection, send(connection)

    def _take(self, origin: Origin) -> http.client.HTTPConnection | None:
        """One that is kept for a server, the last used first, as that is the least likely to be closed."""
        while True:
            with self._lock:
                fitting = [index for index, (of, _, _) in enumerate(self._idle) if of == origin]
                if not fitting:
                    return None
                _, connection, since = self._idle.pop(fitting[-1])
            if time.monotonic() - since < self._idle_seconds and not _is_readable(connection):
                return connection
            connection.close()

    def _put_back(self, origin: Origin, connection: http.client.HTTPConnection) -> None:
        now = time.monotonic()
        with self._lock:
            self._idle.append((origin, connection, now))
            before = self._idle
            self._idle = [kept for kept in before if now - kept[2] < self._idle_seconds][-self._most_idle :]
            gone = [kept for kept in before if kept not in self._idle]
        for _, old, _ in gone:
            old.close()

    def _connect(self, origin: Origin, seconds: float | None) -> http.client.HTTPConnection:
        if origin.is_tls:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                origin.host, origin.port, timeout=seconds, context=self._context()
            )
        else:
            connection = http.client.HTTPConnection(origin.host, origin.port, timeout=seconds)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:  # UnicodeError of a name that is none
            connection.close()
            raise NotConnectedError(str(error)) from error
        connection.response_class = _Response
        return connection

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                self._tls = self._make_tls()
                self._tls.set_alpn_protocols(["http/1.1"])
            return self._tls


class _Lines(io.BufferedReader):
    # of an answer: the end of the connection is not taken for the end of a line, nor for that of the headers
    _has_begun = False

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        if line.endswith(b"\n") or len(line) == size:
            self._has_begun = True
        elif line or self._has_begun:
            raise http.client.IncompleteRead(line)
        return line


class _Response(http.client.HTTPResponse):
    # whose status and headers have come as a whole, and are those of the answer, not of a word before it (1xx)
    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.fp: Any = _Lines(self.fp.detach())

    def begin(self) -> None:
        super().begin()
        while self.status < http.HTTPStatus.OK and self.status != http.HTTPStatus.SWITCHING_PROTOCOLS:
            self.headers = self.msg = None  # type: ignore[assignment]  # as before the first `begin`
            super().begin()


def _send(
    connection: http.client.HTTPConnection,
    target: str,
    headers: Sequence[tuple[bytes, bytes]],
    stall_seconds: float | None,
) -> Answer:
    try:
        connection.sock.settimeout(stall_seconds)
        connection.putrequest("GET", target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name.decode("ascii"), value)
        connection.endheaders()
        return Answer(connection.getresponse())
    except BaseException:
        connection.close()
        raise


def _is_readable(connection: http.client.HTTPConnection) -> bool:
    """Whether something has come on a connection that waits for nothing: its end, most likely."""
    if isinstance(connection.sock, ssl.SSLSocket) and connection.sock.pending():
        found = True
    elif sys.platform != "win32":
        poll = select.poll()
        poll.register(connection.sock, select.POLLIN)
        found = bool(poll.poll(0))
    else:  # whose `select` takes sockets of any number
        found = bool(select.select([connection.sock], [], [], 0)[0])
    return found
