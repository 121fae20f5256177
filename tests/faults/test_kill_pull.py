"""A pull that is killed at any point: a loader finds the old or the new, whole, and the next run ends it."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalEntryNotFoundError

from tests.faults.clients import Clients, Victim, clients
from tests.faults.models import Repo, equal, new_repo, read_folder, weights
from tests.faults.proxy import Proxy, proxied
from tests.systems import posix_only

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("starlette")
pytestmark = posix_only

SHARDS = 4
WORKERS = 2
NBYTES_OF_TENSORS = 8 * 16_384
HEADERS_AND_SMALL_FILES_BYTES = 4_000
BOUNDARIES = {
    "look at the branch": (r"GET /api/.*/revision/", 1),
    "list the revision": (r"GET /api/.*/tree/", 1),
    "read the index": (r"GET .*/resolve/.*/model\.safetensors\.index\.json", 1),
    "read a small file": (r"GET .*/resolve/.*/config\.json", 1),
    "read a shard": (r"GET .*/resolve/.*/model-.*\.safetensors", SHARDS),
}


@dataclass(frozen=True)
class Point:
    """Where a pull dies: at a request, before or after it is done; at an event; before a step on the disk; at a time.

    Attributes:
        kind: of the target.
        job: for the client.
        when: it dies, of a request.
        pattern: of that request.
        number: of that request.
        seconds: after which it dies, or 0.
    """

    kind: str
    job: dict[str, int] = field(default_factory=dict)
    when: str = ""
    pattern: str = ""
    number: int = 0
    seconds: float = 0.0

    def arm(self, proxy: Proxy, victim: Victim) -> None:
        if self.pattern:
            victim.dies_at(proxy, self.pattern, self.number, when=self.when)


def boundaries(kind: str) -> list[Point]:
    return [
        Point(kind, when=when, pattern=pattern, number=number)
        for pattern, count in BOUNDARIES.values()
        for number in range(1, count + 1)
        for when in ("before", "after")
    ]


def events(kind: str) -> list[Point]:
    return [Point(kind, {"die_at_event": number}) for number in range(1, 15)]


def steps(kind: str, numbers: range) -> list[Point]:
    return [Point(kind, {"die_at_step": number}) for number in numbers]


def instants(kind: str, count: int) -> list[Point]:
    chance = random.Random(count)
    return [Point(kind, seconds=chance.uniform(0.01, 0.4)) for _ in range(count)]


class World:
    """A repo whose new revision is pulled over the old one, which lies ready in every kind of target."""

    def __init__(self, hub: Hub, folder: Path, pool: SimpleQueue[Clients]) -> None:
        self.hub = hub
        self.pool = pool
        self.folder = folder
        self.repo: Repo = new_repo(hub)
        self.repo.put(weights(1), shards=3, **{"config.json": b'{"of": "old"}'})
        for kind in ("cache_dir", "local_dir"):
            self.repo.pull(**{kind: folder / kind})
        self.repo.put(weights(2), shards=SHARDS)

    def pull(self, client: Clients, place: Path, kind: str, url: str, **more: Any) -> Any:
        arguments = {"repo_id": self.repo.repo_id, "endpoint": url, "token": "hf_test", "workers": WORKERS}
        target = place / "target"
        return client.run("pull", place, arguments=arguments | {kind: str(target)}, **more)

    def view(self, place: Path, kind: str) -> str:
        """What a loader finds without a network: of a directory, whatever its index names."""
        folder = place / "target"
        try:
            if kind == "cache_dir":
                api = HfApi(endpoint=self.hub.url)
                folder = Path(api.snapshot_download(self.repo.repo_id, cache_dir=folder, local_files_only=True))
            seen = read_folder(folder)
        except (FileNotFoundError, LocalEntryNotFoundError):
            return "nothing"
        return "old" if equal(seen, weights(1)) else "new" if equal(seen, weights(2)) else "a mixture"

    def killed_at(self, point: Point, place: Path) -> tuple[bool, str, int]:
        """Kill, look, run again, look; whether it was killed, what a loader found then, what had arrived."""
        shutil.copytree(self.folder / point.kind, place / "target", symlinks=True)
        victim, client = Victim(), self.pool.get()
        try:
            with proxied(self.hub.port) as proxy:
                point.arm(proxy, victim)
                timer = threading.Timer(point.seconds or 1e6, victim.kill)
                ended = self.pull(client, place, point.kind, proxy.url, victim=victim, then=timer.start, **point.job)
                timer.cancel()
            assert ended.is_killed or ended.status == 0, point
            seen = self.view(place, point.kind)
            assert seen in ({"old", "new"} if point.kind == "cache_dir" else {"old", "new", "nothing"}), point
            with proxied(self.hub.port) as proxy:
                assert self.pull(client, place, point.kind, proxy.url).status == 0, point
                fetched = sum(request.nbytes_answered for request in proxy.lines(r"GET .*/resolve/"))
        finally:
            self.pool.put(client)
        arrived = sum(nbytes for kind, path, nbytes in ended.events if kind == "received" and "model-" in path)
        assert fetched <= NBYTES_OF_TENSORS + HEADERS_AND_SMALL_FILES_BYTES - arrived, (point, fetched, arrived)
        assert self.view(place, point.kind) == "new", point
        self.check_nothing_is_left(place, point)
        shutil.rmtree(place)
        return ended.is_killed, seen, arrived

    def check_nothing_is_left(self, place: Path, point: Point) -> None:
        """No part, no scratch file, no folder in the making, no temporary file, and no weights of the old revision."""
        names = {path.name for private in place.rglob("*hubshard") for path in private.iterdir()}
        assert names <= {"lock", "listings", "pulled.json"}, (point, names)
        assert not list((place / "tmp").iterdir()), point
        if point.kind == "local_dir":
            assert not list((place / "target").glob("model-*-of-00003.safetensors")), point


@pytest.fixture(scope="module")
def world(module_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    env = module_hub.client_env(tmp_path_factory.mktemp("home"))
    free: SimpleQueue[Clients] = SimpleQueue()
    with ExitStack() as stack:
        for _ in range(2):
            free.put(stack.enter_context(clients(env)))
        yield World(module_hub, tmp_path_factory.mktemp("world"), free)


def run_matrix(points: list[Point], world: World, tmp_path: Path) -> list[tuple[bool, str, int]]:
    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(world.killed_at, point, tmp_path / str(number)) for number, point in enumerate(points)]
        return [job.result() for job in jobs]


def test_killed_at_every_request_and_event(world: World, tmp_path: Path) -> None:
    points = boundaries("cache_dir") + events("cache_dir") + boundaries("local_dir")
    assert len(points) > 40
    seen = run_matrix(points, world, tmp_path)
    assert [point for point, left in zip(points, seen, strict=True) if not left[0] and point.pattern] == []
    assert {view for _, view, _ in seen} >= {"old"}
    assert len({arrived for _, _, arrived in seen}) >= SHARDS  # none, one, two, … whole shards; more where parts remain


@pytest.mark.parametrize("kind", ["cache_dir", pytest.param("local_dir", marks=pytest.mark.slow)])
def test_killed_before_a_step_on_the_disk(world: World, tmp_path: Path, kind: str) -> None:
    numbers = range(1, 200, 9)
    seen = run_matrix([*steps(kind, numbers), *instants(kind, 4)], world, tmp_path)
    assert sum(is_killed for is_killed, _, _ in seen) > 8
    assert {"old", "new"} <= {view for _, view, _ in seen}


@pytest.mark.slow  # each of some two hundred steps, for a machine with time
@pytest.mark.parametrize("kind", ["cache_dir", "local_dir"])
def test_killed_before_every_step_on_the_disk(world: World, tmp_path: Path, kind: str) -> None:
    run_matrix([*steps(kind, range(1, 250)), *instants(kind, 40)], world, tmp_path)
