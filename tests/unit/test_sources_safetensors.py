from __future__ import annotations

import json
import pickle
import sys
import tracemalloc
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from hubshard.errors import FormatError, HubshardError, IncompleteError, NotFoundError, UnsafeFormatError
from hubshard.header import encode_header
from hubshard.index import encode_index
from hubshard.manifest import Extent
from hubshard.names import shard_name
from hubshard.sources.safetensors import SafetensorsSource
from hubshard.store.local import LocalStore
from hubshard.tensors import Box, TensorSpec

if TYPE_CHECKING:
    from pathlib import Path

    from hubshard.protocols import Revision, Store

INDEX = "model.safetensors.index.json"
ONE, TWO = shard_name(1, 2), shard_name(2, 2)


def write(path: Path, shapes: dict[str, tuple[int, ...]], metadata: dict[str, str] | None = None) -> None:
    """A file whose tensors are U8 and count up, each from a number of its own."""
    specs = [TensorSpec(name, "U8", shape) for name, shape in shapes.items()]
    data = b"".join(bytes((len(spec.name) + i) % 256 for i in range(spec.numel)) for spec in specs)
    path.write_bytes(encode_header(specs, metadata or {"format": "pt"}) + data)


def write_index(folder: Path, weight_map: dict[str, str], metadata: dict[str, Any] | None = None) -> None:
    (folder / INDEX).write_bytes(encode_index(weight_map, metadata or {}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "model"  # what lies beside it is of this test alone
    folder.mkdir()
    write(folder / ONE, {"a": (4,), "b": (2, 3)}, {"format": "pt", "scheme": "int8"})
    write(folder / TWO, {"c": (5,)}, {"format": "pt", "scheme": "int8", "tied": "c"})
    write_index(folder, {"a": ONE, "b": ONE, "c": TWO}, {"total_size": 15})
    return folder


class Watched:
    """A store that counts what is read of it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.reads: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, at: Revision, path: str, start: int, stop: int, into: memoryview) -> None:
        self.reads.append((path, start, stop))
        self._store.read(at, path, start, stop, into)


def open_watched(root: Path, **options: Any) -> tuple[SafetensorsSource, Watched]:
    store = Watched(LocalStore(root))
    at = store.head("main")
    assert at is not None
    return SafetensorsSource(store, at, **options), store


def open_at(root: Path, **options: Any) -> SafetensorsSource:
    return open_watched(root, **options)[0]


def test_a_sharded_checkpoint_tells_what_it_holds(sharded: Path) -> None:
    source = open_at(sharded)
    assert [spec.name for spec in source.specs()] == ["a", "b", "c"]
    assert source.weight_files == (ONE, TWO)
    assert source.index_path == INDEX
    assert source.index_metadata == {"total_size": 15}
    assert source.header_metadata == {"scheme": "int8"}
    assert source.aliases() == {"tied": "c"}
    assert source.notes == ()
    assert source.manifest.files[TWO].nbytes == (sharded / TWO).stat().st_size


def test_opening_reads_the_index_and_one_range_per_header(sharded: Path) -> None:
    _, store = open_watched(sharded)
    assert Counter(path for path, _, _ in store.reads) == {INDEX: 1, ONE: 1, TWO: 1}


def test_opening_a_large_file_reads_little_more_than_its_header(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"large": (2**21,)})
    _, store = open_watched(tmp_path)
    assert sum(stop - start for _, start, stop in store.reads) <= 2**18


def test_a_header_longer_than_expected_takes_a_second_read(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {f"layer.{n}.{'x' * 100}": (1,) for n in range(2000)})
    source, store = open_watched(tmp_path)
    assert len(source.specs()) == 2000
    assert len(store.reads) == 2
    assert store.reads[0][2] == store.reads[1][1]


@pytest.mark.parametrize(
    ("box", "start", "stop"),
    [
        (Box((0, 0, 0), (4, 6, 8)), 0, 192),
        (Box((1, 0, 0), (2, 6, 8)), 48, 144),
        (Box((3, 2, 0), (1, 3, 8)), 160, 184),
        (Box((2, 5, 3), (1, 1, 4)), 139, 143),
        (Box((3, 5, 7), (1, 1, 1)), 191, 192),
    ],
)
def test_a_box_whose_bytes_lie_together_is_one_exact_read(tmp_path: Path, box: Box, start: int, stop: int) -> None:
    write(tmp_path / "model.safetensors", {"t": (4, 6, 8)})
    source, store = open_watched(tmp_path)
    store.reads.clear()
    source.read("t", box)
    first = source.manifest.pieces_of["t"][0].at.start
    assert store.reads == [("model.safetensors", first + start, first + stop)]


def test_a_slice_along_the_inner_dimension_is_read_in_blocks_of_rows(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"t": (1000, 512)})
    source, store = open_watched(tmp_path)
    store.reads.clear()
    rows = bytes(source.read("t", Box((10, 100), (900, 7))))
    assert len(store.reads) == 1
    content = (tmp_path / "model.safetensors").read_bytes()[source.manifest.pieces_of["t"][0].at.start :]
    assert rows == b"".join(content[row * 512 + 100 : row * 512 + 107] for row in range(10, 910))


def test_rows_far_apart_are_read_alone(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"t": (4, 2**18)})
    source, store = open_watched(tmp_path)
    store.reads.clear()
    source.read("t", Box((0, 5), (4, 16)))
    assert [stop - start for _, start, stop in store.reads] == [16] * 4


def test_reading_into_a_buffer_of_another_size_is_refused(sharded: Path) -> None:
    source = open_at(sharded)
    with pytest.raises(FormatError, match="'a': 3 bytes do not hold"):
        source.read_into("a", Box((0,), (4,)), memoryview(bytearray(3)))


def test_reading_a_large_tensor_holds_it_once(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(encode_header([TensorSpec("t", "U8", (2**24,))], {}) + bytes(2**24))
    source = open_at(tmp_path)
    tracemalloc.start()
    buffer = source.read("t", Box((0,), (2**24,)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(buffer) == 2**24
    assert peak < 2**24 + 2**20


def test_only_what_the_index_names_is_looked_at(sharded: Path) -> None:
    (sharded / "consolidated.safetensors").write_bytes(b"not looked at")
    write(sharded / "model-00003-of-00003.safetensors", {"a": (4,)})
    source, store = open_watched(sharded)
    assert {path for path, _, _ in store.reads} == {INDEX, ONE, TWO}
    assert len(source.specs()) == 3


def test_numbers_may_start_at_zero_and_the_index_needs_no_metadata(tmp_path: Path) -> None:
    write(tmp_path / "model-00000-of-00001.safetensors", {"a": (4,)})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00000-of-00001.safetensors"}}))
    source = open_at(tmp_path)
    assert source.index_metadata == {}
    assert [spec.name for spec in source.specs()] == ["a"]


def test_both_orders_of_variant_and_number_are_read(tmp_path: Path) -> None:
    write(tmp_path / "model.fp16-00001-of-00002.safetensors", {"a": (4,)})
    write(tmp_path / "model-00002-of-00002.fp16.safetensors", {"b": (4,)})
    index = {"a": "model.fp16-00001-of-00002.safetensors", "b": "model-00002-of-00002.fp16.safetensors"}
    (tmp_path / "model.safetensors.index.fp16.json").write_bytes(encode_index(index, {}))
    assert len(open_at(tmp_path, variant="fp16").specs()) == 2


def test_a_checkpoint_in_a_folder_has_paths_from_the_root(sharded: Path) -> None:
    source = open_at(sharded.parent, folder=sharded.name)
    assert source.weight_files == (f"{sharded.name}/{ONE}", f"{sharded.name}/{TWO}")
    assert bytes(source.read("c", Box((1,), (2,)))) == bytes([2, 3])


def test_one_shard_may_be_opened_by_its_path(sharded: Path) -> None:
    source = open_at(sharded, path=TWO)
    assert [spec.name for spec in source.specs()] == ["c"]
    nbytes = (sharded / TWO).stat().st_size
    assert source.manifest.pieces[0].at == Extent(TWO, nbytes - 5, nbytes)


def test_the_index_may_name_a_tied_tensor_that_a_header_records(sharded: Path) -> None:
    write_index(sharded, {"a": ONE, "b": ONE, "c": TWO, "tied": TWO})
    assert open_at(sharded).aliases() == {"tied": "c"}


def test_metadata_that_differs_between_shards_is_kept_once_with_a_note(sharded: Path) -> None:
    write(sharded / TWO, {"c": (5,)}, {"scheme": "int4"})
    source = open_at(sharded)
    assert source.header_metadata == {"scheme": "int8"}
    assert "'scheme'" in source.notes[0]


def test_a_tensor_named_as_the_value_of_format_has_no_alias(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"pt": (4,)})
    assert open_at(tmp_path).aliases() == {}


def _remove(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def _content(name: str, content: bytes) -> Any:
    return lambda folder: (folder / name).write_bytes(content)


def _index(weight_map: dict[str, str]) -> Any:
    return lambda folder: write_index(folder, weight_map)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345678\n"
BAD = {
    "both shards missing": (lambda f: [_remove(n)(f) for n in (ONE, TWO)], NotFoundError, [ONE, TWO, "2 of the 2"]),
    "one shard missing": (_remove(TWO), NotFoundError, [TWO, "1 of the 2", INDEX]),
    "index missing": (_remove(INDEX), IncompleteError, [INDEX]),
    "tensor that the shard lacks": (
        _index({"a": ONE, "b": ONE, "c": TWO, "d": TWO}),
        FormatError,
        ["'d'", TWO, "no shard has it"],
    ),
    "tensor in another shard": (
        _index({"a": ONE, "b": TWO, "c": TWO}),
        FormatError,
        ["'b'", TWO, f"it is in {ONE}"],
    ),
    "tensor that the index lacks": (_index({"a": ONE, "c": TWO}), FormatError, ["'b'", ONE, "does not name"]),
    "tensor twice": (lambda f: write(f / TWO, {"c": (5,), "a": (4,)}), FormatError, ["'a'", ONE, TWO]),
    "parent folder": (_index({"a": "../x.safetensors"}), FormatError, ["'../x.safetensors'"]),
    "absolute path": (_index({"a": "/etc/x.safetensors"}), FormatError, ["'/etc/x.safetensors'"]),
    "drive": (_index({"a": "C:x.safetensors"}), FormatError, ["'C:x.safetensors'"]),
    "backslash": (_index({"a": "..\\x.safetensors"}), FormatError, ["x.safetensors"]),
    "pickle in the index": (_index({"a": "pytorch_model.bin"}), UnsafeFormatError, ["'pytorch_model.bin'"]),
    "pickle": (_content(TWO, pickle.dumps({"c": 1})), UnsafeFormatError, [TWO, "pickled"]),
    "zip of pickles": (_content(TWO, b"PK\x03\x04" + bytes(100)), UnsafeFormatError, [TWO, "pickled"]),
    "page": (_content(TWO, b"<!DOCTYPE html><html></html>"), FormatError, [TWO, "HTML"]),
    "LFS pointer": (_content(TWO, LFS_POINTER), FormatError, [TWO, "LFS pointer"]),
    "empty shard": (_content(TWO, b""), FormatError, [TWO]),
    "index is a list": (_content(INDEX, b"[]"), FormatError, [INDEX]),
    "index is cut off": (_content(INDEX, b'{"weight_map": {'), FormatError, [INDEX]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_checkpoint_that_does_not_hold_together_is_refused_by_name(sharded: Path, case: str) -> None:
    damage, error, says = BAD[case]
    damage(sharded)
    with pytest.raises(HubshardError) as caught:
        open_at(sharded)
    assert type(caught.value) is error
    for part in says:
        assert part in str(caught.value)


def test_a_truncated_shard_is_refused_by_name(sharded: Path) -> None:
    (sharded / TWO).write_bytes((sharded / TWO).read_bytes()[:-1])
    with pytest.raises(FormatError, match=TWO):
        open_at(sharded)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_a_shard_that_is_a_link_out_of_the_folder_is_refused(sharded: Path, tmp_path_factory: Any) -> None:
    outside = tmp_path_factory.mktemp("outside") / TWO
    (sharded / TWO).replace(outside)
    (sharded / TWO).symlink_to(outside)
    with pytest.raises(HubshardError, match=TWO):
        open_at(sharded)


def test_no_weights_at_all_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsafeFormatError, match=r"pytorch_model\.bin"):
        open_at(tmp_path)


def test_a_hundred_thousand_names_open(tmp_path: Path) -> None:
    per_file = 25_000
    weight_map: dict[str, str] = {}
    for number in range(1, 5):
        file = shard_name(number, 4)
        shapes = {f"model.layers.{n}.experts.weight_{number}": (1,) for n in range(per_file)}
        specs = [TensorSpec(name, "U8", shape) for name, shape in shapes.items()]
        (tmp_path / file).write_bytes(encode_header(specs, {}) + bytes(per_file))
        weight_map |= dict.fromkeys(shapes, file)
    write_index(tmp_path, weight_map)
    source, store = open_watched(tmp_path)
    assert len(source.specs()) == 4 * per_file
    assert len(store.reads) == 5
