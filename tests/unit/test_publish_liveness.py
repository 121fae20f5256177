"""The end of another process is seen by the end of a connection to it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from contextlib import closing

import pytest

from hubshard.publish.liveness import Lifeline, Peer

PROGRAM = """
import sys, time
from hubshard.publish.liveness import Lifeline
lifeline = Lifeline()
print(lifeline.address, flush=True)
sys.stdin.read()
"""
PATIENCE_SECONDS = 30


def ends(peer: Peer) -> bool:
    until = time.monotonic() + PATIENCE_SECONDS
    while not peer.has_ended() and time.monotonic() < until:
        time.sleep(0.01)
    return peer.has_ended()


def test_a_process_that_is_killed_is_seen_by_all_who_watch_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline()
        peers = [Peer(address) for _ in range(3)]
        assert not any(peer.has_ended() for peer in peers)
        process.kill()
        assert [ends(peer) for peer in peers] == [True] * 3
        for peer in peers:
            peer.close()


def test_a_lifeline_that_is_closed_is_seen() -> None:
    lifeline = Lifeline()
    with closing(Peer(lifeline.address)) as peer:
        assert not peer.has_ended()
        lifeline.close()
        assert ends(peer)


def test_a_connection_that_ends_on_the_way_is_made_anew() -> None:
    lifeline = Lifeline()
    with closing(lifeline), closing(Peer(lifeline.address)) as peer:
        for connection in lifeline._kept:
            connection.shutdown(socket.SHUT_RDWR)
        for _ in range(20):
            assert not peer.has_ended()
            time.sleep(0.01)
        assert len(lifeline._kept) == 2


def test_of_whom_nothing_can_be_learned_nothing_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        peer = Peer(json.dumps(["127.0.0.1", port, "0123456789abcdef"]))
        assert not peer.has_ended()
    for address in ("", json.dumps(["127.0.0.1", port, "0123456789abcdef"])):
        with closing(Peer(address)) as peer:
            assert not peer.has_ended()


def test_there_is_no_lifeline_where_the_meeting_place_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with closing(Lifeline()) as lifeline:
        assert lifeline.address == ""
