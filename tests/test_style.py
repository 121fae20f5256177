"""Lint, format and types, run as tests so that one command checks everything that is checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(900)  # the first run of mypy reads all of torch
@pytest.mark.parametrize(
    "tool",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]],
    ids=["lint", "format", "types"],
)
def test_style(tool: list[str]) -> None:
    _passes(*tool)


@pytest.mark.slow  # it reads all of torch again
@pytest.mark.timeout(900)
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_types_on_other_systems(platform: str) -> None:
    _passes("mypy", "--platform", platform, "--cache-dir", f".mypy_cache/{platform}")


def _passes(*tool: str) -> None:
    done = subprocess.run([sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
