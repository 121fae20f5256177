"""How things look in JSON."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from hubshard.hubserver import trees

if TYPE_CHECKING:
    from hubshard.hubserver.commits import Commit
    from hubshard.hubserver.refs import Ref
    from hubshard.hubserver.repos import Repo
    from hubshard.hubserver.state import HubState
    from hubshard.hubserver.trees import Entry

__all__ = ["commit_json", "file_json", "folder_json", "iso", "ref_json", "repo_json", "sibling_json"]


def iso(seconds: float) -> str:
    """Seconds since the epoch as `2026-01-31T12:00:00.000Z`."""
    text = datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def repo_json(repo: Repo) -> dict[str, Any]:
    """What is known of a repo without its files."""
    return {
        "_id": f"{repo.id:024x}",
        "id": repo.full_name,
        **({"modelId": repo.full_name} if repo.type == "model" else {}),
        "author": repo.namespace,
        "private": repo.private,
        "gated": repo.gated or False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "createdAt": iso(repo.created_at),
        "lastModified": iso(repo.updated_at),
        **({"sdk": repo.sdk} if repo.type == "space" else {}),
    }


def file_json(state: HubState, entry: Entry, last: Commit | None = None) -> dict[str, Any]:
    """A file as tree and paths-info show it."""
    found: dict[str, Any] = {"type": "file", "oid": entry.oid, "size": entry.nbytes, "path": entry.path}
    if entry.sha256 is not None:
        found["lfs"] = {
            "oid": entry.sha256,
            "size": entry.nbytes,
            "pointerSize": len(trees.pointer(entry.sha256, entry.nbytes)),
        }
        xet_hash = state.objects.xet_hash(entry.sha256)
        if xet_hash is not None:
            found["xetHash"] = xet_hash
    return _with_last(found, last)


def folder_json(path: str, oid: str, last: Commit | None = None) -> dict[str, Any]:
    """A folder as tree and paths-info show it."""
    return _with_last({"type": "directory", "oid": oid, "size": 0, "path": path}, last)


def sibling_json(entry: Entry, *, blobs: bool) -> dict[str, Any]:
    """A file as repo info shows it, with size and ids where `blobs` was asked for."""
    found: dict[str, Any] = {"rfilename": entry.path}
    if blobs:
        found.update(size=entry.nbytes, blobId=entry.oid)
        if entry.sha256 is not None:
            size = len(trees.pointer(entry.sha256, entry.nbytes))
            found["lfs"] = {"sha256": entry.sha256, "size": entry.nbytes, "pointerSize": size}
    return found


def commit_json(commit: Commit, *, formatted: bool) -> dict[str, Any]:
    """A commit as the list of commits shows it."""
    found: dict[str, Any] = {
        "id": commit.oid,
        "title": commit.title,
        "message": commit.message,
        "authors": [{"user": commit.author}],
        "date": iso(commit.date),
    }
    if formatted:
        found["formatted"] = {"title": commit.title, "message": commit.message}
    return found


def ref_json(ref: Ref) -> dict[str, str]:
    """A ref as the list of refs shows it."""
    return {"name": ref.short_name, "ref": ref.name, "targetCommit": ref.commit}


def _with_last(found: dict[str, Any], last: Commit | None) -> dict[str, Any]:
    if last is not None:
        found["lastCommit"] = {"id": last.oid, "title": last.title, "date": iso(last.date)}
    return found
