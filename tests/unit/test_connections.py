"""Plain connections: kept, renewed, bounded, left to the parent at a fork, and what a bad server does to an answer."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hubshard.store.connections import Connections, NotConnectedError, Origin
from tests.systems import fork, posix_only

BODY = bytes(range(256)) * 1000


RAW = {
    "hinted": b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n",
    "torn-status": b"HTTP/1.1 200 O",
    "torn-name": b"HTTP/1.1 200 OK\r\nContent-Le",
    "torn-value": b"HTTP/1.1 200 OK\r\nContent-Length: 1",
    "torn-headers": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n",
    "negative-chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n" + b"x" * 1000,
    "switching": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: other\r\n\r\n",
}


class Server:
    """Answers GET requests as their path says; counts its connections.

    `/whole` is the body with its length, `/chunks` in chunks, `/until-the-end` until the connection ends, `/short` half
    of what was promised, `/last` ends the connection without saying so, `/none` gives no answer, `/stall` half of one.
    Further ones begin as `RAW` says, and end the connection.
    """

    def __init__(self) -> None:
        self.connections = 0
        self.requests: list[str] = []
        self.done = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                server.connections += 1
                super().setup()

            def do_GET(self) -> None:
                server.requests.append(self.path)
                server.answer(self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients may leave."""

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.origin = Origin(is_tls=False, host="127.0.0.1", port=self.server.server_address[1])

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        kind = handler.path.strip("/")
        handler.close_connection = kind in {"until-the-end", "short", "last", "none", *RAW} - {"hinted"}
        handler.wfile.write(RAW.get(kind, b""))
        if handler.close_connection and kind in {"none", *RAW}:
            return
        handler.send_response(200)
        if kind == "chunks":
            handler.send_header("Transfer-Encoding", "chunked")
        elif kind != "until-the-end":
            handler.send_header("Content-Length", str(len(BODY)))
        handler.end_headers()
        if kind == "chunks":
            for piece in (BODY[:1000], BODY[1000:]):
                handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            handler.wfile.write(b"0\r\n\r\n")
            return
        handler.wfile.write(BODY[: len(BODY) // 2] if kind in {"short", "stall"} else BODY)
        if kind == "stall":
            self.done.wait(60)


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.done.set()
        server.server.shutdown()
        server.server.server_close()
        thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


@pytest.fixture
def connections() -> Iterator[Connections]:
    made = Connections(ssl.create_default_context)
    yield made
    made.close()


def fetch(
    connections: Connections, origin: Origin, path: str, *, nbytes: int = 10**6, stall_seconds: float = 60.0
) -> bytes:
    into, position = memoryview(bytearray(nbytes)), 0
    host = f"{origin.host}:{origin.port}".encode()
    with connections.get(origin, path, [(b"Host", host)], connect_seconds=20.0, stall_seconds=stall_seconds) as answer:
        assert answer.status == 200
        while position < nbytes and (count := answer.readinto(into[position:])):
            position += count
    return bytes(into[:position])


@pytest.mark.parametrize("path", ["/whole", "/chunks", "/until-the-end", "/hinted"])
def test_a_body_is_read_to_its_end_however_it_comes(server: Server, connections: Connections, path: str) -> None:
    for _ in range(3):
        assert fetch(connections, server.origin, path) == BODY
    assert server.connections == (3 if path == "/until-the-end" else 1)


def test_an_answer_that_is_not_read_to_its_end_costs_its_connection(server: Server, connections: Connections) -> None:
    assert fetch(connections, server.origin, "/whole", nbytes=10) == BODY[:10]
    assert fetch(connections, server.origin, "/whole") == BODY
    assert server.connections == 2


def test_threads_have_connections_of_their_own(server: Server, connections: Connections) -> None:
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch(connections, server.origin, "/whole"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [BODY] * 8


def test_a_connection_that_the_server_has_closed_is_renewed(server: Server, connections: Connections) -> None:
    for _ in range(3):
        assert fetch(connections, server.origin, "/last") == BODY
    assert server.connections == 3


def test_a_kept_connection_that_gives_no_answer_is_renewed_once(server: Server, connections: Connections) -> None:
    assert fetch(connections, server.origin, "/whole") == BODY
    with pytest.raises(http.client.RemoteDisconnected):
        fetch(connections, server.origin, "/none")
    assert server.requests == ["/whole", "/none", "/none"]
    assert server.connections == 2


def test_an_answer_that_ends_early_is_an_error(server: Server, connections: Connections) -> None:
    with pytest.raises(http.client.IncompleteRead):
        fetch(connections, server.origin, "/short")
    assert server.requests == ["/short"]


@pytest.mark.parametrize("kind", [kind for kind in RAW if kind.startswith("torn")])
def test_an_answer_that_ends_in_its_headers_is_none(server: Server, connections: Connections, kind: str) -> None:
    assert fetch(connections, server.origin, "/whole") == BODY
    with pytest.raises(http.client.IncompleteRead):  # of the second: the kept connection might have been closed before
        fetch(connections, server.origin, f"/{kind}")
    assert server.requests == ["/whole", f"/{kind}", f"/{kind}"]


def test_a_chunk_of_a_negative_size_is_an_error(server: Server, connections: Connections) -> None:
    with pytest.raises(http.client.HTTPException, match="negative"):
        fetch(connections, server.origin, "/negative-chunk", nbytes=10)


def test_a_connection_that_changes_its_protocol_is_not_kept(server: Server, connections: Connections) -> None:
    headers = [(b"Host", b"here")]
    with connections.get(server.origin, "/switching", headers, connect_seconds=20.0, stall_seconds=60.0) as answer:
        assert answer.status == http.HTTPStatus.SWITCHING_PROTOCOLS
        assert not answer.may_stay


def test_an_answer_that_stalls_is_an_error(server: Server, connections: Connections) -> None:
    with pytest.raises(TimeoutError):
        fetch(connections, server.origin, "/stall", stall_seconds=0.1)


def test_idle_connections_are_few_and_not_used_when_old(server: Server) -> None:
    with serving() as other:
        one = Connections(ssl.create_default_context, most_idle=1)
        for origin in (server.origin, other.origin, server.origin):
            assert fetch(one, origin, "/whole") == BODY
        one.close()
        assert (server.connections, other.connections) == (2, 1)
        old = Connections(ssl.create_default_context, idle_seconds=0.0)
        for _ in range(2):
            assert fetch(old, other.origin, "/whole") == BODY
        old.close()
        assert other.connections == 3


def test_nobody_listens(connections: Connections) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(NotConnectedError, match="refused"):
        fetch(connections, Origin(is_tls=False, host="127.0.0.1", port=port), "/whole")
    with pytest.raises(NotConnectedError):
        fetch(connections, Origin(is_tls=False, host="a" * 64, port=port), "/whole")


@posix_only
def test_a_child_leaves_the_connections_of_its_parent_alone(server: Server, connections: Connections) -> None:
    assert fetch(connections, server.origin, "/whole") == BODY
    child = fork()
    if not child:
        try:
            same = fetch(connections, server.origin, "/whole") == BODY
            connections.close()
        finally:
            os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert server.connections == 2
    assert fetch(connections, server.origin, "/whole") == BODY
    assert server.connections == 2


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_certificate_is_checked(server: Server, tmp_path: Path) -> None:
    pem = tmp_path / "localhost.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    subprocess.run([*command, "-keyout", pem, "-out", tmp_path / "cert.pem"], check=True, capture_output=True)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(tmp_path / "cert.pem", pem)
    server.server.socket = ours.wrap_socket(server.server.socket, server_side=True)
    port = server.origin.port
    trusting = Connections(lambda: ssl.create_default_context(cafile=str(tmp_path / "cert.pem")))
    for _ in range(2):
        assert fetch(trusting, Origin(is_tls=True, host="localhost", port=port), "/whole") == BODY
    assert server.connections == 1
    trusting.close()
    with pytest.raises(NotConnectedError, match="certificate"):
        fetch(trusting, Origin(is_tls=True, host="127.0.0.1", port=port), "/whole")
    with pytest.raises(NotConnectedError, match="certificate"):
        fetch(Connections(ssl.create_default_context), Origin(is_tls=True, host="localhost", port=port), "/whole")
