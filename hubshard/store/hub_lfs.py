"""Uploads by the LFS protocol (basic and multipart), from content that is read in order: no file is written.

https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md; multipart as huggingface_hub 2.4 speaks it: the header
of the upload action has `chunk_size` and one URL per part number, and its `href` takes the list of parts at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from huggingface_hub.utils import get_session, httpx

from hubshard.errors import IntegrityError, StoreError
from hubshard.protocols import Content
from hubshard.store.content import blocks_of
from hubshard.store.hub_client import HubClient
from hubshard.store.hub_errors import SignatureError, raise_for_status, signed, translated

__all__ = ["is_held", "upload_lfs"]

_MEDIA_TYPE = "application/vnd.git-lfs+json"
_PIECE_BYTES = 1024 * 1024
_STALLS = 10.0  # the server has to check what it took in


def is_held(client: HubClient, revision: str | None, *, path: str, nbytes: int, sha256: str) -> bool:
    """Whether the repo holds this content already."""
    return _upload_action(client, revision, path=path, nbytes=nbytes, sha256=sha256) is None


def upload_lfs(
    client: HubClient,
    revision: str | None,
    data: Content,
    *,
    path: str,
    nbytes: int,
    sha256: str,
    on_sent: Callable[[int], None],
) -> int:
    """Send content unless the repo holds it; the bytes sent.

    Args:
        client: the repo.
        revision: the branch that it is meant for; None for a pull request that the commit opens.
        data: read in order; once more from its start where a part has to be sent again.
        path: for messages.
        nbytes: its size.
        sha256: in hex.
        on_sent: is told of the bytes handed to the network since its last call.

    Raises:
        IntegrityError: `data` has another size or hash.
        StoreError: refused, or tried again in vain.
    """
    source = _Rewindable(data, path=path, nbytes=nbytes, sha256=sha256, on_sent=on_sent)
    action = partial(_upload_action, client, revision, path=path, nbytes=nbytes, sha256=sha256)
    try:
        return _upload(client, action(), source, nbytes=nbytes, sha256=sha256)
    except SignatureError as error:  # the action of now says so where the token may not write any more
        client.patience.on_retry(path, error.message, 0.0)
        return _upload(client, action(), source, nbytes=nbytes, sha256=sha256)


def _upload(
    client: HubClient, actions: Mapping[str, Any] | None, source: _Rewindable, *, nbytes: int, sha256: str
) -> int:
    if actions is None:
        return 0
    upload = actions["upload"]
    part_bytes = int((upload.get("header") or {}).get("chunk_size", 0))
    if part_bytes:
        _upload_parts(client, upload, source, part_bytes=part_bytes, nbytes=nbytes, sha256=sha256)
    else:
        _put(client, upload["href"], source, 0, nbytes, headers=upload.get("header") or {})
    if "verify" in actions:
        verify = actions["verify"]
        body = {"oid": sha256, "size": nbytes}
        client.send(
            "POST", verify["href"], f"verify {source.path}", needs="write", headers=verify.get("header"), json=body
        )
    return nbytes


def _upload_action(
    client: HubClient, revision: str | None, *, path: str, nbytes: int, sha256: str
) -> Mapping[str, Any] | None:
    body: dict[str, Any] = {
        "operation": "upload",
        "transfers": ["basic", "multipart"],
        "objects": [{"oid": sha256, "size": nbytes}],
        "hash_algo": "sha256",
    }
    if revision is not None:
        body["ref"] = {"name": revision}
    headers = {"Accept": _MEDIA_TYPE, "Content-Type": _MEDIA_TYPE}
    what = f"upload {path}"
    answer: Mapping[str, Any] = client.ask(
        "POST", client.lfs_url(), what, lambda it: dict(it["objects"][0]), needs="write", headers=headers, json=body
    )
    if "error" in answer:
        raise StoreError(f"{client.repo}: cannot {what}: {answer['error'].get('message')}")
    actions: Mapping[str, Any] | None = answer.get("actions")
    return actions


def _upload_parts(
    client: HubClient, upload: Mapping[str, Any], source: _Rewindable, *, part_bytes: int, nbytes: int, sha256: str
) -> None:
    urls = {int(key): url for key, url in upload["header"].items() if key.isdecimal()}
    parts = []
    for number, start in enumerate(range(0, nbytes, part_bytes), start=1):
        response = _put(client, urls[number], source, start, min(nbytes, start + part_bytes), headers={})
        parts.append({"partNumber": number, "etag": response.headers["ETag"]})
    headers = {"Accept": _MEDIA_TYPE, "Content-Type": _MEDIA_TYPE}
    what = f"complete the upload of {source.path}"
    with signed(what, client.repo):
        client.send("POST", upload["href"], what, auth=False, headers=headers, json={"oid": sha256, "parts": parts})


def _put(
    client: HubClient, url: str, source: _Rewindable, start: int, stop: int, *, headers: Mapping[str, str]
) -> httpx.Response:
    """Send a range of the content to a signed URL, from its start again when that fails for a while."""
    what = f"upload {source.path}"

    def attempt() -> httpx.Response:
        with translated(what, client.repo, needs="write"):
            response: httpx.Response = get_session().put(
                url,
                content=source.range(start, stop),
                headers={"Content-Length": str(stop - start), **headers},
                timeout=client.timeout(_STALLS),
            )
            raise_for_status(response)
        return response

    with signed(what, client.repo):
        return client.patience.insist(attempt, what)


class _Rewindable:
    """Content that is read in order, range by range, and begun anew where a range is asked for again."""

    def __init__(self, data: Content, *, path: str, nbytes: int, sha256: str, on_sent: Callable[[int], None]) -> None:
        self.path = path
        self._on_sent = on_sent
        self._data = data
        self._nbytes = nbytes
        self._sha256 = sha256
        self._blocks: Iterator[memoryview] = iter(())
        self._rest = memoryview(b"")
        self._position = nbytes
        self._hash = hashlib.sha256()
        self._prefixes: dict[int, str] = {}

    def range(self, start: int, stop: int) -> Iterator[bytes]:
        """Bytes `start` to `stop`, in pieces; the last one of all is given only if size and hash are as promised.

        Raises:
            IntegrityError: the content ends before, goes on after its end, or is not what was hashed before.
        """
        if self._position != start:
            self._blocks, self._rest, self._position = blocks_of(self._data), memoryview(b""), 0
            self._hash = hashlib.sha256()
            for _ in self._advance(start):
                pass
        prefix = self._hash.hexdigest()
        if self._prefixes.setdefault(start, prefix) != prefix:  # parts that were sent are not of this content
            raise self._changed()
        for piece in self._advance(stop):
            data = bytes(piece)
            if self._position == self._nbytes:
                self._check_end()
            yield data
            self._on_sent(len(data))

    def _check_end(self) -> None:
        if self._rest.nbytes or next(self._blocks, None) is not None or self._hash.hexdigest() != self._sha256:
            raise self._changed()

    def _changed(self) -> IntegrityError:
        return IntegrityError(
            f"{self.path}: it is not the content with the sha256 {self._sha256} and {self._nbytes} bytes",
            hint="did the source change while it was read? run it again",
        )

    def _advance(self, stop: int) -> Iterator[memoryview]:
        while self._position < stop:
            if not self._rest.nbytes:
                block = next(self._blocks, None)
                if block is None:
                    raise IntegrityError(f"{self.path}: it has {self._position} bytes, not {self._nbytes}")
                self._rest = block
            piece = self._rest[: min(_PIECE_BYTES, stop - self._position)]
            self._rest = self._rest[piece.nbytes :]
            self._position += piece.nbytes
            self._hash.update(piece)
            yield piece
