"""Staging on the Hub: asking how a file is to be sent, and sending it that way."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass

from hubshard.digests import git_blob_id
from hubshard.errors import NotFoundError, StoreError
from hubshard.protocols import Content, Staged
from hubshard.store.content import read_all, sample_of, sha256_of
from hubshard.store.hub_client import HubClient
from hubshard.store.hub_errors import is_revision_missing, status_of
from hubshard.store.hub_lfs import is_held, upload_lfs
from hubshard.store.hub_xet import Callbacks, XetUploader
from hubshard.store.hub_xet_session import XetSessions

__all__ = ["Advice", "Stager"]

_SAMPLE_BYTES = 512
_MAX_FILES = 256
_MAIN = "main"


@dataclass(frozen=True, slots=True)
class Advice:
    """What the Hub says of a file before it is sent.

    Attributes:
        is_large: it goes to the large file storage; else into the commit itself.
        is_ignored: the repo's `.gitignore` refuses it.
        blob: of the file that is there now: its sha256 where that is large, else its git blob id; None: no such file.
    """

    is_large: bool
    is_ignored: bool
    blob: str | None


class Stager:
    """Makes content durable in one repo."""

    def __init__(self, client: HubClient, sessions: XetSessions | None) -> None:
        self._client = client
        self._xet = None if sessions is None else XetUploader(client, sessions)

    def advice(
        self, branch: str, files: Mapping[str, tuple[int, bytes]], *, create_pr: bool = False
    ) -> dict[str, Advice]:
        """How the Hub wants files to be sent; of a branch that is not there yet, as for main.

        Args:
            branch: the branch whose commit will name them.
            files: path to size (bytes) and first 512 bytes.
            create_pr: that commit opens a pull request.
        """
        asked = [
            {"path": path, "size": nbytes, "sample": base64.b64encode(sample).decode()}
            for path, (nbytes, sample) in files.items()
        ]
        found: dict[str, Advice] = {}
        for start in range(0, len(asked), _MAX_FILES):
            listed = self._client.ask(
                "POST",
                self._client.api_url("preupload", branch),
                f"upload to {branch!r}",
                lambda answer: {str(file["path"]): (str(file["uploadMode"]), file) for file in answer["files"]},
                needs="write",
                json={"files": asked[start : start + _MAX_FILES]},
                params={"create_pr": "1"} if create_pr else None,
            )
            for path, (mode, file) in listed.items():
                is_large = mode == "lfs" and files[path][0] > 0
                found[path] = Advice(is_large, bool(file.get("shouldIgnore")), file.get("oid"))
        return found

    def stage(
        self,
        branch: str,
        path: str,
        data: Content,
        nbytes: int,
        sha256: str | None,
        callbacks: Callbacks,
        *,
        create_pr: bool,
    ) -> Staged:
        """Make the content of one file durable; see `HubStore.stage`."""
        sample = sample_of(data, _SAMPLE_BYTES) if nbytes else b""
        revision, advice = self._advised(branch, path, nbytes, sample, create_pr=create_pr)
        if advice.is_ignored:
            raise StoreError(
                f"{path}: the .gitignore of {self._client.repo} refuses it", hint="rename it, or change that .gitignore"
            )
        if not advice.is_large:
            content, sha256 = read_all(data, path=path, nbytes=nbytes, sha256=sha256)
            receipt = {"mode": "regular", "content": base64.b64encode(content).decode()}
            return Staged(path, nbytes, sha256, receipt, blob_id=git_blob_id(content), nbytes_sent=nbytes)
        target = None if create_pr else revision
        if sha256 is not None and (advice.blob == sha256 or self._is_held(target, path, nbytes, sha256)):
            return Staged(path, nbytes, sha256, {"mode": "held"})
        return self._send(target, path, data, nbytes, sha256, callbacks)

    def _advised(self, branch: str, path: str, nbytes: int, sample: bytes, *, create_pr: bool) -> tuple[str, Advice]:
        try:
            return branch, self.advice(branch, {path: (nbytes, sample)}, create_pr=create_pr)[path]
        except NotFoundError as error:
            if branch == _MAIN or not is_revision_missing(error):
                raise
        return _MAIN, self.advice(_MAIN, {path: (nbytes, sample)}, create_pr=create_pr)[path]

    def _is_held(self, revision: str | None, path: str, nbytes: int, sha256: str) -> bool:
        try:
            return is_held(self._client, revision, path=path, nbytes=nbytes, sha256=sha256)
        except StoreError as error:
            if status_of(error) in {403, 404}:  # no write access (a pull request), or no plain LFS: then not known
                return False
            raise

    def _send(
        self, revision: str | None, path: str, data: Content, nbytes: int, sha256: str | None, callbacks: Callbacks
    ) -> Staged:
        if self._xet is not None:
            done = self._xet.upload(revision, data, path=path, nbytes=nbytes, sha256=sha256, callbacks=callbacks)
            if done is not None:
                return Staged(path, nbytes, done[0], {"mode": "xet"}, nbytes_sent=done[1])
        sha256 = sha256 or sha256_of(data, path=path, nbytes=nbytes)
        sent = upload_lfs(
            self._client, revision, data, path=path, nbytes=nbytes, sha256=sha256, on_sent=callbacks.on_sent
        )
        return Staged(path, nbytes, sha256, {"mode": "lfs"}, nbytes_sent=sent)
