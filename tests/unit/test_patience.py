"""How long a server is waited for that takes no connection: one that has answered before, and one that never has."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from hubshard.errors import StoreError
from hubshard.store.hub import HubStore
from hubshard.store.hub_errors import is_unreachable
from hubshard.store.patience import NoConnectionError, Patience
from tests.faults.proxy import Answer, Exchange, Proxy

pytest.importorskip("huggingface_hub")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that are waited between tries; nobody does."""
    monkeypatch.setattr("hubshard.store.patience.time.sleep", lambda _: None)
    return []


def _store(endpoint: str, waits: list[float], *, max_retries: int = 5) -> HubStore:
    patience = Patience(max_retries, on_retry=lambda _what, _cause, wait_seconds: waits.append(wait_seconds))
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
