"""The models of the demo: written without torch and numpy, readable by everybody, and a second version that differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from hubshard.cli.demo.model import nudge, random_llama
from hubshard.cli.demo.run import _check, _repo_name, _same
from hubshard.errors import IntegrityError
from hubshard.lazy import open_checkpoint
from hubshard.target import check_repo_id


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("llama")).path


def test_the_random_model_holds_small_finite_numbers_of_both_signs(llama: Path) -> None:
    torch = pytest.importorskip("torch")
    with safe_open(llama / "model.safetensors", framework="pt") as file:
        tensor = file.get_tensor("model.layers.3.mlp.up_proj.weight")
    assert tensor.shape == (1536, 512)
    assert tensor.dtype == torch.bfloat16
    assert tensor.abs().min() >= 2**-7
    assert tensor.abs().max() < 2**-5
    assert 0.4 < (tensor > 0).float().mean() < 0.6


def test_the_random_model_is_the_same_for_the_same_seed(llama: Path, tmp_path: Path) -> None:
    again = random_llama(tmp_path).path
    assert (again / "model.safetensors").read_bytes() == (llama / "model.safetensors").read_bytes()


def test_the_second_version_differs_in_every_tensor_but_the_largest(llama: Path, tmp_path: Path) -> None:
    with open_checkpoint(llama) as first:
        assert first.manifest is not None
        changed = nudge(llama, first.manifest, tmp_path / "second")
        with open_checkpoint(tmp_path / "second") as second:
            same = [name for name in first if first[name].read() == second[name].read()]
            assert {name: second[name].spec for name in second} == {name: first[name].spec for name in first}
            total = first.nbytes
    assert same == ["model.embed_tokens.weight"]
    assert changed == total - 32000 * 512 * 2
    assert (tmp_path / "second" / "config.json").read_bytes() == (llama / "config.json").read_bytes()


@pytest.mark.parametrize("name", ["my model", "..", "a--b", "-x-", "v1.0.git", "Modell-ü", "ok_name"])
def test_any_directory_gives_a_repo_name_that_the_hub_takes(name: str) -> None:
    assert check_repo_id(f"demo/{_repo_name(Path('/somewhere') / name)}")


def test_a_proof_that_fails_is_an_error() -> None:
    with pytest.raises(IntegrityError, match="could not prove that two and two are four"):
        _check(_same({"a": "1"}, {"a": "2"}), "two and two are four")
    assert not _same({}, {})
    assert not _same({"a": "1"}, {"a": "1", "b": "2"})
