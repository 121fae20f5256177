"""Routes of large files: uploads by the LFS protocol, and what a repo holds.

The batch API is that of git-lfs, with the transfers `basic` and `multipart`. The URLs that it hands out are
signed, and are used without a token.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hubshard.errors import IntegrityError
from hubshard.hubserver import commits, jwt, refs, registry, repos, trees, views
from hubshard.hubserver.access import REPO_PATH, repo_for_write, repo_of
from hubshard.hubserver.auth import require_write
from hubshard.hubserver.errors import ApiError, bad_request, forbidden, repo_not_found, unprocessable
from hubshard.hubserver.http import Call, page, route
from hubshard.hubserver.multipart import PartWriter, Prefixes, join_parts
from hubshard.hubserver.rewrite import drop_files
from hubshard.hubserver.xet.streams import receive

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator

    from starlette.requests import Request

    from hubshard.hubserver.repos import Repo
    from hubshard.hubserver.state import HubState

__all__ = ["lfs_routes"]

_URL_SECONDS = 24 * 3600
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MEDIA_TYPE = "application/vnd.git-lfs+json"


def lfs_routes(state: HubState) -> list[Route]:
    """The routes of this module."""
    uploads = _Uploads(state)
    return [
        route(state, "POST", "/{namespace}/{name}.git/info/lfs/objects/batch", _batch, kind="lfs_batch"),
        route(
            state, "POST", "/{kind:repokind}/{namespace}/{name}.git/info/lfs/objects/batch", _batch, kind="lfs_batch"
        ),
        Route("/lfs/upload", uploads.put_object, methods=["PUT"]),
        Route("/lfs/part/{number:int}", uploads.put_part, methods=["PUT"]),
        route(state, "POST", "/lfs/complete", uploads.complete, kind="lfs_complete"),
        route(state, "POST", "/lfs/verify", _verify, kind="lfs_verify"),
        route(state, "GET", f"{REPO_PATH}/lfs-files", _list, kind="lfs_files"),
        route(state, "POST", f"{REPO_PATH}/lfs-files/batch", _delete, kind="lfs_files"),
        route(state, "POST", f"{REPO_PATH}/lfs-files/duplicate", _duplicate, kind="lfs_duplicate"),
    ]


def _batch(call: Call) -> Response:
    body = call.json()
    if body.get("operation") != "upload":
        raise unprocessable("only uploads go through the LFS batch API; download from the resolve routes")
    ref = (body.get("ref") or {}).get("name")
    with call.state.db.write() as connection:
        # Whoever opens a pull request does not know its ref yet and names none.
        contribute = ref is None or str(ref).startswith("refs/pr/")
        repo = repo_for_write(connection, call.principal, call.params, contribute=contribute)
        answers = [_answer(connection, call, repo, item) for item in body.get("objects", [])]
    return JSONResponse({"transfer": "basic", "objects": answers}, media_type=_MEDIA_TYPE)


def _answer(connection: sqlite3.Connection, call: Call, repo: Repo, item: dict[str, Any]) -> dict[str, Any]:
    sha256, nbytes = item.get("oid"), item.get("size")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256) or not isinstance(nbytes, int) or nbytes < 0:
        error = {"code": 422, "message": "an object needs an oid of 64 lower-case hex digits and a size"}
        return {"oid": str(sha256), "size": nbytes if isinstance(nbytes, int) else 0, "error": error}
    answer: dict[str, Any] = {"oid": sha256, "size": nbytes, "authenticated": True}
    if registry.held_bytes(connection, repo.id, sha256) is not None:
        registry.touch(connection, repo.id, sha256)
        return answer
    answer["actions"] = _actions(call, repo, sha256, nbytes)
    return answer


def _actions(call: Call, repo: Repo, sha256: str, nbytes: int) -> dict[str, Any]:
    part_bytes = call.state.settings.lfs_part_bytes
    claims: dict[str, Any] = {
        "use": "lfs",
        "repo": repo.id,
        "key": repo.key,
        "oid": sha256,
        "size": nbytes,
        "exp": int(time.time()) + _URL_SECONDS,
    }
    if nbytes > part_bytes:
        claims["upload"] = secrets.token_hex(16)
    grant, base = jwt.encode(claims, call.state.secret), call.base_url
    upload: dict[str, Any] = {"href": f"{base}/lfs/upload?grant={grant}"}
    if nbytes > part_bytes:
        numbers = range(1, -(-nbytes // part_bytes) + 1)
        header = {str(number): f"{base}/lfs/part/{number}?grant={grant}" for number in numbers}
        upload = {"href": f"{base}/lfs/complete?grant={grant}", "header": {"chunk_size": str(part_bytes), **header}}
    return {"upload": upload, "verify": {"href": f"{base}/lfs/verify?grant={grant}"}}


def _grant(state: HubState, text: str) -> dict[str, Any]:
    try:
        claims = jwt.decode(text, state.secret)
    except jwt.JwtError as error:
        raise forbidden(f"{error}: ask the LFS batch API for a new URL") from error
    if claims.get("use") != "lfs":
        raise forbidden("this URL is not signed for LFS uploads")
    return claims


class _Uploads:
    """The routes that take bytes."""

    def __init__(self, state: HubState) -> None:
        self._state = state
        self._prefixes = Prefixes()

    async def put_object(self, request: Request) -> Response:
        """A whole object."""
        state = self._state
        state.counters.add_request("lfs_upload")
        claims = _grant(state, request.query_params.get("grant", ""))
        writer = await state.run(state.objects.writer)
        try:
            await receive(state, request, writer.write, max_bytes=claims["size"])
            await state.run(writer.commit, claims["oid"], claims["size"])
        finally:
            await state.run(writer.abort)
            state.counters.add(claims["key"], "lfs_received", writer.nbytes)
        await state.run(_register, state, claims)
        return Response(status_code=200, headers={"ETag": f'"{claims["oid"]}"'})

    async def put_part(self, request: Request) -> Response:
        """One part of an object."""
        state = self._state
        state.counters.add_request("lfs_upload")
        claims = _grant(state, request.query_params.get("grant", ""))
        number, most = request.path_params["number"], state.settings.lfs_part_bytes
        if "upload" not in claims or not 1 <= number <= -(-claims["size"] // most):
            raise bad_request(f"part {number} does not belong to this upload")
        writer = await state.run(PartWriter, state.root, self._prefixes, claims["upload"], number, (number - 1) * most)
        try:
            await receive(state, request, writer.write, max_bytes=most)
            etag = await state.run(writer.commit)
        finally:
            await state.run(writer.close)
            state.counters.add(claims["key"], "lfs_received", writer.nbytes)
        return Response(status_code=200, headers={"ETag": f'"{etag}"'})

    def complete(self, call: Call) -> Response:
        """Join the parts of an object."""
        state, claims, body = call.state, _grant(call.state, call.query.get("grant", "")), call.json()
        if body.get("oid") != claims["oid"] or "upload" not in claims:
            raise bad_request("the completed object is not the one that the URL is signed for")
        parts = body.get("parts", [])
        etags = {int(part["partNumber"]): str(part["etag"]).strip('"') for part in parts}
        if sorted(etags) != list(range(1, -(-claims["size"] // state.settings.lfs_part_bytes) + 1)):
            raise bad_request("the list of parts is not complete")
        # A client that lost the answer completes again; the parts are gone then, and the repo holds the object.
        with self._prefixes.joining(claims["upload"]):
            if registry.held_bytes(state.db.connection(), claims["repo"], claims["oid"]) is None:
                join_parts(
                    state.root, self._prefixes, state.objects, claims["upload"], etags, claims["oid"], claims["size"]
                )
                _register(state, claims)
        return JSONResponse({"success": True})


def _register(state: HubState, claims: dict[str, Any]) -> None:
    """The repo holds the object, if both still exist: collection and deletion are transactions too."""
    with state.db.write() as connection:
        if connection.execute("SELECT 1 FROM repos WHERE id = ?", (claims["repo"],)).fetchone() is None:
            raise repo_not_found()
        if state.objects.stat(claims["oid"]) is None:
            raise ApiError(503, "the object was collected while it was uploaded; upload it again")
        registry.hold(connection, claims["repo"], claims["oid"], claims["size"])


def _verify(call: Call) -> Response:
    claims = _grant(call.state, call.query.get("grant", ""))
    found = call.state.objects.stat(claims["oid"])
    if found is None:
        raise ApiError(404, f"object {claims['oid']} has not arrived")
    if found.nbytes != call.json().get("size"):
        raise IntegrityError(f"object {claims['oid']} has {found.nbytes} bytes, not {call.json().get('size')}")
    return JSONResponse({})


def _list(call: Call) -> Response:
    with call.state.db.read() as connection:
        repo = repo_of(connection, call.principal, call.params)
        rows = connection.execute("SELECT * FROM lfs_files WHERE repo_id = ? ORDER BY sha256", (repo.id,)).fetchall()
        chosen, headers = page(call, rows, size=call.state.settings.page_size)
        names = _names(connection, repo, {row["sha256"] for row in chosen})
    shown = [
        {
            "fileOid": row["sha256"],
            "oid": row["sha256"],
            "filename": names.get(row["sha256"], (row["sha256"], None))[0],
            "ref": names.get(row["sha256"], ("", None))[1],
            "size": row["nbytes"],
            "pushedAt": views.iso(row["touched_at"]),
        }
        for row in chosen
    ]
    return JSONResponse(shown, headers=headers)


def _names(connection: sqlite3.Connection, repo: Repo, wanted: set[str]) -> dict[str, tuple[str, str | None]]:
    """sha256 → a path that it has, or had, and the ref, when that is still so; current names come first."""
    found: dict[str, tuple[str, str | None]] = {}
    seen: set[bytes] = set()
    for ref, tree in _all_trees(connection, repo):
        for entry in trees.reachable(connection, tree, seen):
            if entry.sha256 in wanted and entry.sha256 is not None:
                found.setdefault(entry.sha256, (entry.path, ref))
    return found


def _all_trees(connection: sqlite3.Connection, repo: Repo) -> Iterator[tuple[str | None, bytes | None]]:
    for ref in refs.listing(connection, repo.id):
        yield ref.name, commits.get(connection, repo.id, ref.commit).tree
    for row in connection.execute("SELECT tree FROM commits WHERE repo_id = ? ORDER BY date DESC", (repo.id,)):
        yield None, row["tree"]


def _delete(call: Call) -> Response:
    """Give up large files for good.

    With `rewriteHistory` no commit names them afterwards; without it they are named still, and cannot be read.
    """
    deletions = call.json().get("deletions") or {}
    shas, rewrite = {str(sha) for sha in deletions.get("sha", [])}, bool(deletions.get("rewriteHistory"))
    with call.state.db.write() as connection:
        repo = repo_for_write(connection, call.principal, call.params)
        unknown = [sha for sha in sorted(shas) if registry.held_bytes(connection, repo.id, sha) is None]
        if unknown:
            raise ApiError(404, f"the repo holds no LFS file {', '.join(unknown)}")
        if rewrite:
            drop_files(connection, repo.id, shas)
        connection.executemany(
            "DELETE FROM lfs_files WHERE repo_id = ? AND sha256 = ?", [(repo.id, sha) for sha in shas]
        )
        _drop_unheld(connection, call.state, shas)
    return JSONResponse({"success": True})


def _drop_unheld(connection: sqlite3.Connection, state: HubState, shas: set[str]) -> None:
    """Contents that no repo holds any more go at once, inside the transaction, as collection does it."""
    for sha in shas:
        if connection.execute("SELECT 1 FROM lfs_files WHERE sha256 = ? LIMIT 1", (sha,)).fetchone() is None:
            state.objects.delete(sha)


def _duplicate(call: Call) -> Response:
    """Give large files of this repo to another one, without moving a byte."""
    body = call.json()
    target, failed = body.get("target") or {}, []
    with call.state.db.write() as connection:
        source = repo_of(connection, call.principal, call.params)
        kind, full_name = str(target.get("type", "model")), str(target.get("name", ""))
        namespace, name = repos.split_id(full_name)
        other = repos.find(connection, kind, namespace, name)
        if other is None:
            raise repo_not_found(anonymous=call.principal.name is None)
        require_write(call.principal, other, contribute=True)
        for item in body.get("files", []):
            sha256 = str(item.get("sha256"))
            nbytes = registry.held_bytes(connection, source.id, sha256)
            if nbytes is None:
                failed.append({"sha256": sha256, "error": f"{source.key} holds no such file"})
            else:
                registry.hold(connection, other.id, sha256, nbytes)
    return JSONResponse({"success": not failed, "failed": failed})
