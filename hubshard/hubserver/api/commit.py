"""Routes that lead to a commit: validate-yaml, preupload, commit."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hubshard.hubserver import commits, contents, pulls, refs, trees, yamlcheck
from hubshard.hubserver.access import REPO_PATH, repo_for_write, repo_of
from hubshard.hubserver.errors import ApiError, bad_request
from hubshard.hubserver.http import Call, base_url, route, unquote
from hubshard.hubserver.ndjson import CommitReader
from hubshard.hubserver.patterns import is_ignored, is_lfs
from hubshard.hubserver.trees import Trees
from hubshard.hubserver.xet.streams import receive

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Mapping

    from starlette.requests import Request

    from hubshard.hubserver.auth import Principal
    from hubshard.hubserver.refs import Ref
    from hubshard.hubserver.repos import Repo
    from hubshard.hubserver.state import HubState
    from hubshard.hubserver.trees import Entry

__all__ = ["commit_routes"]

_LFS_BYTES = 10_000_000
_MAX_PREUPLOAD_FILES = 256
_MAX_COMMIT_BYTES = 16 << 30
_STALE = "The branch was updated since you opened this page. Please refresh and try again."


def commit_routes(state: HubState) -> list[Route]:
    """The routes of this module."""
    return [
        route(state, "POST", "/api/validate-yaml", _validate_yaml, kind="validate_yaml"),
        route(state, "POST", f"{REPO_PATH}/preupload/{{revision}}", _preupload, kind="preupload"),
        Route(f"{REPO_PATH}/commit/{{revision}}", _Committer(state).endpoint, methods=["POST"]),
    ]


def _validate_yaml(call: Call) -> Response:
    body = call.json()
    verdict = yamlcheck.check(str(body.get("content", "")), str(body.get("repoType", "model")))
    answer = {
        "errors": [{"message": message} for message in verdict.errors],
        "warnings": [{"message": message} for message in verdict.warnings],
    }
    return JSONResponse(answer, 400 if verdict.errors else 200)


def _preupload(call: Call) -> Response:
    body = call.json()
    files = body.get("files", [])
    if not isinstance(files, list) or len(files) > _MAX_PREUPLOAD_FILES:
        raise bad_request(f"preupload takes a list of at most {_MAX_PREUPLOAD_FILES} files")
    with call.state.db.read() as connection:
        repo = _repo_for_commit(connection, call.principal, call.params, create_pr=call.flag("create_pr"))
        oid = refs.resolve(connection, repo.id, call.params["revision"])
        tree = commits.get(connection, repo.id, oid).tree
        attributes = contents.text_of(connection, tree, ".gitattributes")
        ignore = body.get("gitIgnore")
        rules = contents.text_of(connection, tree, ".gitignore") if ignore is None else str(ignore)
        answers = [_advice(connection, tree, file, attributes, rules) for file in files]
    return JSONResponse({"files": answers, "commitOid": oid})


def _advice(
    connection: sqlite3.Connection, tree: bytes | None, file: dict[str, Any], attributes: str, rules: str
) -> dict[str, Any]:
    path, nbytes = commits.check_path(file.get("path")), file.get("size")
    if not isinstance(nbytes, int) or nbytes < 0:
        raise bad_request(f"{path}: its size is missing")
    try:
        sample = base64.b64decode(str(file.get("sample", "")))
    except binascii.Error as error:
        raise bad_request(f"{path}: its sample is not base64") from error
    is_large = nbytes > 0 and (is_lfs(path, attributes) or nbytes >= _LFS_BYTES or _is_binary(sample))
    there = trees.find(connection, tree, path)
    return {
        "path": path,
        "uploadMode": "lfs" if is_large else "regular",
        "shouldIgnore": is_ignored(path, rules),
        "oid": None if there is None else there.sha256 or there.oid,
    }


def _is_binary(sample: bytes) -> bool:
    """Whether the beginning of a file is no UTF-8 text; a character cut off at its end does not count."""
    if b"\0" in sample:
        return True
    try:
        sample.decode()
    except UnicodeDecodeError as error:
        return error.start < len(sample) - 3
    return False


def _repo_for_commit(
    connection: sqlite3.Connection, principal: Principal, params: Mapping[str, str], *, create_pr: bool
) -> Repo:
    """The repo, for who may write to it, or opens a pull request, or goes on with one of theirs."""
    repo = repo_of(connection, principal, params)
    pull = None
    if refs.get(connection, repo.id, params["revision"]) is not None:
        pull = pulls.of_ref(connection, repo.id, params["revision"])
    own = pull is not None and pull.author == principal.name
    return repo_for_write(connection, principal, params, contribute=create_pr or own)


@dataclass(frozen=True, slots=True)
class _Request:
    principal: Principal
    params: dict[str, str]
    create_pr: bool
    base_url: str

    @property
    def author(self) -> str:
        return self.principal.name or "anonymous"


class _Committer:
    """The route of commits: the body is read as it arrives, then one transaction does it all."""

    def __init__(self, state: HubState) -> None:
        self._state = state
        self._trees = Trees()

    async def endpoint(self, request: Request) -> Response:
        """Serve one commit."""
        self._state.counters.add_request("commit")
        wanted = _Request(
            principal=self._state.accounts.principal(request.headers.get("authorization")),
            params={name: unquote(value) for name, value in request.path_params.items()},
            create_pr=request.query_params.get("create_pr", "").lower() in {"1", "true"},
            base_url=base_url(request, self._state),
        )
        key = await self._state.run(self._check, wanted)
        reader = CommitReader(self._state.db)
        try:
            await receive(self._state, request, lambda part: reader.feed(bytes(part)), max_bytes=_MAX_COMMIT_BYTES)
            answer = await self._state.run(self._commit, wanted, reader)
        finally:
            self._state.counters.add(key, "regular_received", reader.nbytes)
        return JSONResponse(answer)

    def _check(self, wanted: _Request) -> str:
        """Refuse early what the body cannot change; the key of the repo."""
        with self._state.db.read() as connection:
            repo = _repo_for_commit(connection, wanted.principal, wanted.params, create_pr=wanted.create_pr)
            refs.writable(connection, repo.id, wanted.params["revision"])
        return repo.key

    def _commit(self, wanted: _Request, reader: CommitReader) -> dict[str, Any]:
        reader.finish()
        with self._state.db.write() as connection:
            repo = _repo_for_commit(connection, wanted.principal, wanted.params, create_pr=wanted.create_pr)
            target = refs.writable(connection, repo.id, wanted.params["revision"])
            parent = _parent(connection, repo, target, reader.parent, create_pr=wanted.create_pr)
            made = self._write(connection, repo, parent, wanted, reader)
            pull = _note(connection, repo, target, parent, made, wanted, reader)
        self._state.counters.add(repo.key, "commits", 1)
        url = f"{wanted.base_url}/{repo.url_path}"
        answer = {"success": True, "commitOid": made.oid, "commitUrl": f"{url}/commit/{made.oid}", "hookOutput": ""}
        if pull is not None:
            answer["pullRequestUrl"] = f"{url}/discussions/{pull.num}"
        return answer

    def _write(
        self,
        connection: sqlite3.Connection,
        repo: Repo,
        parent: commits.Commit,
        wanted: _Request,
        reader: CommitReader,
    ) -> commits.Commit:
        files: Mapping[str, Entry] = self._trees.get(connection, parent.tree)
        changes = commits.apply(connection, repo.id, files, reader.operations)
        _refuse_lost_blobs(connection, changes)
        tree = trees.update(connection, parent.tree, changes)
        self._trees.derive(tree, files, changes)
        return commits.write(
            connection,
            repo.id,
            parent=parent.oid,
            tree=tree,
            author=wanted.author,
            title=reader.summary,
            message=reader.description,
        )


def _parent(
    connection: sqlite3.Connection, repo: Repo, target: Ref, expected: str | None, *, create_pr: bool
) -> commits.Commit:
    """The commit to build on: the head, which must be what the client expects; a new pull request starts anywhere."""
    if create_pr and expected is not None:
        return commits.get(connection, repo.id, refs.resolve(connection, repo.id, expected))
    if expected is not None and not (len(expected) >= 7 and target.commit.startswith(expected)):
        raise ApiError(412, _STALE)
    return commits.get(connection, repo.id, target.commit)


def _refuse_lost_blobs(connection: sqlite3.Connection, changes: Mapping[str, Entry | None]) -> None:
    """Contents arrived before this transaction; a collection with no grace may have taken them since."""
    for entry in changes.values():
        if entry is not None and entry.sha256 is None:
            found = connection.execute("SELECT 1 FROM blobs WHERE oid = ?", (entry.oid,)).fetchone()
            if found is None:
                raise ApiError(503, f"{entry.path}: its content was collected before the commit; try again")


def _note(
    connection: sqlite3.Connection,
    repo: Repo,
    target: Ref,
    parent: commits.Commit,
    made: commits.Commit,
    wanted: _Request,
    reader: CommitReader,
) -> pulls.Discussion | None:
    """Move the branch; or open the pull request, or go on with it."""
    pull = pulls.of_ref(connection, repo.id, target.name)
    if wanted.create_pr:
        base = refs.Ref(target.name, parent.oid)
        pull = pulls.open_pull(
            connection,
            repo.id,
            title=reader.summary,
            description=reader.description,
            author=wanted.author,
            base=base,
            status="open",
        )
    refs.set_head(connection, repo.id, pull.ref if pull else target.name, made.oid)
    if pull is not None:
        data = {"subject": made.title, "oid": made.oid}
        pulls.add_event(connection, repo.id, pull.num, "commit", wanted.author, data)
    return pull if wanted.create_pr else None
