"""What every `Source` promises. A new one adds a subclass of `SourceContract` here."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy

from hubshard.errors import FormatError
from hubshard.plan import plan_shards
from hubshard.shardfile import stream_shard
from hubshard.sources.safetensors import SafetensorsSource
from hubshard.sources.state_dict import StateDictSource
from hubshard.steps.places import LocalPlace
from hubshard.steps.source import StepSource
from hubshard.store.hub import HubStore
from hubshard.store.local import LocalStore
from hubshard.tensors import Box, TensorSpec
from tests.steps.saving import save_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hubshard.protocols import Source
    from tests.conftest import Hub

Arrays = dict[str, "np.ndarray[Any, Any]"]
CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}


def sample() -> Arrays:
    rng = np.random.default_rng(0)
    return {
        "model.layers.0.weight": rng.standard_normal((6, 5, 7)).astype("f4"),
        "model.layers.10.weight": rng.standard_normal((37, 11)).astype("f8"),
        "half": rng.standard_normal((2, 1, 6)).astype("f2"),
        "flags": rng.integers(0, 2, (4, 3)).astype(bool),
        "step": np.array(2**40 + 1),
        "empty": np.zeros((0, 3), "u1"),
        "hollow": np.zeros((3, 0, 2), "i1"),
        "one": np.array([[7]], "i1"),
        "words": rng.integers(0, 2**16, (5, 2)).astype("u2"),
        "long": rng.integers(0, 2**63, 9).astype("u8"),
        "wave": (rng.standard_normal((3, 4)) + 1j).astype("c8"),
        "größe/ñ": rng.standard_normal(3).astype("f4"),
    }


TIED = {"head": "model.layers.0.weight"}


class SourceContract:
    """Inherited by each source: `make` gives one that holds the arrays, with `TIED` as further names."""

    def make(self, arrays: Arrays, folder: Path) -> Source:
        raise NotImplementedError

    @pytest.fixture
    def source(self, tmp_path: Path) -> Source:
        return self.make(sample(), tmp_path)

    def test_specs_tell_name_dtype_and_shape_of_every_tensor_once(self, source: Source) -> None:
        expected = {TensorSpec(name, CODES[array.dtype.name], array.shape) for name, array in sample().items()}
        specs = source.specs()
        assert len(specs) == len(expected)
        assert set(specs) == expected

    def test_tied_names_are_aliases_of_a_stored_tensor_and_no_tensors_themselves(self, source: Source) -> None:
        assert source.aliases() == TIED

    def test_every_tensor_reads_whole(self, source: Source) -> None:
        for name, array in sample().items():
            spec = TensorSpec(name, CODES[array.dtype.name], array.shape)
            assert bytes(source.read(name, spec.box)) == array.tobytes()

    def test_any_box_reads_as_numpy_slices_it(self, source: Source) -> None:
        rng = random.Random(1)
        for name, array in sample().items():
            for _ in range(60):
                box = _random_box(rng, array.shape)
                assert bytes(source.read(name, box)) == _slice(array, box), (name, box)

    def test_blocks_of_a_tensor_join_to_the_whole(self, source: Source) -> None:
        for spec in source.specs():
            for max_bytes in (16, 100, 10**6):
                blocks = spec.box.blocks(bits=spec.bits, max_bytes=max_bytes)
                assert (
                    b"".join(bytes(source.read(spec.name, block)) for block in blocks) == sample()[spec.name].tobytes()
                )

    def test_a_buffer_is_flat_bytes(self, source: Source) -> None:
        for spec in source.specs():
            buffer = source.read(spec.name, spec.box)
            view = memoryview(buffer)
            assert (view.format, view.ndim, view.nbytes, len(view)) == ("B", 1, spec.nbytes, spec.nbytes)

    def test_a_read_may_be_repeated_in_any_order(self, source: Source) -> None:
        specs = list(source.specs())
        random.Random(2).shuffle(specs)
        first = {spec.name: bytes(source.read(spec.name, spec.box)) for spec in specs}
        assert {spec.name: bytes(source.read(spec.name, spec.box)) for spec in reversed(specs)} == first

    def test_many_threads_read_at_once(self, source: Source) -> None:
        rng = random.Random(3)
        arrays = sample()
        jobs = [(name, _random_box(rng, arrays[name].shape)) for name in rng.choices(list(arrays), k=300)]
        with ThreadPoolExecutor(8) as pool:
            results = pool.map(lambda job: bytes(source.read(*job)), jobs)
            assert list(results) == [_slice(arrays[name], box) for name, box in jobs]

    def test_a_name_that_is_not_there_is_refused_by_name(self, source: Source) -> None:
        with pytest.raises(FormatError, match="no tensor 'nowhere'"):
            source.read("nowhere", Box((), ()))

    @pytest.mark.parametrize(
        "box",
        [
            Box((0, 0), (38, 11)),
            Box((36, 0), (2, 11)),
            Box((-1, 0), (1, 11)),
            Box((0, 0), (-1, 11)),
            Box((0,), (37,)),
            Box((0, 0, 0), (1, 1, 1)),
            Box((), ()),
        ],
    )
    def test_a_box_outside_the_tensor_is_refused(self, source: Source, box: Box) -> None:
        with pytest.raises(FormatError, match=r"model\.layers\.10\.weight"):
            source.read("model.layers.10.weight", box)

    def test_its_shards_are_read_by_safetensors(self, source: Source, tmp_path: Path) -> None:
        plan = plan_shards(source.specs(), max_shard_bytes=2500, aliases=source.aliases())
        assert len(plan.shards) > 1
        found: Arrays = {}
        for shard in plan.shards:
            path = tmp_path / "copy.safetensors"
            path.write_bytes(b"".join(bytes(part) for part in stream_shard(shard, source, max_read_bytes=64)))
            found |= safetensors.numpy.load_file(path)
        _assert_equal(found, sample())


class TestStateDictOfArrays(SourceContract):
    def make(self, arrays: Arrays, _: Path) -> Source:
        return StateDictSource(arrays | {alias: arrays[name] for alias, name in TIED.items()}, keep=TIED.values())


class TestStateDictOfStridedArrays(SourceContract):
    """Neither contiguous nor of the machine's byte order."""

    def make(self, arrays: Arrays, _: Path) -> Source:
        strided = {name: _strided(array, byte_order=">") for name, array in arrays.items()}
        return StateDictSource(strided | {alias: strided[name] for alias, name in TIED.items()}, keep=TIED.values())


class TestStateDictOfTensors(SourceContract):
    def make(self, arrays: Arrays, _: Path) -> Source:
        torch = pytest.importorskip("torch")
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return StateDictSource(tensors | {alias: tensors[name] for alias, name in TIED.items()}, keep=TIED.values())


class TestStateDictOfStridedTensors(SourceContract):
    def make(self, arrays: Arrays, _: Path) -> Source:
        torch = pytest.importorskip("torch")
        tensors = {name: torch.from_numpy(_strided(array)) for name, array in arrays.items()}
        return StateDictSource(tensors | {alias: tensors[name] for alias, name in TIED.items()}, keep=TIED.values())


class TestSingleFile(SourceContract):
    def make(self, arrays: Arrays, folder: Path) -> Source:
        safetensors.numpy.save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"} | TIED)
        return _open(folder)


class TestShardedDirectory(SourceContract):
    def make(self, arrays: Arrays, folder: Path) -> Source:
        for path, content in _sharded(arrays).items():
            (folder / path).write_bytes(content)
        return _open(folder)


class TestShardsOnAHub(SourceContract):
    @pytest.fixture(scope="class")
    @staticmethod
    def source(module_hub: Hub) -> Source:
        store = HubStore("org/model", token="hf_test", endpoint=module_hub.url)
        store.create_repo(private=False)
        staged = [
            store.stage("main", path, partial(lambda data: [data], content), nbytes=len(content))
            for path, content in _sharded(sample()).items()
        ]
        at = store.commit("main", parent=store.head("main"), add=staged, remove=[], message="shards", publish_id="1")
        return SafetensorsSource(store, at)


class TestStepOfThreeRanks(SourceContract):
    """Tensors cut along their first, their last or no dimension; tied names are recorded."""

    def make(self, arrays: Arrays, folder: Path) -> Source:
        tensors = {f"model.{name}": (CODES[array.dtype.name], array) for name, array in arrays.items()}
        save_step(folder, tensors, world=3, scalars={"values.model": ({"aliases": TIED},)})
        return StepSource(LocalPlace(folder).open(1))


def _sharded(arrays: Arrays) -> dict[str, bytes]:
    source = StateDictSource(arrays)
    plan = plan_shards(source.specs(), max_shard_bytes=2000, aliases=TIED)
    assert plan.index_path is not None
    files = {plan.index_path: plan.index()}
    for shard in plan.shards:
        files[shard.path] = b"".join(map(bytes, stream_shard(shard, source, max_read_bytes=2**20)))
    return files


def _open(folder: Path) -> SafetensorsSource:
    store = LocalStore(folder)
    at = store.head("main")
    assert at is not None
    return SafetensorsSource(store, at)


def _strided(array: np.ndarray[Any, Any], *, byte_order: str = "=") -> np.ndarray[Any, Any]:
    """The same values with other strides: reversed dimensions, and every second element of a larger array."""
    larger = np.zeros(tuple(2 * n for n in reversed(array.shape)), array.dtype.newbyteorder(byte_order))
    every_second: Any = (Ellipsis, *(slice(None, None, 2) for _ in array.shape))
    view: np.ndarray[Any, Any] = larger[every_second].T
    view[...] = array
    return view


def _random_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    pairs = [sorted(rng.choices(range(n + 1), k=2)) for n in shape]
    return Box(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs))


def _slice(array: np.ndarray[Any, Any], box: Box) -> bytes:
    return array[tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True))].tobytes()


def _assert_equal(found: Mapping[str, np.ndarray[Any, Any]], expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
