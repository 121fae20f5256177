"""What a missing optional package is: an error of ours that names the extra, and what does without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hubshard.header import encode_header
from hubshard.tensors import TensorSpec

PROGRAM = """
import sys
for name in ("torch", "numpy", "transformers"):
    sys.modules[name] = None
import hubshard
try:
    {line}
except hubshard.FormatError as error:
    assert isinstance(error, ImportError)
    print(error, error.hint, sep="|")
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "hubshard.open_checkpoint('.')['w'][:3]",
            'torch, which is not installed|pip install "hubshard[torch]"; its bytes are to be had without, by .read()',
        ),
        ("print(len(hubshard.open_checkpoint('.')['w'].read()))", "16"),
        ("hubshard.dcp", 'hubshard.dcp needs torch, which is not installed|pip install "hubshard[torch]"'),
        ("from hubshard import dcp", 'hubshard.dcp needs torch, which is not installed|pip install "hubshard[torch]"'),
        (
            "hubshard.from_pretrained('.')",
            'needs transformers, which is not installed|pip install "hubshard[transformers]"',
        ),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(tmp_path: Path, line: str, said: str) -> None:
    raw = encode_header([TensorSpec("w", "F32", (4,))], {"format": "pt"}) + bytes(16)
    (tmp_path / "model.safetensors").write_bytes(raw)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    command = [sys.executable, "-c", PROGRAM.format(line=line)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.stdout.strip().endswith(said), done.returncode) == (True, 0), done.stdout + done.stderr
