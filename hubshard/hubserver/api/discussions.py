"""Routes of discussions and pull requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from hubshard.hubserver import pulls, refs, views
from hubshard.hubserver.access import REPO_PATH, repo_for_write, repo_of
from hubshard.hubserver.errors import ApiError, bad_request, forbidden
from hubshard.hubserver.http import Call, route

if TYPE_CHECKING:
    import sqlite3

    from starlette.routing import Route

    from hubshard.hubserver.pulls import Discussion
    from hubshard.hubserver.repos import Repo
    from hubshard.hubserver.state import HubState

__all__ = ["discussion_routes"]

_PAGE = 50


def discussion_routes(state: HubState) -> list[Route]:
    """The routes of this module."""
    one = f"{REPO_PATH}/discussions/{{num}}"
    return [
        route(state, "GET", f"{REPO_PATH}/discussions", _list, kind="discussions"),
        route(state, "POST", f"{REPO_PATH}/discussions", _create, kind="discussions"),
        route(state, "GET", one, _details, kind="discussions"),
        route(state, "POST", f"{one}/comment", _comment, kind="discussions"),
        route(state, "POST", f"{one}/comment/{{comment}}/edit", _edit, kind="discussions"),
        route(state, "POST", f"{one}/comment/{{comment}}/hide", _hide, kind="discussions"),
        route(state, "POST", f"{one}/title", _rename, kind="discussions"),
        route(state, "POST", f"{one}/status", _status, kind="discussions"),
        route(state, "POST", f"{one}/merge", _merge, kind="merge"),
    ]


def _list(call: Call) -> Response:
    query = call.query
    with call.state.db.read() as connection:
        repo = repo_of(connection, call.principal, call.params)
        found = pulls.listing(connection, repo.id)
    kinds = {"pull_request": (True,), "discussion": (False,)}.get(query.get("type", ""), (True, False))
    status = {"open": ("open", "draft"), "closed": ("closed", "merged")}.get(query.get("status", ""))
    chosen = [
        item
        for item in found
        if item.is_pull_request in kinds
        and (status is None or item.status in status)
        and query.get("author", item.author) == item.author
    ]
    page = query.get("p", "0")
    start = (int(page) if page.isdecimal() else 0) * _PAGE
    shown = [_summary(repo, item) for item in chosen[start : start + _PAGE]]
    return JSONResponse({"discussions": shown, "count": len(chosen), "start": start, "numClosedDiscussions": 0})


def _create(call: Call) -> Response:
    body, author = call.json(), _user(call)
    title, description = str(body.get("title", "")), str(body.get("description", ""))
    with call.state.db.write() as connection:
        if body.get("pullRequest"):
            repo = repo_for_write(connection, call.principal, call.params, contribute=True)
            base = refs.Ref(refs.MAIN, refs.resolve(connection, repo.id, refs.MAIN))
            made = pulls.open_pull(connection, repo.id, title=title, description=description, author=author, base=base)
        else:
            repo = repo_of(connection, call.principal, call.params)
            made = pulls.open_discussion(connection, repo.id, title=title, description=description, author=author)
    url = f"{call.base_url}/{repo.url_path}/discussions/{made.num}"
    return JSONResponse({"num": made.num, "url": url, "pullRequest": made.is_pull_request})


def _details(call: Call) -> Response:
    with call.state.db.read() as connection:
        repo, found = _find(connection, call)
        answer = _summary(repo, found)
        answer["events"] = [_event(event) for event in pulls.events(connection, repo.id, found.num)]
        if found.is_pull_request:
            answer["filesWithConflicts"] = pulls.conflicts(connection, repo.id, found)
            answer["changes"] = {"base": found.base, "mergeCommitId": found.merge_commit}
            if call.flag("diff"):
                answer["diff"] = pulls.diff(connection, repo.id, found)
    return JSONResponse(answer)


def _comment(call: Call) -> Response:
    author, text = _user(call), str(call.json().get("comment", "")).strip()
    if not text:
        raise bad_request("a comment needs a text")
    with call.state.db.write() as connection:
        repo, found = _find(connection, call)
        event = pulls.add_event(connection, repo.id, found.num, "comment", author, {"raw": text})
    return JSONResponse({"newMessage": _event(event)})


def _edit(call: Call) -> Response:
    return _change_comment(call, {"raw": str(call.json().get("content", "")), "edited": True})


def _hide(call: Call) -> Response:
    return _change_comment(call, {"raw": "This comment has been hidden", "hidden": True})


def _change_comment(call: Call, changes: dict[str, Any]) -> Response:
    with call.state.db.write() as connection:
        repo, found = _find(connection, call)
        event_id = call.params["comment"]
        event = pulls.edit_comment(connection, repo.id, found.num, event_id, changes)
        _require_author_or_owner(call, repo, event["author"])
    return JSONResponse({"updatedComment": _event(event)})


def _rename(call: Call) -> Response:
    title = str(call.json().get("title", "")).strip()
    if not title:
        raise bad_request("a discussion needs a title")
    with call.state.db.write() as connection:
        repo, found = _find(connection, call)
        _require_author_or_owner(call, repo, found.author)
        event = pulls.rename(connection, repo.id, found, title, _user(call))
    return JSONResponse({"newTitle": _event(event)})


def _status(call: Call) -> Response:
    body = call.json()
    with call.state.db.write() as connection:
        repo, found = _find(connection, call)
        _require_author_or_owner(call, repo, found.author)
        _add_comment(connection, call, repo, found, body)
        event = pulls.set_status(connection, repo.id, found, str(body.get("status")), _user(call))
    return JSONResponse({"newStatus": _event(event)})


def _merge(call: Call) -> Response:
    body = call.json()
    with call.state.db.write() as connection:
        repo = repo_for_write(connection, call.principal, call.params)
        found = pulls.get(connection, repo.id, call.params["num"])
        _add_comment(connection, call, repo, found, body)
        event = pulls.merge(connection, repo, found, author=_user(call))
    call.state.counters.add(repo.key, "commits", 1)
    return JSONResponse({"newStatus": _event(event)})


def _find(connection: sqlite3.Connection, call: Call) -> tuple[Repo, Discussion]:
    repo = repo_of(connection, call.principal, call.params)
    return repo, pulls.get(connection, repo.id, call.params["num"])


def _add_comment(
    connection: sqlite3.Connection, call: Call, repo: Repo, found: Discussion, body: dict[str, Any]
) -> None:
    if body.get("comment"):
        pulls.add_event(connection, repo.id, found.num, "comment", _user(call), {"raw": str(body["comment"])})


def _user(call: Call) -> str:
    if call.principal.name is None:
        raise ApiError(401, "Invalid username or password.")
    if call.principal.role == "read":
        raise forbidden("Forbidden: a token with the role 'read' may not discuss; the role 'write' is needed")
    return call.principal.name


def _require_author_or_owner(call: Call, repo: Repo, author: str) -> None:
    if _user(call) != author and call.principal.why_not_write(repo) is not None:
        raise forbidden(f"Forbidden: only {author} and those who may write to {repo.key} can change this")


def _summary(repo: Repo, found: Discussion) -> dict[str, Any]:
    return {
        "num": found.num,
        "title": found.title,
        "author": {"name": found.author},
        "createdAt": views.iso(found.created_at),
        "status": found.status,
        "repo": {"name": repo.full_name, "type": repo.type},
        "isPullRequest": found.is_pull_request,
    }


def _event(event: dict[str, Any]) -> dict[str, Any]:
    data = event["data"]
    if event["type"] == "comment":
        latest = {"raw": data["raw"], "updated_at": data.get("updated_at", event["created_at"])}
        data = {
            "edited": data.get("edited", False),
            "hidden": data.get("hidden", False),
            "latest": _text(event, latest),
            # None of the texts of a hidden comment are shown.
            "history": [] if data.get("hidden") else [_text(event, text) for text in data.get("history", ())],
        }
    return {
        "id": event["id"],
        "type": event["type"],
        "author": {"name": event["author"]},
        "createdAt": views.iso(event["created_at"]),
        "data": data,
    }


def _text(event: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """One text that a comment has, or had."""
    raw, updated = text["raw"], views.iso(text["updated_at"])
    return {"raw": raw, "html": raw, "updatedAt": updated, "author": {"name": event["author"]}}
