"""Routes of branches, tags and commits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response

from hubshard.hubserver import commits, refs, views
from hubshard.hubserver.access import REPO_PATH, repo_for_write, repo_of
from hubshard.hubserver.http import Call, page_of, route

if TYPE_CHECKING:
    from starlette.routing import Route

    from hubshard.hubserver.state import HubState

__all__ = ["ref_routes"]


def ref_routes(state: HubState) -> list[Route]:
    """The routes of this module."""
    return [
        route(state, "GET", f"{REPO_PATH}/refs", _refs, kind="refs"),
        route(state, "POST", f"{REPO_PATH}/branch/{{branch}}", _create_branch, kind="branch"),
        route(state, "DELETE", f"{REPO_PATH}/branch/{{branch}}", _delete_branch, kind="branch"),
        route(state, "POST", f"{REPO_PATH}/tag/{{revision}}", _create_tag, kind="tag"),
        route(state, "DELETE", f"{REPO_PATH}/tag/{{revision}}", _delete_tag, kind="tag"),
        route(state, "POST", f"{REPO_PATH}/super-squash/{{branch}}", _squash, kind="squash"),
        route(state, "GET", f"{REPO_PATH}/commits/{{revision}}", _commits, kind="commits"),
    ]


def _refs(call: Call) -> Response:
    with call.state.db.read() as connection:
        repo = repo_of(connection, call.principal, call.params)
        found = refs.listing(connection, repo.id)
    answer = {
        "branches": [views.ref_json(ref) for ref in found if ref.name.startswith("refs/heads/")],
        "tags": [views.ref_json(ref) for ref in found if ref.name.startswith("refs/tags/")],
        "converts": [],
    }
    if call.flag("include_prs"):
        answer["pullRequests"] = [views.ref_json(ref) for ref in found if ref.name.startswith("refs/pr/")]
    return JSONResponse(answer)


def _create_branch(call: Call) -> Response:
    branch, start = call.params["branch"], call.json().get("startingPoint", "main")
    refs.check_branch_name(branch)
    with call.state.db.write() as connection:
        repo = repo_for_write(connection, call.principal, call.params)
        commit = refs.resolve(connection, repo.id, str(start))
        refs.create(connection, repo.id, f"refs/heads/{branch}", commit)
    return Response(status_code=200)


def _delete_branch(call: Call) -> Response:
    with call.state.db.write() as connection:
        repo = repo_for_write(connection, call.principal, call.params)
        refs.delete(connection, repo.id, f"refs/heads/{call.params['branch']}")
    return Response(status_code=200)


def _create_tag(call: Call) -> Response:
    body = call.json()
    tag, message = str(body.get("tag", "")), body.get("message")
    refs.check_branch_name(tag, what="tag")
    with call.state.db.write() as connection:
        repo = repo_for_write(connection, call.principal, call.params)
        commit = refs.resolve(connection, repo.id, call.params["revision"])
        refs.create(connection, repo.id, f"refs/tags/{tag}", commit, message=message)
    return Response(status_code=200)


def _delete_tag(call: Call) -> Response:
    with call.state.db.write() as connection:
        repo = repo_for_write(connection, call.principal, call.params)
        refs.delete(connection, repo.id, f"refs/tags/{call.params['revision']}")
    return Response(status_code=200)


def _squash(call: Call) -> Response:
    branch = call.params["branch"]
    title, _, message = str(call.json().get("message") or "Super-squash").partition("\n")
    with call.state.db.write() as connection:
        repo = repo_for_write(connection, call.principal, call.params)
        ref = refs.writable(connection, repo.id, branch)
        head = commits.get(connection, repo.id, ref.commit)
        made = commits.write(
            connection,
            repo.id,
            parent=None,
            tree=head.tree,
            author=call.principal.name or "anonymous",
            title=title,
            message=message.strip(),
        )
        refs.set_head(connection, repo.id, ref.name, made.oid)
    return Response(status_code=200)


def _commits(call: Call) -> Response:
    with call.state.db.read() as connection:
        repo = repo_of(connection, call.principal, call.params)
        head = refs.resolve(connection, repo.id, call.params["revision"])
        size = call.state.settings.page_size
        start = page_of(call)
        found = commits.history(connection, repo.id, head, start=start, count=size + 1)
    formatted = "formatted" in [*call.query.getlist("expand[]"), *call.query.getlist("expand")]
    headers = call.next_page(start + size, at=head) if len(found) > size else {}
    shown = [views.commit_json(commit, formatted=formatted) for commit in found[:size]]
    return JSONResponse(shown, headers=headers)
