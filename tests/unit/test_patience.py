"""How often and how long a failure is borne, what is told of it, and how long a server is that takes no connection."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub.utils import close_session

from hubshard.errors import ConflictError, HubshardError, StoreError
from hubshard.store.hub import HubStore
from hubshard.store.hub_errors import is_unreachable
from hubshard.store.patience import BusyError, NoConnectionError, Patience, Waits
from tests.faults.proxy import Answer, Exchange, Proxy

DOWN = StoreError("down", retryable=True)
REFUSED = StoreError("refused")


@dataclass
class Line:
    """Something that fails as planned, and then answers."""

    plan: list[HubshardError]
    tries: int = 0
    waits: list[float] = field(default_factory=list)
    told: list[tuple[str, str, float]] = field(default_factory=list)

    def ask(self) -> str:
        self.tries += 1
        if self.tries <= len(self.plan):
            raise self.plan[self.tries - 1]
        return "answer"

    def patience(self, max_retries: int = 5) -> Patience:
        return Patience(max_retries, on_retry=lambda *retry: self.told.append(retry), sleep=self.waits.append)


def test_what_may_pass_is_tried_again_ever_later_and_told() -> None:
    line = Line([DOWN] * 5)
    assert line.patience().insist(line.ask, "a request") == "answer"
    assert line.waits == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert line.told == [("a request", "down", wait) for wait in line.waits]


def test_a_store_that_says_when_to_come_back_is_obeyed() -> None:
    line = Line([DOWN, BusyError("busy", wait_seconds=17.0), DOWN])
    assert line.patience().insist(line.ask, "x") == "answer"
    assert line.waits == [1.0, 17.0, 4.0]


def test_a_store_that_asks_for_more_than_an_hour_is_not_waited_for() -> None:
    busy = [BusyError("busy", wait_seconds=3600.0), BusyError("busy", wait_seconds=3601.0)]
    line = Line([*busy])
    with pytest.raises(BusyError) as caught:
        line.patience().insist(line.ask, "x")
    assert caught.value is busy[1]
    assert line.waits == [3600.0]
    assert [wait for _, _, wait in line.told] == [3600.0]


@pytest.mark.parametrize(
    ("max_retries", "most", "tries"), [(5, None, 6), (5, 2, 3), (1, 2, 2), (5, 0, 1), (0, None, 1)]
)
def test_tries_are_bounded_and_the_last_failure_is_raised(max_retries: int, most: int | None, tries: int) -> None:
    line = Line([DOWN] * 99)
    with pytest.raises(StoreError, match="down"):
        line.patience(max_retries).insist(line.ask, "x", most=most)
    assert (line.tries, len(line.waits)) == (tries, tries - 1)


def test_what_will_not_pass_is_final() -> None:
    line = Line([DOWN, REFUSED])
    with pytest.raises(StoreError, match="refused"):
        line.patience().insist(line.ask, "x")
    assert line.tries == 2


def test_the_caller_may_know_better_which_errors_pass() -> None:
    line = Line([ConflictError("moved"), REFUSED])
    with pytest.raises(StoreError, match="refused"):
        line.patience().insist(line.ask, "x", again=lambda error: isinstance(error, ConflictError))
    assert line.tries == 2


def test_random_waits_stay_below_the_others() -> None:
    steady, random = Waits(0.5, 2.0), Waits(0.5, 2.0, at_random=True)
    for retry in range(1, 9):
        assert all(0 <= random.before(retry) <= steady.before(retry) for _ in range(50))
    assert len({random.before(3) for _ in range(50)}) > 1


@pytest.fixture
def waits() -> list[float]:
    """Seconds that are to be waited between tries; nobody does."""
    return []


def _store(endpoint: str, waits: list[float], *, max_retries: int = 5) -> HubStore:
    patience = Patience(max_retries, sleep=waits.append)
    return HubStore("org/model", endpoint=endpoint, token="hf_test", xet=False, patience=patience)


@contextmanager
def _nobody() -> Iterator[str]:
    """An address where nobody listens, nor will meanwhile."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def _busy(_: Exchange) -> Answer:
    return Answer(503, {"X-Error-Message": "busy", "!Connection": "close"}, cut=0)


def test_a_server_that_never_answered_is_given_up_soon_by_its_name(waits: list[float]) -> None:
    with _nobody() as endpoint, pytest.raises(NoConnectionError, match=f"no connection to {endpoint}: ") as told:
        _store(endpoint, waits).head("main")
    assert waits == [0.5, 1.0, 2.0]
    assert is_unreachable(told.value), "what is at hand may do instead"
    assert told.value.hint is not None
    assert "HF_ENDPOINT" in told.value.hint


def test_a_server_that_speaks_no_tls_is_told_as_such_at_once(waits: list[float]) -> None:
    proxy = Proxy(1)
    proxy.always("", _busy)
    with closing(proxy), pytest.raises(NoConnectionError, match="no connection to https://") as told:
        _store(proxy.url.replace("http:", "https:"), waits).head("main")
    assert waits == []
    assert "should HF_ENDPOINT begin with http://" in str(told.value.hint)
    assert is_unreachable(told.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_certificate_that_nobody_trusts_is_told_as_such_at_once(waits: list[float], tmp_path: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command += ["-subj", "/CN=localhost", "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.socket = ours.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        with pytest.raises(NoConnectionError, match="certificate") as told:
            _store(f"https://localhost:{server.server_address[1]}", waits).head("main")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert waits == []
    assert "SSL_CERT_FILE" in str(told.value.hint)


def test_fewer_tries_are_made_where_fewer_are_asked_for(waits: list[float]) -> None:
    with _nobody() as endpoint, pytest.raises(NoConnectionError):
        _store(endpoint, waits, max_retries=1).head("main")
    assert waits == [0.5]


def test_a_server_that_has_answered_and_then_goes_away_is_waited_for(waits: list[float]) -> None:
    proxy = Proxy(1)
    proxy.always("", _busy)
    with closing(proxy), pytest.raises(StoreError, match="busy"):
        _store(proxy.url, waits, max_retries=0).head("main")
    with pytest.raises(NoConnectionError):
        _store(proxy.url, waits).head("main")
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_server_that_is_new_but_busy_is_waited_for(waits: list[float]) -> None:
    proxy = Proxy(1)
    proxy.always("", _busy)
    with closing(proxy), pytest.raises(StoreError, match="busy"):
        _store(proxy.url, waits).head("main")
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]


@pytest.mark.parametrize(("variable", "value"), [("HTTP_PROXY", "ftp://proxy"), ("SSL_CERT_FILE", "nothing.pem")])
def test_a_setting_of_the_environment_that_keeps_the_client_from_being_made_is_named(
    monkeypatch: pytest.MonkeyPatch, waits: list[float], variable: str, value: str
) -> None:
    close_session()
    monkeypatch.setenv(variable, value)
    with pytest.raises(StoreError, match="cannot look at 'main': ") as told:
        _store("http://127.0.0.1:9", waits).head("main")
    assert variable in str(told.value.hint)
    assert waits == []
