"""Fixtures for all tests: an embedded Hub in a process of its own, and clients in processes of theirs.

Name the type of the fixtures with ``if TYPE_CHECKING: from tests.conftest import Hub``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import subprocess
import textwrap
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, settings

from hubshard.hubserver import Settings, gc
from tests import warm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from email.message import Message

    from hubshard.hubserver import GcReport

__all__ = ["TOKEN", "Answer", "Api", "Hub", "StartHub"]

TOKEN = "hf_test"
"""What clients send unless told otherwise; a Hub without tokens takes it as it takes any."""

_CLIENT_SECONDS = 240
_TORCH = re.compile(r"^\s*(import|from) .*\b(torch|transformers|hubshard\.lazy)\b", re.MULTILINE)

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # a machine may be busy


def pytest_configure() -> None:
    """Let Ctrl-C end the processes of the tests, also where a shell runs these in its background, and ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes minutes, unless markers are asked for."""
    if config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: run with -m slow"))


@dataclass(frozen=True)
class Answer:
    """The answer to a plain HTTP request."""

    status: int
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str | None, str]:
        """Status, ``X-Error-Code`` and the text of the body."""
        return self.status, self.headers["X-Error-Code"], str(self.json["error"])


@dataclass(frozen=True)
class Api:
    """Plain HTTP requests to a Hub, as one user: for what the client does not send, or hides."""

    port: int
    token: str | None

    def __call__(
        self, method: str, path: str, body: bytes | Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send one request; what is not bytes goes as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(
                method, path.removeprefix(f"http://127.0.0.1:{self.port}"), data, sent | dict(headers or {})
            )
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read())

    def commit(
        self, repo: str, *lines: tuple[str, Any], revision: str = "main", query: str = "", **header: Any
    ) -> Answer:
        """Send a commit of (key, value) lines to ``models/ns/name``."""
        items = [("header", {"summary": "a commit", **header}), *lines]
        body = b"".join(json.dumps({"key": key, "value": value}).encode() + b"\n" for key, value in items)
        return self("POST", f"/api/{repo}/commit/{quote(revision, safe='')}{query}", body)

    def put(self, repo: str, path: str, data: bytes, **options: Any) -> Answer:
        """Commit one regular file."""
        return self.commit(repo, self.file(path, data), **options)

    @staticmethod
    def file(path: str, data: bytes) -> tuple[str, Any]:
        """The line of a commit that adds a regular file."""
        return "file", {"path": path, "content": base64.b64encode(data).decode(), "encoding": "base64"}

    def upload(self, repo: str, data: bytes) -> str:
        """Upload a large file by the LFS protocol, uncommitted; its sha256."""
        sha256 = hashlib.sha256(data).hexdigest()
        prefix = repo.removeprefix("models/")
        asked = {"operation": "upload", "objects": [{"oid": sha256, "size": len(data)}]}
        (answer,) = self("POST", f"/{prefix}.git/info/lfs/objects/batch", asked).json["objects"]
        if "actions" in answer:
            assert self("PUT", answer["actions"]["upload"]["href"], data).status == 200
        return sha256


class Hub:
    """An embedded Hub under test. Its address stays the same over :meth:`restart`."""

    def __init__(self, root: Path, home: Path, settings: Settings | None = None) -> None:
        self.root = root
        self.home = home
        self.settings = settings or Settings()
        self._process, self.url = warm.start_hub(root, port=0, settings=self.settings)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End the server in good order; again is fine."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()

    def restart(self) -> None:
        """Start it again where it was, after :meth:`kill`, :meth:`stop` or neither."""
        port = self.port
        self.stop()
        self._process, self.url = warm.start_hub(self.root, port=port, settings=self.settings)

    def api(self, token: str | None = TOKEN) -> Api:
        """Plain requests as the user of a token, or as nobody."""
        return Api(self.port, token)

    def counters(self, repo: str | None = None) -> Any:
        """What the server counted: in all, or of one repo (``models/ns/name``), where nothing is zeros."""
        found = self.api()("GET", "/-/counters").json
        return found if repo is None else found["repos"].get(repo, dict.fromkeys(found["total"], 0))

    def reset_counters(self) -> None:
        """Count from zero again."""
        self.api()("DELETE", "/-/counters")

    def gc(self, grace_seconds: float = 0) -> GcReport:
        """Collect garbage, from this process, beside the server."""
        return gc(self.root, grace_seconds)

    def client_env(self, home: Path | None = None, *, token: str = TOKEN, xet: bool = True) -> dict[str, str]:
        """The environment of a client: this Hub, its own ``HF_HOME``, nothing of the user's."""
        env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "HUBSHARD"))}
        env |= {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home or self.home),
            "HF_TOKEN": token,
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        if not xet:
            env["HF_HUB_DISABLE_XET"] = "1"
        return env

    def client(
        self,
        code: str,
        *arguments: str | Path,
        home: Path | None = None,
        token: str = TOKEN,
        xet: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        imports: warm.Imports | None = None,
    ) -> str:
        """Run Python code as a client, in a process of its own; what it printed.

        The code finds ``arguments`` in ``sys.argv[1:]``; it fails the test when it fails. ``imports`` is what it finds
        imported already, by default torch where it imports that.
        """
        done = self.try_client(code, *arguments, home=home, token=token, xet=xet, env=env, cwd=cwd, imports=imports)
        assert done.returncode == 0, f"client failed ({done.returncode}):\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def try_client(
        self,
        code: str,
        *arguments: str | Path,
        home: Path | None = None,
        token: str = TOKEN,
        xet: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        imports: warm.Imports | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """As :meth:`client`, for code that may fail."""
        full_env = self.client_env(home, token=token, xet=xet) | dict(env or {})
        argv = ["-c", textwrap.dedent(code), *arguments]
        imports = imports or ("torch" if _TORCH.search(code) else "client")
        return warm.run(argv, imports=imports, env=full_env, cwd=cwd, timeout=_CLIENT_SECONDS)


class StartHub(Protocol):
    """Starts a Hub with an operator's choices; it is stopped when the test ends."""

    def __call__(self, settings: Settings | None = None, *, root: Path | None = None) -> Hub: ...


@contextmanager
def _hub_under(folder: Path, settings: Settings | None = None, root: Path | None = None) -> Iterator[Hub]:
    folder.mkdir(parents=True, exist_ok=True)
    made = Hub(root or folder / "hub", folder / "home", settings)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A fresh Hub where everybody may do everything."""
    with _hub_under(tmp_path / "hub-under-test") as made:
        yield made


@pytest.fixture(scope="module")
def module_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """One such Hub for all tests of a module, for those that use repos of their own."""
    with _hub_under(tmp_path_factory.mktemp("module-hub")) as made:
        yield made


@pytest.fixture
def start_hub(tmp_path: Path) -> Iterator[StartHub]:
    """Starts Hubs with tokens, small pages, small parts, …"""
    with ExitStack() as stack:

        def start(settings: Settings | None = None, *, root: Path | None = None) -> Hub:
            number = len(list(tmp_path.glob("hub-*")))
            return stack.enter_context(_hub_under(tmp_path / f"hub-{number}", settings, root))

        yield start
