"""`hubshard demo`, run as a person runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hubshard.header import encode_header
from hubshard.tensors import TensorSpec

HIDE = "import sys\nfor name in ('torch', 'transformers', 'numpy'):\n    sys.modules[name] = None\n"
"""As if they were not installed, in every Python that is started."""


def _demo(tmp_path: Path, *arguments: str, hide: bool = False) -> subprocess.CompletedProcess[str]:
    for folder in ("home", "temporary", "hidden"):
        (tmp_path / folder).mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDE if hide else "", encoding="utf-8")
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {name: str(tmp_path / "temporary") for name in ("TMPDIR", "TEMP", "TMP")}
    env |= {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(tmp_path / "hidden"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "hubshard", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=env, cwd=tmp_path, check=False)


def _left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_without_torch_numpy_and_network_it_proves_all_but_the_embedding_and_leaves_nothing(tmp_path: Path) -> None:
    done = _demo(tmp_path, "--offline", hide=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "random weights" in done.stdout
    assert "readers still see the first version, whole (65 tensors bit-equal)" in done.stdout
    assert "65 of 65 tensors bit-equal" in done.stdout
    assert "Load it with transformers: skipped, for torch and transformers are not here" in done.stdout
    assert "Traceback" not in done.stderr
    assert _left(tmp_path / "temporary") == []
    assert _left(tmp_path / "home") == []


def test_with_transformers_it_proves_the_embedding_of_ones_own_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=128
    )
    LlamaModel(config).save_pretrained(tmp_path / "mine")
    done = _demo(tmp_path, "--model", str(tmp_path / "mine"), "--max-shard-size", "100KB")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "your own" in done.stdout
    assert "the last hidden state is bit-equal" in done.stdout
    assert _left(tmp_path / "temporary") == []


def test_a_directory_without_weights_is_an_error_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = _demo(tmp_path, "--model", str(tmp_path / "empty"))
    assert done.returncode == 1
    assert "Error:" in done.stderr
    assert "Traceback" not in done.stderr
    assert _left(tmp_path / "temporary") == []


def test_keep_leaves_a_hub_that_can_be_started_again_and_refuses_a_full_directory(tmp_path: Path) -> None:
    specs = [TensorSpec(f"w{number}", "F32", (4000,)) for number in range(6)]
    (tmp_path / "mine").mkdir()
    raw = encode_header(specs, {"format": "pt"}) + bytes(6 * 16000)
    (tmp_path / "mine" / "model.safetensors").write_bytes(raw)
    options = ("--model", str(tmp_path / "mine"), "--max-shard-size", "20KB", "--keep", str(tmp_path / "kept"))
    done = _demo(tmp_path, *options, hide=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "kept" / "hub").is_dir()
    command = [sys.executable, "-m", "hubshard", "demo", *options]
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "is not empty" in again.stderr
