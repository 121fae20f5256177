"""Byte ranges of files on the Hub, exact or an error."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from huggingface_hub.utils import httpx

from hubshard.errors import IntegrityError, StoreError
from hubshard.protocols import Buffer, Entry
from hubshard.store.hub_client import HubClient
from hubshard.store.hub_errors import signed, translated
from hubshard.store.hub_get import GetAnswer, get
from hubshard.store.patience import may_pass

if TYPE_CHECKING:
    from hubshard.store.hub_xet_read import XetReader

__all__ = ["RangeReader", "entry_of"]

_MAX_HOPS = 5
_SIGNED_URL_LIFETIME_SECONDS = 300.0
_KEPT_URLS = 4096
_PROGRESS_BYTES = 64 * 1024
_PIECE_BYTES = 1 << 20  # of a stream, at most
_REDIRECTS = {301, 302, 303, 307, 308}
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)\Z")

_Room = Callable[[int], memoryview]
"""Memory for the bytes of a file from a position on, for one byte at least."""


@dataclass(frozen=True, slots=True)
class _Signed:
    url: str
    until: float


class RangeReader:
    """Reads ranges of the files of one repo: by Xet what that gives, the rest by HTTP.

    What comes by HTTP goes straight into the caller's memory. A read that fails is taken up where it stopped, as often
    as the client's patience allows without progress; a long silence is a failure. Redirects (5 at most) are followed
    without the token where they leave the Hub; where one led is remembered for 5 minutes, so that a file's next ranges
    cost one request each.

    Args:
        client: the repo.
        xet: is asked first.
    """

    def __init__(self, client: HubClient, xet: XetReader | None = None) -> None:
        self._client = client
        self._xet = xet
        self._signed: dict[str, _Signed] = {}

    def read(self, commit: str, path: str, start: int, into: memoryview, on_read: Callable[[int], None]) -> None:
        """Fill `into` with the bytes of a file from `start` on; never fewer.

        Args:
            commit: of the repo.
            path: of the file.
            start: first byte.
            into: memory of bytes.
            on_read: is told how many bytes have come since its last call.

        Raises:
            NotFoundError: no such file, commit or repo.
            IntegrityError: the Hub delivered another range.
            StoreError: refused, or failed in vain.
        """
        position, stop = start, start + len(into)
        for piece in self._by_xet(commit, path, start, stop):
            into[position - start : position - start + len(piece)] = piece
            position += len(piece)
            on_read(len(piece))
        for count in self._patiently(commit, path, position, stop, lambda at: into[at - start :]):
            on_read(count)

    def stream(self, commit: str, path: str, start: int, stop: int) -> Iterator[Buffer]:
        """Bytes `start` to `stop` of a file, in pieces as they arrive; each is valid until the next is asked for.

        Raises:
            NotFoundError, IntegrityError, StoreError: as for `read`.
        """
        position = start
        for piece in self._by_xet(commit, path, start, stop):
            position += len(piece)
            yield piece
        room = memoryview(bytearray(min(_PIECE_BYTES, stop - position)))
        for count in self._patiently(commit, path, position, stop, lambda at: room[: stop - at]):
            yield room[:count]

    def _by_xet(self, commit: str, path: str, start: int, stop: int) -> Iterator[bytes]:
        """Bytes of a range from its start on, as many as Xet gives."""
        return iter(()) if self._xet is None else self._xet.some(commit, path, start, stop)

    def _patiently(self, commit: str, path: str, start: int, stop: int, room: _Room) -> Iterator[int]:
        """How many bytes came, each time that some have come into the room for them."""
        position, mark, failures = start, start, 0
        while position < stop:
            try:
                for count in self._attempt(commit, path, position, stop, room):
                    position += count
                    yield count
            except StoreError as error:
                if position - mark >= _PROGRESS_BYTES:
                    mark, failures = position, 0
                failures += 1
                if not may_pass(error) or failures > self._client.patience.max_retries:
                    raise
                self._client.patience.pause(path, error, failures)

    def _attempt(self, commit: str, path: str, start: int, stop: int, room: _Room) -> Iterator[int]:
        what = f"read bytes {start}-{stop} of {path} at {commit[:12]}"
        with translated(what, self._client.repo), self._open(commit, path, start, stop) as answer:
            position = start
            while position < stop and (count := answer.readinto(room(position))):
                position += count
                yield count
            if position == stop and answer.readinto(memoryview(bytearray(1))):
                raise IntegrityError(f"{self._client.repo}: more bytes came than asked for: cannot {what}")
        if position < stop:
            raise StoreError(f"{self._client.repo}: the answer ended at byte {position}: cannot {what}", retryable=True)

    @contextlib.contextmanager
    def _open(self, commit: str, path: str, start: int, stop: int) -> Iterator[GetAnswer]:
        """The answer to a ranged request, redirects followed, status and range checked."""
        first = self._client.resolve_url(commit, path)
        signed = self._signed.get(first)
        url = signed.url if signed is not None and signed.until > time.monotonic() else first
        for _ in range(_MAX_HOPS + 1):
            with self._get(url, start, stop) as answer:
                if answer.status in _REDIRECTS and "Location" in answer.headers:
                    url = self._following(url, answer.headers["Location"], path)
                    continue
                if answer.status in {401, 403, 404, 410} and self._forget(first, url):
                    url = first
                    continue
                if answer.status != 416:  # past the end of the file: told below
                    self._raise_for_status(answer, url, f"read {path} at {commit[:12]}")
                self._check(answer, path, start, stop)
                self._remember(first, url)
                yield answer
                return
        raise StoreError(f"{self._client.repo}: {path}: more than {_MAX_HOPS} redirects, the last to {_bare(url)}")

    def _raise_for_status(self, answer: GetAnswer, url: str, what: str) -> None:
        if self._client.is_elsewhere(url):
            with signed(what, self._client.repo), translated(what, self._client.repo):
                answer.raise_for_status()
        answer.raise_for_status()

    def _following(self, url: str, location: str, path: str) -> str:
        """Where a redirect leads."""
        with contextlib.suppress(ValueError, httpx.InvalidURL):
            following = urljoin(url, location)
            parts, _ = urlsplit(following), httpx.URL(following)
            if parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0:
                return following
        raise StoreError(  # it may hold a signature, and is not shown
            f"{self._client.repo}: {path}: the server redirects to what is no address of HTTP",
            hint="does HF_ENDPOINT name a Hub? does a proxy change answers?",
        )

    def _get(self, url: str, start: int, stop: int) -> contextlib.AbstractContextManager[GetAnswer]:
        headers = {**self._client.headers_for(url), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        return get(url, headers, self._client.timeout())

    def _check(self, answer: GetAnswer, path: str, start: int, stop: int) -> None:
        encoding = answer.headers.get("Content-Encoding", "identity")
        given = answer.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.match(given)
        is_range = answer.status == 206 and match and (int(match[1]), int(match[2]) + 1) == (start, stop)
        is_whole = answer.status == 200 and start == 0 and answer.headers.get("Content-Length") == str(stop)
        if encoding != "identity" or not (is_range or is_whole):
            raise IntegrityError(
                f"{self._client.repo}: {path}: asked for bytes {start}-{stop}, but the answer is "
                f"{answer.status} {given or 'with another size'} ({encoding})",
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
    """A URL without its query and password, which are secrets."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
