"""The route that gives the headers of all shards of a model at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from hubshard.hubserver import commits, contents, refs, registry, trees
from hubshard.hubserver.access import repo_of, require_contents
from hubshard.hubserver.errors import entry_not_found, unprocessable
from hubshard.hubserver.http import Call, route

if TYPE_CHECKING:
    import sqlite3

    from starlette.routing import Route

    from hubshard.hubserver.objects import ObjectStore
    from hubshard.hubserver.state import HubState

__all__ = ["safetensors_routes"]

_MAX_HEADER_BYTES = 25_000_000


def safetensors_routes(state: HubState) -> list[Route]:
    """The routes of this module."""
    path = "/api/models/{namespace}/{name}/safetensors-metadata/{path:path}"
    return [route(state, "GET", path, _metadata, kind="safetensors_metadata")]


def _metadata(call: Call) -> Response:
    """The index without its `weight_map`, and the header of every shard that it names, on main."""
    index_path = call.params["path"]
    with call.state.db.read() as connection:
        repo = repo_of(connection, call.principal, call.params)
        require_contents(connection, call.principal, repo)
        commit = commits.get(connection, repo.id, refs.resolve(connection, repo.id, "main"))
        files = _Files(connection, call.state.objects, repo.id, commit)
        index = _json(files.read(index_path, 0, None), index_path)
        weight_map = index.pop("weight_map", None)
        if not isinstance(weight_map, dict):
            raise unprocessable(f"{index_path} has no weight_map")
        above = index_path[: index_path.rfind("/") + 1]
        headers = {name: files.header(f"{above}{name}") for name in sorted({str(name) for name in weight_map.values()})}
    return JSONResponse({"index": index, "headers": headers})


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of a commit, read in part."""

    connection: sqlite3.Connection
    objects: ObjectStore
    repo_id: int
    commit: commits.Commit

    def header(self, path: str) -> dict[str, Any]:
        """The JSON header of a safetensors file, after 8 bytes that hold its size."""
        size = int.from_bytes(self.read(path, 0, 8), "little")
        return _json(self.read(path, 8, 8 + size), path)

    def read(self, path: str, start: int, stop: int | None) -> bytes:
        """Bytes [start, stop) of a file; None for its end."""
        entry = trees.find(self.connection, self.commit.tree, path)
        if entry is None:
            raise entry_not_found(path, self.commit.oid)
        end = entry.nbytes if stop is None else stop
        if end > entry.nbytes or end - start > _MAX_HEADER_BYTES:
            raise unprocessable(f"{path} is not a safetensors file or index")
        if entry.sha256 is None:
            return contents.blob(self.connection, entry)[start:end]
        if registry.held_bytes(self.connection, self.repo_id, entry.sha256) is None:
            raise entry_not_found(path, self.commit.oid)
        return b"".join(self.objects.read(entry.sha256, start, end))


def _json(data: bytes, path: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise unprocessable(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise unprocessable(f"{path}: a JSON object is expected")
    return found
