"""Uploads by the Xet protocol: content is streamed once, chunked and deduplicated by hf_xet; no file is written."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants

from hubshard.disk import MORE_FILES, is_out_of_files
from hubshard.errors import StoreError
from hubshard.protocols import Content
from hubshard.store.content import CheckedContent
from hubshard.store.hub_client import HubClient, without_token
from hubshard.store.hub_errors import status_of, without_queries
from hubshard.store.hub_xet_session import XetSessions

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Callbacks", "XetUploader"]

_STATUS = re.compile(r"HTTP status \w+ error \((\d{3})\b")  # in the words of hf_xet, which has no other place for it
_RETRIES = 2  # hf_xet tries each request again by itself
_LOOK_SECONDS = 0.25
_LOOK_SECONDS_AT_THE_END = 0.02
_LAST_BYTES = 32 * 10**6  # half a block of hf_xet: by then the next file has its first one ready, and memory holds both
_LAST_PART = 4  # and less than a fourth of it
_SILENT_STALLS = 4.0  # what was handed to the system is still on its way when the count stands still
_CHECKED_BYTES_PER_SECOND = 100 * 10**6  # a Hub hashes a file before it answers that it has it


@dataclass(frozen=True, slots=True)
class _Access:
    """What hf_xet needs to write: where, and a short-lived token that it renews by itself."""

    endpoint: str
    token: str
    expiry: int
    refresh_url: str

    @property
    def has_expired(self) -> bool:
        return time.time() >= self.expiry


class _RefusedError(StoreError):
    """What hf_xet was told with the status 401 or 403: by storage, or by the Hub where it renews its token."""

    def __init__(self, message: str, *, status: int, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.status = status


def _access_of(refresh_url: str, answer: Any) -> _Access:
    return _Access(str(answer["casUrl"]), str(answer["accessToken"]), int(answer["exp"]), refresh_url)


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What is called as an upload goes on, from any thread; what it raises ends the upload.

    Attributes:
        on_sent: with the number of bytes that crossed the network since its last call.
        on_ending: once, when the content was handed over, and what is still to be sent of it is little: less than
            32 MB and than a fourth.
    """

    on_sent: Callable[[int], None]
    on_ending: Callable[[], None]


class XetUploader:
    """Streams content into the Xet storage of one repo, from several threads at once if need be."""

    def __init__(self, client: HubClient, sessions: XetSessions) -> None:
        self._client = client
        self._sessions = sessions
        self._pulse = _Pulse()

    def upload(
        self,
        revision: str | None,
        data: Content,
        *,
        path: str,
        nbytes: int,
        sha256: str | None,
        callbacks: Callbacks,
    ) -> tuple[str, int] | None:
        """Make content durable; its sha256, and the bytes that crossed the network for it; None on a Hub without Xet.

        Bytes of chunks that the Hub has are not sent, and those sent are compressed; the few hundred bytes that tell
        the Hub which chunks make up the file do not count.

        Args:
            revision: the branch that it is meant for; None for a pull request that the commit opens.
            data: read once; anew where the upload failed (twice at most).
            path: for messages.
            nbytes: its size.
            sha256: in hex, or None.
            callbacks: see there.

        Raises:
            IntegrityError: `data` has another size or hash.
            StoreError: refused, or tried again in vain.
        """
        access = self._access(revision, path)
        if access is None:
            return None

        def attempt(access: _Access) -> tuple[str, int]:
            content = CheckedContent(data, path=path, nbytes=nbytes, sha256=sha256, hashes=False)
            return self._attempt(access, content, path, nbytes, sha256, callbacks)

        try:
            return self._client.patience.insist(partial(attempt, access), path, most=_RETRIES)
        except _RefusedError as error:
            fresh = self._access(revision, path)  # which says so where the Hub gives none any more
            if fresh is None or not (error.status == 401 or access.has_expired):
                raise
            self._client.patience.on_retry(path, error.message, 0.0)
        return self._client.patience.insist(partial(attempt, fresh), path, most=_RETRIES)

    def _access(self, revision: str | None, path: str) -> _Access | None:
        # For a pull request huggingface_hub names the revision "None", whose number is not known yet.
        url = self._client.api_url("xet-write-token", str(revision)) + ("" if revision else "?create_pr=1")
        try:
            return self._client.ask("GET", url, f"upload {path}", partial(_access_of, url), needs="write")
        except StoreError as error:
            if status_of(error) == 404:
                return None
            raise

    def _attempt(
        self,
        access: _Access,
        content: CheckedContent,
        path: str,
        nbytes: int,
        sha256: str | None,
        callbacks: Callbacks,
    ) -> tuple[str, int]:
        headers = self._client.headers()
        with self._errors(path):
            upload = self._sessions.for_upload().new_upload_commit(
                endpoint=access.endpoint,
                token=access.token,
                token_expiry_unix_secs=access.expiry,
                token_refresh_url=access.refresh_url,
                token_refresh_headers=headers,
                custom_headers=without_token(headers),
            )
        try:
            silence = _SILENT_STALLS * self._client.patience.stall_seconds
            silence += nbytes / _CHECKED_BYTES_PER_SECOND
            with _Meter(upload, callbacks, self._pulse, path, nbytes, silence) as meter:
                done = self._fill(upload, content, path, sha256, meter)
        except BaseException:
            with contextlib.suppress(OSError, RuntimeError):  # the reason is on its way already
                upload.abort()
            raise
        return done

    def _fill(
        self, upload: Any, content: CheckedContent, path: str, sha256: str | None, meter: _Meter
    ) -> tuple[str, int]:
        with self._errors(path):  # a hash is computed once: here where it is known, to check it, else by hf_xet
            stream = upload.start_upload_stream(name=path, **({"sha256": sha256} if sha256 else {}))
        for block in content:
            with self._errors(path):
                stream.write(bytes(block))
            meter.check()
        meter.fed()
        with self._errors(path):
            made = stream.finish()
            report = upload.wait_to_finish()
        sent = int(report.dedup_metrics.xorb_bytes_uploaded)
        meter.end(sent)
        return sha256 or str(made.xet_info.sha256), sent

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """What hf_xet raises, and nothing else, as ours."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise self._ours(error, path) from error

    def _ours(self, error: Exception, path: str) -> StoreError:
        repo, words = self._client.repo, without_queries(str(error))
        found = _STATUS.search(words)
        status = int(found[1]) if found else None
        if status in {401, 403}:
            return _RefusedError(
                f"{repo}: not allowed to upload {path}: the token must have write access to {repo}; Xet says: {words}",
                status=status,
                hint=f"log in with `hf auth login`, or pass a token with write access to {repo}",
            )
        hint = "run it again: what was finished is not sent again"
        if is_out_of_files(error):
            hint = f"too many files were open; {MORE_FILES}"
        elif "I/O error" in words:  # what it says of files of its own
            hint = (
                f"Xet keeps notes in {constants.HF_XET_CACHE}: set HF_HOME or HF_XET_CACHE to a folder that can be "
                "written to, or HF_HUB_DISABLE_XET=1"
            )
        elif status is None:
            hint = f"is the Hub reachable? {hint}"
        is_retryable = isinstance(error, ConnectionError | TimeoutError)
        return StoreError(f"{repo}: cannot upload {path}: {words}", hint=hint, retryable=is_retryable)


class _Pulse:
    """When a byte moved last, in any of the uploads: they share the line, so that one of them may wait for others."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def beat(self) -> None:
        """One has moved now."""
        self._last = time.monotonic()

    def silent_seconds(self, since: float) -> float:
        """How long none has moved, counted from `since` on."""
        return time.monotonic() - max(self._last, since)


class _Meter:
    """Looks at what an upload has sent, several times a second: hf_xet reports nothing by itself.

    An upload that has something to send, or has sent all and waits for the Hub, and in which nothing moves, is ended.

    Args:
        upload: hf_xet's.
        callbacks: see there.
        pulse: of all uploads.
        path: for messages.
        nbytes: of the content.
        silence: that ends it (seconds).
    """

    def __init__(
        self, upload: Any, callbacks: Callbacks, pulse: _Pulse, path: str, nbytes: int, silence: float
    ) -> None:
        self._upload = upload
        self._callbacks = callbacks
        self._pulse = pulse
        self._path = path
        self._last_bytes = min(_LAST_BYTES, nbytes // _LAST_PART)
        self._nbytes = nbytes
        self._silence = silence
        self._is_fed = False
        self._is_ending = False
        self._waits_since: float | None = None
        self._told_bytes = 0
        self._error: BaseException | None = None
        self._has_ended = False
        self._look = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hubshard-xet-meter", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self.check()

    def check(self) -> None:
        """Raise what `on_sent` has raised, or that nothing moved."""
        if self._error is not None:
            raise self._error

    def fed(self) -> None:
        """All content was handed over."""
        self._is_fed = True
        self._look.set()

    def end(self, sent_bytes: int) -> None:
        """Tell of the rest, now that the sum is known."""
        self._stop()
        self._tell(sent_bytes)

    def _stop(self) -> None:
        self._has_ended = True
        self._look.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._has_ended:
            try:
                progress = self._upload.progress()
                self._tell(int(progress.total_transfer_bytes_completed))
                self._tell_of_the_end(int(progress.total_bytes_completed))
                self._listen(is_waiting=self._is_fed or int(progress.total_transfer_bytes) > self._told_bytes)
            except BaseException as error:  # noqa: BLE001  # raised again where the upload is waited for
                self._error = error
                with contextlib.suppress(OSError, RuntimeError):
                    self._upload.abort()
                return
            is_soon = self._is_fed and not self._is_ending
            self._look.wait(_LOOK_SECONDS_AT_THE_END if is_soon else _LOOK_SECONDS)
            self._look.clear()

    def _listen(self, *, is_waiting: bool) -> None:
        if not is_waiting:
            self._waits_since = None
            return
        if self._waits_since is None:
            self._waits_since = time.monotonic()
        if self._pulse.silent_seconds(self._waits_since) > self._silence:
            raise StoreError(f"{self._path}: no byte of it has moved for {self._silence:.0f} s", retryable=True)

    def _tell(self, sent_bytes: int) -> None:
        if sent_bytes > self._told_bytes:
            self._pulse.beat()
            told, self._told_bytes = self._told_bytes, sent_bytes
            self._callbacks.on_sent(sent_bytes - told)

    def _tell_of_the_end(self, done_bytes: int) -> None:
        if self._is_fed and not self._is_ending and self._nbytes - done_bytes <= self._last_bytes:
            self._is_ending = True
            self._callbacks.on_ending()
