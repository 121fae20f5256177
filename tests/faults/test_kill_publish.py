"""A publish that is killed at any point: readers see the old or the new, and the next run, elsewhere, ends it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.clients import Clients, Victim, clients
from tests.faults.models import SHARD_BYTES, Repo, Weights, equal, new_repo, weights
from tests.faults.proxy import Proxy, proxied
from tests.systems import posix_only

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("starlette")
pytestmark = posix_only

SHARDS = 4
TITLES = ["new", "a commit", "initial commit"]
NBYTES_OF_SHARD = 2 * 16_384 + 200
XET_OVERHEAD_BYTES = 100  # per file, for the frames of its chunks
BOUNDARIES = {
    "look at the repo": (r"GET /api/models/[^/]+/[^/]+\?", 1),
    "look at the branch": (r"GET .*/revision/main", 1),
    "list the branch": (r"GET .*/tree/", 1),
    "look for a staging branch": (r"GET .*/revision/hubshard%2Fstaging", 1),
    "ask how to send": (r"POST .*/preupload/", 3),
    "get a token to upload": (r"GET .*/xet-write-token/", SHARDS),
    "upload": (r"POST .*/xorbs/", SHARDS),
    "make the upload durable": (r"POST .*/v1/shards", SHARDS),
    "make the staging branch": (r"POST .*/branch/", 1),
    "commit a shard to it": (r"POST .*/commit/hubshard%2Fstaging", SHARDS),
    "look at the tags": (r"GET .*/refs", 1),
    "the one commit": (r"POST .*/commit/main", 1),
    "tag it": (r"POST .*/tag/", 1),
    "drop the staging branch": (r"DELETE .*/branch/", 1),
}
"""Request lines, and how many of each there are at least."""

LFS_BOUNDARIES = {
    "ask where to send": (r"POST .*/info/lfs/objects/batch", SHARDS),
    "upload": (r"PUT /lfs/", SHARDS),
    "commit a shard to the staging branch": (r"POST .*/commit/hubshard%2Fstaging", SHARDS),
}


@dataclass(frozen=True)
class Point:
    """Where a client dies: at the n-th request of a kind, before or after it is done; at an event; or at a time."""

    when: str
    pattern: str = ""
    number: int = 0
    seconds: float = 0.0

    def arm(self, proxy: Proxy, victim: Victim) -> None:
        if self.pattern:
            victim.dies_at(proxy, self.pattern, self.number, when=self.when)

    def timer(self, victim: Victim) -> threading.Timer:
        return threading.Timer(self.seconds or 1e6, victim.kill)


def boundaries(requests: Mapping[str, tuple[str, int]]) -> list[Point]:
    points = []
    for pattern, count in requests.values():
        for number in sorted({1, min(2, count), count}):
            points += [Point("before", pattern, number), Point("after", pattern, number)]
    return points


def events() -> list[Point]:
    return [Point("event", number=number) for number in (1, 2, 4, 7, 10, 13, 16, 19)]


def instants(count: int) -> list[Point]:
    chance = random.Random(count)
    return [Point("instant", seconds=chance.uniform(0.02, 1.2)) for _ in range(count)]


@pytest.fixture(scope="module")
def pool(module_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleQueue[Clients]]:
    """Two programs that fork clients."""
    with _pool(module_hub.client_env(tmp_path_factory.mktemp("home"))) as made:
        yield made


@pytest.fixture(scope="module")
def lfs_pool(module_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleQueue[Clients]]:
    """The same, for clients without Xet."""
    with _pool(module_hub.client_env(tmp_path_factory.mktemp("home"), xet=False)) as made:
        yield made


@contextmanager
def _pool(env: dict[str, str]) -> Iterator[SimpleQueue[Clients]]:
    free: SimpleQueue[Clients] = SimpleQueue()
    with ExitStack() as stack:
        for _ in range(2):
            free.put(stack.enter_context(clients(env)))
        yield free


def arguments(repo: Repo, url: str) -> dict[str, Any]:
    options = {"max_shard_size": SHARD_BYTES, "staging_batch_size": 1, "message": "new", "tag": "v1"}
    return {"seed": 2, "repo_id": repo.repo_id, "endpoint": url, "token": "hf_test", **options}


def staged_bytes(repo: Repo) -> int:
    """Of the shards that a run has left on the staging branch, or shown."""
    branches = [name for name in repo.branches() if name != "main"]
    assert len(branches) <= 1
    listed = repo.files(branches[0]) if branches else {}
    return NBYTES_OF_SHARD * sum(path.startswith("staged/") for path in listed)


def view(repo: Repo, cache: Path) -> str:
    seen: Weights = repo.tensors(cache)
    return "old" if equal(seen, weights(1)) else "new" if equal(seen, weights(2)) else "a mixture"


@dataclass(frozen=True)
class Seen:
    """What a killed publish has left."""

    is_killed: bool
    view: str
    staged_bytes: int


def publish_killed_at(point: Point, hub: Hub, pool: SimpleQueue[Clients], place: Path) -> Seen:
    """Kill, look, run again, look."""
    repo, victim = new_repo(hub), Victim()
    repo.put(weights(1))
    client = pool.get()
    try:
        with proxied(hub.port) as proxy:
            point.arm(proxy, victim)
            timer = point.timer(victim)
            job = {"die_at_event": point.number} if point.when == "event" else {}
            ended = client.run(
                "push", place / "1", victim=victim, then=timer.start, arguments=arguments(repo, proxy.url), **job
            )
            timer.cancel()
            proxy.settle()
        assert ended.is_killed or ended.status == 0, point
        seen = view(repo, place / "seen")
        assert seen in {"old", "new"}, point
        assert not list((place / "1" / "tmp").iterdir()), point
        left = SHARDS * NBYTES_OF_SHARD if seen == "new" else staged_bytes(repo)
        before = repo.nbytes_received()
        again = client.run("push", place / "2", arguments=arguments(repo, hub.url))
        assert again.status == 0, point
    finally:
        pool.put(client)
    sent = repo.nbytes_received() - before
    assert sent <= SHARDS * (NBYTES_OF_SHARD + XET_OVERHEAD_BYTES) - left, (point, sent, left)
    assert view(repo, place / "seen again") == "new", point
    assert repo.titles() == TITLES, point
    assert repo.branches() == ["main"], point
    assert list(repo.tags()) == ["v1"], point
    return Seen(ended.is_killed, seen, left)


def run_matrix(points: list[Point], hub: Hub, pool: SimpleQueue[Clients], tmp_path: Path) -> list[Seen]:
    with ThreadPoolExecutor(2) as threads:
        jobs = [
            threads.submit(publish_killed_at, point, hub, pool, tmp_path / str(number))
            for number, point in enumerate(points)
        ]
        return [job.result() for job in jobs]


def test_killed_at_every_boundary(module_hub: Hub, pool: SimpleQueue[Clients], tmp_path: Path) -> None:
    points = boundaries(BOUNDARIES)
    assert len(points) >= 40
    seen = run_matrix(points, module_hub, pool, tmp_path)
    assert [point for point, left in zip(points, seen, strict=True) if not left.is_killed] == []
    assert {left.view for left in seen} == {"old", "new"}
    assert {left.staged_bytes for left in seen} == {shards * NBYTES_OF_SHARD for shards in range(SHARDS + 1)}


def test_without_xet_killed_at_every_boundary_of_an_upload(
    module_hub: Hub, lfs_pool: SimpleQueue[Clients], tmp_path: Path
) -> None:
    seen = run_matrix(boundaries(LFS_BOUNDARIES), module_hub, lfs_pool, tmp_path)
    assert all(left.is_killed for left in seen)


def test_killed_at_events_and_at_random_instants(module_hub: Hub, pool: SimpleQueue[Clients], tmp_path: Path) -> None:
    seen = run_matrix([*events(), *instants(6)], module_hub, pool, tmp_path)
    assert sum(left.is_killed for left in seen) >= 8


@pytest.mark.slow  # sixty more of the same kind, for a machine with time
def test_killed_at_many_random_instants(module_hub: Hub, pool: SimpleQueue[Clients], tmp_path: Path) -> None:
    run_matrix(instants(60), module_hub, pool, tmp_path)
