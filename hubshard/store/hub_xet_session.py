"""hf_xet's session: one per store, made when it is first needed, with its memory bounded."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from typing import Any

from huggingface_hub import constants

__all__ = ["XetSessions", "is_xet_enabled"]

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
    "client.read_timeout": "30s",
    "client.retry_base_delay": "1s",
}


def is_xet_enabled() -> bool:
    """Whether hf_xet is installed and not switched off by HF_HUB_DISABLE_XET."""
    return not constants.HF_HUB_DISABLE_XET and importlib.util.find_spec("hf_xet") is not None


class XetSessions:
    """The session of this process; a fork gets its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: Any = None
        self._process = 0

    def get(self) -> Any:
        """An `hf_xet.XetSession`."""
        hf_xet = importlib.import_module("hf_xet")  # slow, and only needed here
        with self._lock:
            if self._session is None or self._process != os.getpid():
                self._session = hf_xet.XetSession(hf_xet.XetConfig().with_config(_CONFIG))
                self._process = os.getpid()
            return self._session
