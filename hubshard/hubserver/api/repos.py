"""Routes of whole repos: create, delete, move, settings, lists and info."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from hubshard.hubserver import commits, contents, refs, repos, trees, views, yamlcheck
from hubshard.hubserver.access import REPO_PATH, repo_for_write, repo_of, require_contents
from hubshard.hubserver.errors import ApiError, bad_request, repo_not_found
from hubshard.hubserver.http import Call, page, route
from hubshard.hubserver.patterns import INITIAL_ATTRIBUTES
from hubshard.hubserver.trees import Entry

if TYPE_CHECKING:
    import sqlite3

    from starlette.routing import Route

    from hubshard.hubserver.repos import Repo
    from hubshard.hubserver.state import HubState

__all__ = ["repo_routes"]

_CARD = "README.md"


def repo_routes(state: HubState) -> list[Route]:
    """The routes of this module."""
    kind = "/api/{kind:repokind}"
    return [
        route(state, "POST", "/api/repos/create", _create, kind="repo_create"),
        route(state, "DELETE", "/api/repos/delete", _delete, kind="repo_delete"),
        route(state, "POST", "/api/repos/move", _move, kind="repo_move"),
        route(state, "GET", "/api/settings/repositories", _storage, kind="repo_list"),
        route(state, "GET", "/api/organizations/{organization}/settings/repositories", _storage, kind="repo_list"),
        route(state, "GET", kind, _list, kind="repo_list"),
        route(state, "PUT", f"{REPO_PATH}/settings", _settings, kind="repo_settings"),
        route(state, "POST", f"{REPO_PATH}/user-access-request/grant", _grant, kind="grant"),
        route(state, "GET", f"{REPO_PATH}/auth-check", _auth_check, kind="auth_check"),
        route(state, "GET", f"{REPO_PATH}/auth-check/write", _auth_check_write, kind="auth_check"),
        route(state, "POST", f"{REPO_PATH}/duplicate", _duplicate, kind="repo_duplicate"),
        route(state, "GET", f"{REPO_PATH}/revision/{{revision}}", _info, kind="repo_info"),
        route(state, "GET", REPO_PATH, _info, kind="repo_info"),
        route(state, "GET", f"{kind}/{{name}}/revision/{{revision}}", _no_namespace, kind="repo_info"),
        route(state, "GET", f"{kind}/{{name}}", _no_namespace, kind="repo_info"),
    ]


def _create(call: Call) -> Response:
    body = call.json()
    kind, full_name = _type_of(body), _full_name(call, body)
    repos.require_namespace(call.principal, full_name.partition("/")[0], kind)
    with call.state.db.write() as connection:
        made = repos.insert(
            connection, kind, full_name, private=_is_private(body) or False, sdk=body.get("sdk"), base_url=call.base_url
        )
        _first_commit(connection, made, _author(call))
    return JSONResponse({"url": f"{call.base_url}/{made.url_path}", "name": made.full_name, "id": made.full_name})


def _first_commit(connection: sqlite3.Connection, repo: Repo, author: str) -> None:
    data = INITIAL_ATTRIBUTES.encode()
    entry = Entry(".gitattributes", commits.store_blob(connection, data), len(data))
    tree = trees.update(connection, None, {entry.path: entry})
    made = commits.write(connection, repo.id, parent=None, tree=tree, author=author, title="initial commit")
    refs.create(connection, repo.id, refs.MAIN, made.oid)


def _delete(call: Call) -> Response:
    body = call.json()
    namespace, _, name = _full_name(call, body).partition("/")
    with call.state.db.write() as connection:
        params = {"kind": f"{_type_of(body)}s", "namespace": namespace, "name": name}
        repos.delete(connection, repo_for_write(connection, call.principal, params))
    return Response(status_code=200)


def _move(call: Call) -> Response:
    body = call.json()
    kind, old, new = _type_of(body), str(body.get("fromRepo", "")), str(body.get("toRepo", ""))
    namespace, name = repos.split_id(old)
    repos.require_namespace(call.principal, repos.split_id(new)[0], kind)
    with call.state.db.write() as connection:
        params = {"kind": f"{kind}s", "namespace": namespace, "name": name}
        repos.move(connection, repo_for_write(connection, call.principal, params), new)
    return JSONResponse({"url": f"{call.base_url}/{new if kind == 'model' else f'{kind}s/{new}'}"})


def _settings(call: Call) -> Response:
    body = call.json()
    private, gated = _is_private(body), body.get("gated")
    if gated not in (None, False, "auto", "manual"):
        raise bad_request(f"gated must be false, 'auto' or 'manual', not {gated!r}")
    publishers = [json.dumps(claims, sort_keys=True) for claims in body.get("trustedPublishers", [])]
    with call.state.db.write() as connection:
        repo = repo_for_write(connection, call.principal, call.params)
        if private is not None:
            connection.execute("UPDATE repos SET private = ? WHERE id = ?", (private, repo.id))
        if gated is not None:
            connection.execute("UPDATE repos SET gated = ? WHERE id = ?", (gated or None, repo.id))
        if "trustedPublishers" in body:
            connection.execute("DELETE FROM publishers WHERE repo_id = ?", (repo.id,))
            connection.executemany("INSERT OR IGNORE INTO publishers VALUES (?, ?)", [(repo.id, p) for p in publishers])
        changed = repo_of(connection, call.principal, call.params)
    visibility = "private" if changed.private else "public"
    return JSONResponse({"private": changed.private, "visibility": visibility, "gated": changed.gated or False})


def _grant(call: Call) -> Response:
    user = str(call.json().get("user", ""))
    with call.state.db.write() as connection:
        repo = repo_for_write(connection, call.principal, call.params)
        if repo.gated is None or not user:
            raise bad_request(f"{repo.key} is not gated" if user else "a user is needed")
        connection.execute("INSERT OR IGNORE INTO grants VALUES (?, ?)", (repo.id, user))
    return JSONResponse({})


def _auth_check(call: Call) -> Response:
    connection = call.state.db.connection()
    require_contents(connection, call.principal, repo_of(connection, call.principal, call.params))
    return JSONResponse({})


def _auth_check_write(call: Call) -> Response:
    repo_for_write(call.state.db.connection(), call.principal, call.params)
    return JSONResponse({})


def _duplicate(call: Call) -> Response:
    """A new repo with the head of main of another one: its files, in one first commit."""
    body = call.json()
    target, private = str(body.get("repository", "")), _is_private(body)
    with call.state.db.write() as connection:
        source = repo_of(connection, call.principal, call.params)
        repos.require_namespace(call.principal, repos.split_id(target)[0], source.type)
        made = repos.insert(
            connection,
            source.type,
            target,
            private=source.private if private is None else private,
            sdk=source.sdk,
            base_url=call.base_url,
        )
        head = commits.get(connection, source.id, refs.resolve(connection, source.id, "main"))
        connection.execute(
            "INSERT INTO lfs_files SELECT ?, sha256, nbytes, touched_at FROM lfs_files WHERE repo_id = ?",
            (made.id, source.id),
        )
        title = f"Duplicate from {source.full_name}"
        first = commits.write(connection, made.id, parent=None, tree=head.tree, author=_author(call), title=title)
        refs.create(connection, made.id, refs.MAIN, first.oid)
    return JSONResponse({"url": f"{call.base_url}/{made.url_path}", "filesCopyPending": False})


def _list(call: Call) -> Response:
    query = call.query
    wanted = {name: query.get(name, "").lower() for name in ("author", "search")}
    with call.state.db.read() as connection:
        found = [
            (repo, _described(connection, repo))
            for repo in repos.owned(connection, repos.TYPES[call.params["kind"]])
            if call.principal.may_read(repo)
            and wanted["author"] in ("", repo.namespace.lower())
            and wanted["search"] in repo.full_name.lower()
        ]
        found = [item for item in found if _is_wanted(call, item[1])]
        if query.get("sort") in ("createdAt", "lastModified"):
            found.sort(key=lambda item: str(item[1][query["sort"]]), reverse=True)
        chosen, headers = page(call, found, size=call.state.settings.page_size)
        if call.flag("full") or "siblings" in _expanded(call):
            for repo, item in chosen:
                item["siblings"] = _siblings(connection, repo, item["sha"], blobs=False)
    return JSONResponse([_shown(call, item) for _, item in chosen], headers=headers)


def _is_wanted(call: Call, item: dict[str, Any]) -> bool:
    """Whether a repo has all the tags, the task and the gate that a list is asked for."""
    card, gated = item.get("cardData", {}), call.query.get("gated")
    tags = {*item["tags"], item.get("pipeline_tag"), item.get("library_name"), *_words(card.get("language"))}
    tags |= {f"license:{name}" for name in _words(card.get("license"))}
    tags |= {f"dataset:{name}" for name in _words(card.get("datasets"))}
    return (
        tags.issuperset(call.query.getlist("filter"))
        and call.query.get("pipeline_tag") in (None, item.get("pipeline_tag"))
        and (gated is None or call.flag("gated") == bool(item["gated"]))
    )


def _words(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list) else [value] if value else [])]


def _storage(call: Call) -> Response:
    if call.principal.name is None:
        raise ApiError(401, "Invalid username or password.")
    connection = call.state.db.connection()
    owner = call.params.get("organization", call.principal.name)
    mine = [repo for repo in repos.owned(connection) if repo.namespace.lower() == owner.lower()]
    shown = [repo for repo in mine if call.principal.owns(repo.namespace)]
    used = {repo.id: _used_bytes(connection, repo) for repo in shown}
    total = sum(used.values()) or 1
    return JSONResponse(
        [
            {
                "id": repo.full_name,
                "type": repo.type,
                "updatedAt": views.iso(repo.updated_at),
                "visibility": "private" if repo.private else "public",
                "storage": used[repo.id],
                "storagePercent": used[repo.id] / total,
            }
            for repo in shown
        ]
    )


def _info(call: Call) -> Response:
    with call.state.db.read() as connection:
        repo = repo_of(connection, call.principal, call.params)
        found = _described(connection, repo, call.params.get("revision", "main"))
        found["siblings"] = _siblings(connection, repo, found["sha"], blobs=call.flag("blobs"))
        found["usedStorage"] = _used_bytes(connection, repo)
    return JSONResponse(_shown(call, found))


def _described(connection: sqlite3.Connection, repo: Repo, revision: str = "main") -> dict[str, Any]:
    """What is known of a repo at a revision, without its files."""
    commit = commits.get(connection, repo.id, refs.resolve(connection, repo.id, revision))
    card = yamlcheck.metadata(contents.text_of(connection, commit.tree, _CARD))
    return views.repo_json(repo) | {"sha": commit.oid, "lastModified": views.iso(commit.date)} | _card_fields(card)


def _siblings(connection: sqlite3.Connection, repo: Repo, commit: str, *, blobs: bool) -> list[dict[str, Any]]:
    files = trees.load(connection, commits.get(connection, repo.id, commit).tree)
    return [views.sibling_json(entry, blobs=blobs) for entry in sorted(files, key=lambda entry: entry.path)]


def _expanded(call: Call) -> set[str]:
    return {*call.query.getlist("expand"), *call.query.getlist("expand[]")}


def _shown(call: Call, found: dict[str, Any]) -> dict[str, Any]:
    """All of it, or the fields that were asked for; dates of cards and the like as texts."""
    wanted = _expanded(call)
    chosen = {key: value for key, value in found.items() if not wanted or key in {"_id", "id", *wanted}}
    shown: dict[str, Any] = json.loads(json.dumps(chosen, default=str))
    return shown


def _no_namespace(call: Call) -> Response:
    raise repo_not_found(anonymous=call.principal.name is None)


def _card_fields(card: dict[str, Any]) -> dict[str, Any]:
    tags = card.get("tags")
    found: dict[str, Any] = {"cardData": card} if card else {}
    found["tags"] = [str(tag) for tag in tags] if isinstance(tags, list) else []
    for key in ("pipeline_tag", "library_name"):
        if isinstance(card.get(key), str):
            found[key] = card[key]
    return found


def _used_bytes(connection: sqlite3.Connection, repo: Repo) -> int:
    row = connection.execute("SELECT total(nbytes) AS n FROM lfs_files WHERE repo_id = ?", (repo.id,)).fetchone()
    return int(row["n"])


def _type_of(body: dict[str, Any]) -> str:
    kind = body.get("type") or "model"
    if kind not in repos.TYPES.values():
        raise bad_request(f"Invalid repo type {kind!r}: one of {', '.join(repos.TYPES.values())}")
    return str(kind)


def _full_name(call: Call, body: dict[str, Any]) -> str:
    """The repo that a body names; without an organisation it is the caller's own."""
    name, organization = str(body.get("name", "")), body.get("organization")
    if "/" in name and not organization:
        return name
    if not organization and call.principal.name is None:
        raise ApiError(401, "Invalid username or password.")
    return f"{organization or call.principal.name}/{name}"


def _is_private(body: dict[str, Any]) -> bool | None:
    visibility = body.get("visibility")
    if visibility is None:
        return None if body.get("private") is None else bool(body["private"])
    if visibility not in ("public", "private"):
        raise bad_request(f"visibility must be 'public' or 'private', not {visibility!r}")
    return bool(visibility == "private")


def _author(call: Call) -> str:
    return call.principal.name or "anonymous"
