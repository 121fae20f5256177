"""Limits on the command line: a publish or pull over a bad line ends with exit status 3, and goes on later."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests import warm
from tests.faults.proxy import Proxy, drop, proxied, say, stall

if TYPE_CHECKING:
    from tests.conftest import Hub

REPO = "org/model"
SOCKET_SECONDS = 3600.0


@pytest.fixture
def proxy(hub: Hub) -> Iterator[Proxy]:
    with proxied(hub.port) as made:
        yield made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    save_file({f"w{i}": np.frombuffer(os.urandom(3_000_000), np.uint8) for i in range(4)}, made / "model.safetensors")
    return made


def _hubshard(hub: Hub, url: str, *arguments: str | Path, xet: bool = True) -> subprocess.CompletedProcess[str]:
    env = hub.client_env(xet=xet) | {"HF_ENDPOINT": url}
    return warm.run(["-m", "hubshard", *arguments], imports="client", env=env, timeout=120)


@pytest.mark.parametrize("xet", [True, False], ids=["xet", "lfs"])
def test_a_publish_that_stands_still_ends_with_status_3_and_goes_on_later(
    hub: Hub, proxy: Proxy, model: Path, tmp_path: Path, xet: bool
) -> None:
    pattern = r"POST /.*xorb" if xet else r"PUT .*"
    proxy.always(pattern, stall(10, SOCKET_SECONDS))
    events = tmp_path / "events.jsonl"
    arguments: list[str | Path] = ["publish", model, REPO, "--stall-seconds", "2", "--events", events]
    done = _hubshard(hub, proxy.url, *arguments, xet=xet)
    assert done.returncode == 3, done.stderr
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert line.startswith("Error: gave up: no byte has moved for")
    assert "run the same command again" in line
    last = json.loads(events.read_text("utf-8").splitlines()[-1])
    assert (last["kind"], last["detail"].split(":")[0]) == ("error", "LimitError")
    proxy.heal()
    again = _hubshard(hub, proxy.url, *arguments, "--json", xet=xet)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["changed"] is True


def test_a_pull_that_stands_still_ends_with_status_3_and_goes_on_later(
    hub: Hub, proxy: Proxy, model: Path, tmp_path: Path
) -> None:
    assert _hubshard(hub, hub.url, "publish", model, REPO).returncode == 0
    proxy.always(r"GET /.*model\.safetensors", stall(10, SOCKET_SECONDS))
    arguments: list[str | Path] = ["pull", REPO, "--local-dir", tmp_path / "copy", "--stall-seconds", "2"]
    done = _hubshard(hub, proxy.url, *arguments, xet=False)
    assert done.returncode == 3, done.stderr
    assert "no byte has moved" in done.stderr
    assert not (tmp_path / "copy" / "model.safetensors").exists()
    proxy.heal()
    assert _hubshard(hub, proxy.url, *arguments, xet=False).returncode == 0
    assert (tmp_path / "copy" / "model.safetensors").stat().st_size > 12_000_000


def test_one_retry_too_many_ends_with_status_3(hub: Hub, proxy: Proxy, model: Path, tmp_path: Path) -> None:
    assert _hubshard(hub, hub.url, "publish", model, REPO).returncode == 0
    proxy.fail(r"GET /api/models/.*/tree/", say(503), drop)
    arguments: list[str | Path] = ["pull", REPO, "--local-dir", tmp_path / "copy", "--max-retries"]
    done = _hubshard(hub, proxy.url, *arguments, "1")
    assert done.returncode == 3, done.stderr
    assert "2 retries, and 1 are allowed" in done.stderr
    assert "Retry:" in done.stderr
    assert _hubshard(hub, proxy.url, *arguments, "1").returncode == 0


def test_limits_that_make_no_sense_are_refused_before_anything_is_done(hub: Hub, model: Path) -> None:
    for option, value in (("--stall-seconds", "0"), ("--min-rate", "fast"), ("--min-rate", "-1MB")):
        done = _hubshard(hub, hub.url, "publish", model, REPO, option, value)
        assert done.returncode == 1, option
        assert done.stderr.startswith("Error: ")
    assert hub.api()("GET", f"/api/models/{REPO}").status == 404
