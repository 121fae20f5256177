"""A file that is begun before its turn sends nothing of it, whatever is read of it by then."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

from huggingface_hub import HfApi

from hubshard.publish.ahead import Turn
from hubshard.store.hub import HubStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Hub

BLOCK_BYTES = 8 << 20
NBYTES = 9 * BLOCK_BYTES


def test_nothing_is_sent_before_its_turn(hub: Hub) -> None:
    HfApi(endpoint=hub.url, token="hf_test").create_repo("hubshard/ahead")
    store = HubStore("hubshard/ahead", endpoint=hub.url, token="hf_test")
    turn, read = Turn(has_come=False), [0]

    def content() -> Iterator[bytes]:
        read[0] = 0
        rng = random.Random(5)
        for _ in range(NBYTES // BLOCK_BYTES):
            read[0] += BLOCK_BYTES
            yield rng.randbytes(BLOCK_BYTES)

    staged: list[int] = []

    def stage() -> None:
        data = lambda: turn.pace(content(), NBYTES)  # noqa: E731
        staged.append(store.stage("main", "model.safetensors", data, nbytes=NBYTES).nbytes_sent)

    sender = threading.Thread(target=stage, daemon=True)
    sender.start()
    while read[0] < 6 * BLOCK_BYTES:  # the sixth block has been read, and is held back
        time.sleep(0.01)
    time.sleep(1.0)
    assert hub.counters()["total"]["xet_received"] == 0
    turn.come()
    sender.join()
    assert staged == [hub.counters()["total"]["xet_received"]]
    assert staged[0] >= NBYTES
