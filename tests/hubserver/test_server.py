"""Starting and stopping the server."""

from __future__ import annotations

import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from http.client import HTTPConnection
from typing import TYPE_CHECKING

import psutil
import pytest

from hubshard.errors import StoreError
from hubshard.hubserver import Settings, running
from hubshard.hubserver.db import Database, Schema
from hubshard.hubserver.state import open_state

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Hub, StartHub


def test_a_server_runs_for_the_length_of_a_block(tmp_path: Path) -> None:
    with running(tmp_path) as url:
        port = int(url.rpartition(":")[2])
        assert url == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


def test_a_connection_that_clients_still_hold_is_not_closed_by_the_server(tmp_path: Path) -> None:
    with running(tmp_path) as url:
        connection = HTTPConnection("127.0.0.1", int(url.rpartition(":")[2]), timeout=60)
        with closing(connection):
            for pause_seconds in (6, 0):  # a second more than the clients keep theirs
                connection.request("GET", "/-/counters")
                assert connection.getresponse().read()
                held = connection.sock
                time.sleep(pause_seconds)
                assert connection.sock is held
                held.setblocking(False)
                with pytest.raises(BlockingIOError):  # the server has said nothing more, nor closed
                    held.recv(1)
                held.settimeout(60)


def test_a_port_that_is_taken_is_said(hub: Hub, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hubshard.hubserver", "--root", str(tmp_path / "other"), "--port", str(hub.port)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Error: 127.0.0.1:{hub.port} cannot be listened on: ")


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from hubshard.hubserver import process
print(process(Path(sys.argv[1]))[0].pid, flush=True)
os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)  # the time limit of tests ends this when the server does not


def test_a_bare_token_is_an_administrators(tmp_path: Path, start_hub: StartHub) -> None:
    hub = start_hub(Settings(tokens={"hf_secret": "hubshard:admin"}))
    assert hub.api("hf_secret")("POST", "/api/repos/create", {"name": "x", "organization": "any"}).status == 200
    assert hub.api("hf_other")("GET", "/api/models/any/x").status == 401


def test_the_public_url_is_what_clients_are_told(start_hub: StartHub) -> None:
    api = start_hub(Settings(public_url="https://hub.example/")).api()
    assert api("POST", "/api/repos/create", {"name": "x"}).json["url"] == "https://hub.example/hubshard/x"


def test_a_directory_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    open_state(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "hub.sqlite3")) as connection:
        connection.execute("UPDATE schemas SET version = 99")
        connection.commit()
    with pytest.raises(StoreError, match=r"version 99, this program knows \d"):
        open_state(tmp_path)


def test_a_migration_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "hub.sqlite3"
    good = Schema("part", ("CREATE TABLE one (x)",))
    Database(path, (good,)).close()
    bad = Schema("part", (*good.migrations, "CREATE TABLE two (x); CREATE TABLE one (x)"))
    with pytest.raises(sqlite3.OperationalError):
        Database(path, (bad,))
    db = Database(path, (Schema("part", (*good.migrations, "CREATE TABLE two (x); INSERT INTO two VALUES (5)")),))
    assert db.connection().execute("SELECT x FROM two").fetchone()["x"] == 5
    db.close()


def test_the_secret_outlives_a_restart(tmp_path: Path) -> None:
    secrets = []
    for _ in range(2):
        state = open_state(tmp_path)
        secrets.append(state.secret)
        state.close()
    assert secrets[0] == secrets[1]
    assert len(secrets[0]) == 32
