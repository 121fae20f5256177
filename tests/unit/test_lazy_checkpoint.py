from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hubshard.errors import FormatError, IntegrityError, NotFoundError
from hubshard.header import encode_header
from hubshard.lazy.checkpoint import Checkpoint
from hubshard.lazy.opening import open_checkpoint
from hubshard.lazy.reading import Policy
from hubshard.plan import plan_shards
from hubshard.protocols import Entry, Revision
from hubshard.sources.dtypes import TORCH_CODES
from hubshard.store.local import LocalStore
from hubshard.tensors import DTYPE_BITS, Box, TensorSpec

torch = pytest.importorskip("torch")

KNOWN = {code for name, code in TORCH_CODES.items() if hasattr(torch, name)}
WHOLE_BYTES = sorted(code for code in KNOWN if DTYPE_BITS[code] % 8 == 0)
EXACT = Policy(max_gap_bytes=0, max_read_bytes=1 << 20, budget_bytes=1 << 22, workers=2)
RAW = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


@dataclass
class CountingStore:
    """A store that remembers what was read from it."""

    inner: LocalStore
    reads: list[tuple[str, int, int]] = field(default_factory=list)

    def head(self, branch: str) -> Revision | None:
        return self.inner.head(branch)

    def list(self, at: Revision) -> Sequence[Entry]:
        return self.inner.list(at)

    def read(self, at: Revision, path: str, start: int, stop: int, into: memoryview) -> None:
        self.reads.append((path, start, stop))
        self.inner.read(at, path, start, stop, into)

    @property
    def nbytes(self) -> int:
        return sum(stop - start for _, start, stop in self.reads)


def write(
    folder: Path,
    tensors: Mapping[str, tuple[str, np.ndarray[Any, Any]]],
    *,
    max_shard_bytes: int = 1 << 40,
    aliases: Mapping[str, str] | None = None,
) -> None:
    specs = [TensorSpec(name, dtype, array.shape) for name, (dtype, array) in tensors.items()]
    plan = plan_shards(specs, max_shard_bytes=max_shard_bytes, aliases=aliases)
    for shard in plan.shards:
        data = b"".join(tensors[spec.name][1].tobytes() for spec in shard.specs)
        (folder / shard.path).write_bytes(shard.header + data)
    if plan.index_path:
        (folder / plan.index_path).write_bytes(plan.index())


def counted(folder: Path, policy: Policy | None = None) -> tuple[Checkpoint, CountingStore]:
    store = CountingStore(LocalStore(folder))
    at = store.head("main")
    assert at is not None
    return Checkpoint.of_store(store, at, policy=policy), store


def numbers(shape: tuple[int, ...], bits: int) -> np.ndarray[Any, Any]:
    flat = np.arange(math.prod(shape), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    array: np.ndarray[Any, Any] = (flat >> np.uint64(64 - bits)).astype(RAW[bits]).reshape(shape)
    return array


@st.composite
def reads(draw: st.DrawFn) -> tuple[str, tuple[int, ...], Any]:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=7))
    return draw(st.sampled_from(WHOLE_BYTES)), shape, draw(hnp.basic_indices(shape, allow_newaxis=True, max_dims=8))


@given(reads(), st.sampled_from([None, EXACT]))
@settings(max_examples=300, deadline=None)
def test_a_part_of_any_dtype_equals_the_part_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[str, tuple[int, ...], Any], policy: Policy | None
) -> None:
    dtype, shape, index = case
    folder = tmp_path_factory.mktemp("checkpoint")
    array = numbers(shape, DTYPE_BITS[dtype])
    if dtype == "BOOL":
        array = array & np.uint8(1)  # of a scalar NumPy 1 would make an int64
    write(folder, {"a": ("U8", np.zeros(3, np.uint8)), "t": (dtype, array)})
    wanted = np.ascontiguousarray(array[index]).tobytes()
    for checkpoint in (counted(folder, policy)[0], open_checkpoint(folder)):
        part = checkpoint["t"][index]
        assert part.dtype == checkpoint["t"].dtype
        assert tuple(part.shape) == np.shape(array[index])
        assert part.is_contiguous()
        assert part.reshape(-1).view(torch.uint8).numpy().tobytes() == wanted


def test_opening_reads_the_index_and_one_range_per_shard(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.weight": ("BF16", numbers((64, 1024), 16)) for i in range(12)}
    write(tmp_path, tensors, max_shard_bytes=300_000)
    checkpoint, store = counted(tmp_path)
    shards = {path for path, _, _ in store.reads if path.endswith(".safetensors")}
    assert len(shards) == 6
    assert len(store.reads) == len(shards) + 1
    headers = sum((tmp_path / path).stat().st_size - 2 * 64 * 1024 * 2 for path in shards)
    index = (tmp_path / "model.safetensors.index.json").stat().st_size
    assert store.nbytes <= index + headers + len(shards) * 8192
    assert checkpoint.nbytes == 12 * 64 * 1024 * 2


def test_rows_read_no_other_bytes(tmp_path: Path) -> None:
    array = numbers((1024, 512), 16)
    write(tmp_path, {"t": ("BF16", array), "u": ("BF16", array)})
    checkpoint, store = counted(tmp_path)
    store.reads.clear()
    part = checkpoint["t"][256:512]
    assert part.view(torch.uint8).numpy().tobytes() == array[256:512].tobytes()
    assert store.nbytes == 256 * 512 * 2


def test_columns_are_read_in_blocks_of_rows(tmp_path: Path) -> None:
    array = numbers((8192, 1024), 16)
    write(tmp_path, {"t": ("BF16", array)})
    checkpoint, store = counted(tmp_path)
    store.reads.clear()
    part = checkpoint["t"][:, 256:512]
    assert part.view(torch.uint8).numpy().tobytes() == array[:, 256:512].tobytes()
    assert store.nbytes <= array.nbytes
    assert len(store.reads) <= 3


def test_far_rows_are_read_one_by_one(tmp_path: Path) -> None:
    array = numbers((4096, 512), 16)
    write(tmp_path, {"t": ("BF16", array)})
    checkpoint, store = counted(tmp_path, EXACT)
    store.reads.clear()
    part = checkpoint["t"][::-1000]
    assert part.view(torch.uint8).numpy().tobytes() == np.ascontiguousarray(array[::-1000]).tobytes()
    assert store.nbytes == 5 * 512 * 2


def test_a_whole_local_tensor_is_mapped_and_a_write_to_it_stays_private(tmp_path: Path) -> None:
    array = numbers((64, 64), 32)
    write(tmp_path, {"t": ("F32", array)})
    before = (tmp_path / "model.safetensors").read_bytes()
    with open_checkpoint(tmp_path) as checkpoint:
        whole = checkpoint["t"][...]
        again = checkpoint["t"][:, :]
        whole.zero_()
        assert again.any()
        assert checkpoint["t"][:].any()
    assert not whole.any()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_returned_tensor_outlives_its_checkpoint(tmp_path: Path) -> None:
    array = numbers((64, 64), 16)
    write(tmp_path, {"t": ("BF16", array)})
    with open_checkpoint(tmp_path) as checkpoint:
        whole = checkpoint["t"][...]
        lazy = checkpoint["t"]
    assert whole.view(torch.uint8).numpy().tobytes() == array.tobytes()
    with pytest.raises(ValueError, match="closed"):
        lazy[...]
    with pytest.raises(ValueError, match="closed"):
        checkpoint["t"]


def test_a_file_that_was_replaced_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, {"t": ("BF16", numbers((64, 64), 16))})
    checkpoint = open_checkpoint(tmp_path)
    write(tmp_path, {"t": ("BF16", numbers((64, 65), 16))})
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        checkpoint["t"][...]
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        checkpoint["t"].read()


def test_further_names_of_tied_weights_are_listed_and_found(tmp_path: Path) -> None:
    array = numbers((8, 4), 16)
    write(tmp_path, {"embed": ("BF16", array), "norm": ("BF16", array[0])}, aliases={"head": "embed"})
    checkpoint = open_checkpoint(tmp_path)
    assert sorted(checkpoint) == ["embed", "head", "norm"]
    assert len(checkpoint) == 3
    assert checkpoint.aliases == {"head": "embed"}
    assert list(checkpoint.specs) == ["embed", "norm"]
    assert checkpoint.nbytes == array.nbytes + array[0].nbytes
    assert checkpoint["head"][...].data_ptr() == checkpoint["embed"][...].data_ptr()
    with pytest.raises(KeyError):
        checkpoint["nowhere"]


def test_the_bytes_of_a_box_need_no_torch(tmp_path: Path) -> None:
    array = numbers((6, 5, 4), 16)
    write(tmp_path, {"t": ("BF16", array)})
    lazy = open_checkpoint(tmp_path)["t"]
    assert bytes(lazy.read()) == array.tobytes()
    assert bytes(lazy.read(Box((1, 0, 2), (3, 5, 1)))) == array[1:4, :, 2:3].tobytes()
    with pytest.raises(FormatError, match="outside"):
        lazy.read(Box((0, 0, 0), (7, 5, 4)))
    with pytest.raises(FormatError, match="outside"):
        lazy.read(Box((0, 0), (1, 1)))


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS.keys() - KNOWN))
def test_a_dtype_that_this_torch_lacks_is_refused_by_its_name_and_its_bytes_can_be_read(
    tmp_path: Path, dtype: str
) -> None:
    data = bytes(range(4 * DTYPE_BITS[dtype] // 8))
    header = encode_header([TensorSpec("t", dtype, (4,))], {})
    (tmp_path / "model.safetensors").write_bytes(header + data)
    tensor = open_checkpoint(tmp_path)["t"]
    with pytest.raises(FormatError, match=f"'t' has dtype {dtype}, which this torch does not have") as refused:
        tensor[...]
    assert refused.value.hint is not None
    assert ".read(box)" in refused.value.hint
    assert bytes(tensor.read()) == data


@pytest.mark.skipif("F4" not in KNOWN, reason="this torch has no float4")
def test_packed_floats_are_cut_at_whole_bytes(tmp_path: Path) -> None:
    packed = numbers((4, 8), 8)
    header = encode_header([TensorSpec("t", "F4", (4, 16))], {})
    (tmp_path / "model.safetensors").write_bytes(header + packed.tobytes())
    lazy = open_checkpoint(tmp_path)["t"]
    assert lazy.get_shape() == [4, 16]
    assert lazy.shape == (4, 8)
    assert lazy[...].dtype == torch.float4_e2m1fn_x2
    assert bytes(lazy[...].view(torch.uint8).numpy().tobytes()) == packed.tobytes()
    assert lazy[1:3, 4:8].view(torch.uint8).numpy().tobytes() == packed[1:3, 2:4].tobytes()
    with pytest.raises(FormatError, match="whole bytes"):
        lazy[:, 1:4]
    with pytest.raises(TypeError, match="step 1"):
        lazy[::2]


def test_a_lone_file_an_index_and_a_folder_open_the_same_tensors(tmp_path: Path) -> None:
    array = numbers((64, 64), 16)
    write(tmp_path, {"a": ("BF16", array), "b": ("F16", array)}, max_shard_bytes=9000)
    whole = open_checkpoint(str(tmp_path))
    by_index = open_checkpoint(tmp_path / "model.safetensors.index.json")
    assert set(whole) == set(by_index) == {"a", "b"}
    (tmp_path / "elsewhere").symlink_to("/")  # what lies beside a lone file is nobody's business
    lone = open_checkpoint(tmp_path / "model-00001-of-00002.safetensors")
    assert list(lone) == ["a"]
    assert bytes(lone["a"].read()) == array.tobytes()
    assert lone["a"][...].view(torch.uint8).numpy().tobytes() == array.tobytes()
    assert lone["a"][3].view(torch.uint8).numpy().tobytes() == array[3].tobytes()


def test_an_index_that_lies_is_refused_at_opening(tmp_path: Path) -> None:
    array = numbers((64, 64), 16)
    write(tmp_path, {"a": ("BF16", array), "b": ("F16", array)}, max_shard_bytes=9000)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["a"], index["weight_map"]["b"] = index["weight_map"]["b"], index["weight_map"]["a"]
    path.write_text(json.dumps(index))
    with pytest.raises(FormatError, match="'a'"):
        open_checkpoint(tmp_path)


def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(NotFoundError):
        open_checkpoint(tmp_path)
    with pytest.raises(FormatError, match="revision"):
        open_checkpoint(tmp_path, revision="main")


class Doubling:
    """A source that computes its values."""

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec("t", "I32", (50, 4))]

    def aliases(self) -> Mapping[str, str]:
        return {}

    def read(self, _: str, box: Box) -> bytes:
        array = np.arange(200, dtype=np.int32).reshape(50, 4) * 2
        return array[tuple(slice(o, s) for o, s in zip(box.offset, box.stop, strict=True))].tobytes()


def test_any_source_can_be_opened() -> None:
    checkpoint = open_checkpoint(Doubling())
    assert checkpoint.manifest is None
    array = np.arange(200, dtype=np.int32).reshape(50, 4) * 2
    np.testing.assert_array_equal(checkpoint["t"][4:10:3, 1].numpy(), array[4:10:3, 1])
    np.testing.assert_array_equal(checkpoint["t"][...].numpy(), array)
    assert bytes(checkpoint["t"].read()) == array.tobytes()


def test_a_lazy_tensor_answers_what_a_slice_of_safetensors_answers(tmp_path: Path) -> None:
    write(tmp_path, {"t": ("BF16", numbers((3, 5), 16)), "n": ("I64", numbers((), 64))})
    checkpoint = open_checkpoint(tmp_path)
    lazy = checkpoint["t"]
    assert (lazy.get_shape(), lazy.get_dtype()) == ([3, 5], "BF16")
    assert (lazy.shape, lazy.dtype, lazy.ndim, lazy.nbytes, lazy.numel()) == ((3, 5), torch.bfloat16, 2, 30, 15)
    assert lazy.is_floating_point()
    assert not checkpoint["n"].is_floating_point()
    assert checkpoint["n"][()].shape == ()
    assert repr(lazy) == "LazyTensor('t', BF16, (3, 5))"
