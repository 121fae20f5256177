"""Configs that are not what they should be, odd boxes of packed tensors, and a disk that runs full."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hubshard.errors import FormatError
from hubshard.header import encode_header
from hubshard.lazy import Checkpoint, from_pretrained, open_checkpoint
from hubshard.protocols import Buffer
from hubshard.tensors import Box, TensorSpec
from tests import warm

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

DEEP = "[" * 200_000 + "]" * 200_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of one tensor; its config is the test's."""
    header = encode_header([TensorSpec("w", "F32", (2,))], {"format": "pt"})
    (tmp_path / "model.safetensors").write_bytes(header + bytes(8))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (DEEP, "no valid JSON"),
        ("{", "no valid JSON"),
        ("[]", "no JSON object"),
        ("{}", "names no architecture"),
        ('{"architectures": "LlamaForCausalLM"}', "names no architecture"),
        ('{"architectures": {"0": "x"}}', "names no architecture"),
        ('{"architectures": [5]}', "names no architecture"),
        ('{"architectures": [["x"]]}', "names no architecture"),
        ('{"architectures": ["pipeline"]}', "no model class 'pipeline'"),
        ('{"architectures": ["AutoTokenizer"]}', "no model class 'AutoTokenizer'"),
        ('{"architectures": ["__builtins__"]}', "no model class '__builtins__'"),
        ('{"architectures": ["utils"]}', "no model class 'utils'"),
        ('{"architectures": ["X"], "auto_map": ["x"]}', "no model class 'X'"),
        ('{"architectures": ["X"], "auto_map": {"AutoModel": ["a.X"]}}', "no model class 'X'"),
        ('{"architectures": ["X"], "quantization_config": ["torchao"]}', "no model class 'X'"),
        ('{"architectures": ["X"], "quantization_config": "torchao"}', "no model class 'X'"),
        (json.dumps({"architectures": ["X" * 100_000]}), "no model class 'XXX"),
    ],
)
def test_a_config_that_is_not_what_it_should_be_is_refused_in_one_line(folder: Path, config: str, says: str) -> None:
    (folder / "config.json").write_text(config)
    with pytest.raises(FormatError, match=says) as refused:
        from_pretrained(folder)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("config", [DEEP, "{", "[]", "{}", '{"base_model_name_or_path": 5}'])
def test_so_is_that_of_an_adapter(folder: Path, config: str) -> None:
    pytest.importorskip("peft")
    (folder / "adapter_config.json").write_text(config)
    with pytest.raises(FormatError, match=r"adapter_config\.json"):
        from_pretrained(folder)


def test_a_small_file_that_is_large_is_not_read(folder: Path) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate(2**29)
    with open_checkpoint(folder) as checkpoint, pytest.raises(FormatError, match="too many for a file"):
        checkpoint.read_file("config.json")


class Packed:
    """Twelve elements of four bits."""

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec("p", "F4", (2, 6))]

    def aliases(self) -> dict[str, str]:
        return {}

    def read(self, name: str, box: Box) -> Buffer:
        del name
        assert box.offset[1] % 2 == 0
        start = (box.offset[0] * 6 + box.offset[1]) // 2
        return bytes(range(6))[start : start + box.numel // 2]


@pytest.mark.parametrize("box", [Box((0, 0), (1, 3)), Box((0, 1), (1, 2)), Box((0, 1), (2, 5)), Box((1, 5), (1, 1))])
def test_boxes_of_a_packed_tensor_that_cut_a_byte_are_refused(box: Box, tmp_path: Path) -> None:
    header = encode_header([TensorSpec("p", "F4", (2, 6))], {})
    (tmp_path / "model.safetensors").write_bytes(header + bytes(range(6)))
    for checkpoint in (Checkpoint(Packed()), open_checkpoint(tmp_path)):
        assert bytes(checkpoint["p"].read()) == bytes(range(6))
        assert bytes(checkpoint["p"].read(Box((1, 2), (1, 2)))) == b"\x04"
        with pytest.raises(FormatError, match="does not fall on whole bytes"):
            checkpoint["p"].read(box)


def test_a_disk_that_runs_full_costs_the_cache_its_growth_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    (tmp_path / "a").write_bytes(bytes(range(256)) * 4096)
    code = """
    import resource, sys
    from pathlib import Path
    from hubshard.lazy.byte_cache import CachedReader
    from hubshard.store.local import LocalStore
    store = LocalStore(Path(sys.argv[1]))
    at = store.head("main")
    cached = CachedReader(store, cap_bytes=2**30, folder=Path(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    for _ in range(3):
        for start in range(0, 2**20, 2**16):
            into = bytearray(2**16)
            cached.read(at, "a", start, start + 2**16, memoryview(into))
            assert into == bytes(range(256)) * 256
    print(len(cached._kept))
    """
    (tmp_path / "cache").mkdir()
    done = warm.run(["-c", textwrap.dedent(code), tmp_path, tmp_path / "cache"], imports="torch")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 4


def test_a_class_of_a_config_object_is_taken_as_before(folder: Path) -> None:
    config: Any = transformers.BertConfig(
        hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4, architectures=["BertModel"]
    )
    loaded = from_pretrained(folder, config=config)
    assert type(loaded).__name__ == "BertModel"
