"""The demo's surroundings: a Hub, and programs run against it, each in a process and a cache of its own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hubshard.errors import StoreError
from hubshard.hubserver import running  # without its packages, the demo ends before it downloads anything

__all__ = ["Publication", "World", "demo_hub"]

_CLIENT = Path(__file__).with_name("client.py")
_STEP_SECONDS = 600
_RECEIVED = ("lfs_received", "xet_received", "regular_received")
_SENT = ("resolve_sent", "xet_sent")


@contextmanager
def demo_hub(root: Path) -> Iterator[str]:
    """An embedded Hub in `root/hub`; gives its URL."""
    with running(root / "hub") as url:
        yield url


@dataclass(frozen=True, slots=True)
class Publication:
    """A publish by the command line.

    Attributes:
        answer: what it printed as JSON.
        seconds: how long the process ran.
        received_bytes: bytes of content that came in meanwhile, by the Hub's counters.
    """

    answer: Mapping[str, Any]
    seconds: float
    received_bytes: int


@dataclass(frozen=True, slots=True)
class World:
    """A Hub at `url`, a directory for everything that is written, and the bound per shard."""

    url: str
    root: Path
    max_shard_size: str

    def command(self, source: Path, repo_id: str) -> str:
        """What `publish` runs, for people."""
        return shlex.join(["hubshard", *self._arguments(source, repo_id)])

    def _arguments(self, source: Path, repo_id: str) -> list[str]:
        return ["publish", str(source), repo_id, "--max-shard-size", self.max_shard_size]

    def publish(self, source: Path, repo_id: str) -> Publication:
        """Run `hubshard publish`; its progress goes to this terminal."""
        before, started = self._count(_RECEIVED), time.monotonic()
        command = [sys.executable, "-m", "hubshard", *self._arguments(source, repo_id), "--json"]
        output = self._run(command, home="publisher")
        return Publication(json.loads(output), time.monotonic() - started, self._count(_RECEIVED) - before)

    def publish_and_kill(self, source: Path, repo_id: str, changed_bytes: int) -> int:
        """Start a publish and kill the process half way; gives the bytes that the Hub received by then."""
        before = self._count(_RECEIVED)
        arguments = [str(source), repo_id, self.max_shard_size, str(changed_bytes)]
        command = [sys.executable, "-m", "hubshard.cli.demo.half", *arguments]
        with subprocess.Popen(
            command, env=self._environment("publisher"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                line = process.stdout.readline() if process.stdout else ""
            finally:
                process.kill()
        if line.strip() != "half":
            raise StoreError(f"the publish that was to be killed ended by itself (exit status {process.returncode})")
        return self._count(_RECEIVED) - before

    def client(self, verb: str, *arguments: str, home: str = "client") -> Any:
        """Run the plain client, which knows nothing of hubshard: `python -c`, so that its folder is not on the path."""
        program = _CLIENT.read_text(encoding="utf-8")
        return json.loads(self._run([sys.executable, "-c", program, verb, *arguments], home=home))

    def lazily(self, repo_id: str) -> tuple[Mapping[str, str], int]:
        """Hash each tensor of the repo by lazy reads; with the bytes that left the Hub for it."""
        before = self._count(_SENT)
        output = self._run([sys.executable, "-m", "hubshard.cli.demo.lazy", repo_id], home="lazy")
        return json.loads(output), self._count(_SENT) - before

    def _run(self, command: Sequence[str], *, home: str) -> str:
        done = subprocess.run(
            command,
            env=self._environment(home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if command[1:3] == ["-m", "hubshard"] else subprocess.PIPE,
            text=True,
            timeout=_STEP_SECONDS,
            check=False,
        )
        if done.returncode:
            said = (done.stderr or "see above").strip().splitlines()[-1]
            raise StoreError(f"a step of the demo failed (exit status {done.returncode}): {said}")
        return done.stdout

    def _environment(self, home: str) -> dict[str, str]:
        # nothing of the user's own Hugging Face set-up: no token leaves this machine, no cache is touched
        own = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        return own | {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": "hf_demo",  # the embedded Hub takes any
            "HF_HOME": str(self.root / "homes" / home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "PYTHONIOENCODING": "utf-8",
        }

    def _count(self, kinds: Sequence[str]) -> int:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.url}/-/counters", timeout=30) as response:
            total = json.load(response)["total"]
        return sum(int(total[kind]) for kind in kinds)
