"""Publishing through scratch files, to a real Hub without Xet: what lies on the disk, and what is read back."""

from __future__ import annotations

import hashlib
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from tests.conftest import Hub

PUSH = """
import os, signal, sys
import hubshard

source, scratch, die_after = sys.argv[1], sys.argv[2], int(sys.argv[3])
staged = most = reads = 0

def on_event(event):
    global staged, most, reads
    most = max(most, len([name for name in os.listdir(scratch) if name.endswith(".part")]))
    staged += event.kind == "staged"
    reads += event.nbytes if event.kind in ("read", "hashed") else 0
    if event.kind == "staged" and staged == die_after:
        os.kill(os.getpid(), signal.SIGKILL)

published = hubshard.push_to_hub(source, "org/model", max_shard_size="12MB", scratch=scratch, on_event=on_event)
print(most, len(os.listdir(scratch)), published.sent_bytes, published.skipped_bytes, published.total_bytes, reads)
"""


def _tensors(count: int = 5) -> dict[str, Any]:
    rng = random.Random(1)
    return {f"w{i}": np.frombuffer(rng.randbytes(11_000_000), np.uint8) for i in range(count)}


def _read_back(hub: Hub) -> set[str]:
    code = """
    from pathlib import Path
    from huggingface_hub import snapshot_download
    from safetensors import deserialize
    import hashlib
    for path in Path(snapshot_download("org/model")).glob("*.safetensors"):
        for name, tensor in deserialize(path.read_bytes()):
            print(name, hashlib.sha256(tensor["data"]).hexdigest())
    """
    return set(hub.client(code, xet=False).splitlines())


def test_at_most_two_shards_lie_on_the_disk_and_a_killed_run_leaves_nothing_for_long(hub: Hub, tmp_path: Path) -> None:
    source, scratch = tmp_path / "source", tmp_path / "scratch"
    source.mkdir()
    scratch.mkdir()
    tensors = _tensors()
    save_file(tensors, source / "model.safetensors")
    watched, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            watched[0] = max(watched[0], len(list(scratch.glob("*.part"))))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        killed = hub.try_client(PUSH, source, scratch, "2", xet=False)
        assert killed.returncode == -9, killed.stderr
        hub.reset_counters()
        said = hub.client(PUSH, source, scratch, "0", xet=False)
    finally:
        stop.set()
        thread.join()
    most, left, sent, skipped, total, reads = map(int, said.split())
    assert 1 <= most <= 2
    assert watched[0] <= 2 + 2  # a killed run's, until the next begins
    assert left == 0
    assert sent + skipped == total
    assert skipped > 11_000_000
    assert hub.counters("models/org/model")["lfs_received"] < total - 11_000_000
    assert reads < total + 2_000_000  # the source is read once
    expected = {f"{name} {hashlib.sha256(value.tobytes()).hexdigest()}" for name, value in tensors.items()}
    assert _read_back(hub) == expected
