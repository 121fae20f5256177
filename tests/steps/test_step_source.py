"""The model of a saved step as a source: which names it has, and how much is read for it."""

from __future__ import annotations

import math
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hubshard.errors import FormatError, IntegrityError, NotFoundError
from hubshard.plan import plan_shards
from hubshard.reads import plan_reads
from hubshard.shardfile import stream_shard
from hubshard.steps.checked import CheckedReader
from hubshard.steps.places import LocalPlace, OpenStep
from hubshard.steps.source import StepSource, open_step
from hubshard.steps.step import Placement, Step, StepFile, step_folder
from hubshard.steps.step_json import encode_step
from hubshard.tensors import Box
from tests import warm
from tests.steps.saving import random_tensors, save_step

MIB = 2**20


def opened(root: Path, step: int = 1) -> OpenStep:
    return LocalPlace(root).open(step)


def tensor(*shape: int, seed: int = 0) -> tuple[str, Any]:
    return "F32", np.random.default_rng(seed).standard_normal(shape, dtype="f4")


def stream_all(source: StepSource, max_shard_bytes: int = 10**9, max_read_bytes: int = 8 * MIB) -> int:
    """Read everything as a publish does; the bytes of it."""
    plan = plan_shards(source.specs(), max_shard_bytes=max_shard_bytes, aliases=source.aliases())
    sizes = [sum(map(len, stream_shard(shard, source, max_read_bytes=max_read_bytes))) for shard in plan.shards]
    assert sizes == [shard.nbytes for shard in plan.shards]
    return sum(spec.nbytes for spec in source.specs())


# Names


def test_it_has_the_names_below_the_key_of_the_part_and_nothing_else(tmp_path: Path) -> None:
    tensors = {
        "model.model.embed": tensor(4, 3),
        "model.head": tensor(2),
        "optimizer.m": tensor(4),
        "modell.x": tensor(1),
    }
    save_step(tmp_path, tensors, scalars={"model.version": 3, "epoch": 1})
    source = StepSource(opened(tmp_path))
    assert {spec.name: spec.shape for spec in source.specs()} == {"model.embed": (4, 3), "head": (2,)}
    assert source.left_out == ("model.version",)
    assert [spec.name for spec in StepSource(opened(tmp_path), "optimizer").specs()] == ["m"]
    assert {spec.name for spec in StepSource(opened(tmp_path), "").specs()} == tensors.keys()


def test_names_for_the_same_bytes_are_one_tensor_and_its_aliases(tmp_path: Path) -> None:
    tensors = {
        "model.embed": tensor(6, 4),
        "model.b": tensor(4),
        "model.empty": tensor(0, 2),
        "model.hollow": tensor(0, 2),
    }
    save_step(tmp_path, tensors, world=2, same={"model.head": "model.embed", "model.also": "model.embed"})
    source = StepSource(opened(tmp_path))
    assert source.aliases() == {"embed": "also", "head": "also"}
    assert [spec.name for spec in source.specs()] == ["also", "b", "empty", "hollow"]
    assert bytes(source.read("also", Box((0, 0), (6, 4)))) == tensors["model.embed"][1].tobytes()


def test_tied_weights_are_aliases_where_the_saved_state_records_them(tmp_path: Path) -> None:
    tensors = {"model.embed": tensor(2, 2), "ema.module.embed": tensor(2, 2), "ema.n_averaged": tensor(1)}
    scalars = {
        "values.model": ({"aliases": {"head": "embed"}},),
        "values.ema": ({"aliases": {"module.head": "module.embed"}},),
        "values.other": ({"aliases": ["no", "table"]},),
        "values.data": 3,
    }
    save_step(tmp_path, tensors, scalars=scalars)
    assert StepSource(opened(tmp_path)).aliases() == {"head": "embed"}
    averaged = StepSource(opened(tmp_path), "ema.module")
    assert ([spec.name for spec in averaged.specs()], averaged.aliases()) == (["embed"], {"head": "embed"})
    assert StepSource(opened(tmp_path), "").aliases() == {
        "model.head": "model.embed",
        "ema.module.head": "ema.module.embed",
    }


def test_further_names_of_a_tensor_that_is_not_there_are_refused(tmp_path: Path) -> None:
    save_step(tmp_path, {"model.a": tensor(2)}, scalars={"values.model": ({"aliases": {"head": "embed"}},)})
    with pytest.raises(FormatError, match="'embed', which it lacks"):
        StepSource(opened(tmp_path))


def test_a_compiled_model_has_the_names_of_the_bare_one(tmp_path: Path) -> None:
    save_step(tmp_path, {"model._orig_mod.a": tensor(2), "model.layers.0._orig_mod.b": tensor(2)})
    assert [spec.name for spec in StepSource(opened(tmp_path)).specs()] == ["a", "layers.0.b"]
    save_step(tmp_path, {"model._orig_mod.a": tensor(2), "model.a": tensor(2)}, step=2)
    with pytest.raises(FormatError, match="two names under 'model' differ only"):
        StepSource(opened(tmp_path, 2))


def test_a_step_without_the_part_is_refused_and_says_what_it_holds(tmp_path: Path) -> None:
    save_step(
        tmp_path, {"net.a": tensor(2), "net.b": tensor(2), "optimizer.m": tensor(4)}, scalars={"optimizer.lr": 0.1}
    )
    with pytest.raises(NotFoundError) as refused:
        StepSource(opened(tmp_path))
    assert refused.value.message.endswith(
        "step-00000001 holds no tensor under 'model'; it holds 'net' (2 tensors, 0 values), "
        "'optimizer' (1 tensor, 1 value)"
    )


def test_a_flat_state_whose_names_happen_to_begin_with_the_part_is_not_taken_for_it(tmp_path: Path) -> None:
    save_step(tmp_path, {"model.embed": tensor(2), "head": tensor(2)}, flat=True)
    with pytest.raises(FormatError, match="it was flat") as refused:
        StepSource(opened(tmp_path))
    assert refused.value.hint is not None
    assert 'part=""' in refused.value.hint
    assert [spec.name for spec in StepSource(opened(tmp_path), "").specs()] == ["head", "model.embed"]


def test_a_step_without_any_tensor_is_refused(tmp_path: Path) -> None:
    save_step(tmp_path, {}, scalars={"epoch": 1})
    for part in ("model", ""):
        with pytest.raises(NotFoundError, match="holds no tensor"):
            StepSource(opened(tmp_path), part)


# Reads


@pytest.mark.parametrize("world", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("dim", [0, -1])
def test_what_is_published_is_read_once_whatever_ranks_had_saved_it(tmp_path: Path, world: int, dim: int) -> None:
    sizes = {"big": (1000, 1100), "square": (512, 512), "norm": (1024,), "bias": (1100,)}
    tensors = {
        f"{part}.layers.{layer}.{name}": tensor(*shape, seed=layer)
        for layer in range(3)
        for name, shape in sizes.items()
        for part in ("model", "optimizer")
    }
    save_step(tmp_path, tensors, world=world, dims=(dim,), block_bytes=2**16)
    source = StepSource(opened(tmp_path))
    wanted = stream_all(source, max_shard_bytes=6 * MIB, max_read_bytes=MIB)
    # at either end of what a file holds of the model there is a block that holds something else too
    assert source.nbytes_read <= wanted + world * 2 * 2**16
    assert source.nbytes_read <= wanted * 1.05 or world > 2


def test_blocks_that_do_not_fit_are_read_again_and_kept_within_the_bound(tmp_path: Path) -> None:
    save_step(tmp_path, random_tensors(40, (1000, 11)), world=4, dims=(0,), block_bytes=2**16)
    bound = 3 * 2**16
    source = StepSource(opened(tmp_path), kept_bytes=bound)
    tracemalloc.start()
    wanted = stream_all(source, max_read_bytes=2**16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert wanted < source.nbytes_read
    assert peak <= bound + 4 * MIB
    assert source.reader._kept_bytes <= bound


def test_many_threads_get_the_right_bytes_while_blocks_come_and_go(tmp_path: Path) -> None:
    tensors = random_tensors(6, (300, 40))
    save_step(tmp_path, tensors, world=3, dims=(0, -1), block_bytes=1000)
    source = StepSource(opened(tmp_path), kept_bytes=5000)
    rng = np.random.default_rng(5)
    jobs = []
    for _ in range(400):
        (a, b), (c, d) = np.sort(rng.integers(0, [300, 300])), np.sort(rng.integers(0, [40, 40]))
        jobs.append((f"layers.{rng.integers(6)}.weight", Box((int(a), int(c)), (int(b - a), int(d - c)))))

    def is_right(job: tuple[str, Box]) -> bool:
        name, box = job
        index = tuple(slice(start, stop) for start, stop in zip(box.offset, box.stop, strict=True))
        return bool(bytes(source.read(name, box)) == tensors[f"model.{name}"][1][index].tobytes())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(is_right, jobs))


def test_a_flipped_byte_is_refused_by_file_and_block_and_elsewhere_it_does_not_matter(tmp_path: Path) -> None:
    step = save_step(tmp_path, random_tensors(2, (100, 10)), dims=(None,), block_bytes=1000)
    path = tmp_path / step_folder(1) / step.files[0].name
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    source = StepSource(opened(tmp_path))
    source.read("layers.0.weight", Box((0, 0), (100, 10)))
    for _ in range(2):
        with pytest.raises(IntegrityError, match=rf"{path.name}: block 8 \(bytes 8000 to {len(raw)}\)"):
            source.read("layers.1.weight", Box((99, 0), (1, 10)))


def test_its_manifest_makes_the_pieces_of_a_tensor_when_they_are_asked_for(tmp_path: Path) -> None:
    tensors = random_tensors(3, (12, 4)) | {"optimizer.m": tensor(4)}
    step = save_step(tmp_path, tensors, world=3, dims=(0,), same={"model.tied": "model.layers.0.weight"})
    source = StepSource(opened(tmp_path))
    manifest = source.part_manifest
    assert (manifest.tensors, manifest.aliases) == ({s.name: s for s in source.specs()}, source.aliases())
    assert len(manifest.pieces_of) == 3
    assert [piece.at for piece in manifest.pieces_of["layers.1.weight"]] == [
        piece.at for piece in step.pieces("model.layers.1.weight")
    ]
    plan = plan_reads(manifest, {"layers.2.weight": Box((1, 0), (2, 4))}, max_gap_bytes=0, max_read_bytes=MIB)
    assert plan.nbytes_read == plan.nbytes_wanted == 32
    assert source.files().keys() == {piece.at.path for name in list(tensors)[:3] for piece in step.pieces(name)}


def test_the_model_of_four_thousand_ranks_is_opened_without_a_look_at_every_piece(tmp_path: Path) -> None:
    world = 4096
    step = save_step(tmp_path, {"model.a": tensor(world * 2, 3), "optimizer.m": tensor(2)}, world=1)
    one = step.files[0]
    files = [
        StepFile(f"rank-{n:05d}.safetensors", one.nbytes, one.data_start, one.sha256, 64, one.blocks)
        for n in range(world)
    ]
    (placed,) = (placed for name, placed in step.tensors.items() if name == "model.a")
    tiling = replace(
        placed.tiling,
        offsets=tuple(
            type(c).of(v) for c, v in zip(placed.tiling.offsets, (range(0, world * 2, 2), [0] * world), strict=True)
        ),
        sizes=tuple(type(c).of([n] * world) for c, n in zip(placed.tiling.sizes, (2, 3), strict=True)),
    )
    column = type(placed.files)
    many = Placement(placed.spec, tiling, column.of(range(world)), column.of([0] * world), placed.path)
    tensors = {
        f"model.t{n:04d}": replace(
            many,
            spec=replace(many.spec, name=f"model.t{n:04d}"),
            path=("model", f"t{n:04d}"),
            starts=column.of([24 * n] * world),
        )
        for n in range(2000)
    }
    large = Step(1, world, files, tensors)
    tracemalloc.start()
    source = StepSource(replace(opened(tmp_path), step=large))
    pieces = source.part_manifest.pieces_of["t0007"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(source.specs()) == 2000
    assert len(pieces) == world
    assert peak < 64 * MIB


# Steps


def test_a_step_is_taken_from_the_folder_that_holds_it(tmp_path: Path) -> None:
    save_step(tmp_path, {"model.a": tensor(2)}, step=3)
    save_step(tmp_path, {"model.a": tensor(2)}, step=20)
    assert open_step(None, step=3, branch="resume", local_dir=tmp_path).step.step == 3
    assert open_step(None, step=None, branch="resume", local_dir=tmp_path).step.step == 20
    with pytest.raises(NotFoundError, match="no step 4 is saved; there are 3, 20"):
        open_step(None, step=4, branch="resume", local_dir=tmp_path)


def test_a_manifest_that_asks_for_more_memory_than_there_is_is_refused(tmp_path: Path) -> None:
    step = save_step(tmp_path, random_tensors(2, (10, 10)))
    path = tmp_path / step_folder(1) / "manifest.json"
    one = replace(step.files[0], nbytes=2**60, block_bytes=2**60, blocks=b"")
    path.write_bytes(encode_step(replace(step, files=[one])))
    with pytest.raises(FormatError, match="describes no file of a step"):
        opened(tmp_path)
    with path.open("r+b") as file:
        file.truncate(2**31)
    with pytest.raises(FormatError, match="too many for a manifest"):
        opened(tmp_path)


def test_the_reader_lists_the_files_and_finds_the_head_of_its_store(tmp_path: Path) -> None:
    step = save_step(tmp_path, random_tensors(2, (10, 10)))
    found = opened(tmp_path)
    reader = CheckedReader(found.folder, step)
    assert reader.head("main") == found.folder.at
    (entry,) = reader.list(found.folder.at)
    raw = bytearray(entry.nbytes)
    reader.read(found.folder.at, entry.path, 0, entry.nbytes, memoryview(raw))
    assert bytes(raw) == (tmp_path / step_folder(1) / entry.path).read_bytes()
    assert math.isclose(reader.nbytes_read, entry.nbytes)
    assert encode_step(step) == (tmp_path / step_folder(1) / "manifest.json").read_bytes()


def test_no_torch_is_imported(tmp_path: Path) -> None:
    save_step(tmp_path, random_tensors(2, (10, 10)))
    code = (
        "import sys; from pathlib import Path; from hubshard.steps.places import LocalPlace; "
        "from hubshard.steps.source import StepSource; s = StepSource(LocalPlace(Path(sys.argv[1])).open(1)); "
        "[s.read(spec.name, spec.box) for spec in s.specs()]; assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = warm.run(["-c", code, tmp_path], imports="client")
    assert done.returncode == 0, done.stderr
