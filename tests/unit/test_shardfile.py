"""A shard as a stream: the bytes load with safetensors and are those of the tensors."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from hubshard.errors import IntegrityError
from hubshard.plan import plan_shards
from hubshard.protocols import Buffer
from hubshard.shardfile import stream_shard
from hubshard.tensors import Box, TensorSpec

CODES = {"float32": "F32", "float64": "F64", "int16": "I16", "uint8": "U8", "bool": "BOOL", "float16": "F16"}


@dataclass(frozen=True)
class ArraySource:
    """Arrays of numpy as a source."""

    arrays: Mapping[str, npt.NDArray[Any]]

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec(name, CODES[str(a.dtype)], a.shape) for name, a in self.arrays.items()]

    def aliases(self) -> Mapping[str, str]:
        return {}

    def read(self, name: str, box: Box) -> Buffer:
        slices = tuple(slice(start, stop) for start, stop in zip(box.offset, box.stop, strict=True))
        return self.arrays[name][slices].tobytes()


@st.composite
def sources(draw: st.DrawFn) -> ArraySource:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    arrays = {}
    for name in draw(st.lists(st.text("abc.09\u00e9", min_size=1, max_size=5), unique=True, min_size=1, max_size=5)):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        arrays[name] = np.asarray(rng.integers(0, 2, shape)).astype(draw(st.sampled_from(list(CODES))))
    return ArraySource(arrays)


@given(sources(), st.integers(100, 1000), st.integers(8, 200))
@settings(max_examples=80, deadline=None)
def test_streamed_shards_load_with_safetensors_and_hold_the_tensors(
    source: ArraySource, max_shard_bytes: int, max_read_bytes: int
) -> None:
    plan = plan_shards(source.specs(), max_shard_bytes=max_shard_bytes)
    loaded: dict[str, npt.NDArray[Any]] = {}
    for shard in plan.shards:
        buffers = [bytes(buffer) for buffer in stream_shard(shard, source, max_read_bytes=max_read_bytes)]
        assert all(0 < len(buffer) <= max_read_bytes for buffer in buffers)
        assert sum(map(len, buffers)) == shard.nbytes
        loaded |= load(b"".join(buffers))
    assert loaded.keys() == source.arrays.keys()
    for name, array in source.arrays.items():
        assert loaded[name].dtype == array.dtype
        assert np.array_equal(loaded[name], array)


def test_the_same_tensors_give_the_same_bytes_in_whatever_order_they_come_and_however_they_are_cut() -> None:
    arrays = {f"layers.{number}.w": np.full((number, 3), number, np.float32) for number in range(1, 9)}
    hashes = set()
    for names, max_read_bytes in ((sorted(arrays), 8), (sorted(arrays, reverse=True), 10_000)):
        source = ArraySource({name: arrays[name] for name in names})
        (shard,) = plan_shards(source.specs(), max_shard_bytes=10_000).shards
        data = b"".join(map(bytes, stream_shard(shard, source, max_read_bytes=max_read_bytes)))
        hashes.add(hashlib.sha256(data).hexdigest())
    assert len(hashes) == 1


@pytest.mark.parametrize("by", [-1, 1])
def test_a_source_that_gives_other_bytes_than_promised_is_refused(by: int) -> None:
    class Changed(ArraySource):
        def read(self, name: str, box: Box) -> Buffer:
            return bytes(len(super().read(name, box)) + by)

    source = Changed({"w": np.zeros((4, 4), np.float32)})
    (shard,) = plan_shards(source.specs(), max_shard_bytes=1000).shards
    with pytest.raises(IntegrityError, match="tensor 'w'"):
        list(stream_shard(shard, source, max_read_bytes=1000))


def test_a_shard_is_never_held_whole() -> None:
    class Zeros(ArraySource):
        def read(self, name: str, box: Box) -> Buffer:
            assert name.startswith("w")
            return bytes(box.numel)

    specs = [TensorSpec(f"w{number}", "U8", (8 * 2**20,)) for number in range(8)]
    (shard,) = plan_shards(specs, max_shard_bytes=10**9).shards
    tracemalloc.start()
    total = sum(memoryview(buffer).nbytes for buffer in stream_shard(shard, Zeros({}), max_read_bytes=2**20))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == shard.nbytes
    assert peak < 4 * 2**20
