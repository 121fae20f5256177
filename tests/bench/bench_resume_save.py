"""What saving costs the training, how fast the background is, how fast a restore, and how much memory; with peers.

`python tests/bench/bench_resume_save.py [--mb 1000] [--repeat 5] [--dir FOLDER] [--only PART,...] [--no-peers]`

Parts: stall, write, slow, memory, restore, peers. The state is a model of square layers and its AdamW, of so many
megabytes in one process. Each figure is a ratio of two things that were measured by turns in this run; medians.

* stall: `save` against one copy of the bytes into memory that is used again (`Tensor.copy_`), both warm.
* write: from the return of `save` until the step is durable, hashes included, against a thread that writes the same
  bytes in pieces of 8 MiB, then fsync.
* slow: how many rounds a loop of another process, on a core that it shares with nobody else, and a loop of matrix
  products in this process do in a second, while a save is written, against the same loops beside the raw write.
* memory: the most memory of a process that saves twice, over what it held before, against one copy of its state.
* restore: from the disk, against reading the bytes of the files into memory by 4 threads; warm, and cold where the
  system lets a process drop its files from the page cache.
* peers: the same state by others; what the training waits for, until it is durable by their own account (`fsync` only
  where they do it), and loading.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, cast

import torch

from hubshard import ResumeBranch
from hubshard.events import Event
from hubshard.lazy.pages import forget

warnings.simplefilter("ignore")
PIECE_BYTES = 8 * 2**20
ROW = "| {:<52} | {:>10} | {:>10} | {:>7} |"


def make_state(mb: int, seed: int = 0) -> dict[str, Any]:
    """A model and its AdamW after a step: 12 bytes per parameter."""
    torch.manual_seed(seed)
    width = 1024 if mb < 4000 else 4096
    layers = max(1, round(mb * 1e6 / 12 / (width * width)))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    return after_a_step(model)


def after_a_step(model: torch.nn.Module) -> dict[str, Any]:
    """A model and its AdamW, which holds its moments."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"model": model, "optimizer": optimizer}


def nbytes_of(state: dict[str, Any]) -> int:
    model, optimizer = state["model"], state["optimizer"]
    moments = sum(v.nbytes for held in optimizer.state.values() for v in held.values() if torch.is_tensor(v))
    return int(sum(p.nbytes for p in model.parameters()) + moments)


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def show(what: str, ours: list[float], other: list[float], *, unit: str = "s", ratio: float | None = None) -> None:
    mine, theirs = statistics.median(ours), statistics.median(other)
    print(ROW.format(what, f"{mine:.3f} {unit}", f"{theirs:.3f} {unit}", f"{ratio or mine / theirs:.2f}"), flush=True)


class Bench:
    """A state, and a run that saves it."""

    def __init__(self, mb: int, repeat: int, folder: Path) -> None:
        self.repeat, self.folder = repeat, folder
        self.state = make_state(mb)
        self.nbytes = nbytes_of(self.state)
        self.step = 0
        self.done = threading.Event()
        self.done_time = 0.0

    def open(self, name: str) -> ResumeBranch:
        return ResumeBranch(None, local_dir=self.folder / name, keep=1, signals=(), on_event=self.note)

    def note(self, event: Event) -> None:
        if event.operation == "save" and event.kind == "commit":
            self.done_time = time.perf_counter()
            self.done.set()

    def save(self, branch: ResumeBranch) -> tuple[float, float]:
        """Seconds that the training waits, and from then until the step is durable."""
        self.step += 1
        self.done.clear()
        stall = seconds(lambda: branch.save(self.state, self.step))
        began = time.perf_counter()
        self.done.wait()
        branch.wait()
        return stall, self.done_time - began

    def raw_write(self, source: torch.Tensor) -> float:
        """Seconds of a thread that writes as many bytes, durably."""
        path = self.folder / "raw"
        view: memoryview = memoryview(cast("bytearray", source.numpy()))

        def write() -> None:
            with path.open("wb", buffering=0) as file:
                for start in range(0, view.nbytes, PIECE_BYTES):
                    file.write(view[start : start + PIECE_BYTES])
                os.fsync(file.fileno())

        with ThreadPoolExecutor(1) as pool:
            took = seconds(pool.submit(write).result)
        path.unlink()
        return took


def stall_and_write(bench: Bench, parts: set[str]) -> None:
    source, target = (torch.ones(bench.nbytes, dtype=torch.uint8) for _ in range(2))
    stalls, copies, ours, raws = [], [], [], []
    with bench.open("steps") as branch:
        first, _ = bench.save(branch)
        for _ in range(bench.repeat):
            copies.append(seconds(lambda: target.copy_(source)))
            stall, write = bench.save(branch)
            stalls.append(stall)
            ours.append(write)
            if "write" in parts:
                raws.append(bench.raw_write(source))
    if "stall" in parts:
        show("stall of a save / one copy", stalls, copies)
        show("  of the first, which also takes the memory", [first], copies)
    if "write" in parts:
        show(
            "background write, rate / raw write with fsync",
            ours,
            raws,
            ratio=statistics.median(raws) / statistics.median(ours),
        )


# Beside a training


def spin(count: Synchronized[int], stop: Synchronized[int], core: int) -> None:
    """A loop on a core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    while not stop.value:
        total = 0
        for number in range(20_000):
            total += number
        count.value += 1


@contextmanager
def spinning() -> Iterator[Callable[[], int]]:
    context = multiprocessing.get_context("spawn")
    count, stop = context.Value("q", 0, lock=False), context.Value("q", 0, lock=False)
    process = context.Process(target=spin, args=(count, stop, (os.cpu_count() or 1) - 1), daemon=True)
    process.start()
    while not count.value:
        time.sleep(0.05)
    try:
        yield lambda: count.value
    finally:
        stop.value = 1
        process.join()


def rate_during(count: Callable[[], int], work: Callable[[], Any]) -> float:
    """Rounds per second while something goes on."""
    before, began = count(), time.perf_counter()
    work()
    return (count() - before) / (time.perf_counter() - began)


def slowing(bench: Bench) -> None:
    source = torch.ones(bench.nbytes, dtype=torch.uint8)
    with bench.open("steps") as branch, spinning() as count:
        bench.save(branch)
        alone, beside_raw, beside_ours = [], [], []
        for _ in range(bench.repeat):
            alone.append(rate_during(count, lambda: time.sleep(1.0)))
            beside_raw.append(rate_during(count, lambda: bench.raw_write(source)))
            bench.step += 1
            branch.save(bench.state, bench.step)
            beside_ours.append(rate_during(count, branch.wait))
        show("loop on another core, while saving / alone", beside_ours, alone, unit="k/s")
        show("  the same beside the raw write / alone", beside_raw, alone, unit="k/s")
    matrix = torch.randn(384, 384)

    def for_a_second() -> Callable[[], bool]:
        until = time.perf_counter() + 1.0
        return lambda: time.perf_counter() > until

    def train(stop: Callable[[], bool]) -> float:
        rounds, began = 0, time.perf_counter()
        while not stop():
            for _ in range(20):
                matrix @ matrix
            rounds += 1
        return rounds / (time.perf_counter() - began)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with bench.open("steps") as branch:
        alone, beside_ours = [], []
        for _ in range(bench.repeat):
            alone.append(train(for_a_second()))
            bench.step += 1
            branch.save(bench.state, bench.step)
            beside_ours.append(train(lambda: not branch._saver.is_writing))
            branch.wait()
        show("training in this process, while saving / alone", beside_ours, alone, unit="k/s")
    torch.set_num_threads(threads)


# Memory


def status_bytes(field: str) -> int:
    with Path("/proc/self/status").open() as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def memory_child(mb: int, folder: Path) -> None:
    small = Bench(4, 1, folder / "small")
    with small.open("warm") as branch:
        small.save(branch)
        small.save(branch)
    bench = Bench(mb, 1, folder)
    gc.collect()
    held = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with bench.open("memory") as branch:
        for _ in range(3):
            bench.save(branch)
        saving = status_bytes("VmHWM") - held
        copy_bytes = branch._taker._buffer._memory.nbytes
        del branch._taker
    gc.collect()
    held = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with bench.open("memory") as branch:
        branch.restore(bench.state)
    print(json.dumps([saving, copy_bytes, status_bytes("VmHWM") - held]))


def memory(mb: int, folder: Path) -> None:
    command = [sys.executable, __file__, "--memory-child", "--mb", str(mb), "--dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    saving, copy_bytes, restoring = json.loads(done.stdout.splitlines()[-1])
    show("memory of saving, over the state / one copy", [saving / 1e6], [copy_bytes / 1e6], unit="MB")
    show("  what is over the copy / 64 MiB", [(saving - copy_bytes) / 1e6], [64 * 2**20 / 1e6], unit="MB")
    show("  of restoring, over the state / 64 MiB", [restoring / 1e6], [64 * 2**20 / 1e6], unit="MB")


# Restoring


def read_all(files: list[Path]) -> None:
    """The bytes of some files, into memory that is there, by 4 threads."""

    def read(job: tuple[Path, int, int]) -> None:
        path, start, stop = job
        buffer = memoryview(_buffers.setdefault(threading.get_ident(), bytearray(PIECE_BYTES)))
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while start < stop:
                start += file.readinto(buffer[: min(PIECE_BYTES, stop - start)])

    size = 64 * 2**20
    jobs = [(f, at, min(at + size, f.stat().st_size)) for f in files for at in range(0, f.stat().st_size, size)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, jobs))
    _buffers.clear()


_buffers: dict[int, bytearray] = {}


def drop(files: list[Path]) -> bool:
    """Drop files from the page cache, where the system has a way."""
    dropped = []
    for path in files:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            dropped.append(forget(file.fileno(), 0, path.stat().st_size))
    return all(dropped)


def restoring(bench: Bench) -> None:
    with bench.open("restored") as branch:
        bench.save(branch)
        files = sorted((bench.folder / "restored").glob("step-*/*"))
        for kind in ("warm", "cold"):
            ours: list[float] = []
            reads: list[float] = []
            for _ in range(bench.repeat):
                for work, into in ((lambda: branch.restore(bench.state), ours), (lambda: read_all(files), reads)):
                    if kind == "cold" and not drop(files):
                        return
                    into.append(seconds(work))
            show(f"restore, {kind} / reading the bytes", ours, reads)


# Others


def peers(bench: Bench) -> None:
    import torch.distributed.checkpoint as checkpointing

    from hubshard.dcp import HubReader, HubWriter

    dcp: Any = checkpointing  # its types do not name what it exports
    folder, state = bench.folder / "peers", bench.state
    distcp, hf, ours = folder / "distcp", folder / "hf", folder / "hubshard"
    accelerator = _accelerator(state)

    def tensors() -> dict[str, Any]:  # the format for models takes no more
        return {f"model.{name}": tensor for name, tensor in state["model"].state_dict().items()}

    saves: dict[str, Callable[[], Any]] = {
        "dcp.save, .distcp": lambda: dcp.save(dict(state), checkpoint_id=distcp),
        "dcp.save, hubshard.dcp.HubWriter": lambda: dcp.save(
            dict(state), storage_writer=HubWriter(None, step=1, local_dir=ours)
        ),
        "dcp.save, HuggingFaceStorageWriter (model alone)": lambda: dcp.save(
            tensors(), storage_writer=dcp.HuggingFaceStorageWriter(str(hf))
        ),
        "torch.save": lambda: torch.save({key: item.state_dict() for key, item in state.items()}, folder / "state.pt"),
        "accelerate save_state": lambda: accelerator.save_state(str(folder / "accelerate")),
    }
    loads: dict[str, Callable[[], Any]] = {
        "dcp.load, .distcp": lambda: dcp.load(dict(state), checkpoint_id=distcp),
        "dcp.load, hubshard.dcp.HubReader": lambda: dcp.load(
            dict(state), storage_reader=HubReader(None, local_dir=ours)
        ),
        "torch.load": lambda: torch.load(folder / "state.pt", weights_only=True),
        "accelerate load_state": lambda: accelerator.load_state(str(folder / "accelerate")),
    }
    branch = bench.open("steps")
    bench.save(branch)
    _compare(bench, "save", saves, lambda: sum(bench.save(branch)), folder)
    _compare(bench, "load", loads, lambda: branch.restore(state), folder)
    stalls, ends, own = [], [], []
    for number in range(bench.repeat):
        began = time.perf_counter()
        future: Any = dcp.async_save(dict(state), checkpoint_id=folder / f"async-{number % 2}")
        stalls.append(time.perf_counter() - began)
        future.result()
        ends.append(time.perf_counter() - began)
        own.append(bench.save(branch)[0])
    show("stall of a save / dcp.async_save", own, stalls)
    branch.close()


def _compare(
    bench: Bench, what: str, theirs: dict[str, Callable[[], Any]], ours: Callable[[], Any], folder: Path
) -> None:
    folder.mkdir(exist_ok=True)
    own: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in theirs}
    for _ in range(bench.repeat):
        own.append(seconds(ours))
        for name, work in theirs.items():
            found[name].append(seconds(work))
    for name, took in found.items():
        show(f"{what}, until it is done / {name}", own, took)


def _accelerator(state: dict[str, Any]) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(state["model"], state["optimizer"])
    return accelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("bench-resume"))
    parser.add_argument("--only", default="stall,write,slow,memory,restore,peers")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--memory-child", action="store_true")
    given = parser.parse_args()
    given.dir.mkdir(parents=True, exist_ok=True)
    if given.memory_child:
        memory_child(given.mb, given.dir)
        return
    parts = set(given.only.split(",")) - ({"peers"} if given.no_peers else set())
    if "memory" in parts:
        print(ROW.format("", "this", "that", "ratio"))
        memory(given.mb, given.dir)
    if parts - {"memory"}:
        bench = Bench(given.mb, given.repeat, given.dir)
        cores, threads = os.cpu_count(), torch.get_num_threads()
        print(f"\n{bench.nbytes / 1e6:,.0f} MB, {cores} cores, {threads} threads of torch, median of {given.repeat}")
        print(ROW.format("", "this", "that", "ratio"))
        if parts & {"stall", "write"}:
            stall_and_write(bench, parts)
        for name, work in {"slow": slowing, "restore": restoring, "peers": peers}.items():
            if name in parts:
                work(bench)
    shutil.rmtree(given.dir)


if __name__ == "__main__":
    main()
