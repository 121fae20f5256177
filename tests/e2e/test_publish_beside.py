"""What lies in a repo beside what is published, before it begins or by the time that it ends: nothing is mixed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from huggingface_hub import HfApi
from safetensors.numpy import save_file

import hubshard
from hubshard.errors import ConflictError, FormatError
from hubshard.events import Event

if TYPE_CHECKING:
    from tests.conftest import Hub

ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}


class Lab:
    """A repo, with what was told of the last publish to it."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.hub = hub
        self.repo = f"org/{name}"
        self.api = HfApi(endpoint=hub.url, token="hf_test")
        self.told: list[str] = []

    def push(self, source: Any, meanwhile: Callable[[], object] | None = None, **options: Any) -> hubshard.Published:
        """Publish; `meanwhile` is done when the first file is staged."""
        self.told = []
        to_do = [] if meanwhile is None else [meanwhile]

        def on_event(event: Event) -> None:
            if event.kind == "staged" and to_do:
                to_do.pop()()
            if event.kind == "warning":
                self.told.append(event.detail)

        return hubshard.push_to_hub(
            source, self.repo, endpoint=self.hub.url, token="hf_test", on_event=on_event, **options
        )

    def put(self, path: str, content: bytes = b"{}") -> None:
        self.api.upload_file(path_or_fileobj=content, path_in_repo=path, repo_id=self.repo)

    def files(self) -> set[str]:
        return set(self.api.list_repo_files(self.repo)) - {".gitattributes"}

    def received(self) -> int:
        counted = self.hub.counters(f"models/{self.repo}")
        return int(counted["xet_received"]) + int(counted["lfs_received"]) + int(counted["regular_received"])

    def refuses(self, source: Any, match: str) -> FormatError:
        """Nothing is sent, nor by a dry run said to be well."""
        before = self.received(), self.files()
        for dry_run in (True, False):
            with pytest.raises(FormatError, match=match) as told:
                self.push(source, dry_run=dry_run)
        assert (self.received(), self.files()) == before
        return told.value


@pytest.fixture
def lab(module_hub: Hub, request: pytest.FixtureRequest) -> Lab:
    return Lab(module_hub, re.sub(r"[^a-z0-9]+", "-", request.node.name)[5:90].strip("-"))


def write(folder: Path, *stems: str, seed: int = 0, **configs: object) -> Path:
    """Weights of these stems, and configs."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem in stems:
        tensors = {"w": np.random.default_rng(seed).standard_normal((64, 128), dtype=np.float32)}
        save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", "model", config={"model_type": "llama"})


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write(tmp_path / "adapter", "adapter_model", seed=1, adapter_config={"peft_type": "LORA"})


def test_a_model_takes_the_place_of_an_adapter_with_a_word(lab: Lab, model: Path, adapter: Path) -> None:
    lab.push(adapter)
    before = len(lab.api.list_repo_commits(lab.repo))
    assert not lab.push(model, dry_run=True).changed
    [foretold] = lab.told
    done = lab.push(model)
    assert lab.told == [foretold]
    assert foretold.startswith(f"{lab.repo}: adapter_config.json, adapter_model.safetensors: removed")
    assert lab.files() == {"config.json", "model.safetensors"}
    assert set(done.deleted) == ADAPTER
    assert len(lab.api.list_repo_commits(lab.repo)) == before + 1
    assert not lab.push(model).changed
    assert lab.told == []


def test_an_adapter_is_refused_where_a_model_lies(lab: Lab, model: Path, adapter: Path) -> None:
    lab.push(model)
    error = lab.refuses(adapter, f"{lab.repo} holds a model where the adapter would lie, model.safetensors: ")
    assert error.hint is not None
    assert "to a repo of its own" in error.hint
    assert "remove the model first" in error.hint
    lab.api.delete_file("model.safetensors", lab.repo)
    lab.push(adapter)
    assert lab.files() == {"config.json", *ADAPTER}


def test_in_folders_and_of_pickles_it_is_the_same(lab: Lab, model: Path, adapter: Path) -> None:
    both = model.parent / "both"
    adapter.rename(write(both, "model") / "style")
    lab.push(both)
    assert lab.files() >= {"model.safetensors", *(f"style/{name}" for name in ADAPTER)}
    for name in ADAPTER:
        lab.api.delete_file(f"style/{name}", lab.repo)
    lab.put("style/pytorch_model.bin", b"x")
    lab.refuses(both, "style/pytorch_model.bin")


def test_a_source_that_holds_both_is_published_as_it_is(lab: Lab, model: Path, adapter: Path) -> None:
    for file in adapter.iterdir():
        file.rename(model / file.name)
    lab.push(model)
    lab.push(write(model, "adapter_model", seed=2))
    assert lab.files() == {"config.json", "model.safetensors", *ADAPTER}
    assert lab.told == []


def test_what_comes_meanwhile_is_neither_mixed_nor_lost(lab: Lab, model: Path, adapter: Path) -> None:
    lab.push(write(model.parent / "other", "model"), revision="other")

    def add(folder: Path) -> Callable[[], object]:
        return lambda: lab.api.upload_folder(folder_path=folder, repo_id=lab.repo)

    with pytest.raises(ConflictError, match=r"adapter_config\.json, adapter_model\.safetensors, which this publish"):
        lab.push(model, add(adapter))
    assert lab.files() == ADAPTER
    lab.push(model, lambda: lab.put("NOTES.md", b"hi"))
    assert lab.files() == {"config.json", "model.safetensors", "NOTES.md"}
    lab.api.delete_files(lab.repo, ["config.json", "model.safetensors"])
    with pytest.raises(FormatError, match="holds a model where the adapter would lie"):
        lab.push(adapter, add(model))
    assert lab.files() == {"config.json", "model.safetensors", "NOTES.md"}


def test_each_check_of_a_tree_is_made_of_a_new_parent_too(lab: Lab, model: Path) -> None:
    write(model, config={"model_type": "x"})
    lab.push(write(model.parent / "other", "model"))
    for path, content, match in (
        ("Config.json", b"{}", "are one file on a disk without regard to case"),
        ("config.json/x", b"", "'config.json' would be a file and"),
        (".gitignore", b"*.safetensors\n", r"\.gitignore of .* refuses model\.safetensors"),
    ):
        before = lab.files()
        with pytest.raises(FormatError, match=match):
            lab.push(model, partial(lab.put, path, content))
        assert lab.files() == {*before, path}
        lab.api.delete_file(path, lab.repo)
    lab.push(model, lambda: lab.put("old/model.safetensors"))
    assert any("keeps weights that this publish leaves alone in old" in note for note in lab.told)


@pytest.mark.parametrize(("mine", "theirs"), [("unet/x.txt", "unet"), ("unet", "unet/x.txt"), ("Unet", "unet/x.txt")])
def test_a_file_that_would_be_a_folder_is_refused_before_anything_is_sent(
    lab: Lab, model: Path, mine: str, theirs: str
) -> None:
    lab.push(model)
    lab.put(theirs, b"x")
    (model / mine).parent.mkdir(exist_ok=True)
    (model / mine).write_text("y")
    error = lab.refuses(model, f"{theirs!r} is in {lab.repo}")
    assert error.hint == "delete or rename the one in the repo, or rename the one to publish"


@pytest.mark.parametrize("file", [None, "trainer_state.json"])
def test_an_adapter_goes_along_whatever_its_folder_is_called_but_no_step_of_a_run(
    lab: Lab, adapter: Path, file: str | None
) -> None:
    second = {f"checkpoint-5/{name}" for name in ADAPTER}
    shutil.copytree(adapter, adapter / "checkpoint-5")
    if file is not None:
        (adapter / "checkpoint-5" / file).write_text("{}")
    lab.push(adapter)
    assert (second <= lab.files()) == (file is None)
    if file is None:
        copy = Lab(lab.hub, lab.repo.partition("/")[2] + "-copy")
        copy.push(lab.repo)
        assert second <= copy.files()


def test_of_a_pipeline_that_a_model_takes_the_place_of_the_list_goes_with_its_components(lab: Lab, model: Path) -> None:
    lab.push(model)
    lab.put("unet/diffusion_pytorch_model.safetensors")
    lab.push(model)
    assert f"`hf repos delete-files {lab.repo} 'unet/*'`" in lab.told[-1]
    lab.put("model_index.json", b'{"unet": ["diffusers", "UNet2DModel"]}')
    lab.push(model)
    assert f"`hf repos delete-files {lab.repo} 'unet/*' model_index.json`" in lab.told[-1]


def test_weights_of_another_loader_in_the_same_folder_are_told_of(lab: Lab, model: Path) -> None:
    unet = write(model.parent / "unet", "diffusion_pytorch_model", config={"_class_name": "UNet2DModel"})
    lab.push(model)
    lab.push(unet)
    [note] = lab.told
    assert note.startswith(f"{lab.repo} keeps weights that this publish leaves alone in the root: ")
    assert f"`hf repos delete-files {lab.repo} model.safetensors`" in note
    lab.api.delete_file("model.safetensors", lab.repo)
    lab.put("diffusion_pytorch_model.fp16.safetensors")
    lab.push(unet)
    assert lab.told == []
    lab.push(model)
    [note] = lab.told
    assert "diffusion_pytorch_model.fp16.safetensors diffusion_pytorch_model.safetensors`" in note


def test_a_link_that_leads_out_stays_behind_where_it_is_excluded(lab: Lab, model: Path) -> None:
    (model / "checkpoint-5").symlink_to(model.parent)
    lab.push(model)
    (model / "notes").symlink_to(model.parent)
    (model / "log.txt").symlink_to(model / "gone")
    for excluded in ((), ("notes",), ("notes/*",), ("log.txt",)):
        with pytest.raises(FormatError, match="links to") as told:
            lab.push(model, exclude=list(excluded))
        assert "a publish leaves it behind with `exclude`" in str(told.value.hint)
    lab.push(model, exclude=["notes/*", "*.txt"])
    assert lab.files() == {"config.json", "model.safetensors"}


def test_a_folder_whose_weights_git_ignores_is_published_twice(lab: Lab, model: Path) -> None:
    (model / ".gitignore").write_text("*.safetensors\n")
    for _ in range(2):
        lab.push(model)
        [note] = lab.told
        assert note.startswith(".gitignore: left out")
    assert lab.files() == {"config.json", "model.safetensors"}
    lab.put(".gitignore", b"*.safetensors\n")
    error = lab.refuses(model, "refuses model.safetensors")
    assert f"delete it with `hf repos delete-files {lab.repo} .gitignore`" in str(error.hint)
