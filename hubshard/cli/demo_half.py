"""A publish that stops in its tracks half way, and waits there to be killed.

Usage: `python -m hubshard.cli.demo_half DIR REPO MAX_SHARD_SIZE BYTES`, with the bytes that it will have to send. It
says "half" on stdout once half of them are on their way and a shard at least is stored. Nothing is tidied up after
that, as with a power cut.
"""

from __future__ import annotations

import logging
import sys
import threading

from hubshard.events import Event
from hubshard.publish import push_to_hub

__all__: list[str] = []


class _StopHalfWay:
    """Blocks for ever, with every thread that comes by, once half is done."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._sent_bytes = 0
        self._stored = 0
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            if event.path.endswith(".safetensors"):
                self._sent_bytes += event.nbytes if event.kind == "sent" else 0
                self._stored += event.kind == "staged"
            if self._stored and self._sent_bytes * 2 >= self._total_bytes:
                sys.stdout.write("half\n")
                sys.stdout.flush()
                threading.Event().wait()


def _main(source: str, repo_id: str, max_shard_size: str, total_bytes: str) -> None:
    logging.getLogger("hubshard").addHandler(logging.NullHandler())  # it has been said by the first publish
    stop = _StopHalfWay(int(total_bytes))
    push_to_hub(source, repo_id, max_shard_size=max_shard_size, staging_batch_size=1, on_event=stop)


if __name__ == "__main__":
    _main(*sys.argv[1:])
