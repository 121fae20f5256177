"""Large bodies, which are taken straight from the socket."""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from contextlib import closing
from http.client import HTTPConnection
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Api, Hub

NBYTES = (13 << 20) + 4321
names = itertools.count()


def noise(nbytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@pytest.fixture
def api(module_hub: Hub) -> Api:
    return module_hub.api()


@pytest.fixture
def line(module_hub: Hub) -> Iterator[HTTPConnection]:
    """One connection, kept."""
    with closing(HTTPConnection(urlsplit(module_hub.url).netloc, timeout=60)) as connection:
        yield connection


def place(api: Api, data: bytes) -> tuple[str, str]:
    """A new repo, and where to send an object that it is to hold."""
    name = f"direct-{next(names)}"
    assert api("POST", "/api/repos/create", {"name": name}).status == 200
    item = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}
    answer = api("POST", f"/hubshard/{name}.git/info/lfs/objects/batch", {"operation": "upload", "objects": [item]})
    href = urlsplit(answer.json["objects"][0]["actions"]["upload"]["href"])
    return name, f"{href.path}?{href.query}"


def is_stored(api: Api, name: str, data: bytes) -> bool:
    oid = hashlib.sha256(data).hexdigest()
    value = {"path": "m.bin", "algo": "sha256", "oid": oid, "size": len(data)}
    done = api.commit(f"models/hubshard/{name}", ("lfsFile", value)).status
    return done == 200 and api("GET", f"/hubshard/{name}/resolve/main/m.bin").body == data


def put(line: HTTPConnection, target: str, pieces: list[bytes], *, nbytes: int | None) -> int:
    """Send a body in these pieces; the status."""
    line.putrequest("PUT", target)
    if nbytes is None:
        line.putheader("Transfer-Encoding", "chunked")
    else:
        line.putheader("Content-Length", str(nbytes))
    line.endheaders()
    for piece in pieces:
        line.send(piece if nbytes is not None else b"%x\r\n%b\r\n" % (len(piece), piece))
        time.sleep(0.001)
    if nbytes is None:
        line.send(b"0\r\n\r\n")
    answer = line.getresponse()
    answer.read()
    return answer.status


@pytest.mark.parametrize("size", [1, 1000, 65_535, 65_537, 1 << 20, (4 << 20) + 1, 9 << 20])
@pytest.mark.parametrize("has_length", [True, False])
def test_a_body_is_stored_however_it_is_cut(api: Api, line: HTTPConnection, size: int, has_length: bool) -> None:
    data = noise(max(NBYTES if size > 1000 else 100 * size, 100), size)
    name, target = place(api, data)
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert put(line, target, pieces, nbytes=len(data) if has_length else None) == 200
    assert is_stored(api, name, data)


def test_a_connection_goes_on_after_a_large_body(api: Api, line: HTTPConnection) -> None:
    for seed, size in enumerate([NBYTES, 10, NBYTES, 100_000, NBYTES]):
        data = noise(size, seed)
        name, target = place(api, data)
        assert put(line, target, [data], nbytes=size) == 200
        assert is_stored(api, name, data)


@pytest.mark.parametrize("size", [100, NBYTES])
def test_a_body_that_is_refused_is_answered_when_it_is_through(api: Api, line: HTTPConnection, size: int) -> None:
    bad = b"\xff" * size
    token = api("GET", f"/api/models/hubshard/{place(api, b'any')[0]}/xet-write-token/main").json
    target = f"{urlsplit(token['casUrl']).path}/v1/xorbs/default/{'0' * 64}"
    for _ in range(2):  # on one connection
        line.request("POST", target, body=bad, headers={"Authorization": f"Bearer {token['accessToken']}"})
        answer = line.getresponse()
        assert answer.status == 400
        assert b"chunk" in answer.read()


def test_a_body_longer_than_announced_to_the_repo_is_refused(api: Api, line: HTTPConnection) -> None:
    data = noise(NBYTES, 20)
    name, target = place(api, data)
    assert put(line, target, [data, b"more"], nbytes=len(data) + 4) == 413
    assert put(line, target, [data], nbytes=len(data)) == 200
    assert is_stored(api, name, data)


def test_a_client_that_goes_away_leaves_nothing(api: Api, module_hub: Hub) -> None:
    data = noise(NBYTES, 21)
    name, target = place(api, data)
    with closing(HTTPConnection(urlsplit(module_hub.url).netloc, timeout=60)) as line:
        line.putrequest("PUT", target)
        line.putheader("Content-Length", str(len(data)))
        line.endheaders()
        line.send(data[: len(data) // 2])
    left = module_hub.root / "tmp"
    while list(left.iterdir()):  # until the Hub has seen it; a limit is that of all tests
        time.sleep(0.01)
    assert not is_stored(api, name, data)
