"""SIGKILL at any moment: what was acknowledged is there, what was not is there whole or not at all."""

from __future__ import annotations

import random
import socket
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPException
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Api, Hub

REPO = "models/hubshard/durable"
ROUNDS = 6
WRITERS = 3


def content(name: str, part: str) -> bytes:
    return random.Random(f"{name}-{part}").randbytes(20_000)


def publish(api: Api, name: str) -> str:
    """One commit of three files, one of them large; its id once it is acknowledged."""
    oid = api.upload(REPO, content(name, "large"))
    answer = api.commit(
        REPO,
        api.file(f"{name}/a", content(name, "a")),
        ("lfsFile", {"path": f"{name}/large.bin", "algo": "sha256", "oid": oid, "size": 20_000}),
        api.file(f"{name}/b", content(name, "b")),
        summary=name,
    )
    assert answer.status == 200, answer.body
    return str(answer.json["commitOid"])


def write_until_dead(api: Api, writer: str, acknowledged: dict[str, str]) -> None:
    for number in range(10_000):
        try:
            acknowledged[f"{writer}-{number}"] = publish(api, f"{writer}-{number}")
        except (OSError, HTTPException):
            return


def files(api: Api) -> set[str]:
    found, target = set(), f"/api/{REPO}/tree/main?recursive=1"
    while target:
        answer = api("GET", target)
        found |= {item["path"] for item in answer.json if item["type"] == "file"}
        target = (answer.headers["Link"] or "").partition(">")[0].lstrip("<")
    return found - {".gitattributes"}


def history(api: Api) -> dict[str, str]:
    found: dict[str, str] = {}
    target = f"/api/{REPO}/commits/main"
    while target:
        answer = api("GET", target)
        found |= {item["title"]: item["id"] for item in answer.json}
        target = (answer.headers["Link"] or "").partition(">")[0].lstrip("<")
    return found


def test_no_acknowledged_commit_is_lost_and_none_is_half_there(hub: Hub) -> None:
    api, acknowledged = hub.api(), dict[str, str]()
    assert api("POST", "/api/repos/create", {"name": "durable"}).status == 200
    for number in range(ROUNDS):
        with ThreadPoolExecutor(WRITERS) as pool:
            jobs = [pool.submit(write_until_dead, api, f"r{number}w{w}", acknowledged) for w in range(WRITERS)]
            goal = len(acknowledged) + 3
            while len(acknowledged) < goal:
                time.sleep(0.001)
            time.sleep(random.Random(number).uniform(0, 0.1))
            hub.kill()
            for job in jobs:
                job.result()
        hub.restart()
        there, titles = files(api), history(api)
        assert {name: titles.get(name) for name in acknowledged} == acknowledged
        parts = {f"{name}/{part}" for name in titles if name != "initial commit" for part in ("a", "b", "large.bin")}
        assert there == parts
    for name in acknowledged:
        for path, part in (("a", "a"), ("b", "b"), ("large.bin", "large")):
            assert api("GET", f"/hubshard/durable/resolve/main/{name}/{path}").body == content(name, part)
    hub.stop()
    with closing(sqlite3.connect(hub.root / "hub.sqlite3")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def test_a_killed_upload_leaves_nothing_that_passes_for_an_object(hub: Hub) -> None:
    api = hub.api()
    api("POST", "/api/repos/create", {"name": "durable"})
    data = random.Random(1).randbytes(40_000_000)
    threads = [threading.Thread(target=_upload_quietly, args=(api, data)) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not any((hub.root / "tmp").iterdir()):
        time.sleep(0.001)
    hub.kill()
    for thread in threads:
        thread.join()
    assert not [
        path for path in (hub.root / "objects").rglob("*") if path.is_file() and path.stat().st_size != len(data)
    ]
    hub.restart()
    api.upload("models/hubshard/durable", data)


def _upload_quietly(api: Api, data: bytes) -> None:
    try:
        api.upload(REPO, data)
    except (OSError, HTTPException, AssertionError):
        return


def test_writers_at_once_lose_nothing(hub: Hub) -> None:
    api = hub.api()
    api("POST", "/api/repos/create", {"name": "durable"})
    with ThreadPoolExecutor(4) as pool:
        oids = list(pool.map(lambda number: publish(api, f"n{number}"), range(40)))
    assert len(set(oids)) == 40
    assert len(files(api)) == 120
    assert len(history(api)) == 41


def test_of_two_writers_with_one_parent_one_wins(hub: Hub) -> None:
    api = hub.api()
    api("POST", "/api/repos/create", {"name": "durable"})
    for number in range(10):
        parent = api("GET", f"/api/{REPO}").json["sha"]
        with ThreadPoolExecutor(2) as pool:
            answers = list(
                pool.map(
                    lambda w, n=number, p=parent: api.put(REPO, f"{n}-{w}", b"x", parentCommit=p).status,
                    range(2),
                )
            )
        assert sorted(answers) == [200, 412]


@pytest.mark.parametrize("body", [b"", b'{"key": "header", "value": {"summary": "x"}}\n{"key": "file"'])
def test_a_client_that_goes_away_in_the_middle_of_a_commit_leaves_no_trace(hub: Hub, body: bytes) -> None:
    api = hub.api()
    api("POST", "/api/repos/create", {"name": "durable"})
    before = api("GET", f"/api/{REPO}").json["sha"]
    with socket.create_connection(("127.0.0.1", hub.port)) as connection:
        connection.sendall(
            b"POST /api/models/hubshard/durable/commit/main HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + body
        )
    assert api.put(REPO, "after.txt", b"x").status == 200
    assert [item["title"] for item in api("GET", f"/api/{REPO}/commits/main").json] == ["a commit", "initial commit"]
    assert before in [item["id"] for item in api("GET", f"/api/{REPO}/commits/main").json]
