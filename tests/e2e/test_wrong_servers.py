"""Servers that are no Hub, and tokens and addresses that cannot be right: one error that says so, at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hubshard
from hubshard.errors import FormatError, StoreError

if TYPE_CHECKING:
    from tests.conftest import Hub

REPO = "org/model"
WEIGHTS = {"w": np.ones(4, np.float32)}
SECRET = "hf_s3cret"


class Answering(ThreadingHTTPServer):
    """Answers every request with 200 and the same body."""

    def __init__(self, media_type: str, body: bytes) -> None:
        super().__init__(("127.0.0.1", 0), AnyRequest)
        self.media_type, self.body, self.requests = media_type, body, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class AnyRequest(BaseHTTPRequestHandler):
    server: Answering

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests += 1
        self.send_response(200)
        self.send_header("Content-Type", self.server.media_type)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(
    params=[
        ("text/html", b"<!DOCTYPE html><html>log in</html>"),
        ("application/json", b"{}"),
        ("application/json", b"[]"),
        ("application/json", b"null"),
        ("application/json", b'{"sha": '),
        ("application/json", b""),
    ],
    ids=["html", "object", "list", "null", "truncated", "empty"],
)
def no_hub(request: pytest.FixtureRequest) -> Iterator[Answering]:
    with Answering(*request.param) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


Verb = Callable[[Path, str, str | bool | None], object]
VERBS: dict[str, Verb] = {
    "push_to_hub": lambda _, url, token: hubshard.push_to_hub(WEIGHTS, REPO, endpoint=url, token=token),
    "pull": lambda folder, url, token: hubshard.pull(REPO, local_dir=folder / "copy", endpoint=url, token=token),
    "open_checkpoint": lambda _, url, token: hubshard.open_checkpoint(REPO, endpoint=url, token=token),
    "verify": lambda _, url, token: hubshard.verify(REPO, endpoint=url, token=token),
    "diff": lambda _, url, token: hubshard.diff(REPO, REPO, endpoint=url, token=token),
    "rollback": lambda _, url, token: hubshard.rollback(REPO, to="v1", endpoint=url, token=token),
}
verbs = pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS.keys())


@verbs
def test_a_server_that_is_no_hub_is_told_at_once(tmp_path: Path, no_hub: Answering, verb: Verb) -> None:
    with pytest.raises(StoreError, match="something else than a Hub would") as caught:
        verb(tmp_path, no_hub.url, None)
    assert not caught.value.retryable
    assert REPO in str(caught.value)
    assert no_hub.requests == 1
    assert list(tmp_path.glob("*.safetensors")) == []


@verbs
def test_without_the_login_that_is_asked_for_there_is_one_error(
    tmp_path: Path, hub: Hub, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(StoreError, match="token") as caught:
        verb(tmp_path, hub.url, True)
    assert not caught.value.retryable
    assert "hf auth login" in str(caught.value.hint)


@pytest.mark.parametrize("token", ["", f"{SECRET}\n", f" {SECRET}", f"{SECRET} x", f"{SECRET}\u00fc"])
@verbs
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(
    tmp_path: Path, hub: Hub, verb: Verb, token: str
) -> None:
    with pytest.raises(FormatError, match="token") as caught:
        verb(tmp_path, hub.url, token)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", ["hub", "hub.example:80", "ftp://hub.example", "http://", "http://[bad", "http://h:x"])
@verbs
def test_an_address_that_is_none_is_refused_by_name(tmp_path: Path, verb: Verb, url: str) -> None:
    with pytest.raises(FormatError, match="no URL of a Hub") as caught:
        verb(tmp_path, url, None)
    assert repr(url) in str(caught.value)
