from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from hubshard.errors import FormatError, IntegrityError
from hubshard.lazy import load_into, open_checkpoint
from hubshard.lazy.verifying import VerifyingReader
from hubshard.store.local import LocalStore

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
nn = torch.nn


class Net(nn.Sequential):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(300, 300) for _ in range(4)))


@pytest.fixture
def wanted() -> dict[str, Any]:
    torch.manual_seed(0)
    return {name: tensor.clone() for name, tensor in Net().state_dict().items()}


@pytest.fixture
def snapshot(wanted: dict[str, Any], tmp_path: Path) -> Path:
    """A snapshot as the Hub's cache has it, of two shards with a tensor that no module wants."""
    folder, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    names = sorted([*wanted, "more"])
    tensors = wanted | {"more": torch.randn(500, 500)}
    weight_map: dict[str, str] = {}
    for number in range(2):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        raw = safetensors_torch.save({name: tensors[name] for name in names[number::2]})
        blob = blobs / hashlib.sha256(raw).hexdigest()
        blob.write_bytes(raw)
        (folder / file).symlink_to(blob)
        weight_map |= dict.fromkeys(names[number::2], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def damage(snapshot: Path, number: int, position: int) -> None:
    blob = (snapshot / f"model-{number:05d}-of-00002.safetensors").resolve()
    raw = bytearray(blob.read_bytes())
    raw[position] ^= 1
    blob.write_bytes(raw)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_files_as_promised_are_loaded_and_read_once(
    snapshot: Path, wanted: dict[str, Any], device: str, dtype: str | None
) -> None:
    with torch.device(device):
        net = Net()
    report = load_into(net, snapshot, verify=True, strict=False, dtype=dtype)
    assert all(torch.equal(t, wanted[name].to(t.dtype)) for name, t in net.state_dict().items())
    nbytes = sum(path.stat().st_size for path in snapshot.glob("*.safetensors"))
    assert report.bytes_read == nbytes
    assert len(open_checkpoint(snapshot, verify=True)) == len(wanted) + 1


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_checkpoint_that_tells_of_its_reads_is_verified_as_any(
    snapshot: Path, wanted: dict[str, Any], device: str
) -> None:
    told: list[int] = []
    with torch.device(device):
        net = Net()
    assign = False if device == "cpu" else None
    with open_checkpoint(snapshot) as checkpoint:
        load_into(net, checkpoint.told(told.append), verify=True, strict=False, assign=assign)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in net.state_dict().items())
    damage(snapshot, 1, -1)
    with torch.device("meta"):
        other = Net()
    with open_checkpoint(snapshot) as checkpoint, pytest.raises(IntegrityError, match=r"00001-of.*sha256"):
        load_into(other, checkpoint.told(told.append), verify=True, strict=False, dtype="float64")
    assert all(tensor.is_meta for tensor in other.state_dict().values())
    assert sum(told) > 0 or device == "meta"


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("position", [-1, -900_000])
def test_a_flipped_bit_anywhere_is_found_before_a_parameter_is_assigned(
    snapshot: Path, number: int, position: int
) -> None:
    damage(snapshot, number, position)
    with torch.device("meta"):
        net = Net()
    with pytest.raises(IntegrityError, match=f"0000{number}-of.*sha256"):
        load_into(net, snapshot, verify=True, strict=False)
    assert all(tensor.is_meta for tensor in net.state_dict().values())
    with pytest.raises(IntegrityError, match=f"0000{number}-of.*sha256"):
        open_checkpoint(snapshot, verify=True)


def test_without_a_promise_there_is_nothing_to_verify(snapshot: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(next(snapshot.glob("*.safetensors")).read_bytes())
    with pytest.raises(FormatError, match="no sha256 is promised"):
        open_checkpoint(path, verify=True)
    with pytest.raises(FormatError, match="no sha256 is promised"):
        load_into(Net(), path, verify=True, strict=False)


def test_pieces_are_hashed_in_order_whatever_order_they_come_in(tmp_path: Path) -> None:
    raw = random.Random(0).randbytes(10_000)
    (tmp_path / "a.bin").write_bytes(raw)
    store = LocalStore(tmp_path)
    at = store.head("main")
    assert at is not None
    for seed in range(20):
        reader = VerifyingReader(store, {"a.bin": hashlib.sha256(raw).hexdigest()})
        starts = list(range(0, 10_000, 900))
        random.Random(seed).shuffle(starts)
        for start in starts + starts[:3]:  # some again
            buffer = memoryview(bytearray(min(900, 10_000 - start)))
            reader.read(at, "a.bin", start, start + buffer.nbytes, buffer)
        reader.check()
    reader = VerifyingReader(store, {"a.bin": hashlib.sha256(raw).hexdigest()})
    reader.read(at, "a.bin", 0, 9_999, memoryview(bytearray(9_999)))
    with pytest.raises(IntegrityError):
        reader.check()
