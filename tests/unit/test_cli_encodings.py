"""Output to files and pipes in encodings that lack much of what is shown, as on Windows."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

from hubshard.cli.app import main

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ["wörter.weight", "模型.weight", "\N{GRINNING FACE}.weight"]


def printed(monkeypatch: pytest.MonkeyPatch, encoding: str, *arguments: object) -> bytes:
    """What a command that ends well writes to a file."""
    out = io.BytesIO()
    text = io.TextIOWrapper(out, encoding, write_through=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", text)
        patch.setattr(sys, "argv", ["hubshard", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    return out.getvalue()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file({name: np.zeros(3, np.float32) for name in NAMES}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp932", "utf-8"])
def test_what_an_encoding_lacks_is_written_as_an_escape(
    model: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    shown = printed(monkeypatch, encoding, "inspect", model, "--tensors").decode(encoding)
    for name in NAMES:
        assert name.encode(encoding, "backslashreplace").decode(encoding) in shown


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp932", "utf-8"])
def test_json_is_the_same_for_machines_whatever_the_encoding(
    model: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    found = json.loads(printed(monkeypatch, encoding, "inspect", model, "--json").decode("utf-8"))
    assert {tensor["name"] for tensor in found["tensors"]} == {*NAMES}


@pytest.mark.parametrize(("encoding", "bar"), [("cp1252", "#"), ("utf-8", "█")])
def test_bars_are_drawn_with_what_there_is(monkeypatch: pytest.MonkeyPatch, encoding: str, bar: str) -> None:
    lines = printed(monkeypatch, encoding, "resume", "advise", "30s", "--mtbf", "4h").decode(encoding).splitlines()
    (best,) = (line for line in lines if "<- best" in line)
    assert bar * 3 in best
    assert not any("\\u" in line for line in lines)
