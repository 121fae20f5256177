"""Whole checkpoints that lie: each is refused before a parameter is touched; what is merely unusual loads."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hubshard.errors import FormatError, HubshardError, IncompleteError, NotFoundError, UnsafeFormatError
from hubshard.header import encode_header
from hubshard.lazy import from_pretrained, load_into, offload, open_checkpoint
from hubshard.tensors import TensorSpec
from tests.systems import make_pipe, posix_only

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

INDEX = "model.safetensors.index.json"
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    """Three shards, their index, a config; and a file outside."""
    path = tmp_path / "model"
    model.save_pretrained(path, max_shard_size="45KB")
    assert len(shards(path)) == 3
    secret = {"lm_head.weight": torch.full((64, 32), 7.0)}
    safetensors_torch.save_file(secret, tmp_path / "outside.safetensors")
    return path


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def edit_header(path: Path, change: Callable[[dict[str, Any]], Any], data: bytes = b"") -> None:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :] + data)


def tensors_of(header: dict[str, Any]) -> list[dict[str, Any]]:
    entries = (entry for name, entry in header.items() if name != "__metadata__")
    return sorted(entries, key=lambda entry: entry["data_offsets"][0])


def missing_tensor(folder: Path) -> None:
    edit_index(folder, lambda index: index["weight_map"].update({"no.such.weight": shards(folder)[0].name}))


def missing_name(folder: Path) -> None:
    edit_index(folder, lambda index: index["weight_map"].pop("model.norm.weight"))


def wrong_shard(folder: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        table = index["weight_map"]
        first, other = shards(folder)[0].name, shards(folder)[1].name
        name = next(name for name, file in table.items() if file == first)
        table[name] = other

    edit_index(folder, change)


def all_in_one_shard(folder: Path) -> None:
    first = shards(folder)[0].name
    edit_index(folder, lambda index: index.update(weight_map=dict.fromkeys(index["weight_map"], first)))


def two_shards_exchanged(folder: Path) -> None:
    first, second, _ = shards(folder)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def one_name_in_two_shards(folder: Path) -> None:
    first, second, _ = shards(folder)
    tensors = safetensors_torch.load_file(second)
    stolen = safetensors_torch.load_file(first)
    name = next(iter(stolen))
    safetensors_torch.save_file(tensors | {name: stolen[name] + 1}, second)


def missing_shard(folder: Path) -> None:
    shards(folder)[1].unlink()


def shard_is_a_folder(folder: Path) -> None:
    path = shards(folder)[1]
    path.unlink()
    path.mkdir()
    (path / "x").write_bytes(b"")


def truncated(folder: Path) -> None:
    path = shards(folder)[2]
    path.write_bytes(path.read_bytes()[:-100])


def truncated_in_the_header(folder: Path) -> None:
    path = shards(folder)[2]
    path.write_bytes(path.read_bytes()[:100])


def empty_shard(folder: Path) -> None:
    shards(folder)[2].write_bytes(b"")


def more_bytes(folder: Path) -> None:
    path = shards(folder)[0]
    path.write_bytes(path.read_bytes() + b"x")


def header_past_the_end(folder: Path) -> None:
    path = shards(folder)[0]
    raw = path.read_bytes()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw[8:])


def overlap(folder: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        first, second = tensors_of(header)[:2]
        shift = min(second["data_offsets"][1] - second["data_offsets"][0], 64)
        second["data_offsets"] = [offset - shift for offset in second["data_offsets"]]
        del first

    edit_header(shards(folder)[0], change)


def same_bytes_twice(folder: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        entries = tensors_of(header)
        header["stolen.weight"] = dict(entries[0])

    edit_header(shards(folder)[0], change)
    edit_index(folder, lambda index: index["weight_map"].update({"stolen.weight": shards(folder)[0].name}))


def gap(folder: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        last = tensors_of(header)[-1]
        last["data_offsets"] = [offset + 64 for offset in last["data_offsets"]]

    edit_header(shards(folder)[0], change, bytes(64))


def other_shape(folder: Path) -> None:
    edit_header(shards(folder)[0], lambda header: tensors_of(header)[-1].update(shape=[1, 1]))


def tensor_past_the_end(folder: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        last = tensors_of(header)[-1]
        last["shape"][0] *= 4
        start, stop = last["data_offsets"]
        last["data_offsets"] = [start, start + 4 * (stop - start)]

    edit_header(shards(folder)[0], change)


def outside(name: str) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        path = name.replace("ABSOLUTE", str(folder.parent / "outside.safetensors"))
        edit_index(folder, lambda index: index["weight_map"].update({"lm_head.weight": path}))

    return attack


def link_out(folder: Path) -> None:
    path = shards(folder)[0]
    path.unlink()
    path.symlink_to(folder.parent / "outside.safetensors")
    edit_index(folder, lambda index: index.update(weight_map={"lm_head.weight": path.name}))


def link_of_a_folder_out(folder: Path) -> None:
    (folder / "sub").symlink_to(folder.parent)
    edit_index(folder, lambda index: index["weight_map"].update({"lm_head.weight": "sub/outside.safetensors"}))


def link_to_nothing(folder: Path) -> None:
    path = shards(folder)[0]
    path.unlink()
    path.symlink_to(folder / "nothing.safetensors")


def link_to_itself(folder: Path) -> None:
    path = shards(folder)[0]
    path.unlink()
    path.symlink_to(path)


def pipe(folder: Path) -> None:
    path = shards(folder)[0]
    path.unlink()
    make_pipe(path)


def no_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def pickles(folder: Path) -> None:
    for path in [*shards(folder), folder / INDEX]:
        path.unlink()
    torch.save({"lm_head.weight": torch.zeros(64, 32)}, folder / "pytorch_model.bin")


def pickle_by_another_name(folder: Path) -> None:
    torch.save({"lm_head.weight": torch.zeros(64, 32)}, shards(folder)[0])


def index_of_pickles(folder: Path) -> None:
    edit_index(folder, lambda index: index["weight_map"].update({"lm_head.weight": "pytorch_model-1.bin"}))


LIES: dict[str, tuple[Callable[[Path], None], type[HubshardError], str]] = {
    "a tensor that no shard has": (missing_tensor, FormatError, r"no\.such\.weight"),
    "a tensor that the index does not name": (missing_name, FormatError, r"model\.norm\.weight"),
    "a tensor in another shard": (wrong_shard, FormatError, "lacks it"),
    "all in one shard": (all_in_one_shard, FormatError, "lacks it"),
    "two shards exchanged": (two_shards_exchanged, FormatError, "lacks it"),
    "one name in two shards": (one_name_in_two_shards, FormatError, "two (shards|files)"),
    "a shard that is not there": (missing_shard, NotFoundError, "00002-of-00003"),
    "a shard that is a folder": (shard_is_a_folder, NotFoundError, "00002-of-00003"),
    "a truncated shard": (truncated, FormatError, "00003-of-00003"),
    "a shard truncated in its header": (truncated_in_the_header, FormatError, "00003-of-00003"),
    "an empty shard": (empty_shard, FormatError, "00003-of-00003"),
    "bytes after the last tensor": (more_bytes, FormatError, "00001-of-00003"),
    "a header past the end": (header_past_the_end, FormatError, "00001-of-00003"),
    "tensors that overlap": (overlap, FormatError, "00001-of-00003"),
    "the same bytes as two tensors": (same_bytes_twice, FormatError, "00001-of-00003"),
    "a gap between tensors": (gap, FormatError, "00001-of-00003"),
    "a shape of other bytes": (other_shape, FormatError, "00001-of-00003"),
    "a tensor past the end": (tensor_past_the_end, FormatError, "00001-of-00003"),
    "a file above the folder": (outside("../outside.safetensors"), FormatError, "outside"),
    "a file above, by a detour": (outside("sub/../../outside.safetensors"), FormatError, "outside"),
    "a file at an absolute path": (outside("ABSOLUTE"), FormatError, "outside"),
    "a file that begins in the home": (outside("~/outside.safetensors"), HubshardError, "outside"),
    "an address": (outside("file:///outside.safetensors"), FormatError, "outside"),
    "a link out of the folder": (link_out, FormatError, "outside"),
    "a link of a folder out": (link_of_a_folder_out, FormatError, "outside"),
    "a link to nothing": (link_to_nothing, FormatError, "does not exist"),
    "a link to itself": (link_to_itself, HubshardError, "00001-of-00003"),
    "shards without an index": (no_index, IncompleteError, "index"),
    "pickles": (pickles, HubshardError, "pickle|safetensors"),
    "a pickle by another name": (pickle_by_another_name, UnsafeFormatError, "pickle"),
    "an index of pickles": (index_of_pickles, UnsafeFormatError, "pickle"),
}
if hasattr(os, "mkfifo"):
    LIES["a pipe"] = (pipe, FormatError, "00001-of-00003")


@pytest.mark.timeout(60)
@posix_only
@pytest.mark.parametrize("name", LIES)
def test_a_checkpoint_that_lies_is_refused_before_a_parameter_is_touched(model: Any, folder: Path, name: str) -> None:
    attack, kind, words = LIES[name]
    attack(folder)
    module = transformers.LlamaForCausalLM(model.config)
    before = {key: (tensor.data_ptr(), tensor.clone()) for key, tensor in module.state_dict().items()}
    with pytest.raises(kind, match=words):
        open_checkpoint(folder)
    with pytest.raises(kind, match=words):
        load_into(module, folder, strict=False)
    with pytest.raises(kind, match=words):
        offload(module, folder, budget="1GB", strict=False)
    with pytest.raises(kind, match=words):
        from_pretrained(folder)
    for key, tensor in module.state_dict().items():
        assert tensor.data_ptr() == before[key][0]
        assert torch.equal(tensor, before[key][1])


def zero_based(folder: Path) -> None:
    names = {}
    for number, path in enumerate(shards(folder)):
        names[path.name] = f"model-{number:05d}-of-00003.safetensors"
        path.rename(folder / names[path.name])  # each new name is free by then
    edit_index(
        folder,
        lambda index: index.update(weight_map={key: names[file] for key, file in index["weight_map"].items()}),
    )


def no_metadata_in_the_index(folder: Path) -> None:
    edit_index(folder, lambda index: index.pop("metadata"))


def no_metadata_in_the_headers(folder: Path) -> None:
    for path in shards(folder):
        edit_header(path, lambda header: header.pop("__metadata__"))


def stray_shard(folder: Path) -> None:
    stray = folder / "model-00004-of-00004.safetensors"
    safetensors_torch.save_file({"lm_head.weight": torch.zeros(64, 32)}, stray)


def stray_rubbish(folder: Path) -> None:
    (folder / "model-00009-of-00009.safetensors").write_bytes(b"rubbish")
    (folder / "notes.bin").write_bytes(b"more")


def wrong_totals(folder: Path) -> None:
    edit_index(folder, lambda index: index.update(metadata={"total_size": 1, "by": ["someone"]}))


def shards_in_folders(folder: Path) -> None:
    (folder / "parts").mkdir()
    for path in shards(folder):
        path.rename(folder / "parts" / path.name)
    edit_index(
        folder,
        lambda index: index.update(weight_map={key: f"parts/{file}" for key, file in index["weight_map"].items()}),
    )


def link_within(folder: Path) -> None:
    path = shards(folder)[0]
    (folder / "blobs").mkdir()
    path.rename(folder / "blobs" / "a")
    path.symlink_to(folder / "blobs" / "a")


def names_unlike_any(folder: Path) -> None:
    names = {}
    for number, path in enumerate(shards(folder)):
        names[path.name] = f"Gewichte {number} é.safetensors"
        path.rename(folder / names[path.name])
    edit_index(
        folder,
        lambda index: index.update(weight_map={key: names[file] for key, file in index["weight_map"].items()}),
    )


def tensors_in_reverse(folder: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        items = list(header.items())
        header.clear()
        header.update(reversed(items))

    for path in shards(folder):
        edit_header(path, change)


def unaligned(folder: Path) -> None:
    def padded(length: int) -> Callable[[dict[str, Any]], None]:
        return lambda header: header.update({"__metadata__": {"pad": "x" * length}})

    for length, path in enumerate(shards(folder), start=1):
        edit_header(path, padded(length))


UNUSUAL = {
    "shards counted from zero": zero_based,
    "an index without metadata": no_metadata_in_the_index,
    "headers without metadata": no_metadata_in_the_headers,
    "a shard that the index does not name": stray_shard,
    "rubbish that the index does not name": stray_rubbish,
    "totals that are wrong": wrong_totals,
    "shards in a folder": shards_in_folders,
    "a link within the folder": link_within,
    "shards of other names": names_unlike_any,
    "tensors listed in reverse": tensors_in_reverse,
    "data that is not aligned": unaligned,
}


@pytest.mark.timeout(60)
@posix_only
@pytest.mark.parametrize("name", UNUSUAL)
def test_a_checkpoint_that_is_merely_unusual_loads(model: Any, folder: Path, name: str) -> None:
    UNUSUAL[name](folder)
    module = transformers.LlamaForCausalLM(model.config)
    load_into(module, folder)
    loaded: Any = from_pretrained(folder)
    for key, tensor in model.state_dict().items():
        assert torch.equal(module.state_dict()[key], tensor), key
        assert torch.equal(loaded.state_dict()[key], tensor), key


@pytest.mark.timeout(180)
def test_fifty_thousand_names_load(tmp_path: Path) -> None:
    count, per_shard = 50_001, 12_501
    names = [f"a.{number}" for number in range(count)]
    weight_map: dict[str, str] = {}
    for number, start in enumerate(range(0, count, per_shard)):
        some = names[start : start + per_shard]
        file = f"model-{number:05d}.safetensors"
        specs = [TensorSpec(name, "I32", ()) for name in some]
        data = struct.pack(f"<{len(some)}i", *range(start, start + len(some)))
        (tmp_path / file).write_bytes(encode_header(specs, {"format": "pt"}) + data)
        weight_map |= dict.fromkeys(some, file)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint) == count
        for number in (0, 1, per_shard, count - 1):
            assert checkpoint[f"a.{number}"][...].item() == number
