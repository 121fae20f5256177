"""Repos that hold a checkpoint in each of several folders, read as one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hubshard.errors import FormatError, NotFoundError
from hubshard.header import encode_header
from hubshard.index import encode_index
from hubshard.protocols import Revision
from hubshard.sources.model_index import component_names
from hubshard.sources.several import SeveralCheckpoints, open_each, variants_by_folder
from hubshard.store.local import LocalStore
from hubshard.tensors import Box, TensorSpec

STEM = "diffusion_pytorch_model"


def write(path: Path, **tensors: bytes) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    specs = [TensorSpec(name, "U8", (len(data),)) for name, data in tensors.items()]
    path.write_bytes(encode_header(specs, {"format": "pt"}) + b"".join(tensors.values()))


def at(folder: Path) -> tuple[LocalStore, Revision]:
    store = LocalStore(folder)
    head = store.head("main")
    assert head is not None
    return store, head


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    folder = tmp_path / "pipeline"
    write(folder / "vae" / f"{STEM}.safetensors", w=b"vae")
    write(folder / "vae" / f"{STEM}.fp16.safetensors", w=b"v")
    write(folder / "text" / "model.safetensors", w=b"text")
    write(folder / "unet" / "a.safetensors", w=b"unet", b=b"1")
    write(folder / "unet" / "b.safetensors", c=b"23")
    index = encode_index({"w": "a.safetensors", "b": "a.safetensors", "c": "b.safetensors"}, {})
    (folder / "unet" / f"{STEM}.safetensors.index.json").write_bytes(index)
    return folder


@pytest.mark.parametrize(
    ("paths", "variant", "chosen"),
    [
        (("a/model.safetensors", "model.safetensors"), None, {"": None, "a": None}),
        (("a/model.fp16.safetensors", "b/model.safetensors"), "fp16", {"a": "fp16", "b": None}),
        (("a/model.safetensors.index.fp16.json", "b/model.safetensors"), "fp16", {"a": "fp16", "b": None}),
        (("a/model.safetensors", "b/model.safetensors"), "fp16", {"a": "fp16", "b": "fp16"}),
        (("a/model.fp16.safetensors",), None, {"a": None}),
        (("a/x.safetensors", "x.safetensors"), None, {"": None}),
        (("a/model.fp16.bin", "x.safetensors"), "fp16", {"": "fp16"}),
    ],
)
def test_a_folder_without_the_variant_gives_its_plain_weights(
    paths: tuple[str, ...], variant: str | None, chosen: dict[str, str | None]
) -> None:
    assert variants_by_folder(paths, variant=variant) == chosen


def test_a_folder_that_should_hold_a_checkpoint_is_one_to_open() -> None:
    paths = ("a/model.fp16.safetensors", "b/model.bin")
    assert variants_by_folder(paths, variant="fp16", expected=["b", "a"]) == {"b": None, "a": "fp16"}
    assert variants_by_folder(paths[1:], variant="fp16", expected=["b"]) == {"b": None}


def test_tensors_are_called_by_folder_and_read_from_it(pipeline: Path) -> None:
    found = SeveralCheckpoints(open_each(*at(pipeline), path=None, variant=None))
    assert {spec.name: bytes(found.read(spec.name, spec.box)) for spec in found.specs()} == {
        "text/w": b"text",
        "unet/w": b"unet",
        "unet/b": b"1",
        "unet/c": b"23",
        "vae/w": b"vae",
    }
    assert found.read("unet/c", Box((1,), (1,))) == b"3"
    assert found.manifest.validate() is found.manifest
    assert set(found.manifest.files) == {
        "text/model.safetensors",
        "unet/a.safetensors",
        "unet/b.safetensors",
        f"vae/{STEM}.safetensors",
    }


def test_a_variant_is_taken_where_it_is(pipeline: Path) -> None:
    found = SeveralCheckpoints(open_each(*at(pipeline), path=None, variant="fp16"))
    assert found.read("vae/w", Box((0,), (1,))) == b"v"
    assert found.read("text/w", Box((0,), (4,))) == b"text"


def test_names_of_the_root_are_as_they_are_and_tied_weights_keep_their_names(tmp_path: Path) -> None:
    data = encode_header([TensorSpec("w", "U8", (2,))], {"format": "pt", "head": "w"}) + b"ab"
    for name in ("model.safetensors", "2_Dense/model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    found = SeveralCheckpoints(open_each(*at(tmp_path), path=None, variant=None))
    assert [spec.name for spec in found.specs()] == ["w", "2_Dense/w"]
    assert found.aliases() == {"head": "w", "2_Dense/head": "2_Dense/w"}
    with pytest.raises(FormatError, match="no tensor 'w2'"):
        found.read("w2", Box((0,), (1,)))


def test_one_name_for_two_tensors_is_refused(tmp_path: Path) -> None:
    specs = [TensorSpec("unet/w", "U8", (1,))]
    (tmp_path / "model.safetensors").write_bytes(encode_header(specs, {"format": "pt"}) + b"1")
    write(tmp_path / "unet" / "model.safetensors", w=b"2")
    with pytest.raises(FormatError, match="unet/w"):
        SeveralCheckpoints(open_each(*at(tmp_path), path=None, variant=None))


def test_one_broken_component_is_an_error_that_names_it(pipeline: Path) -> None:
    (pipeline / "unet" / "b.safetensors").unlink()
    with pytest.raises(NotFoundError, match="unet/"):
        open_each(*at(pipeline), path=None, variant=None)


def test_the_components_are_what_has_a_library_and_a_class(tmp_path: Path) -> None:
    store, head = at(tmp_path)
    assert component_names(store, head, store.list(head)) == ()
    table = {
        "_class_name": ["a", "b"],
        "unet": ["diffusers", "UNet"],
        "safety_checker": [None, None],
        "force_zeros": True,
        "sizes": [1, 2],
        "scheduler": ["diffusers", "DDIM"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(table))
    store, head = at(tmp_path)
    assert component_names(store, head, store.list(head)) == ["unet", "scheduler"]
    (tmp_path / "model_index.json").write_text("[]")
    store, head = at(tmp_path)
    with pytest.raises(FormatError, match=r"model_index\.json"):
        component_names(store, head, store.list(head))
