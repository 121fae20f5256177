"""A pull that is killed at any step leaves the old or the new, never a mixture, and the next one goes on."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from hubshard.fetch.hf_cache import CacheLayout
from hubshard.fetch.parts import PIECE_BYTES
from hubshard.fetch.pulling import pull_from
from tests import warm
from tests.systems import KILLED, posix_only

WORKERS = 2
DIE_AT_A_PIECE = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import memory_hub
from hubshard.fetch.hf_cache import CacheLayout
from hubshard.fetch.pulling import pull_from

hub = memory_hub.MemoryHub(lambda path, start, data: start == int(sys.argv[3]) and os.kill(os.getpid(), 9))
hub.put(memory_hub.REVISIONS["six pieces"]())
pull_from(hub, CacheLayout(Path(sys.argv[2]), "org/model"), memory_hub.request(workers=int(sys.argv[4])))
"""


@posix_only
@pytest.mark.parametrize(
    "change",
    [
        *("other weights in as many shards", pytest.param("a single file", marks=pytest.mark.slow), "only the config"),
        pytest.param("a pipeline with other shards", marks=pytest.mark.slow),
        "a pipeline with a single file",
        pytest.param("a pipeline with another list alone", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", ["cache", "directory"])
def test_killed_at_any_step_a_reader_sees_the_old_or_the_new_and_the_rerun_completes(
    tmp_path: Path, kind: str, change: str
) -> None:
    program = Path(__file__).with_name("kill_everywhere.py")
    done = warm.run([program, kind, tmp_path, change], imports="client", timeout=280)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["mixtures"] == 0
    assert seen["left_behind"] == 0
    assert seen["steps"] > 20
    assert seen["old"] > 5
    assert seen["new"] > 0
    if kind == "cache":
        assert seen["nothing"] == 0


@pytest.mark.parametrize("piece", [1, 3, 5])
def test_after_a_kill_no_more_than_the_pieces_in_flight_are_fetched_again(
    memory: ModuleType, tmp_path: Path, piece: int
) -> None:
    arguments = [str(Path(__file__).parent), str(tmp_path), str(piece * PIECE_BYTES), str(WORKERS)]
    killed = warm.run(["-c", DIE_AT_A_PIECE, *arguments], imports="client", timeout=120)
    assert killed.returncode == KILLED, killed.stderr
    files = memory.REVISIONS["six pieces"]()
    hub = memory.MemoryHub()
    hub.put(files)
    assert memory.held(pull_from(hub, CacheLayout(tmp_path, "org/model"), memory.request())) == files
    assert hub.nbytes_read <= (6 - piece + WORKERS) * PIECE_BYTES
