"""Loading a whole model from disk, against the loaders that others offer, by turns, each time a new process.

`python tests/bench/bench_load.py [--folder DIR] [--layers N] [--rounds N] [--only NAME …]` writes a model of Llama's
shape in bfloat16 (4 GB in 8 shards with 9 layers), then loads it cold (weight files dropped from the page cache by
posix_fadvise after fsync) and warm, and touches every page. Printed per loader: median seconds without imports, of cold
runs also relative to `dd` with two streams in the same round, bytes that came from the disk, and the most anonymous
memory (RssAnon of /proc/self/status, sampled every 4 ms, over that before the load).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench.load_tools import load_average, make_cold, make_model, make_warm, measured, median

META = """
import transformers
from accelerate import init_empty_weights
with init_empty_weights():
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder)).to(torch.bfloat16)
"""
LOADERS = {
    "hubshard.load_into": META
    + """
import hubshard, hubshard.lazy
with Measured() as m:
    hubshard.load_into(model, folder)
    touch(model.parameters())
m.report()
""",
    "hubshard.from_pretrained": """
import transformers, hubshard, hubshard.lazy
transformers.LlamaForCausalLM
with Measured() as m:
    model = hubshard.from_pretrained(folder)
    touch(model.parameters())
m.report()
""",
    "transformers": """
import transformers
transformers.LlamaForCausalLM
with Measured() as m:
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    touch(model.parameters())
m.report()
""",
    "safetensors load_file": """
from safetensors.torch import load_file
with Measured() as m:
    found = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    touch(t for some in found for t in some.values())
m.report()
""",
    "huggingface_hub load_torch_model": """
import transformers
from huggingface_hub import load_torch_model
with torch.device("cpu"):
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder))
with Measured() as m:
    load_torch_model(model, folder)
    touch(model.parameters())
m.report()
""",
    "accelerate": META
    + """
from accelerate import load_checkpoint_in_model
with Measured() as m:
    load_checkpoint_in_model(model, folder, device_map={"": "cpu"}, dtype=torch.bfloat16)
    touch(model.parameters())
m.report()
""",
    "fastsafetensors": """
from fastsafetensors import fastsafe_open
with Measured() as m:
    kept = []
    with fastsafe_open(sorted(map(str, folder.glob("*.safetensors"))), nogds=True, device="cpu") as file:
        for key in file.keys():
            kept.append(file.get_tensor(key))
        touch(kept)
m.report()
""",
    "runai-model-streamer": """
from runai_model_streamer import SafetensorsStreamer
with Measured() as m:
    kept = []
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(sorted(map(str, folder.glob("*.safetensors"))))
        kept += [tensor for _, tensor in streamer.get_tensors()]
        touch(kept)
m.report()
""",
    "hubshard.load_into, to float32": META
    + """
import hubshard, hubshard.lazy
with Measured() as m:
    hubshard.load_into(model, folder, dtype=torch.float32)
m.report(result=sum(p.nbytes for p in model.parameters()))
""",
    "transformers, to float32": """
import transformers
transformers.LlamaForCausalLM
with Measured() as m:
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
m.report(result=sum(p.nbytes for p in model.parameters()))
""",
}


def dd(folder: Path) -> float:
    """Seconds of two streams of dd over all shards, cold."""
    make_cold(folder)
    paths = sorted(folder.glob("*.safetensors"))
    start = time.perf_counter()
    streams = [
        subprocess.Popen(["sh", "-c", "; ".join(f"dd if={p} of=/dev/null bs=8M status=none" for p in paths[n::2])])
        for n in range(2)
    ]
    for stream in streams:
        stream.wait()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(LOADERS))
    options = parser.parse_args()
    nbytes = make_model(options.folder, layers=options.layers, hidden=4096, inner=11008, vocab=32000, shards=8)
    shards = len(list(options.folder.glob("*.safetensors")))
    print(f"{nbytes / 1e9:.2f} GB in {shards} shards, {options.rounds} rounds, load {load_average()}")
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for name in options.only:
            reference = dd(options.folder)
            make_cold(options.folder)
            _add(found, name, "cold", measured(LOADERS[name], options.folder), reference)
        make_warm(options.folder)
        for name in options.only:
            _add(found, name, "warm", measured(LOADERS[name], options.folder), 1.0)
    print_table(options.only, found)
    print(f"load afterwards {load_average()}")


def _add(
    found: dict[tuple[str, str], list[dict[str, Any]]],
    name: str,
    kind: str,
    run: dict[str, Any] | None,
    reference: float,
) -> None:
    if run is not None:
        found.setdefault((name, kind), []).append(run | {"ratio": run["s"] / reference})


def print_table(names: Sequence[str], found: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    print("| loader | cold, s | cold, of dd | from disk, GB | warm, s | anonymous MB, cold and warm | result MB |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name in names:
        cold, warm = found.get((name, "cold"), []), found.get((name, "warm"), [])
        if not cold or not warm:
            print(f"| {name} | failed |")
            continue
        peaks = f"{median(cold, 'anonymous') / 1e6:.0f} and {median(warm, 'anonymous') / 1e6:.0f}"
        result = f"{cold[0]['result'] / 1e6:.0f}" if "result" in cold[0] else ""
        print(
            f"| {name} | {median(cold, 's'):.2f} | {median(cold, 'ratio'):.2f} | {median(cold, 'disk') / 1e9:.2f} "
            f"| {median(warm, 's'):.2f} | {peaks} | {result} |"
        )


if __name__ == "__main__":
    main()
