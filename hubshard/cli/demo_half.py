"""A publish that stops in its tracks once half of its shards are stored, and waits there to be killed.

Usage: `python -m hubshard.cli.demo_half DIR REPO MAX_SHARD_SIZE`. It says "half" on stdout when it has stopped. What is
stopped is the thread that reports; nothing is tidied up, as with a power cut.
"""

from __future__ import annotations

import sys
import threading

from hubshard.events import Event
from hubshard.publish import push_to_hub

__all__: list[str] = []


class _StopAtHalf:
    """Blocks for ever, and every thread that comes by, once half of the changed shards are stored."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._done = 0
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._done += event.kind in {"staged", "skipped"} and event.path.endswith(".safetensors")
            if self._done * 2 >= self._shards:
                sys.stdout.write("half\n")
                sys.stdout.flush()
                threading.Event().wait()


def _main(source: str, repo_id: str, max_shard_size: str) -> None:
    planned = push_to_hub(source, repo_id, max_shard_size=max_shard_size, dry_run=True)
    stop = _StopAtHalf(planned.shards)
    push_to_hub(source, repo_id, max_shard_size=max_shard_size, staging_batch_size=1, on_event=stop)


if __name__ == "__main__":
    _main(*sys.argv[1:])
