"""DCP's save and load on a local folder, in one process: bit-equal, without pickles, and broken steps refused."""

from __future__ import annotations

import copy
import json
import logging
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hubshard.errors import FormatError, IntegrityError
from hubshard.header import decode_header
from hubshard.steps.step import step_folder
from hubshard.steps.step_json import decode_step

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402

from hubshard.dcp import HubReader, HubWriter, LoadPlanner, SavePlanner  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*assuming the intent is:UserWarning")

FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]


def _state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (7, 8), dtype=torch.uint8, generator=generator)
    # "nested.odd" as one key and as a path would be one name: DCP refuses that itself
    return {
        "model": {
            "odd.weight": torch.randn(13, 7, generator=generator),
            "bf16": torch.randn(5, 3, generator=generator).bfloat16(),
            "half": torch.randn(9, generator=generator).half(),
            "column": torch.randn(6, 10, generator=generator).t(),
            "part": torch.randn(100, generator=generator)[10:31],
            "conj": torch.randn(4, dtype=torch.complex64, generator=generator).conj(),
            "frozen": torch.nn.Parameter(torch.randn(3, generator=generator)),
            **{name: bits.view(getattr(torch, name)) for name in FLOAT8 if hasattr(torch, name)},
        },
        "optim": {
            "state": {0: {"step": torch.tensor(float(seed)), "count": torch.tensor(2**60 + seed), "n": seed}},
            "param_groups": [{"lr": 0.1 + seed, "betas": (0.9, 0.999), "params": [0, 1], "foreach": None}],
            "empty": torch.empty(0, 7),
            "mask": torch.randint(0, 2, (11,), generator=generator).bool(),
            "rng": bits[0],
        },
        "limits": [math.inf, -0.0, 2**80 + seed, b"\x80\x04", {"a", "b"}],
        "best": -math.inf if seed else 0.25,
    }


def _bits(value: Any) -> Any:
    """A state as something that is equal only where every bit, dtype and type is."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""
    if isinstance(value, dict):
        return {key: _bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [_bits(item) for item in value]
    return type(value).__name__, repr(value) if isinstance(value, float) else value


def _save(state: dict[str, Any], folder: Path, *, step: int = 5, planner: Any = None, **options: Any) -> HubWriter:
    writer = HubWriter(None, step=step, local_dir=folder, **options)
    dcp.save(state, storage_writer=writer, planner=planner)
    return writer


def _load(state: dict[str, Any], folder: Path, *, step: int | None = None, planner: Any = None) -> HubReader:
    reader = HubReader(None, step=step, local_dir=folder)
    dcp.load(state, storage_reader=reader, planner=planner)
    return reader


def _cause(caught: pytest.ExceptionInfo[BaseException]) -> BaseException:
    assert isinstance(caught.value, CheckpointException)
    return next(iter(caught.value.failures.values()))[0]


def _files(folder: Path, step: int = 5) -> list[Path]:
    return sorted((folder / step_folder(step)).iterdir())


@pytest.mark.parametrize("planners", [(None, None), (SavePlanner, LoadPlanner), (SavePlanner, None)])
def test_a_state_comes_back_bit_by_bit_with_and_without_our_planners(tmp_path: Path, planners: Any) -> None:
    state, other = _state(1), _state(2)
    saver, loader = (planner() if planner else None for planner in planners)
    _save(state, tmp_path, planner=saver)
    before = _bits(state)
    _load(other, tmp_path, planner=loader)
    assert _bits(other) == _bits(state) == before


def test_a_state_comes_back_where_nothing_is_flattened(tmp_path: Path) -> None:
    state, other = {"w": torch.arange(3.0), "n": (1, {2: b"x"})}, {"w": torch.zeros(3), "n": 0}
    _save(state, tmp_path, planner=SavePlanner(flatten_state_dict=False))
    _load(other, tmp_path, planner=LoadPlanner(flatten_state_dict=False))
    assert _bits(other) == _bits(state)


def test_a_model_and_its_optimizer_come_back_through_the_state_dict_helpers(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(torch.randn(4, 7)).sum().backward()
        optimizer.step()
        return model, optimizer

    first, second = made(1), made(2)
    model_state, optimizer_state = get_state_dict(*first)
    _save({"model": model_state, "optim": optimizer_state}, tmp_path)
    state: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(*second), strict=True))
    _load(state, tmp_path)
    set_state_dict(*second, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert _bits(second[0].state_dict()) == _bits(first[0].state_dict())
    assert _bits(second[1].state_dict()["state"]) == _bits(first[1].state_dict()["state"])


def test_files_are_bounded_whatever_the_size_of_a_tensor_and_hold_no_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, None)
    state = _state(1) | {"big": torch.randn(300, 50), "long": torch.arange(9000)}
    writer = _save(state, tmp_path, max_file_size="8kB")
    files = _files(tmp_path)
    data = [path for path in files if path.suffix == ".safetensors"]
    assert len(data) > 15
    assert all(path.stat().st_size <= 8000 for path in data)
    assert writer.saved is not None
    assert [file.name for file in writer.saved.files] == [path.name for path in data]
    assert files == [next(path for path in files if path.name == "manifest.json"), *data]
    # every byte is a header, the manifest, or a tensor's
    held = 0
    for path in data:
        raw = path.read_bytes()
        header = decode_header(raw, file_nbytes=len(raw), path=path.name)
        held += len(raw) - header.nbytes
        assert header.metadata == {}
    assert held == sum(placement.spec.nbytes for placement in writer.saved.tensors.values())
    json.loads(files[0].read_bytes().decode("ascii"))
    other = copy.deepcopy(_state(2)) | {"big": torch.zeros(300, 50), "long": torch.zeros(9000, dtype=torch.long)}
    _load(other, tmp_path)
    assert _bits(other) == _bits(state)


def test_files_are_opened_by_safetensors_and_hold_each_tensor_once(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    _save(_state(1), tmp_path)
    (path,) = (path for path in _files(tmp_path) if path.suffix == ".safetensors")
    found = safetensors.load_file(path)
    assert _bits(found["model.odd.weight"]) == _bits(_state(1)["model"]["odd.weight"])
    step = decode_step((tmp_path / step_folder(5) / "manifest.json").read_bytes(), path="m")
    assert set(found) == set(step.tensors)
    assert step.tensors["model.odd.weight"].path == ("model", "odd.weight")
    assert step.scalar_paths["optim.param_groups.0.betas"] == ("optim", "param_groups", 0, "betas")


def test_the_same_state_gives_the_same_bytes_and_an_unchanged_part_of_it_too(tmp_path: Path) -> None:
    for name in "ab":
        _save(_state(1), tmp_path / name)
    assert [(path.name, path.read_bytes()) for path in _files(tmp_path / "a")] == [
        (path.name, path.read_bytes()) for path in _files(tmp_path / "b")
    ]


def test_a_step_that_is_saved_again_replaces_the_old_one_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    _save(_state(1), tmp_path, max_file_size="500B")
    (tmp_path / step_folder(5) / ".rank-00000-00001-killed.part").write_bytes(b"half")
    _save(_state(3), tmp_path)
    assert len(_files(tmp_path)) == 2
    other = _state(2)
    assert _load(other, tmp_path).opened.ignored == ()  # type: ignore[union-attr]
    assert _bits(other) == _bits(_state(3))


def test_async_save_gives_the_state_as_it_was_when_it_was_called(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.arange(100_000.0), "n": 3, "more": [torch.ones(2), ([7], "x")]}
    future = dcp.async_save(state, storage_writer=HubWriter(None, step=1, local_dir=tmp_path))
    for tensor in (state["w"], state["more"][0]):
        tensor.zero_()
    state["more"][1][0][0] = 8
    future.result()
    other = {"w": torch.zeros(100_000), "n": 0, "more": [torch.zeros(2), ([0], "y")]}
    _load(other, tmp_path)
    assert other["n"] == 3
    assert torch.equal(other["w"], torch.arange(100_000.0))
    assert str(other["more"]) == "[tensor([1., 1.]), ([7], 'x')]"


@pytest.mark.parametrize("planner", [None, SavePlanner])
def test_what_cannot_be_stored_is_refused_by_its_path_before_anything_is_written(tmp_path: Path, planner: Any) -> None:
    refused: dict[str, dict[str, Any]] = {
        "optimizer.state.3.callback: a function": {"optimizer": {"state": {3: {"callback": lambda: 0}}}},
        "pair.*tuple": {"pair": (torch.ones(2), torch.ones(2))},
        "'z' has dtype torch.complex128": {"z": torch.ones(2, dtype=torch.complex128)},
        "optim: a builtin_function": {"w": torch.ones(3), "optim": len},
    }
    for reason, state in refused.items():
        with pytest.raises(CheckpointException) as caught:
            _save(state, tmp_path / "steps", planner=planner() if planner else None)
        cause = _cause(caught)
        assert isinstance(cause, FormatError)
        assert re.search(reason, f"{cause} {cause.hint}"), cause
        assert not (tmp_path / "steps").exists()


def test_a_planner_that_pickles_on_its_own_is_refused(tmp_path: Path) -> None:
    class Own(dcp.DefaultSavePlanner):  # type: ignore[name-defined, misc]
        def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
            return super().transform_object(write_item, object)

    with pytest.raises(CheckpointException) as caught:
        _save({"n": 5}, tmp_path, planner=Own())
    assert "made no canonical JSON" in str(_cause(caught))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Steps 5 and 7, of different states."""
    _save(_state(5), tmp_path, step=5, max_file_size="2kB")
    _save(_state(7), tmp_path, step=7, max_file_size="2kB")
    return tmp_path


def _data(folder: Path, step: int = 7) -> Path:
    return next(path for path in _files(folder, step) if path.suffix == ".safetensors")


def _break(folder: Path, how: str) -> None:
    path = _data(folder)
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "longer":
        path.write_bytes(path.read_bytes() + b"\0")
    elif how == "no manifest":
        (path.parent / "manifest.json").unlink()
    else:
        manifest = path.parent / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b'"step":7', b'"step":8', 1))


BREAKS = ["missing", "truncated", "longer", "no manifest", "changed manifest"]


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_step_is_refused_before_the_state_is_touched(saved: Path, how: str) -> None:
    _break(saved, how)
    state = _state(1)
    with pytest.raises(CheckpointException, match="step-00000007"):
        _load(state, saved, step=7)
    assert _bits(state) == _bits(_state(1))


@pytest.mark.parametrize("how", BREAKS)
def test_without_a_number_a_broken_step_is_passed_over_and_said(
    saved: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    _break(saved, how)
    state = _state(1)
    with caplog.at_level(logging.WARNING, "hubshard"):
        reader = _load(state, saved)
    assert "step 7 is passed over" in caplog.text
    assert reader.opened is not None
    assert reader.opened.step.step == 5
    assert _bits(state) == _bits(_state(5))


def test_any_flipped_byte_of_the_data_is_found_while_it_is_read(saved: Path) -> None:
    for path in [path for path in _files(saved, 7) if path.suffix == ".safetensors"]:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
        with pytest.raises(CheckpointException) as caught:
            _load(_state(1), saved, step=7)
        cause = _cause(caught)
        assert isinstance(cause, IntegrityError)
        assert path.name in str(cause)
        assert "block 0" in str(cause)
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    _load(_state(1), saved, step=7)


def test_files_that_the_manifest_does_not_name_are_ignored_and_named(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stale = _data(saved, 5).read_bytes()
    (saved / step_folder(7) / "rank-00002-00001-000000000000.safetensors").write_bytes(stale)
    state = _state(1)
    with caplog.at_level(logging.WARNING, "hubshard"):
        reader = _load(state, saved)
    assert reader.opened is not None
    assert reader.opened.ignored == ("rank-00002-00001-000000000000.safetensors",)
    assert "rank-00002-00001-000000000000.safetensors" in caplog.text
    assert _bits(state) == _bits(_state(7))


def test_a_state_of_another_dtype_shape_or_key_is_refused_untouched(tmp_path: Path) -> None:
    _save({"a": torch.ones(4), "b": torch.ones(2, 3)}, tmp_path)
    for reason, state in {
        "was saved as F32": {"a": torch.zeros(4), "b": torch.zeros(2, 3, dtype=torch.float64)},
        "Size mismatch": {"a": torch.zeros(4), "b": torch.zeros(3, 2)},
        "Missing key": {"a": torch.zeros(4), "c": torch.zeros(1)},
    }.items():
        with pytest.raises(CheckpointException, match=reason):
            _load(state, tmp_path)
        assert not state["a"].any()


def test_a_missing_step_is_said_with_those_that_are_there(saved: Path) -> None:
    with pytest.raises(CheckpointException, match="no step 6 is saved; there are 5, 7"):
        _load(_state(1), saved, step=6)
    with pytest.raises(CheckpointException, match="no step is saved here yet"):
        _load(_state(1), saved / "elsewhere")


def test_bad_requests_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="neither a repo nor a local folder"):
        HubWriter(None, step=1)
    with pytest.raises(FormatError, match="neither a repo nor a local folder"):
        HubReader(None)
    with pytest.raises(FormatError, match="no number of a step"):
        HubWriter(None, step=-1, local_dir=tmp_path)
    with pytest.raises(FormatError, match="is not a size"):
        HubWriter(None, step=1, local_dir=tmp_path, max_file_size="5 apples")
    with pytest.raises(FormatError, match="checkpoint_id"):
        dcp.save({}, checkpoint_id="x", storage_writer=HubWriter(None, step=1, local_dir=tmp_path))


def test_only_a_block_is_read_for_a_small_part(tmp_path: Path) -> None:
    _save({"big": torch.arange(2**19), "small": torch.arange(5)}, tmp_path)
    reader = _load({"small": torch.zeros(5, dtype=torch.long)}, tmp_path)
    assert reader.nbytes_read <= 2**16
    manifest = json.loads((tmp_path / step_folder(5) / "manifest.json").read_bytes())
    assert manifest["step"]["files"][0][4] == 2**16


def test_writers_and_readers_are_plain_data_that_can_go_to_another_process(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(HubWriter("org/run", step=4, local_dir=tmp_path)))  # noqa: S301  # our own
    reader = pickle.loads(pickle.dumps(HubReader("org/run", local_dir=tmp_path)))  # noqa: S301  # our own
    assert (writer.repo_id, writer.step, reader.branch) == ("org/run", 4, "resume")


MEASURED = """
import resource, sys, threading, warnings
import torch
import torch.distributed.checkpoint as dcp
from hubshard.dcp import HubReader, HubWriter
warnings.filterwarnings("ignore", message="torch.distributed is .*assuming the intent is")

folder, count = sys.argv[1], int(sys.argv[2])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
small = {"w": torch.ones(1000), "n": 1}
dcp.save(small, storage_writer=HubWriter(None, step=1, local_dir=folder))
dcp.load(small, storage_reader=HubReader(None, step=1, local_dir=folder))
state = {f"w{number}": torch.full((1024, 2048), float(number)) for number in range(count)}
before = peak()
dcp.save(state, storage_writer=HubWriter(None, step=2, local_dir=folder))
saved = peak()
for tensor in state.values():
    tensor.zero_()
dcp.load(state, storage_reader=HubReader(None, step=2, local_dir=folder))
assert all((tensor == number).all() for number, tensor in enumerate(state.values()))
print(saved - before, peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is measured as Linux counts it")
def test_saving_and_loading_need_a_few_blocks_of_memory_beside_the_state(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURED, tmp_path, "24"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    saving, loading = map(int, done.stdout.split())
    assert saving <= 32 * 2**20
    assert loading <= 96 * 2**20
