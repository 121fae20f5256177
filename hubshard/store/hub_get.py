"""GET requests for content, of the Hub and of wherever it leads: an answer's bytes go into the caller's memory.

They take plain connections, which cost a fraction of what the HTTP client does. The client still makes the request:
its headers and hooks are part of it. Where the client itself was made to order, or a proxy stands between, it also
gets the answer.
"""

from __future__ import annotations

import atexit
import http.client
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from huggingface_hub.utils import get_session, httpx

from hubshard.store.connections import Answer, Connections, NotConnectedError, Origin
from hubshard.store.hub_errors import raise_for_status

__all__ = ["GetAnswer", "get"]

_MOST_ERROR_BYTES = 1 << 20
_PORTS = {"http": 80, "https": 443}

_connections = Connections(httpx.create_ssl_context)
atexit.register(_connections.close)


class GetAnswer(Protocol):
    """An answer whose body is still to come."""

    @property
    def status(self) -> int:
        """Of HTTP."""

    @property
    def headers(self) -> httpx.Headers:
        """Of the answer."""

    def readinto(self, into: memoryview) -> int:
        """Put the next bytes of the body, as many as have come and fit, into `into`; 0 at its end.

        Raises:
            httpx.HTTPError: it stalled, or broke off.
        """

    def raise_for_status(self) -> None:
        """Raise huggingface_hub's error for an answer that is one."""


@contextmanager
def get(url: str, headers: dict[str, str], timeout: httpx.Timeout) -> Iterator[GetAnswer]:
    """The answer to a GET request; redirects are not followed.

    Args:
        url: whole.
        headers: further ones than the client's own.
        timeout: to connect, and of silence.

    Raises:
        httpx.HTTPError: there is no answer.
        OfflineModeIsEnabled: no request may be made.
    """
    session = get_session()
    if not _is_plain(session, httpx.URL(url)):
        with _stream(session, url, headers, timeout) as response:
            yield _ClientAnswer(response)
        return
    request = session.build_request("GET", url, headers=headers)
    for hook in session.event_hooks["request"]:
        hook(request)
    host = request.url.raw_host.decode("ascii")  # whose encoding is newer than the one of sockets
    origin = Origin(request.url.scheme == "https", host, request.url.port or _PORTS[request.url.scheme])
    target = request.url.raw_path.decode("ascii")
    seconds = {"connect_seconds": timeout.connect, "stall_seconds": timeout.read}
    with ExitStack() as stack:
        with _errors(request):  # not those of whoever takes the answer
            answer = stack.enter_context(_connections.get(origin, target, request.headers.raw, **seconds))
        yield _PlainAnswer(answer, request)


@contextmanager
def _stream(
    session: httpx.Client, url: str, headers: dict[str, str], timeout: httpx.Timeout
) -> Iterator[httpx.Response]:
    with ExitStack() as stack:
        answer = session.stream("GET", url, headers=headers, timeout=timeout, follow_redirects=False)
        try:
            response = stack.enter_context(answer)
        except httpx.InvalidURL as error:  # some releases look at where a redirect leads, though they do not follow
            raise httpx.RemoteProtocolError("the server redirects to what is no address") from error
        yield response


class _ClientAnswer:
    # an answer that the HTTP client gets
    def __init__(self, response: httpx.Response) -> None:
        self.status: int = response.status_code
        self.headers = response.headers
        self._response = response
        self._pieces: Iterator[bytes] = response.iter_raw()
        self._piece = memoryview(b"")

    def readinto(self, into: memoryview) -> int:
        while not self._piece:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._piece = memoryview(piece)
        count = min(len(into), len(self._piece))
        into[:count], self._piece = self._piece[:count], self._piece[count:]
        return count

    def raise_for_status(self) -> None:
        raise_for_status(self._response)


class _PlainAnswer:
    # an answer that comes by a plain connection
    def __init__(self, answer: Answer, request: httpx.Request) -> None:
        self.status = answer.status
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
        self.headers = httpx.Headers(raw)  # which finds out how they are encoded
        self._answer = answer
        self._request = request

    def readinto(self, into: memoryview) -> int:
        with _errors(self._request):
            return self._answer.readinto(into)

    def raise_for_status(self) -> None:
        words = self._words() if self.status >= 400 else b""  # those of the server are in the body
        raise_for_status(httpx.Response(self.status, headers=self.headers, content=words, request=self._request))

    def _words(self) -> bytes:
        body = memoryview(bytearray(_MOST_ERROR_BYTES))
        nbytes = 0
        while nbytes < len(body) and (count := self.readinto(body[nbytes:])):
            nbytes += count
        return bytes(body[:nbytes])


def _is_plain(session: Any, url: httpx.URL) -> bool:
    """Whether the client would do nothing with a request that a plain connection does not do too."""
    module = sys.modules.get("huggingface_hub.utils._http")
    usual = getattr(module, "default_client_factory", None)
    is_usual = usual is not None and getattr(module, "_GLOBAL_CLIENT_FACTORY", None) is usual
    return is_usual and type(session) is httpx.Client and not url.userinfo and _is_direct(session, url)


def _is_direct(session: Any, url: httpx.URL) -> bool:
    """Whether the client takes no proxy; it reads NO_PROXY in a way of its own."""
    choose = getattr(session, "_transport_for_url", None)
    return choose is not None and choose(url) is getattr(session, "_transport", None)


@contextmanager
def _errors(request: httpx.Request) -> Iterator[None]:
    """Raise the errors that the client would."""
    try:
        yield
    except NotConnectedError as error:
        kind = httpx.ConnectTimeout if isinstance(error.__cause__, TimeoutError) else httpx.ConnectError
        raise kind(str(error), request=request) from error
    except TimeoutError as error:
        raise httpx.ReadTimeout(str(error), request=request) from error
    except http.client.IncompleteRead as error:
        message = f"the connection ended {error.expected or 'some'} bytes before the answer did"
        raise httpx.RemoteProtocolError(message, request=request) from error
    except http.client.RemoteDisconnected as error:
        raise httpx.RemoteProtocolError("the server ended the connection without an answer", request=request) from error
    except OSError as error:
        raise httpx.ReadError(str(error), request=request) from error
    except http.client.HTTPException as error:
        message = f"what the server answers is no HTTP ({type(error).__name__})"
        raise httpx.RemoteProtocolError(message, request=request) from error
