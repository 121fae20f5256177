"""The body of a commit: a header line, then one operation a line, read as it arrives."""

from __future__ import annotations

import base64
import json
import re
from typing import TYPE_CHECKING, Any

from hubshard.hubserver import commits
from hubshard.hubserver.commits import Delete, Operation, Put, PutLarge, check_path
from hubshard.hubserver.errors import ApiError, bad_request
from hubshard.hubserver.trees import blob_oid

if TYPE_CHECKING:
    from hubshard.hubserver.db import Database

__all__ = ["CommitReader"]

_MAX_LINE_BYTES = 32 << 20
_BATCH_BYTES = 8 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


class CommitReader:
    """Takes the body in pieces; contents go to the database in batches, so that memory stays bounded.

    A content that is stored and never committed is nobody's, and is collected later.

    Attributes:
        summary: the title of the commit.
        description: the rest of its message.
        parent: the head that the client saw, or None.
        operations: what the commit does.
        nbytes: bytes of content received.
    """

    def __init__(self, db: Database) -> None:
        self._db = db
        self._line = bytearray()
        self._batch: list[bytes] = []
        self._seen_header = False
        self.summary = ""
        self.description = ""
        self.parent: str | None = None
        self.operations: list[Operation] = []
        self.nbytes = 0

    def feed(self, data: bytes) -> None:
        """Take a piece of the body.

        Raises:
            ApiError: 400, 413 or 422: a line that cannot be.
        """
        head, *rest = data.split(b"\n")
        self._line += head
        for part in rest:
            self._take(bytes(self._line))
            self._line = bytearray(part)
        if len(self._line) > _MAX_LINE_BYTES:
            raise ApiError(413, f"a line of the commit has more than {_MAX_LINE_BYTES} bytes: upload the file as LFS")

    def finish(self) -> None:
        """The body is through.

        Raises:
            ApiError: 400: it had no header.
        """
        self._take(bytes(self._line))
        self._flush()
        if not self._seen_header:
            raise bad_request("the commit has no header line")

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            item = json.loads(line)
            key, value = item["key"], item["value"]
        except (ValueError, KeyError, TypeError) as error:
            raise bad_request(f"a line of the commit cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise bad_request(f"a line of the commit has no value: {key}")
        if key == "header":
            self._header(value)
        elif key == "file":
            self._file(value)
        elif key == "lfsFile":
            self.operations.append(_large(value))
        elif key in {"deletedFile", "deletedFolder"}:
            self.operations.append(Delete(check_path(value.get("path"))))
        else:
            raise bad_request(f"unknown operation {key!r} in the commit")

    def _header(self, value: dict[str, Any]) -> None:
        summary, parent = value.get("summary"), value.get("parentCommit")
        if not isinstance(summary, str) or not summary.strip():
            raise bad_request("the commit has no summary")
        title, _, rest = summary.strip().partition("\n")
        parts = (rest.strip(), str(value.get("description") or "").strip())
        self.summary, self.description = title.strip(), "\n\n".join(part for part in parts if part)
        self.parent = str(parent) if parent else None
        self._seen_header = True

    def _file(self, value: dict[str, Any]) -> None:
        path = check_path(value.get("path"))
        content = value.get("content")
        if not isinstance(content, str):
            raise bad_request(f"{path}: a file needs a content")
        try:
            is_text = value.get("encoding", "base64") == "utf-8"
            data = content.encode() if is_text else base64.b64decode(content, validate=True)
        except ValueError as error:
            raise bad_request(f"{path}: its content is not base64") from error
        self.operations.append(Put(path, blob_oid(data), len(data)))
        self.nbytes += len(data)
        self._batch.append(data)
        if sum(map(len, self._batch)) > _BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._batch:
            with self._db.write() as connection:
                for data in self._batch:
                    commits.store_blob(connection, data)
        self._batch = []


def _large(value: dict[str, Any]) -> PutLarge:
    path, sha256, size = check_path(value.get("path")), value.get("oid"), value.get("size")
    if value.get("algo", "sha256") != "sha256" or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise bad_request(f"{path}: an LFS file needs algo 'sha256' and an oid of 64 lower-case hex digits")
    return PutLarge(path, sha256, size if isinstance(size, int) else None)
