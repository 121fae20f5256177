"""A proxy between a client and the embedded Hub that loses, cuts, delays, refuses, corrupts or leads elsewhere.

The `Host` that the client named is passed on, so that the Hub's own URLs lead back through the proxy.
"""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = [
    "Answer",
    "Exchange",
    "Fault",
    "Proxy",
    "change",
    "corrupt",
    "cut",
    "delay",
    "done_then",
    "drop",
    "lose",
    "proxied",
    "redirect",
    "say",
    "skew",
    "stall",
    "without_range",
]

_HOP_BY_HOP = {"transfer-encoding", "connection", "server", "date", "content-length"}
_CLIENT_GONE = (BrokenPipeError, ConnectionResetError)


@dataclass
class Answer:
    """What goes back to the client: `cut` bytes of the body where given, nothing at all with `status` 0."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: int | None = None
    pause_seconds: float = 0.0


@dataclass
class Exchange:
    """One request; `forward` sends it on to the Hub, without some of its headers if so wished."""

    line: str
    headers: dict[str, str]
    body: bytes
    forward: Callable[..., Answer]
    nbytes_answered: int = 0

    def done(self) -> Answer:
        """As if there were no proxy; a `Fault` that is none."""
        return self.forward()

    @property
    def has_token(self) -> bool:
        """Whether it carries an Authorization header."""
        return "authorization" in {name.lower() for name in self.headers}


Fault = Callable[[Exchange], Answer]


class Proxy:
    """Stands between a client and a Hub; each fault is used once, on the first request that it matches.

    Attributes:
        url: where clients find it.
        seen: all requests, in order of arrival.
        faults: those still to come.
    """

    def __init__(self, port: int) -> None:
        self.seen: list[Exchange] = []
        self.faults: list[tuple[re.Pattern[str], Fault]] = []
        self._always: list[tuple[re.Pattern[str], Fault]] = []
        self._port = port
        self._changed = threading.Condition()
        self._active = 0
        self._closing = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_any(self) -> None:
                proxy._handle(self)

            do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_any  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients that are killed in the middle of a request are what this is for."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop; what stalls ends."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fail(self, pattern: str | re.Pattern[str], *faults: Fault) -> None:
        """Use each of the faults once, in order, on requests whose line matches."""
        self.faults += [(re.compile(pattern), fault) for fault in faults]

    def always(self, pattern: str | re.Pattern[str], fault: Fault) -> None:
        """Use the fault on every request whose line matches, after those that are used once."""
        self._always.append((re.compile(pattern), fault))

    def heal(self) -> None:
        """No faults any more."""
        with self._changed:
            self.faults.clear()
            self._always.clear()

    def lines(self, pattern: str | re.Pattern[str]) -> list[Exchange]:
        """The requests seen whose line matches."""
        return [exchange for exchange in self.seen if re.match(pattern, exchange.line)]

    def settle(self) -> None:
        """Wait until no request is on its way: what a client that was killed has left."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._active == 0, timeout=60)

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until the proxy closes."""
        self._closing.wait(seconds)

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        with self._changed:
            self._active += 1
        try:
            nbytes = int(handler.headers.get("Content-Length", 0))
            body = handler.rfile.read(nbytes)
            if len(body) < nbytes:  # killed while it was sending: what there is of it goes nowhere
                handler.close_connection = True
                return
            exchange = self._exchange(handler, body)
            answer = self._take(exchange)(exchange)
            exchange.nbytes_answered = len(answer.body[: answer.cut])
            self._send(handler, answer)
        except _CLIENT_GONE:
            handler.close_connection = True
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def _exchange(self, handler: BaseHTTPRequestHandler, body: bytes) -> Exchange:
        headers = dict(handler.headers.items())

        def forward(*, without: tuple[str, ...] = ()) -> Answer:
            sent = {name: value for name, value in headers.items() if name.lower() not in without}
            with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)) as connection:
                connection.request(handler.command, handler.path, body, sent)
                answer = connection.getresponse()
                return Answer(answer.status, dict(answer.headers.items()), answer.read())

        return Exchange(f"{handler.command} {handler.path}", headers, body, forward)

    def _take(self, exchange: Exchange) -> Fault:
        with self._changed:
            self.seen.append(exchange)
            for index, (pattern, fault) in enumerate(self.faults):
                if pattern.match(exchange.line):
                    del self.faults[index]
                    return fault
            for pattern, fault in self._always:
                if pattern.match(exchange.line):
                    return fault
        return lambda exchange: exchange.forward()

    def _send(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        handler.close_connection = handler.close_connection or answer.status == 0 or answer.cut is not None
        if answer.status == 0:
            return
        handler.send_response_only(answer.status)
        headers = {"Content-Length": str(len(answer.body)), "Date": handler.date_time_string()}
        if handler.command == "HEAD" and "Content-Length" in answer.headers:
            headers["Content-Length"] = answer.headers["Content-Length"]
        forced = {name.removeprefix("!"): value for name, value in answer.headers.items() if name.startswith("!")}
        passed = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
        for name, value in ({n: v for n, v in passed.items() if not n.startswith("!")} | headers | forced).items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(answer.body[: answer.cut])
        self.wait(answer.pause_seconds)


@contextmanager
def proxied(port: int) -> Iterator[Proxy]:
    """A proxy in front of the Hub on a port of this machine."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()


def lose(exchange: Exchange) -> Answer:
    """Done, but the answer never arrives."""
    exchange.forward()
    return Answer(0)


def drop(exchange: Exchange) -> Answer:
    """Never done."""
    return Answer(0)


def say(status: int, text: str = "no", **headers: str) -> Fault:
    """Not done, but answered."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _: Answer(status, names | {"X-Error-Message": text}, b'{"error": "%b"}' % text.encode())


def done_then(fault: Fault) -> Fault:
    """Done, and answered otherwise."""
    return lambda exchange: (exchange.forward(), fault(exchange))[1]


def cut(nbytes: int) -> Fault:
    """The connection ends after so many bytes of the body."""
    return change(cut=nbytes)


def stall(nbytes: int, seconds: float = 30.0) -> Fault:
    """After so many bytes of the body comes nothing, for so long."""
    return change(cut=nbytes, pause_seconds=seconds)


def delay(proxy: Proxy, seconds: float) -> Fault:
    """All comes, but late."""

    def fault(exchange: Exchange) -> Answer:
        proxy.wait(seconds)
        return exchange.forward()

    return fault


def corrupt(position: int) -> Fault:
    """One bit of the body is flipped."""

    def fault(exchange: Exchange) -> Answer:
        answer = exchange.forward()
        body = bytearray(answer.body)
        body[position % len(body)] ^= 1
        answer.body = bytes(body)
        return answer

    return fault


def redirect(url: str | Callable[[Exchange], str]) -> Fault:
    """Go elsewhere."""
    return lambda exchange: Answer(302, {"Location": url if isinstance(url, str) else url(exchange)})


def without_range(exchange: Exchange) -> Answer:
    """200 with the whole body where a range was asked for."""
    return exchange.forward(without=("range",))


def skew(fault: Fault, date: str) -> Fault:
    """With the date of a clock that is wrong."""

    def skewed(exchange: Exchange) -> Answer:
        answer = fault(exchange)
        answer.headers["!Date"] = date
        return answer

    return skewed


def change(*, headers: Mapping[str, str] | None = None, **fields: object) -> Fault:
    """Done, and the answer changed: its headers ("!" before a name that the proxy would set itself), or its fields."""

    def fault(exchange: Exchange) -> Answer:
        answer = exchange.forward()
        answer.headers |= headers or {}
        for name, value in fields.items():
            setattr(answer, name, value)
        return answer

    return fault
