"""Between the wire and the routes: raw paths, request ids, error bodies, bodies with a bound, pages.

Route patterns match the path *as it was sent*: `resume%2Fstate` is one segment, a real slash separates. Path
parameters are unquoted after matching (`Call` does it, or `unquote`).
"""

from __future__ import annotations

import json
import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlencode

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hubshard.errors import FormatError, HubshardError, IntegrityError, NotFoundError
from hubshard.hubserver.errors import ApiError, bad_request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence

    from starlette.datastructures import Headers, QueryParams
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from hubshard.hubserver.auth import Principal
    from hubshard.hubserver.state import HubState

__all__ = ["Call", "Edge", "base_url", "page", "page_of", "read_body", "route", "unquote"]

T = TypeVar("T")

_log = logging.getLogger("hubshard.hubserver")

_MAX_JSON_BYTES = 64 << 20
_MAX_DRAIN_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Call:
    """One request whose body has been read, as the handlers of small requests see it.

    Attributes:
        state: the server.
        principal: who asks.
        params: the path's parameters, unquoted.
        raw_params: the same as they were sent.
        query: the query.
        headers: the request's headers.
        body: the whole body.
        base_url: the URL under which the client knows the server.
        path: the path as it was sent, still quoted.
    """

    state: HubState
    principal: Principal
    params: Mapping[str, str]
    raw_params: Mapping[str, str]
    query: QueryParams
    headers: Headers
    body: bytes
    base_url: str
    path: str

    def json(self) -> dict[str, Any]:
        """The body as a JSON object; an empty body is an empty object.

        Raises:
            ApiError: 400: it is something else.
        """
        if not self.body:
            return {}
        try:
            found = json.loads(self.body)
        except ValueError as error:
            raise bad_request(f"the body is not JSON: {error}") from error
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise bad_request("the body is not a JSON object")
        return found

    def flag(self, name: str) -> bool:
        """Whether a query parameter is set to something that means yes."""
        return self.query.get(name, "").lower() in {"1", "true", "yes"}

    def next_page(self, position: int, *, at: str | None = None) -> dict[str, str]:
        """The `Link` header to the page that begins at a position.

        Args:
            position: kept in the query as `cursor`.
            at: the commit that is listed: it takes the place of the revision, so that a branch that moves
                between two pages does not mix two commits.
        """
        path = self.path
        if at is not None:
            path = path.replace(f"/{self.raw_params['revision']}", f"/{at}", 1)
        query = [(key, value) for key, value in self.query.multi_items() if key != "cursor"]
        target = f"{self.base_url}{path}?{urlencode([*query, ('cursor', str(position))])}"
        return {"Link": f'<{target}>; rel="next"'}


def base_url(request: Request, state: HubState) -> str:
    """The URL under which the client knows the server, without a slash at the end."""
    if state.settings.public_url:
        return state.settings.public_url.rstrip("/")
    return f"{request.url.scheme}://{request.headers.get('host', request.url.netloc)}"


async def read_body(request: Request, *, max_bytes: int = _MAX_JSON_BYTES) -> bytes:
    """The whole body of a small request.

    Raises:
        ApiError: 413: it is larger than `max_bytes`.
    """
    parts, nbytes = [], 0
    async for part in request.stream():
        nbytes += len(part)
        if nbytes > max_bytes:
            raise ApiError(413, f"the body has more than {max_bytes} bytes")
        parts.append(part)
    return b"".join(parts)


def route(state: HubState, method: str, path: str, handler: Callable[[Call], Response], *, kind: str) -> Route:
    """A route whose handler is an ordinary function, run in the pool once the body is there.

    Args:
        state: the server.
        method: the HTTP method; GET answers HEAD too.
        path: the pattern, matched against the quoted path.
        handler: the function.
        kind: under which its requests are counted.
    """

    async def endpoint(request: Request) -> Response:
        state.counters.add_request(kind)
        call = Call(
            state=state,
            principal=state.accounts.principal(request.headers.get("authorization")),
            params={name: unquote(value) for name, value in request.path_params.items()},
            raw_params=request.path_params,
            query=request.query_params,
            headers=request.headers,
            body=await read_body(request),
            base_url=base_url(request, state),
            path=request.scope["path"],
        )
        return await state.run(handler, call)

    return Route(path, endpoint, methods=[method])


def page_of(call: Call) -> int:
    """The position at which the wanted page begins."""
    return _positive(call.query.get("cursor"), 0)


def page(call: Call, items: Sequence[T], *, size: int, at: str | None = None) -> tuple[Sequence[T], dict[str, str]]:
    """The part of `items` that a request asks for, and the `Link` header to the next part, if there is one."""
    limit = min(size, _positive(call.query.get("limit"), size))
    start = page_of(call)
    headers = call.next_page(start + limit, at=at) if start + limit < len(items) else {}
    return items[start : start + limit], headers


def _positive(text: str | None, default: int) -> int:
    if text is None:
        return default
    if not text.isdecimal():
        raise bad_request(f"{text!r} is not a number")
    return int(text)


class Edge:
    """The outermost layer: every answer gets a request id, every error its body, every body is read to its end.

    A client sends its whole body before it looks at the answer, so a refusal waits until the body is through.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = scope["raw_path"].decode("ascii", "replace")
        exchange = _Exchange(scope, receive, send)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except ClientDisconnect:  # nobody is there to be answered
            return
        except Exception as error:  # the one place where an error becomes an answer
            if exchange.started:
                raise
            await _error_response(error)(scope, exchange.receive, exchange.send)


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        self._receive, self._send = receive, send
        self._request_id = headers.get(b"x-request-id", secrets.token_hex(12).encode())
        self._body_done = scope["method"] in {"GET", "HEAD"}
        self.started = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._body_done = True
        return message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            await self._drain()
            self.started = True
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._request_id)]
        await self._send(message)

    async def _drain(self) -> None:
        nbytes = 0
        while not self._body_done and nbytes <= _MAX_DRAIN_BYTES:
            message = await self.receive()
            nbytes += len(message.get("body", b""))


def _error_response(error: Exception) -> Response:
    if isinstance(error, ApiError):
        return _answer(error)
    if isinstance(error, FormatError | IntegrityError):
        return _answer(ApiError(400, error.message))
    if isinstance(error, NotFoundError):
        return _answer(ApiError(404, error.message))
    _log.error("a request failed", exc_info=error)
    if isinstance(error, OSError | HubshardError):
        return _answer(ApiError(507 if getattr(error, "errno", None) == 28 else 500, f"the server failed: {error}"))
    return _answer(ApiError(500, f"Internal Error - {type(error).__name__}: {error}"))


def _answer(error: ApiError) -> Response:
    headers = {**error.headers, "X-Error-Message": _header_text(error.message)}
    if error.code is not None:
        headers["X-Error-Code"] = error.code
    return JSONResponse({"error": error.message, **error.extra}, error.status, headers)


def _header_text(text: str) -> str:
    return " ".join(text.split()).encode("ascii", "replace").decode()
