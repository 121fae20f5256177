"""Fixtures of the tests with faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hubshard.store.patience import Waits
from tests.faults.proxy import Proxy, proxied

if TYPE_CHECKING:
    from tests.conftest import Hub


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process a further try comes after a twentieth of the time; that of a server's own word stays."""
    before = Waits.before
    monkeypatch.setattr(Waits, "before", lambda waits, retry: before(waits, retry) / 20)


@pytest.fixture
def proxy(module_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of the module's Hub, for clients that run in this process."""
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))
    with proxied(module_hub.port) as made:
        yield made
