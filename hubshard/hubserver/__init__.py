"""An embedded Hugging Face Hub: the unmodified clients work against it with only `HF_ENDPOINT` set.

Example:
    with running(Path("hub")) as url:
        HfApi(endpoint=url).create_repo("org/model")
"""

from __future__ import annotations

from hubshard.hubserver.gc import GcReport
from hubshard.hubserver.server import gc, process, running, serve, stop
from hubshard.hubserver.state import Settings

__all__ = ["GcReport", "Settings", "gc", "process", "running", "serve", "stop"]
