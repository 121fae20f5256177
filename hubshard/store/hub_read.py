"""Byte ranges of files on the Hub over HTTP, exact or an error."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

from huggingface_hub.utils import get_session, hf_raise_for_status, httpx

from hubshard.errors import IntegrityError, StoreError
from hubshard.protocols import Entry
from hubshard.store.hub_client import HubClient
from hubshard.store.hub_errors import translated
from hubshard.store.patience import may_pass

__all__ = ["RangeReader", "entry_of"]

_MAX_HOPS = 5
_SIGNED_URL_LIFETIME_SECONDS = 300.0
_KEPT_URLS = 4096
_PROGRESS_BYTES = 64 * 1024
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)\Z")


@dataclass(frozen=True, slots=True)
class _Signed:
    url: str
    until: float


class RangeReader:
    """Reads ranges of the files of one repo.

    A read that fails is taken up where it stopped, as often as the client's patience allows without progress; a long
    silence is a failure. Redirects (5 at most) are followed without the token where they leave the Hub; where one led
    is remembered for 5 minutes, so that a file's next ranges cost one request each.

    Args:
        client: the repo.
    """

    def __init__(self, client: HubClient) -> None:
        self._client = client
        self._signed: dict[str, _Signed] = {}

    def stream(self, commit: str, path: str, start: int, stop: int) -> Iterator[bytes]:
        """Bytes `start` to `stop` of a file, in pieces as they arrive; never fewer.

        Raises:
            NotFoundError: no such file, commit or repo.
            IntegrityError: the Hub delivered another range.
            StoreError: refused, or failed in vain.
        """
        position, mark, failures = start, start, 0
        while position < stop:
            try:
                for piece in self._attempt(commit, path, position, stop):
                    position += len(piece)
                    yield piece
            except StoreError as error:
                if position - mark >= _PROGRESS_BYTES:
                    mark, failures = position, 0
                failures += 1
                if not may_pass(error) or failures > self._client.patience.max_retries:
                    raise
                self._client.patience.pause(path, error, failures)

    def _attempt(self, commit: str, path: str, start: int, stop: int) -> Iterator[bytes]:
        what = f"read bytes {start}-{stop} of {path} at {commit[:12]}"
        with translated(what, self._client.repo), self._open(commit, path, start, stop) as response:
            position = start
            for piece in response.iter_raw():
                position += len(piece)
                if position > stop:
                    raise IntegrityError(f"{self._client.repo}: more bytes came than asked for: cannot {what}")
                yield piece
        if position < stop:
            raise StoreError(f"{self._client.repo}: the answer ended at byte {position}: cannot {what}", retryable=True)

    @contextlib.contextmanager
    def _open(self, commit: str, path: str, start: int, stop: int) -> Iterator[httpx.Response]:
        """The answer to a ranged request, redirects followed, status and range checked."""
        first = self._client.resolve_url(commit, path)
        signed = self._signed.get(first)
        url = signed.url if signed is not None and signed.until > time.monotonic() else first
        for _ in range(_MAX_HOPS + 1):
            with self._get(url, start, stop) as response:
                if response.has_redirect_location:
                    url = urljoin(url, response.headers["Location"])
                    continue
                if response.status_code in {401, 403, 404, 410} and self._forget(first, url):
                    url = first
                    continue
                if response.status_code != 416:  # past the end of the file: told below
                    hf_raise_for_status(response)
                self._check(response, path, start, stop)
                self._remember(first, url)
                yield response
                return
        raise StoreError(f"{self._client.repo}: {path}: more than {_MAX_HOPS} redirects, the last to {_bare(url)}")

    def _get(self, url: str, start: int, stop: int) -> contextlib.AbstractContextManager[httpx.Response]:
        headers = {**self._client.headers_for(url), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        stream: contextlib.AbstractContextManager[httpx.Response] = get_session().stream(
            "GET", url, headers=headers, timeout=self._client.timeout(), follow_redirects=False
        )
        return stream

    def _check(self, response: httpx.Response, path: str, start: int, stop: int) -> None:
        encoding = response.headers.get("Content-Encoding", "identity")
        given = response.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.match(given)
        is_range = response.status_code == 206 and match and (int(match[1]), int(match[2]) + 1) == (start, stop)
        is_whole = response.status_code == 200 and start == 0 and response.headers.get("Content-Length") == str(stop)
        if encoding != "identity" or not (is_range or is_whole):
            raise IntegrityError(
                f"{self._client.repo}: {path}: asked for bytes {start}-{stop}, but the answer is "
                f"{response.status_code} {given or 'with another size'} ({encoding})",
                hint="is the file shorter than expected, or does a proxy change answers?",
            )

    def _forget(self, first: str, url: str) -> bool:
        """Whether `url` was remembered for `first`: it may have expired."""
        known = self._signed.get(first)
        if known is None or known.url != url:
            return False
        self._signed.pop(first, None)
        return True

    def _remember(self, first: str, url: str) -> None:
        known = self._signed.get(first)
        if url == first or (known is not None and known.url == url):
            return
        if len(self._signed) >= _KEPT_URLS:
            self._signed.clear()
        self._signed[first] = _Signed(url, time.monotonic() + _SIGNED_URL_LIFETIME_SECONDS)


def entry_of(item: Any) -> Entry:
    """A file of the Hub's list of a tree."""
    large = item.get("lfs")
    return Entry(str(item["path"]), int(item["size"]), str(large["oid"]) if large else None, str(item["oid"]))


def _bare(url: str) -> str:
    """A URL without its query, which may hold a signature."""
    return urlsplit(url)._replace(query="").geturl()
