"""How long the manifest of a very large step takes, and how much memory.

`python tests/bench/bench_resume.py [RANKS TENSORS]` (default 4096 2000) prints a table. Every tensor is cut along its
first dimension over all ranks, as FSDP2 does, and a scalar per four tensors is held by one rank. Timed: what one rank
does (plan its files, their headers, its receipt), and what one coordinator and one reader do: merge all receipts,
write the manifest, read and validate it, read what a list of steps shows of it, and find what one rank of three
quarters as many would read.
Bytes of tensors are never made.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import zlib
from array import array
from dataclasses import replace
from typing import Any

import psutil

from hubshard.reads import plan_reads
from hubshard.steps.parts import FileReceipt, Part, PlannedFile, block_bytes_for, merge, plan_files
from hubshard.steps.reading import part_manifest
from hubshard.steps.step import StepFile
from hubshard.steps.step_json import decode_head, decode_step, encode_step
from hubshard.tensors import Box, TensorSpec

SHAPES = [(8192, 1024), (8192, 3584), (28672, 1024), (8192,), (8191, 1023), (50257, 1024), (5000, 33)]
SIZES = {shape[0] for shape in SHAPES}


def specs_of(tensors: int) -> list[TensorSpec]:
    return [
        TensorSpec(f"model.layers.{number // 9}.block.{number}.weight", "F32", SHAPES[number % len(SHAPES)])
        for number in range(tensors)
    ]


def box_of(spec: TensorSpec, rank: int, world: int) -> Box:
    """The rows of a rank, as torch.chunk cuts them: ceiling division, the last ones shorter or empty."""
    rows = -(-spec.shape[0] // world)
    start = min(rank * rows, spec.shape[0])
    stop = min(start + rows, spec.shape[0])
    return Box((start, *(0,) * (len(spec.shape) - 1)), (stop - start, *spec.shape[1:]))


def scalars_of(rank: int, world: int, tensors: int) -> list[Part]:
    """Replicated tensors, each stored by one rank."""
    return [Part(TensorSpec(f"optim.{number}.step", "F32", ()), Box((), ())) for number in range(rank, tensors, world)]


def receipt_of(planned: PlannedFile, rank: int, block_bytes: int) -> FileReceipt:
    sha256 = hashlib.sha256(b"%d" % rank).hexdigest()
    blocks = -(-planned.nbytes // block_bytes)
    name = f"rank-{rank:05d}-00001-{sha256[:12]}.safetensors"
    hashes = bytes(32 * blocks) if blocks > 1 else b""
    file = StepFile(name, planned.nbytes, len(planned.header), sha256, block_bytes, hashes)
    return FileReceipt.of(planned, file)


class Ranks:
    """The receipts of all ranks, as they arrive: what is wholly alike is planned once, to save the bench's time."""

    def __init__(self, world: int, specs: list[TensorSpec]) -> None:
        self.world = world
        self.specs = specs
        self.block_bytes = block_bytes_for(sum(spec.nbytes for spec in specs))
        self.known: dict[tuple[object, ...], FileReceipt] = {}

    def plan(self, rank: int) -> FileReceipt:
        parts = [Part(spec, box_of(spec, rank, self.world)) for spec in self.specs]
        parts += scalars_of(rank, self.world, len(self.specs) // 4)
        (planned,) = plan_files(parts, max_file_bytes=10**12)
        return receipt_of(planned, rank, self.block_bytes)

    def receipt(self, rank: int) -> FileReceipt:
        rows = {spec.shape[0]: box_of(spec, rank, self.world) for spec in self.specs}
        held = tuple(box.shape[0] for box in rows.values())
        shape = (*held, *(part.spec.name for part in scalars_of(rank, self.world, len(self.specs) // 4)))
        like = self.known.get(shape)
        if like is None:
            self.known[shape] = like = self.plan(rank)
            return like
        moved = tuple(replace(group, offsets=self._moved(group, rank)) for group in like.groups)
        name = f"rank-{rank:05d}{like.file.name[10:]}"
        return replace(like, file=replace(like.file, name=name), groups=moved)

    def _moved(self, group: Any, rank: int) -> array[int]:
        _, _, shapes, _, _ = json.loads(zlib.decompress(group.layout))
        start_of = {size: box_of(TensorSpec("", "F32", (size,)), rank, self.world).offset[0] for size in SIZES}
        offsets = array("q")
        for shape in shapes:
            if shape:
                offsets.extend((start_of[shape[0]], *(0,) * (len(shape) - 1)))
        return offsets


def peak_bytes() -> int:
    if sys.platform != "win32":
        import resource

        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    else:
        found = int(psutil.Process().memory_info().peak_wset)
    return found


def main() -> None:
    ranks, tensors = (int(argument) for argument in sys.argv[1:3]) if len(sys.argv) > 2 else (4096, 2000)
    specs = specs_of(tensors)
    rows: list[tuple[str, float]] = []
    clock = time.process_time

    of_ranks = Ranks(ranks, specs)
    begun = clock()
    of_ranks.plan(1)
    rows.append(("one rank plans its files", clock() - begun))
    receipts = [of_ranks.receipt(rank) for rank in range(ranks)]
    begun = clock()
    step = merge(receipts, step=1000, world_size=ranks, scalars={"epoch": 3}, paths={}, metadata={})
    rows.append(("merge the receipts of all", clock() - begun))
    del receipts
    begun = clock()
    raw = encode_step(step)
    rows.append(("write the manifest", clock() - begun))
    begun = clock()
    again = decode_step(raw, path="manifest.json")
    rows.append(("read and validate it", clock() - begun))
    begun = clock()
    decode_head(raw, path="manifest.json")
    rows.append(("read what a list of steps shows", clock() - begun))
    assert encode_step(replace(again)) == raw
    begun = clock()
    wanted = [(spec.name, box_of(spec, 77, ranks * 3 // 4)) for spec in specs]
    manifest, boxes = part_manifest(again, wanted)
    plan = plan_reads(manifest, boxes, max_gap_bytes=2**16, max_read_bytes=2**23)
    rows.append(("find what a rank of fewer reads", clock() - begun))

    print(f"| {ranks:,} ranks, {tensors:,} tensors, {ranks * tensors:,} pieces | CPU s |\n|---|--:|")
    for what, seconds in rows:
        print(f"| {what} | {seconds:.3f} |")
    print(f"| all but the first | {sum(seconds for _, seconds in rows[1:]):.3f} |")
    print(f"\nmanifest {len(raw) / 1e6:.1f} MB, {len(plan.reads):,} reads, peak {peak_bytes() / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
