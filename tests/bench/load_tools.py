"""What the benchmarks of loading share: a model on disk, processes that are measured, cold files, medians."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from hubshard.lazy.pages import forget
from hubshard.plan import plan_shards
from hubshard.tensors import TensorSpec

MEASURE = """
import json, os, sys, threading, time, warnings
from pathlib import Path
warnings.simplefilter("ignore")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch
torch.set_num_threads(2)

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

def from_disk():
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))

class Measured:
    # seconds, the most anonymous memory over what there was, and bytes that came from the disk
    def __enter__(self):
        self.done, self.peak = threading.Event(), 0
        self.base, self.disk = anonymous(), from_disk()
        def watch():
            while not self.done.wait(0.004):
                self.peak = max(self.peak, anonymous() - self.base)
        self.thread = threading.Thread(target=watch)
        self.thread.start()
        self.start = time.perf_counter()
        return self
    def __exit__(self, *error):
        self.seconds = time.perf_counter() - self.start
        self.peak = max(self.peak, anonymous() - self.base)
        self.done.set()
        self.thread.join()
    def report(self, **more):
        print(json.dumps({"s": self.seconds, "anonymous": self.peak, "disk": from_disk() - self.disk, **more}))

def touch(tensors):
    # every page, since what is mapped is not there yet
    return sum(int(t.detach().reshape(-1).view(torch.uint8)[::4096].sum()) for t in tensors)

folder = Path(sys.argv[1])
"""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
}
_BLOCK_BYTES = 4 * 2**20
_SIGN_AND_EXPONENT = bytes((byte & 0x80) | 0x3C for byte in range(256))


def llama_specs(*, layers: int, hidden: int, inner: int, vocab: int, dtype: str) -> Iterator[TensorSpec]:
    """The tensors of a model of Llama's shape."""
    yield TensorSpec("model.embed_tokens.weight", dtype, (vocab, hidden))
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield TensorSpec(f"{prefix}.self_attn.{name}.weight", dtype, (hidden, hidden))
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            yield TensorSpec(f"{prefix}.mlp.{name}_proj.weight", dtype, shape)
        yield TensorSpec(f"{prefix}.input_layernorm.weight", dtype, (hidden,))
        yield TensorSpec(f"{prefix}.post_attention_layernorm.weight", dtype, (hidden,))
    yield TensorSpec("model.norm.weight", dtype, (hidden,))
    yield TensorSpec("lm_head.weight", dtype, (vocab, hidden))


def make_model(
    folder: Path, *, layers: int, hidden: int, inner: int, vocab: int, shards: int, dtype: str = "BF16"
) -> int:
    """Write a model of small random numbers in BF16 or F32, unless it is there already; its bytes."""
    specs = list(llama_specs(layers=layers, hidden=hidden, inner=inner, vocab=vocab, dtype=dtype))
    nbytes = sum(spec.nbytes for spec in specs)
    if (folder / "model.safetensors.index.json").exists():
        return nbytes
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocab}
    names = {"BF16": "bfloat16", "F32": "float32"}
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes | {"dtype": names[dtype]}))
    block = bytearray(random.Random(0).randbytes(_BLOCK_BYTES))
    width = 2 if dtype == "BF16" else 4
    block[width - 1 :: width] = block[width - 1 :: width].translate(_SIGN_AND_EXPONENT)
    plan = plan_shards(specs, max_shard_bytes=-(-nbytes // shards) + 64 * 2**20)
    for shard in plan.shards:
        with (folder / shard.path).open("wb") as file:
            file.write(shard.header)
            for spec in shard.specs:
                for start in range(0, spec.nbytes, _BLOCK_BYTES):
                    file.write(block[: min(_BLOCK_BYTES, spec.nbytes - start)])
            file.flush()
            os.fsync(file.fileno())
    (folder / "model.safetensors.index.json").write_bytes(plan.index())
    return nbytes


def make_cold(folder: Path) -> None:
    """Take the weight files out of the page cache: written back, then dropped by posix_fadvise(DONTNEED)."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            forget(file.fileno(), 0, path.stat().st_size)


def make_warm(folder: Path) -> None:
    """Bring the weight files into the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(_BLOCK_BYTES):
                pass


def measured(code: str, *arguments: str | Path, env: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """What a new process measured; None where it could not be done, which is told."""
    command = [sys.executable, "-c", MEASURE + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, check=False)
    if done.returncode:
        print((done.stderr.strip().splitlines() or ["failed"])[-1], file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def median(found: Sequence[Mapping[str, Any]], key: str) -> float:
    """Of one figure over several runs."""
    return statistics.median(float(run[key]) for run in found)


def load_average() -> str:
    """How busy the machine is."""
    return " ".join(f"{value:.1f}" for value in psutil.getloadavg())
