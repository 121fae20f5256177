"""hf_xet's sessions: made when they are first needed, with their memory bounded."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from typing import Any

from huggingface_hub import constants

__all__ = ["XetSessions", "is_xet_enabled"]

_UPLOAD_STALLS = 60.0

_CONFIG = {
    # Up: blocks of 64 MB are filled, and those that wait to be sent are held. With two in flight, one stream takes
    # 230 MiB on a fast line and 360 MiB on one of 15 MB/s (505 MiB and more with the defaults); two 570, three 740 MiB.
    "client.ac_initial_upload_concurrency": 2,
    "client.ac_max_upload_concurrency": 2,
    # Down: ranges of 8 MiB by 4 threads take 80 MiB, by 16 threads 200 MiB; the default buffer alone is 1.6 GB.
    "reconstruction.download_buffer_size": 64_000_000,
    "reconstruction.download_buffer_limit": 64_000_000,
    "reconstruction.download_buffer_perfile_size": 16_000_000,
    "reconstruction.min_reconstruction_fetch_size": 16_000_000,
    "reconstruction.min_prefetch_buffer": 16_000_000,
    "client.ac_max_download_concurrency": 16,
    "client.retry_base_delay": "1s",
}


def is_xet_enabled() -> bool:
    """Whether hf_xet is installed and not switched off by HF_HUB_DISABLE_XET."""
    return not constants.HF_HUB_DISABLE_XET and importlib.util.find_spec("hf_xet") is not None


class XetSessions:
    """The sessions of this process, one for each direction; a fork gets its own.

    Args:
        stall_seconds: of silence that are a failure. hf_xet's limit runs from the first byte that is sent to the
            first of the answer: going up, a block of 64 MB on a slow line needs 60 times as much. Uploads in which
            nothing moves at all are given up earlier, by who makes them.
    """

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._lock = threading.Lock()
        self._sessions: dict[tuple[int, str], Any] = {}

    def for_upload(self) -> Any:
        """An `hf_xet.XetSession`."""
        return self._get("upload", _UPLOAD_STALLS * self._stall_seconds)

    def for_download(self) -> Any:
        """An `hf_xet.XetSession`."""
        return self._get("download", self._stall_seconds)

    def _get(self, direction: str, timeout_seconds: float) -> Any:
        hf_xet = importlib.import_module("hf_xet")  # slow, and only needed here
        key = os.getpid(), direction
        with self._lock:
            if key not in self._sessions:
                config = _CONFIG | {"client.read_timeout": f"{max(int(timeout_seconds * 1000), 1)}ms"}
                self._sessions[key] = hf_xet.XetSession(hf_xet.XetConfig().with_config(config))
            return self._sessions[key]
