"""A publish that stops in its tracks half way, and waits there to be killed.

Usage: `python -m hubshard.cli.demo.half DIR REPO MAX_SHARD_SIZE BYTES`, with the bytes that it will have to send. It
sends one shard after the other, and says "half" on stdout once shards of half of these bytes are stored. Nothing is
tidied up after that, as with a power cut.
"""

from __future__ import annotations

import logging
import sys
import threading

from hubshard.events import Event
from hubshard.publish import push_to_hub

__all__: list[str] = []


class _StopHalfWay:
    """Lets one shard at a time go on, and none once half is stored: whoever reports then waits for ever."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._stored_bytes = 0
        self._read_bytes = 0
        self._current: str | None = None
        self._turn = threading.Condition()

    def __call__(self, event: Event) -> None:
        if not event.path.endswith(".safetensors") or event.kind not in {"read", "staged"}:
            return
        with self._turn:
            self._turn.wait_for(lambda: self._current in {None, event.path})
            if event.kind == "read":
                self._current = event.path
                self._read_bytes += event.nbytes
                return
            self._stored_bytes += self._read_bytes
            self._read_bytes = 0
            if self._stored_bytes * 2 >= self._total_bytes:
                sys.stdout.write("half\n")
                sys.stdout.flush()
                threading.Event().wait()
            self._current = None
            self._turn.notify_all()


def _main(source: str, repo_id: str, max_shard_size: str, total_bytes: str) -> None:
    logging.getLogger("hubshard").addHandler(logging.NullHandler())  # it has been said by the first publish
    stop = _StopHalfWay(int(total_bytes))
    push_to_hub(source, repo_id, max_shard_size=max_shard_size, staging_batch_size=1, on_event=stop)


if __name__ == "__main__":
    _main(*sys.argv[1:])
