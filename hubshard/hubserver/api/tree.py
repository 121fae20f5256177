"""Routes that list the files of a commit."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.responses import JSONResponse, Response

from hubshard.hubserver import commits, refs, views
from hubshard.hubserver.access import REPO_PATH, repo_of
from hubshard.hubserver.errors import ApiError, entry_not_found
from hubshard.hubserver.http import Call, page, route
from hubshard.hubserver.trees import Entry, Trees

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Mapping, Sequence

    from starlette.routing import Route

    from hubshard.hubserver.state import HubState

__all__ = ["tree_routes"]

_MAX_PATHS = 1000
_EXPANDED_PAGE = 100


@dataclass(frozen=True, slots=True)
class _Folder:
    path: str
    oid: str


def tree_routes(state: HubState) -> list[Route]:
    """The routes of this module."""
    views_of = _Listings(Trees())
    return [
        route(state, "GET", f"{REPO_PATH}/tree/{{revision}}", views_of.tree, kind="tree"),
        route(state, "GET", f"{REPO_PATH}/tree/{{revision}}/{{path:path}}", views_of.tree, kind="tree"),
        route(state, "POST", f"{REPO_PATH}/paths-info/{{revision}}", views_of.paths_info, kind="paths_info"),
    ]


class _Listings:
    """The handlers, with the trees that they keep in memory."""

    def __init__(self, trees: Trees) -> None:
        self._trees = trees

    def tree(self, call: Call) -> Response:
        """One folder, or all below it, in pages."""
        folder = call.params.get("path", "").strip("/")
        expand, size = call.flag("expand"), call.state.settings.page_size
        with call.state.db.read() as connection:
            repo_id, commit, files = self._files(connection, call)
            items = _below(files, folder, recursive=call.flag("recursive"))
            if not items and folder:
                raise entry_not_found(folder, commit)
            chosen, headers = page(call, items, size=min(size, _EXPANDED_PAGE) if expand else size, at=commit)
            last = _last(connection, repo_id, commit, chosen, files) if expand else {}
        shown = [_item_json(call.state, item, last) for item in chosen]
        return JSONResponse(shown, headers={**headers, "X-Repo-Commit": commit})

    def paths_info(self, call: Call) -> Response:
        """The named files and folders; those that are not there are left out."""
        body = _form_or_json(call)
        paths = [str(path).strip("/") for path in body.get("paths", [])]
        if len(paths) > _MAX_PATHS:
            raise ApiError(413, f"too many paths: {len(paths)}, at most {_MAX_PATHS}")
        expand = str(body.get("expand", [""])[-1]).lower() in {"1", "true"}
        with call.state.db.read() as connection:
            repo_id, commit, files = self._files(connection, call)
            folders = _folders(files) if any(path not in files for path in paths) else {}
            found = [files.get(path) or folders.get(path) for path in dict.fromkeys(paths)]
            items = [item for item in found if item is not None]
            last = _last(connection, repo_id, commit, items, files) if expand else {}
        return JSONResponse([_item_json(call.state, item, last) for item in items])

    def _files(self, connection: sqlite3.Connection, call: Call) -> tuple[int, str, Mapping[str, Entry]]:
        repo = repo_of(connection, call.principal, call.params)
        oid = refs.resolve(connection, repo.id, call.params["revision"])
        commit = commits.get(connection, repo.id, oid)
        return repo.id, oid, self._trees.get(connection, commit.tree)


def _below(files: Mapping[str, Entry], folder: str, *, recursive: bool) -> list[Entry | _Folder]:
    """What is in a folder: its folders, then its files, each in the order of their names."""
    prefix = f"{folder}/" if folder else ""
    inside = {path: entry for path, entry in files.items() if path.startswith(prefix)}
    folders = [item for item in _folders(inside).values() if item.path.startswith(prefix) and item.path != folder]
    entries = list(inside.values())
    if not recursive:
        folders = [item for item in folders if "/" not in item.path[len(prefix) :]]
        entries = [entry for entry in entries if "/" not in entry.path[len(prefix) :]]
    return [*sorted(folders, key=lambda item: item.path), *entries]


def _folders(files: Mapping[str, Entry]) -> dict[str, _Folder]:
    """Every folder above the files; its id is a sha1 over the paths and ids below it."""
    hashes: dict[str, Any] = {}
    for path, entry in files.items():
        parts = path.split("/")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            state = hashes.setdefault(above, hashlib.sha1(usedforsecurity=False))
            state.update(f"{path[len(above) :]}\0{entry.oid}\n".encode())
    return {path: _Folder(path, state.hexdigest()) for path, state in hashes.items()}


def _last(
    connection: sqlite3.Connection,
    repo_id: int,
    commit: str,
    items: Sequence[Entry | _Folder],
    files: Mapping[str, Entry],
) -> dict[str, commits.Commit]:
    """Path → the commit that changed it last; for a folder, the last of those of its files."""
    folders = [item.path for item in items if isinstance(item, _Folder)]
    inside = {folder: [path for path in files if path.startswith(f"{folder}/")] for folder in folders}
    wanted = {item.path for item in items if isinstance(item, Entry)}.union(*inside.values())
    found = commits.last_commits(connection, repo_id, commit, sorted(wanted))
    for folder, paths in inside.items():
        dated: Iterable[commits.Commit] = (found[path] for path in paths if path in found)
        newest = max(dated, key=lambda commit: commit.date, default=None)
        if newest is not None:
            found[folder] = newest
    return found


def _item_json(state: HubState, item: Entry | _Folder, last: Mapping[str, commits.Commit]) -> dict[str, Any]:
    if isinstance(item, Entry):
        return views.file_json(state, item, last.get(item.path))
    return views.folder_json(item.path, item.oid, last.get(item.path))


def _form_or_json(call: Call) -> dict[str, Any]:
    if "json" not in call.headers.get("content-type", ""):
        return parse_qs(call.body.decode(), keep_blank_values=True, max_num_fields=10_000)
    found = call.json()
    return {"paths": found.get("paths", []), "expand": [found.get("expand", False)]}
