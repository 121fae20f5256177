"""Who gets an answer: plain connections, or the HTTP client where it may know better; what both do is the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import close_session, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import httpx
from huggingface_hub.utils._http import default_client_factory

from hubshard.store import hub_get
from hubshard.store.connections import NotConnectedError, Origin
from hubshard.store.hub_get import get

TIMEOUT = httpx.Timeout(60.0)


class Server(ThreadingHTTPServer):
    """Answers every GET request with its target, or with the status in it; may be taken for a proxy."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.headers: list[dict[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        status = int(self.path.rpartition("/")[2].partition("?")[0])
        body = self.path.encode() if status == 200 else b'{"error": "the words of the server"}'
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Disposition", 'filename="\xc3\xa9"')  # UTF-8, as it is
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    close_session()  # the client reads the environment once
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()
        close_session()


@pytest.fixture
def made_to_order() -> Iterator[list[str]]:
    """What a client of the user's own has been asked for."""
    seen: list[str] = []

    def make() -> httpx.Client:
        client = default_client_factory()
        client.event_hooks["response"].append(lambda response: seen.append(str(response.request.url)))
        return client

    set_client_factory(make)
    yield seen
    set_client_factory(default_client_factory)


def fetch(url: str) -> bytes:
    into = memoryview(bytearray(1000))
    with get(url, {"range": "bytes=0-9"}, TIMEOUT) as answer:
        answer.raise_for_status()
        assert answer.headers["CONTENT-LENGTH"]
        assert answer.headers["Content-Disposition"] == 'filename="\xe9"'
        position = 0
        while count := answer.readinto(into[position : position + 7]):
            position += count
    return bytes(into[:position])


def test_the_request_is_the_one_that_the_client_would_send(server: Server, made_to_order: list[str]) -> None:
    assert fetch(f"{server.url}/a%20b/200?c=d") == b"/a%20b/200?c=d"
    assert made_to_order == [f"{server.url}/a%20b/200?c=d"]
    set_client_factory(default_client_factory)
    assert fetch(f"{server.url}/a%20b/200?c=d") == b"/a%20b/200?c=d"
    assert made_to_order == [f"{server.url}/a%20b/200?c=d"]
    by_client, plain = server.headers
    assert plain.keys() == by_client.keys() >= {"x-amzn-trace-id", "user-agent", "range", "host"}
    assert plain.pop("x-amzn-trace-id") != by_client.pop("x-amzn-trace-id")
    assert plain == by_client


def test_a_proxy_is_asked_where_one_is_set(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    assert fetch("http://hub.invalid/200") == b"http://hub.invalid/200"
    close_session()
    monkeypatch.setenv("no_proxy", "127.0.0.1,.hub.invalid")
    assert fetch(f"{server.url}/200") == b"/200"
    assert fetch("http://hub.invalid/200") == b"http://hub.invalid/200"  # as the client reads it: names below alone


def test_the_name_of_a_server_is_encoded_as_the_client_does(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(origin: Origin, *_: object, **__: object) -> None:
        asked.append(origin.host)
        raise NotConnectedError("nobody")

    monkeypatch.setattr(hub_get._connections, "get", refuse)
    for host in ("stra\xdfe.invalid", "[::1]"):
        with pytest.raises(httpx.ConnectError, match="nobody"):
            fetch(f"http://{host}/200")
    assert asked == ["xn--strae-oqa.invalid", "::1"]  # not strasse.invalid, which is another server


def test_a_name_and_password_in_the_address_are_left_to_the_client(server: Server) -> None:
    assert fetch(server.url.replace("//", "//me:secret@") + "/200") == b"/200"
    assert server.headers[0]["authorization"].startswith("Basic ")


@pytest.mark.parametrize("status", [404, 500])
def test_an_error_has_the_words_of_the_server(server: Server, made_to_order: list[str], status: int) -> None:
    told = []
    for _ in range(2):
        with pytest.raises(HfHubHTTPError, match="the words of the server") as caught:
            fetch(f"{server.url}/{status}")
        told.append((type(caught.value), caught.value.server_message, caught.value.response.status_code))
        set_client_factory(default_client_factory)
    assert len(made_to_order) == 1
    assert told[0] == told[1]


def test_nothing_is_sent_in_offline_mode(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OfflineModeIsEnabled):
        fetch(f"{server.url}/200")
    assert server.headers == []


def test_certificates_are_those_that_the_client_trusts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/at/all.pem")
    with pytest.raises(FileNotFoundError):
        hub_get._connections._make_tls()


def test_what_the_caller_does_with_an_answer_is_not_an_error_of_the_line(server: Server) -> None:
    with pytest.raises(TimeoutError, match="of the caller"), get(f"{server.url}/200", {}, TIMEOUT):
        raise TimeoutError("of the caller")
