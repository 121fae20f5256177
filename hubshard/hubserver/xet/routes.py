"""The routes of Xet storage: tokens, xorbs, shards, reconstructions, chunks.

The paths and answers are those of the public CAS API (https://huggingface.co/docs/xet/api), under
`/xet/{realm}`. Routes of that API that are not here answer 404, from which clients fall back to those that are.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hubshard.errors import FormatError
from hubshard.hubserver import repos
from hubshard.hubserver.access import require_contents
from hubshard.hubserver.auth import require_read, require_write
from hubshard.hubserver.errors import ApiError, forbidden, repo_not_found
from hubshard.hubserver.http import base_url, read_body, route
from hubshard.hubserver.xet.dedup import find_chunk, is_asked, note_upload
from hubshard.hubserver.xet.files import XetFiles
from hubshard.hubserver.xet.hashing import from_hex, to_hex
from hubshard.hubserver.xet.realm import current_realm
from hubshard.hubserver.xet.reconstruct import reconstruction
from hubshard.hubserver.xet.shard import parse_shard
from hubshard.hubserver.xet.streams import receive, send_range
from hubshard.hubserver.xet.tokens import Scope, XetToken, XorbGrant, open_grant, open_token, sign_grant, sign_token
from hubshard.hubserver.xet.xorb import MAX_XORB_BYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from hubshard.hubserver.http import Call
    from hubshard.hubserver.state import HubState
    from hubshard.hubserver.xet.files import Term

__all__ = ["xet_routes"]

# The realm is not looked at: it is there for the clients, see realm.py.
_BASE = "/xet/{realm}"
_TOKEN_SECONDS = 3600
_URL_SECONDS = 3600
_UPLOADS_AT_ONCE = 12
_FILES_AT_ONCE = 4
# Beyond the data: 8 bytes per chunk, what packing may add, and the footer that older clients send.
_MAX_BODY_BYTES = MAX_XORB_BYTES + (4 << 20)
_MAX_SHARD_BYTES = 64 << 20
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


def xet_routes(state: HubState) -> list[Route]:
    """All routes of Xet storage."""
    cas = _Cas(state)
    return [
        *(
            route(
                state,
                "GET",
                f"/api/{kind}/{{namespace}}/{{name}}/xet-{scope}-token/{{revision:path}}",
                _token_handler(repos.TYPES[kind], scope),
                kind="xet_token",
            )
            for kind in repos.TYPES
            for scope in ("read", "write")
        ),
        cas.route("POST", f"{_BASE}/v1/xorbs/default/{{hash}}", cas.upload_xorb, "xet_xorb"),
        cas.route("POST", f"{_BASE}/v1/shards", cas.upload_shard, "xet_shard"),
        cas.route("GET", f"{_BASE}/v1/reconstructions/{{hash}}", cas.reconstruction, "xet_reconstruction"),
        cas.route("GET", f"{_BASE}/v1/chunks/{{prefix}}/{{hash}}", cas.find_chunk, "xet_chunk"),
        cas.route("GET", "/xet/data/{hash}", cas.xorb_bytes, "xet_data"),
        *(cas.route("POST", f"{prefix}/v1/telemetry", cas.telemetry, "xet_telemetry") for prefix in ("", _BASE)),
    ]


def _token_handler(kind: str, scope: Scope) -> Callable[[Call], Response]:
    def handler(call: Call) -> Response:
        params, principal = call.params, call.principal
        repo = repos.find(call.state.db.connection(), kind, params["namespace"], params["name"])
        if repo is None:
            raise repo_not_found(anonymous=principal.name is None)
        if scope == "write":
            # Whoever opens a pull request does not know its number yet: the client says create_pr, or names None.
            known = params["revision"].startswith("refs/pr/")
            contribute = known or call.flag("create_pr") or params["revision"] == "None"
            require_write(principal, repo, contribute=contribute)
        else:
            require_read(principal, repo)
            require_contents(call.state.db.connection(), principal, repo)
        token = XetToken(repo.id, repo.key, principal.name, scope, int(time.time()) + _TOKEN_SECONDS)
        return _token_response(token, call)

    return handler


def _token_response(token: XetToken, call: Call) -> Response:
    text, url = sign_token(token, call.state.secret), f"{call.base_url}/xet/{current_realm(call.state.db)}"
    headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": text, "X-Xet-Token-Expiration": str(token.exp)}
    return JSONResponse({"casUrl": url, "exp": token.exp, "accessToken": text}, headers=headers)


class _Cas:
    """The routes that carry a Xet token, or a signed URL, instead of a Hub token."""

    def __init__(self, state: HubState) -> None:
        self._state = state
        self._files = state.objects.xet if isinstance(state.objects.xet, XetFiles) else XetFiles(state.root, state.db)
        state.objects.xet = self._files
        self._uploads = asyncio.Semaphore(_UPLOADS_AT_ONCE)
        self._hashing: set[asyncio.Task[None]] = set()

    def route(self, method: str, path: str, handler: Callable[[Request], Awaitable[Response]], kind: str) -> Route:
        async def endpoint(request: Request) -> Response:
            self._state.counters.add_request(kind)
            return await handler(request)

        return Route(path, endpoint, methods=[method])

    async def upload_xorb(self, request: Request) -> Response:
        token = self._token(request, "write")
        xorb = from_hex(request.path_params["hash"])
        self._files.ahead.xorb_begins(token.repo_id, xorb)
        async with self._uploads:
            writer = await self._state.run(self._files.xorbs.writer, xorb)
            try:
                nbytes = await receive(self._state, request, writer.write, max_bytes=_MAX_BODY_BYTES)
                inserted, index = await self._state.run(writer.commit)
            finally:
                await self._state.run(writer.abort)
        await self._state.run(note_upload, self._state.db, token.repo_id, xorb, index)
        self._state.counters.add(token.repo, "xet_received", nbytes)
        self._hash_ahead(token.repo_id, xorb)
        return JSONResponse({"was_inserted": inserted})

    def _hash_ahead(self, repo_id: int, xorb: bytes) -> None:
        """While the client sends on, or makes the next xorb."""
        task = asyncio.create_task(self._state.run(self._files.ahead.xorb_stored, repo_id, xorb))
        self._hashing.add(task)
        task.add_done_callback(self._hashing.discard)

    async def upload_shard(self, request: Request) -> Response:
        token = self._token(request, "write")
        files = parse_shard(await read_body(request, max_bytes=_MAX_SHARD_BYTES))
        new: list[bool] = []
        for at in range(0, len(files), _FILES_AT_ONCE):
            batch = files[at : at + _FILES_AT_ONCE]
            new += await asyncio.gather(*(self._state.run(self._files.register, file, token.repo_id) for file in batch))
        return JSONResponse({"result": int(any(new))})

    async def reconstruction(self, request: Request) -> Response:
        token = self._token(request, "read")
        return await self._state.run(self._reconstruct, request, token)

    async def find_chunk(self, request: Request) -> Response:
        token = self._token(request, "read")
        chunk = from_hex(request.path_params["hash"])
        if token.scope != "write":  # who does not upload has nothing to deduplicate
            return Response(status_code=404)
        if not is_asked(chunk):  # clients ask about two kinds of chunks
            self._files.ahead.file_begins(token.repo_id, chunk)
        shard = await self._state.run(find_chunk, self._state.db, self._files.xorbs, token.repo_id, chunk)
        return Response(shard, 404 if shard is None else 200, media_type="application/octet-stream")

    async def xorb_bytes(self, request: Request) -> Response:
        xorb = from_hex(request.path_params["hash"])
        try:
            grant = open_grant(request.query_params.get("grant", ""), self._state.secret)
        except FormatError as error:
            raise forbidden(error.message) from error
        start, stop = _range(request.headers.get("range"), grant.stop) or (grant.start, grant.stop)
        if grant.xorb != to_hex(xorb) or not grant.start <= start < stop <= grant.stop:
            raise forbidden("the URL is not signed for these bytes; ask for the reconstruction again")
        path = self._files.xorbs.path(xorb)
        index = await self._state.run(self._files.xorbs.index, xorb)
        headers = {
            "Content-Length": str(stop - start),
            "Content-Range": f"bytes {start}-{stop - 1}/{index.packed_bytes}",
        }
        self._state.counters.add(grant.repo, "xet_sent", stop - start)
        body = send_range(self._state, path, start, stop)
        return StreamingResponse(body, 206, headers, media_type="application/octet-stream")

    async def telemetry(self, _request: Request) -> Response:
        return Response(status_code=204)

    def _token(self, request: Request, scope: Scope) -> XetToken:
        kind, _, text = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            raise ApiError(401, "a Xet token is needed; ask the Hub for one at the xet-read-token route")
        try:
            token = open_token(text.strip(), self._state.secret)
        except FormatError as error:
            raise ApiError(401, error.message) from error
        if scope == "write" and token.scope != "write":
            raise forbidden("this Xet token has the scope 'read'; the route needs 'write'")
        return token

    def _reconstruct(self, request: Request, token: XetToken) -> Response:
        value = from_hex(request.path_params["hash"])
        if not self._files.held_by(value, token.repo_id):
            raise ApiError(404, f"file {to_hex(value)} is not in {token.repo}")
        file = self._files.file_map(value)
        start, stop = _range(request.headers.get("range"), file.nbytes) or (0, file.nbytes)
        if start >= stop:
            headers = {"Content-Range": f"bytes */{file.nbytes}"}
            raise ApiError(416, f"the file has {file.nbytes} bytes", headers=headers)
        base, expires = base_url(request, self._state), int(time.time()) + _URL_SECONDS

        def url_for(run: Term) -> str:
            xorb = to_hex(run.xorb)
            grant = XorbGrant(xorb, run.packed_start, run.packed_stop, token.repo, expires)
            return f"{base}/xet/data/{xorb}?grant={sign_grant(grant, self._state.secret)}"

        return JSONResponse(reconstruction(file, self._files.xorbs, start, stop, url_for))


def _range(header: str | None, nbytes: int) -> tuple[int, int] | None:
    """The half-open range that a Range header asks for, cut at `nbytes`; None without a header.

    Raises:
        ApiError: 400: it is not one range of the form bytes=first-last.
    """
    if header is None:
        return None
    match = _RANGE.fullmatch(header.strip())
    if match is None:
        raise ApiError(400, f"Range {header!r} is not of the form bytes=first-last")
    last = int(match[2]) + 1 if match[2] else nbytes
    return int(match[1]), min(last, nbytes)
