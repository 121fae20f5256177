"""`hubshard demo`, run as a person runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hubshard.header import encode_header
from hubshard.tensors import TensorSpec
from tests.systems import posix_only

WITHOUT_TORCH = ("torch", "transformers", "numpy")


def _demo(tmp_path: Path, *arguments: str, hidden: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command, env = _prepared(tmp_path, *arguments, hidden=hidden)
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=env, cwd=tmp_path, check=False)


def _prepared(tmp_path: Path, *arguments: str, hidden: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """The command, and the environment: packages hidden as if they were not installed, in every Python it starts."""
    for folder in ("home", "temporary", "hidden"):
        (tmp_path / folder).mkdir()
    hiding = f"import sys\nfor name in {tuple(hidden)}:\n    sys.modules[name] = None\n"
    (tmp_path / "hidden" / "sitecustomize.py").write_text(hiding, encoding="utf-8")
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {name: str(tmp_path / "temporary") for name in ("TMPDIR", "TEMP", "TMP")}
    env |= {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(tmp_path / "hidden"), "PYTHONDONTWRITEBYTECODE": "1"}
    return [sys.executable, "-m", "hubshard", "demo", *arguments], env


def _left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_without_torch_numpy_and_network_it_proves_all_but_the_embedding_and_leaves_nothing(tmp_path: Path) -> None:
    done = _demo(tmp_path, "--offline", hidden=WITHOUT_TORCH)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "random weights" in done.stdout
    assert "readers still see the first version, whole (65 tensors bit-equal)" in done.stdout
    assert "65 of 65 tensors bit-equal" in done.stdout
    assert "Load it with transformers: skipped, for torch and transformers are not here" in done.stdout
    commands = [line for line in done.stdout.splitlines() if "$ hubshard publish " in line]
    assert [line.partition(":")[0].partition(" $")[0] for line in commands] == ["Publish", "Run it again"]
    assert all(line.endswith(" --max-shard-size 10MB") for line in commands)
    assert "Traceback" not in done.stderr
    assert _left(tmp_path / "temporary") == []
    assert _left(tmp_path / "home") == []


@posix_only
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_it_leaves_nothing(tmp_path: Path, number: int) -> None:
    command, env = _prepared(tmp_path, "--offline", hidden=WITHOUT_TORCH)
    env["PYTHONUNBUFFERED"] = "1"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", env=env, cwd=tmp_path
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "$ hubshard publish" in line:
                break
        assert _left(tmp_path / "temporary") != []
        demo.send_signal(number)
        _, said = demo.communicate()
    assert demo.returncode == 128 + number
    assert "the demo's Hub is stopped." in said
    assert "Traceback" not in said
    assert _left(tmp_path / "temporary") == []


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


@pytest.mark.parametrize("package", ["blake3", "starlette"])
def test_without_the_extra_it_names_that_before_it_downloads_anything(tmp_path: Path, package: str) -> None:
    done = _demo(tmp_path, hidden=[package])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [f"Error: this needs the package {package}", 'Hint: pip install "hubshard[hub]"']
    assert _left(tmp_path / "temporary") == []


def test_keep_leaves_a_hub_that_can_be_started_again_and_refuses_a_full_directory(tmp_path: Path) -> None:
    specs = [TensorSpec(f"w{number}", "F32", (4000,)) for number in range(6)]
    (tmp_path / "mine").mkdir()
    raw = encode_header(specs, {"format": "pt"}) + bytes(6 * 16000)
    (tmp_path / "mine" / "model.safetensors").write_bytes(raw)
    options = ("--model", str(tmp_path / "mine"), "--max-shard-size", "20KB", "--keep", str(tmp_path / "kept"))
    done = _demo(tmp_path, *options, hidden=WITHOUT_TORCH)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "kept" / "hub").is_dir()
    command = [sys.executable, "-m", "hubshard", "demo", *options]
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "is not empty" in again.stderr
