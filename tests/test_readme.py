"""README's examples, run as they stand against the embedded Hub, and its commands against what CI runs."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import warm

if TYPE_CHECKING:
    from tests.conftest import Hub

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)

MODEL = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
                     tie_word_embeddings=True)
LlamaForCausalLM(config).save_pretrained("my-model")
"""


def _blocks(language: str) -> list[str]:
    return [body for found, body in BLOCKS if found == language]


def test_ci_runs_the_second_command_word_for_word() -> None:
    first, second = (block.strip() for block in _blocks("sh")[:2])
    assert second in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    assert first in (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")


def test_every_example_runs_as_it_stands(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    hub.client(MODEL, cwd=tmp_path)
    program = "\n".join(_as_python(language, body) for language, body in BLOCKS if language in {"console", "python"})
    printed = hub.client(program, cwd=tmp_path)
    assert "model-00001" in printed or "model.safetensors" in printed
    assert "model.embed_tokens.weight F32 [64, 16]" in printed
    assert (tmp_path / "copy" / "model.safetensors").exists()


def _as_python(language: str, body: str) -> str:
    """An example as part of one program, so that they share names and run in the order of the text."""
    if language == "python":
        return body
    commands = [line.removeprefix("$ ") for line in body.splitlines()]
    assert all(line.startswith("$ hubshard ") for line in body.splitlines())
    calls = [[sys.executable, "-m", "hubshard", *shlex.split(command)[1:]] for command in commands]
    return "import subprocess\n" + "\n".join(f"subprocess.run({call!r}, check=True)" for call in calls)


@pytest.mark.parametrize(
    "verb", ["publish", "pull", "inspect", "verify", "diff", "rollback", "demo", "hub serve", "hub gc"]
)
def test_every_option_that_is_named_with_a_verb_exists(verb: str) -> None:
    text = warm.run(["-m", "hubshard", *verb.split(), "--help"], imports="client").stdout
    lines = re.findall(rf"hubshard {verb}\b.*", TEXT)
    assert lines
    assert {option for line in lines for option in re.findall(r"--[a-z-]+", line) if option not in text} == set()
