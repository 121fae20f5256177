"""Loading parts: a rank's slices, opening many shards, and layers that come when they run.

`python tests/bench/bench_load_parts.py --folder DIR [--rounds N] [--only slices opening streaming]`

slices: a quarter of every matrix of one layer by rows, and by columns, cold; bytes that came from the disk
(/proc/self/io) relative to those asked for, with hubshard and with the slices of safetensors.
opening: 100 shards, 10,000 tensors; seconds without imports until every shape is known.
streaming: forwards (8 tokens, float32) of a model of about 1 GB with all layers on disk, warm: hubshard.offload with
the budget of two layers, against transformers' disk offload; median seconds of five forwards, most memory over that
before the model was made (Anonymous and Rss of /proc/self/smaps_rollup, sampled every 20 ms in two forwards before).
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from hubshard.header import encode_header
from hubshard.tensors import TensorSpec
from tests.bench.load_tools import load_average, make_cold, make_model, make_warm, measured, median

SLICES = """
import hubshard, hubshard.lazy
from safetensors import safe_open
dim, how = int(sys.argv[2]), sys.argv[3]
index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
names = [n for n in index if n.startswith("model.layers.1.") and "norm" not in n]
opened = hubshard.open_checkpoint(folder) if how == "hubshard" else None
files = {path: safe_open(folder / path, "pt") for path in set(index.values())} if how != "hubshard" else {}
wanted = 0
with Measured() as m:
    for name in names:
        lazy = opened[name] if opened else files[index[name]].get_slice(name)
        length = lazy.get_shape()[dim] // 4
        part = lazy[length : 2 * length] if dim == 0 else lazy[:, length : 2 * length]
        part = part.clone() if how != "hubshard" else part
        wanted += part.nbytes
m.report(wanted=wanted)
"""
OPENING = {
    "hubshard.open_checkpoint": """
import hubshard, hubshard.lazy
with Measured() as m:
    shapes = {name: lazy.shape for name, lazy in hubshard.open_checkpoint(folder).items()}
m.report(count=len(shapes))
""",
    "safetensors safe_open, every header": """
from safetensors import safe_open
with Measured() as m:
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}
m.report(count=len(shapes))
""",
}
WATCH = """
def look():
    with open("/proc/self/smaps_rollup") as file:
        table = dict(line.split(":") for line in file.read().splitlines()[1:])
    return [int(table[key].split()[0]) * 1024 for key in ("Anonymous", "Rss")]
import transformers
from accelerate import init_empty_weights
config = transformers.AutoConfig.from_pretrained(folder)
tokens = torch.arange(8).reshape(1, 8)
# what a forward needs besides weights is there before the count
small = transformers.AutoConfig.from_pretrained(folder)
small.num_hidden_layers, small.vocab_size = 1, 64
with torch.inference_mode():
    transformers.LlamaForCausalLM(small)(tokens % 64)
base, peak, done = look(), [0, 0], threading.Event()
def watch():
    global peak
    while not done.wait(0.02):
        peak = [max(p, now - b) for p, now, b in zip(peak, look(), base)]
def forwards(model):
    thread = threading.Thread(target=watch)
    thread.start()
    with torch.inference_mode():
        logits = model(tokens).logits
        model(tokens)
        done.set()
        thread.join()
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            model(tokens)
            seconds.append(time.perf_counter() - start)
    Path(sys.argv[2]).write_bytes(logits.numpy().tobytes())
    return {"s": sorted(seconds)[2], "anonymous": peak[0], "rss": peak[1]}
"""
STREAMING = {
    "hubshard.offload, two layers": WATCH
    + """
import hubshard
with init_empty_weights():
    model = transformers.LlamaForCausalLM(config).eval()
layer = sum(p.nbytes for p in model.model.layers[0].parameters())
with hubshard.offload(model, folder, budget=max(2 * layer, 2 * model.lm_head.weight.nbytes)) as offloaded:
    found = forwards(model)
print(json.dumps(found | {"budget": offloaded.budget_bytes, "held": offloaded.peak_bytes}))
""",
    "transformers, all layers on disk": WATCH
    + """
device_map = {f"model.layers.{n}": "disk" for n in range(config.num_hidden_layers)}
device_map |= {"model.embed_tokens": "disk", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "disk"}
model = transformers.LlamaForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=sys.argv[3])
print(json.dumps(forwards(model)))
""",
    "the whole model in memory": WATCH
    + """
model = transformers.LlamaForCausalLM.from_pretrained(folder)
print(json.dumps(forwards(model)))
""",
}


def slices(folder: Path, rounds: int) -> None:
    make_model(folder / "model", layers=4, hidden=4096, inner=11008, vocab=32000, shards=4)
    print("\n| slices of a layer | loader | wanted MB | from disk, relative to wanted | s |\n|---|---|--:|--:|--:|")
    for dim in (0, 1):
        for how in ("hubshard", "safetensors get_slice"):
            runs = []
            for _ in range(rounds):
                make_cold(folder / "model")
                runs.append(measured(SLICES, folder / "model", str(dim), how) or {})
            wanted, disk = median(runs, "wanted"), median(runs, "disk")
            print(f"| dim {dim} | {how} | {wanted / 1e6:.1f} | {disk / wanted:.3f} | {median(runs, 's'):.2f} |")


def opening(folder: Path, rounds: int) -> None:
    many = folder / "many"
    make_many(many, shards=100, tensors=10_000)
    print("\n| opening 100 shards, 10,000 tensors | s, warm |\n|---|--:|")
    for name, code in OPENING.items():
        runs: list[dict[str, Any]] = [measured(code, many) or {} for _ in range(rounds)]
        print(f"| {name} | {median(runs, 's'):.3f} |")


def make_many(folder: Path, *, shards: int, tensors: int) -> None:
    """Many small tensors in many shards."""
    if (folder / "model.safetensors.index.json").exists():
        return
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        names = [f"model.layers.{n}.some.module.weight" for n in range(number, tensors, shards)]
        header = encode_header([TensorSpec(name, "F32", (4, 4)) for name in names], {"format": "pt"})
        (folder / file).write_bytes(header + struct.pack("<16f", *range(16)) * len(names))
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def streaming(folder: Path, rounds: int) -> None:
    model = folder / "streamed"
    nbytes = make_model(model, layers=5, hidden=2048, inner=5504, vocab=4096, shards=4, dtype="F32")
    make_warm(model)
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for name, code in STREAMING.items():
            found = measured(code, model, folder / f"{name}.logits", folder / "offloaded")
            runs.setdefault(name, []).extend([found] if found else [])
    print(f"\n| forward of {nbytes / 1e9:.2f} GB, warm | s | anonymous MB | rss MB | budget MB | held MB |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, some in runs.items():
        more = [f"{median(some, key) / 1e6:.0f}" if key in some[0] else "" for key in ("budget", "held")]
        memory = [f"{median(some, key) / 1e6:.0f}" for key in ("anonymous", "rss")]
        print(f"| {name} | {median(some, 's'):.2f} | {' | '.join(memory + more)} |")
    files = [(folder / f"{name}.logits").read_bytes() for name in runs]
    print(f"\nlogits of all three are equal: {len(set(files)) == 1}")


PARTS = {"slices": slices, "opening": opening, "streaming": streaming}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS))
    options = parser.parse_args()
    print(f"load {load_average()}")
    for name in options.only:
        PARTS[name](options.folder, options.rounds)
    print(f"load afterwards {load_average()}")


if __name__ == "__main__":
    main()
