"""The route that serves files."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from hubshard.hubserver import commits, contents, refs, registry, trees
from hubshard.hubserver.access import repo_of, require_contents
from hubshard.hubserver.errors import ApiError, entry_not_found
from hubshard.hubserver.http import base_url, unquote
from hubshard.hubserver.xet.streams import send_range

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.requests import Request

    from hubshard.hubserver.objects import Stored
    from hubshard.hubserver.repos import Repo
    from hubshard.hubserver.state import HubState
    from hubshard.hubserver.trees import Entry

__all__ = ["resolve_routes"]

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def resolve_routes(state: HubState) -> list[Route]:
    """The routes of this module."""
    resolver = _Resolver(state)
    return [
        Route(f"{prefix}/{{namespace}}/{{name}}/{word}/{{revision}}/{{path:path}}", resolver.endpoint, methods=["GET"])
        for word in ("resolve", "raw")
        for prefix in ("/{kind:repokind}", "")
    ]


@dataclass(frozen=True, slots=True)
class _Found:
    """A file of a commit: a regular one with its content, or a large one with where that is."""

    repo: Repo
    commit: str
    entry: Entry
    data: bytes | None
    stored: Stored | None


class _Resolver:
    def __init__(self, state: HubState) -> None:
        self._state = state

    async def endpoint(self, request: Request) -> Response:
        """Serve HEAD and GET, whole or a range."""
        state = self._state
        is_head = request.method == "HEAD"
        state.counters.add_request("resolve_head" if is_head else "resolve")
        found = await state.run(self._find, request)
        headers = _headers(found, base_url(request, state))
        nbytes = found.entry.nbytes
        span = _range(request.headers.get("range"), nbytes, headers)
        start, stop = span or (0, nbytes)
        if span is not None:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{nbytes}"
        headers["Content-Length"] = str(stop - start)
        status = 200 if span is None else 206
        if is_head:
            return Response(None, status, headers)
        state.counters.add(found.repo.key, "resolve_sent", stop - start)
        if found.data is not None:
            return Response(found.data[start:stop], status, headers)
        return StreamingResponse(self._body(found, start, stop), status, headers)

    def _find(self, request: Request) -> _Found:
        params = {name: unquote(value) for name, value in request.path_params.items()}
        principal = self._state.accounts.principal(request.headers.get("authorization"))
        with self._state.db.read() as connection:
            repo = repo_of(connection, principal, params)
            require_contents(connection, principal, repo)
            oid = refs.resolve(connection, repo.id, params["revision"])
            entry = trees.find(connection, commits.get(connection, repo.id, oid).tree, params["path"])
            if entry is None:
                raise entry_not_found(params["path"], oid)
            data = contents.blob(connection, entry) if entry.sha256 is None else None
            held = entry.sha256 is not None and registry.held_bytes(connection, repo.id, entry.sha256) is not None
        stored = self._state.objects.stat(entry.sha256) if held and entry.sha256 else None
        if data is None and stored is None:
            raise ApiError(
                404,
                f"{entry.path}: its content {entry.sha256} was deleted for good",
                code="EntryNotFound",
                headers={"X-Repo-Commit": oid},
            )
        return _Found(repo, oid, entry, data, stored)

    def _body(self, found: _Found, start: int, stop: int) -> AsyncIterator[bytes]:
        if found.stored is not None and found.stored.path is not None:
            return send_range(self._state, found.stored.path, start, stop)
        return _pieces(self._state, self._state.objects.read(found.entry.sha256 or "", start, stop))


async def _pieces(state: HubState, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces of a blocking iterator, each made in a thread, one ahead."""
    waiting = asyncio.create_task(state.run(next, pieces, None))
    try:
        while (piece := await waiting) is not None:
            waiting = asyncio.create_task(state.run(next, pieces, None))
            yield piece
    finally:
        await waiting


def _headers(found: _Found, base: str) -> dict[str, str]:
    entry, repo = found.entry, found.repo
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream" if found.data is None else "text/plain; charset=utf-8",
        "Content-Disposition": f"inline; filename*=UTF-8''{quote(entry.path.rpartition('/')[2], safe='')}",
        "ETag": f'"{entry.sha256 or entry.oid}"',
        "X-Repo-Commit": found.commit,
    }
    if entry.sha256 is not None:
        headers["X-Linked-Etag"] = f'"{entry.sha256}"'
        headers["X-Linked-Size"] = str(entry.nbytes)
    if found.stored is not None and found.stored.xet_hash is not None:
        auth = f"{base}/api/{repo.key}/xet-read-token/{found.commit}"
        headers["X-Xet-Hash"] = found.stored.xet_hash
        headers["Link"] = f'<{auth}>; rel="xet-auth"'
    return headers


def _range(header: str | None, nbytes: int, headers: dict[str, str]) -> tuple[int, int] | None:
    """The half-open range that is asked for; None for all. Several ranges at once are answered with all."""
    match = _RANGE.fullmatch(header.replace(" ", "")) if header else None
    if match is None or not (match[1] or match[2]):
        return None
    if match[1]:
        start, stop = int(match[1]), min(nbytes, int(match[2]) + 1 if match[2] else nbytes)
    else:
        start, stop = max(0, nbytes - int(match[2])), nbytes
    if start >= stop:
        extra = {"Content-Range": f"bytes */{nbytes}", "X-Repo-Commit": headers["X-Repo-Commit"]}
        raise ApiError(416, f"the file has {nbytes} bytes", headers=extra)
    return start, stop
