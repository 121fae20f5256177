"""Uploads by the Xet protocol: content is streamed once, chunked and deduplicated by hf_xet; no file is written."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hubshard.errors import StoreError
from hubshard.protocols import Content
from hubshard.store.content import CheckedContent
from hubshard.store.hub_client import HubClient
from hubshard.store.hub_errors import status_of
from hubshard.store.hub_xet_session import XetSessions

__all__ = ["XetUploader"]

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class _Access:
    """What hf_xet needs to write: where, and a short-lived token that it renews by itself."""

    endpoint: str
    token: str
    expiry: int
    refresh_url: str


class XetUploader:
    """Streams content into the Xet storage of one repo, from several threads at once if need be."""

    def __init__(self, client: HubClient, sessions: XetSessions) -> None:
        self._client = client
        self._sessions = sessions

    def upload(
        self, revision: str | None, data: Content, *, path: str, nbytes: int, sha256: str | None
    ) -> tuple[str, int] | None:
        """Make content durable; its sha256, and the bytes that crossed the network for it; None on a Hub without Xet.

        Bytes of chunks that the Hub has are not sent, and those sent are compressed; the few hundred bytes that tell
        the Hub which chunks make up the file do not count.

        Args:
            revision: the branch that it is meant for; None for a pull request that the commit opens.
            data: read once; anew where the upload failed (3 attempts; hf_xet tries each request again by itself).
            path: for messages.
            nbytes: its size.
            sha256: in hex, or None.

        Raises:
            IntegrityError: `data` has another size or hash.
            StoreError: refused, or tried again in vain.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            access = self._access(revision, path)
            if access is None:
                return None
            try:
                return self._attempt(
                    access, CheckedContent(data, path=path, nbytes=nbytes, sha256=sha256), path, sha256
                )
            except StoreError as error:
                if not error.retryable or attempt == _ATTEMPTS:
                    raise
            time.sleep(attempt)
        raise AssertionError("unreachable: the last attempt raises or returns")

    def _access(self, revision: str | None, path: str) -> _Access | None:
        # For a pull request huggingface_hub names the revision "None", whose number is not known yet.
        url = self._client.api_url("xet-write-token", str(revision)) + ("" if revision else "?create_pr=1")
        try:
            answer = self._client.send("GET", url, f"upload {path}", needs="write").json()
        except StoreError as error:
            if status_of(error) == 404:
                return None
            raise
        return _Access(answer["casUrl"], answer["accessToken"], int(answer["exp"]), url)

    def _attempt(self, access: _Access, content: CheckedContent, path: str, sha256: str | None) -> tuple[str, int]:
        headers = self._client.headers()
        with self._errors(path):
            upload = self._sessions.for_upload().new_upload_commit(
                endpoint=access.endpoint,
                token=access.token,
                token_expiry_unix_secs=access.expiry,
                token_refresh_url=access.refresh_url,
                token_refresh_headers=headers,
                custom_headers={name: value for name, value in headers.items() if name.lower() != "authorization"},
            )
        try:
            return self._fill(upload, content, path, sha256)
        except BaseException:
            with contextlib.suppress(OSError, RuntimeError):  # the reason is on its way already
                upload.abort()
            raise

    def _fill(self, upload: Any, content: CheckedContent, path: str, sha256: str | None) -> tuple[str, int]:
        with self._errors(path):  # a hash that is known is not computed twice: the content's own pass checks it
            stream = upload.start_upload_stream(name=path, **({"sha256": sha256} if sha256 else {}))
        for block in content:
            with self._errors(path):
                stream.write(bytes(block))
        with self._errors(path):
            stream.finish()
            report = upload.wait_to_finish()
        return content.sha256, int(report.dedup_metrics.xorb_bytes_uploaded)

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """What hf_xet raises, and nothing else, as ours."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise StoreError(
                f"{self._client.repo}: cannot upload {path}: {error}",
                hint="is the Hub reachable? run it again: what was finished is not sent again",
                retryable=isinstance(error, ConnectionError | TimeoutError),
            ) from error
