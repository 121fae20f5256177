"""What is wrong with a checkpoint is told with its place, and with what to do."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hubshard.errors import FormatError, HubshardError, NotFoundError
from hubshard.lazy import load_into, offload, open_checkpoint
from hubshard.paths import check_case

SHARD = "model-00001-of-00001.safetensors"
GOOD = {"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}
HEADERS: dict[str, Any] = {
    "a gap": {"a": {"dtype": "F32", "shape": [15], "data_offsets": [4, 64]}},
    "too short": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
    "a dtype": {"a": {"dtype": "F33", "shape": [16], "data_offsets": [0, 64]}},
    "a shape": {"a": {"dtype": "F32", "shape": [15], "data_offsets": [0, 64]}},
    "a negative shape": {"a": {"dtype": "F32", "shape": [-16], "data_offsets": [0, 64]}},
    "no offsets": {"a": {"dtype": "F32", "shape": [16]}},
    "metadata": GOOD | {"__metadata__": {"a": 1}},
    "a list": [1],
}
INDEXES: dict[str, Any] = {
    "a list": [1],
    "no map": {},
    "numbers": {"weight_map": {"a": 1}},
    "a list as map": {"weight_map": [1]},
    "an empty map": {"weight_map": {}},
    "a path": {"weight_map": {"a": f"../{SHARD}"}},
    "another suffix": {"weight_map": {"a": "a.txt"}},
    "metadata": {"metadata": 3, "weight_map": {"a": SHARD}},
    "another tensor": {"weight_map": {"b": SHARD}},
    "another file": {"weight_map": {"a": "model-00002-of-00002.safetensors"}},
}


def weights(header: Any) -> bytes:
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(64)


def refusal(folder: Path, **where: Any) -> HubshardError:
    with pytest.raises(HubshardError) as caught:
        open_checkpoint(folder, **where)
    assert str(caught.value).startswith(f"{folder}: ")
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_lies_is_told_with_what_to_do(tmp_path: Path, what: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(weights(HEADERS[what]))
    assert "model.safetensors" in str(refusal(tmp_path))


@pytest.mark.parametrize("raw", [bytes(100), (1 << 40).to_bytes(8, "little") + bytes(92), b""])
def test_what_is_no_header_is_told_with_what_to_do(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    assert "model.safetensors" in str(refusal(tmp_path))


@pytest.mark.parametrize("what", INDEXES)
def test_an_index_that_lies_is_told_with_what_to_do(tmp_path: Path, what: str) -> None:
    (tmp_path / SHARD).write_bytes(weights(GOOD))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(INDEXES[what]))
    assert "model.safetensors.index.json" in str(refusal(tmp_path))


@pytest.mark.parametrize("text", ["nope", "[1]"])
def test_a_bad_config_is_told_with_what_to_do(tmp_path: Path, text: str) -> None:
    for name in ("model.safetensors", "adapter_model.safetensors"):  # so that the config is asked
        (tmp_path / name).write_bytes(weights(GOOD))
    (tmp_path / "config.json").write_text(text)
    assert "config.json" in str(refusal(tmp_path))


def test_a_folder_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    for name in ("unet", "vae"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "diffusion_pytorch_model.safetensors").write_bytes(weights(GOOD))
    error = refusal(tmp_path, subfolder="nope")
    assert isinstance(error, NotFoundError)
    assert (str(error), error.hint) == (
        f"{tmp_path}: nope: there is no such folder",
        "there are checkpoints in unet, vae",
    )


@pytest.mark.parametrize(
    "call",
    [load_into, lambda module, source: offload(module, source, budget="1GB").__enter__()],
    ids=["load", "offload"],
)
def test_what_is_no_module_is_told_as_that(tmp_path: Path, call: Callable[[Any, Path], Any]) -> None:
    pytest.importorskip("torch")
    (tmp_path / "model.safetensors").write_bytes(weights(GOOD))
    with pytest.raises(FormatError, match="a int holds no parameters") as caught:
        call(3, tmp_path)
    assert "nn.Module" in str(caught.value.hint)


def test_two_names_that_look_the_same_are_told_apart() -> None:
    names = [unicodedata.normalize(form, "é.txt") for form in ("NFC", "NFD")]
    with pytest.raises(FormatError) as caught:
        check_case(names, path="org/model@main", hint="leave one out")
    assert str(caught.value) == (
        "org/model@main: 'e\\u0301.txt' and '\\xe9.txt' are one file on a disk without regard to Unicode's forms"
    )
    assert caught.value.hint == "leave one out"
