"""Byte ranges of files in Xet storage: faster than HTTP ranges, and without the Hub in between."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hubshard.errors import IntegrityError, StoreError
from hubshard.protocols import Entry
from hubshard.store.hub_client import HubClient, without_token
from hubshard.store.hub_errors import without_queries
from hubshard.store.hub_read import entry_of
from hubshard.store.hub_xet_session import XetSessions

__all__ = ["XetFile", "XetReader", "file_of"]

_KEPT_COMMITS = 4
_LEAST_BYTES = 4 * 1024 * 1024
_SEGMENT_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class XetFile:
    """A file in Xet storage.

    Attributes:
        xet_hash: its id there, in hex.
        nbytes: its size.
    """

    xet_hash: str
    nbytes: int


def file_of(item: Any) -> tuple[Entry, XetFile | None] | None:
    """A file of the Hub's list of a tree, and where it is in Xet storage; None for a folder."""
    if item["type"] != "file":
        return None
    entry = entry_of(item)
    return entry, XetFile(str(item["xetHash"]), entry.nbytes) if item.get("xetHash") and item.get("lfs") else None


class XetReader:
    """Reads ranges of those files of one repo whose Xet hash is known.

    Measured on a loaded machine against a Hub on it, 8 MiB ranges by 4 threads: 300 MB/s, 180 MB/s by HTTP. Whole
    chunks (64 KiB on average) cross the network: small ranges cost less by HTTP. Long ranges are read in segments of
    16 MiB: that takes 16 MiB of memory where one stream takes 200 MiB, and is faster.
    """

    def __init__(self, client: HubClient, sessions: XetSessions) -> None:
        self._client = client
        self._sessions = sessions
        self._lock = threading.Lock()
        self._files: dict[str, Mapping[str, XetFile]] = {}
        self._groups: dict[tuple[int, str], Any] = {}

    def note(self, commit: str, files: Mapping[str, XetFile]) -> None:
        """Remember the files of a commit."""
        with self._lock:
            self._files[commit] = files
            for oldest in list(self._files)[:-_KEPT_COMMITS]:
                del self._files[oldest]

    def some(self, commit: str, path: str, start: int, stop: int) -> Iterator[bytes]:
        """Bytes of a range in order, in pieces, as many as Xet gives; none of a small range, or of an unknown file.

        Raises:
            IntegrityError: more came than asked for.
        """
        file = self._files.get(commit, {}).get(path)
        if file is None or stop - start < _LEAST_BYTES or stop > file.nbytes:
            return
        position = start
        try:
            for piece in self._stream(commit, file, start, stop):
                position += len(piece)
                if position > stop:
                    raise IntegrityError(f"{self._client.repo}: {path}: more bytes came than asked for")
                yield piece
        except StoreError as error:  # HTTP is the other route
            self._client.patience.on_retry(path, error.message, 0.0)

    def _stream(self, commit: str, file: XetFile, start: int, stop: int) -> Iterator[bytes]:
        position = start
        while position < stop:
            end = min(stop, position + _SEGMENT_BYTES)
            for piece in self._segment(commit, file, position, end):
                position += len(piece)
                yield piece
            if position != end:  # hf_xet ends early without an error where it cannot go on
                return

    def _segment(self, commit: str, file: XetFile, start: int, stop: int) -> Iterator[bytes]:
        hf_xet = importlib.import_module("hf_xet")  # slow, and only needed here
        with self._errors(commit):
            info = hf_xet.XetFileInfo(file.xet_hash, file.nbytes)
            stream = self._group(commit).download_stream(info, start, stop)
        try:
            while True:
                with self._errors(commit):
                    piece = next(stream, None)
                if piece is None:
                    return
                yield piece
        finally:
            stream.cancel()

    def _group(self, commit: str) -> Any:
        """The connection for the files of a commit; it renews its token by itself."""
        key = os.getpid(), commit
        with self._lock:
            if key not in self._groups:
                headers = self._client.headers()
                self._groups = {
                    key: self._sessions.for_download().new_download_stream_group(
                        token_refresh_url=self._client.api_url("xet-read-token", commit),
                        token_refresh_headers=headers,
                        custom_headers=without_token(headers),
                    )
                }
            return self._groups[key]

    @contextlib.contextmanager
    def _errors(self, commit: str) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            with self._lock:  # the next read connects anew, with a fresh token
                self._groups.pop((os.getpid(), commit), None)
            words = without_queries(str(error))
            message = f"{self._client.repo}: cannot read files of {commit[:12]} by Xet: {words}"
            raise StoreError(message, retryable=True) from error
