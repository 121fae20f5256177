"""Format version 1: the golden checkpoints are written to the byte as ever, and read as ever."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import safetensors

from hubshard.header import decode_header
from hubshard.index import decode_index
from hubshard.manifest import manifest_of_headers

HERE = Path(__file__).parent
SCRIPT = runpy.run_path(str(HERE / "format_1.py"))
GOLDEN: dict[str, Any] = {golden.name: golden for golden in SCRIPT["GOLDEN"]}


def _committed(name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (HERE / "format_1" / name).iterdir()}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_same_tensors_give_the_bytes_that_were_committed(name: str) -> None:
    assert dict(GOLDEN[name].files()) == _committed(name)


@pytest.mark.parametrize("name", GOLDEN)
def test_safetensors_reads_the_committed_files(name: str) -> None:
    golden = GOLDEN[name]
    content = SCRIPT["Content"](golden.specs)
    found: dict[str, Any] = {}
    for path, data in _committed(name).items():
        if path.endswith(".safetensors"):
            found |= dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    assert {key: (value["dtype"], tuple(value["shape"]), bytes(value["data"])) for key, value in found.items()} == {
        spec.name: (spec.dtype, spec.shape, content.whole(spec)) for spec in golden.specs
    }


@pytest.mark.parametrize("name", GOLDEN)
def test_we_read_the_committed_files(name: str) -> None:
    golden = GOLDEN[name]
    files = _committed(name)
    shards = {path: data for path, data in files.items() if path.endswith(".safetensors")}
    headers = [(path, decode_header(data, file_nbytes=len(data), path=path)) for path, data in sorted(shards.items())]
    manifest = manifest_of_headers(headers).validate()
    assert manifest.tensors == {spec.name: spec for spec in golden.specs}
    assert manifest.aliases == golden.aliases
    content = SCRIPT["Content"](golden.specs)
    for piece in manifest.pieces:
        data = shards[piece.at.path][piece.at.start : piece.at.stop]
        assert data == content.whole(manifest.tensors[piece.tensor])
    for path in files.keys() - shards.keys():
        index = decode_index(files[path], path=path)
        assert index.weight_map == {piece.tensor: piece.at.path for piece in manifest.pieces}
        assert index.metadata["total_size"] == sum(spec.nbytes for spec in golden.specs)


def test_the_goldens_hold_single_files_and_several_shards_and_a_variant() -> None:
    counts = {name: len(_committed(name)) for name in GOLDEN}
    assert counts["single"] == counts["dtypes"] == 1
    assert counts["sharded"] >= 4
    assert "model.safetensors.index.fp16.json" in _committed("variant")
