"""Pulls of repos with a checkpoint in each of several folders into a directory: what stays, what goes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from hubshard.errors import FormatError
from hubshard.events import Event, ignore
from hubshard.fetch.folder import FolderLayout
from hubshard.fetch.pulling import pull_from
from hubshard.sources.selection import holds_weights, is_entry_point

STEM = "diffusion_pytorch_model"
ONE = b'\x39\0\0\0\0\0\0\0{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}    '
"""A safetensors file of one byte, but for that byte."""


def into(directory: Path, variant: str | None = None) -> FolderLayout:
    return FolderLayout(directory, "org/model", variant=variant, on_event=ignore)


@pytest.mark.parametrize(("before", "after"), [("sharded", "single"), ("single", "sharded")])
def test_stale_weights_leave_the_folder_of_each_component(
    memory: ModuleType, tmp_path: Path, before: str, after: str
) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.pipeline(1, unet=before))
    pull_from(hub, into(tmp_path), memory.request())
    new = memory.pipeline(2, unet=after)
    hub.put(new)
    assert memory.held(pull_from(hub, into(tmp_path), memory.request())) == new


def test_adapters_and_other_variants_stay_in_the_folder_of_a_component(memory: ModuleType, tmp_path: Path) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.pipeline(1, unet="sharded"))
    pull_from(hub, into(tmp_path), memory.request())
    mine = {f"unet/{STEM}.bf16.safetensors": b"mine", "unet/adapter_model.safetensors": b"mine", "unet/x.bin": b"mine"}
    for path, content in mine.items():
        (tmp_path / path).write_bytes(content)
    new = memory.pipeline(2, unet="single")
    hub.put(new)
    assert memory.held(pull_from(hub, into(tmp_path), memory.request())) == new | mine


def test_an_adapter_repo_replaces_its_own_weights(memory: ModuleType, tmp_path: Path) -> None:
    hub = memory.MemoryHub()
    hub.put(
        {
            "adapter_config.json": b"{}",
            "style/adapter_model.safetensors": ONE + b"1",
            "adapter_model.safetensors": ONE + b"1",
        }
    )
    pull_from(hub, into(tmp_path), memory.request())
    shards = [f"style/adapter_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = b'{"metadata": {}, "weight_map": {"a": "%b", "b": "%b"}}' % tuple(
        shard.removeprefix("style/").encode() for shard in shards
    )
    new = {shards[0]: ONE + b"2", shards[1]: ONE + b"3", "style/adapter_model.safetensors.index.json": index}
    new |= {"adapter_config.json": b"{}", "adapter_model.safetensors": ONE + b"4"}
    hub.put(new)
    assert memory.held(pull_from(hub, into(tmp_path), memory.request())) == new


@pytest.mark.parametrize("name", [f"{STEM}.safetensors", f"{STEM}.bin", "model.safetensors"])
def test_weights_in_the_folder_of_a_component_that_no_pull_put_there_are_refused(
    memory: ModuleType, tmp_path: Path, name: str
) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.pipeline(1, unet="sharded"))
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / name).write_bytes(b"mine")
    with pytest.raises(FormatError, match=name):
        pull_from(hub, into(tmp_path), memory.request())
    assert memory.held(tmp_path) == {f"unet/{name}": b"mine"}


def test_a_component_that_lost_its_variant_keeps_none_of_it(memory: ModuleType, tmp_path: Path) -> None:
    hub = memory.MemoryHub()
    both = memory.pipeline(1, unet="single")
    both |= {f"{name}/{STEM}.fp16.safetensors": ONE + b"h" for name in ("unet", "vae")}
    hub.put(both)
    pull_from(hub, into(tmp_path, "fp16"), memory.request(variant="fp16"))
    del both[f"vae/{STEM}.fp16.safetensors"]
    hub.put(both)
    shown = pull_from(hub, into(tmp_path, "fp16"), memory.request(variant="fp16"))
    assert set(memory.held(shown)) == set(both) - {f"unet/{STEM}.safetensors"}


PLAIN = {"config.json": b"{}", "model.safetensors": ONE + b"p"}
EXTRA = {
    "extra/config.json": b"{}",
    f"extra/{STEM}-00001-of-00001.safetensors": ONE + b"e",
    f"extra/{STEM}.safetensors.index.json": b'{"metadata": {}, "weight_map": {"a": "%b-00001-of-00001.safetensors"}}'
    % STEM.encode(),
}


def weights(folder: Path) -> set[str]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    names = [path.as_posix() for path in files if ".cache" not in path.parts]
    return {name for name in names if is_entry_point(name) or holds_weights(name)}


def test_weights_of_folders_that_hold_none_any_more_go(memory: ModuleType, tmp_path: Path) -> None:
    hub = memory.MemoryHub()
    pipeline = memory.pipeline(1, unet="single")
    for files in (PLAIN, pipeline | EXTRA, pipeline, PLAIN, pipeline | EXTRA, PLAIN):
        hub.put(files)
        pull_from(hub, into(tmp_path), memory.request())
        assert weights(tmp_path) == {path for path in files if is_entry_point(path) or holds_weights(path)}
        assert memory.held(tmp_path).items() >= files.items()


def test_weights_of_other_folders_that_the_user_has_put_or_changed_stay(memory: ModuleType, tmp_path: Path) -> None:
    hub = memory.MemoryHub()
    pipeline = memory.pipeline(1, unet="single")
    hub.put(pipeline | EXTRA | {"more/model.safetensors": ONE + b"m"})
    pull_from(hub, into(tmp_path), memory.request())
    mine = {"extra/mine.safetensors": b"mine", "more/model.safetensors": b"mine", "own/model.safetensors": b"mine"}
    (tmp_path / "own").mkdir()
    for path, content in mine.items():
        (tmp_path / path).write_bytes(content)
    hub.put(pipeline)
    events: list[Event] = []
    layout = FolderLayout(tmp_path, "org/model", variant=None, on_event=events.append)
    pull_from(hub, layout, memory.request())
    assert memory.held(tmp_path) == pipeline | mine | {"extra/config.json": b"{}"}
    assert [event.path for event in events if event.kind == "warning"] == ["more/model.safetensors"]


@pytest.mark.parametrize("part", [{"include": ["unet/*"]}, {"exclude": ["vae/*"]}])
def test_a_pull_of_a_part_leaves_other_folders_alone_and_the_next_whole_one_does_not(
    memory: ModuleType, tmp_path: Path, part: dict[str, list[str]]
) -> None:
    hub = memory.MemoryHub()
    pipeline = memory.pipeline(1, unet="single")
    hub.put(pipeline | EXTRA)
    pull_from(hub, into(tmp_path), memory.request())
    hub.put(pipeline)
    pull_from(hub, into(tmp_path), memory.request(**part))
    assert memory.held(tmp_path) == pipeline | EXTRA
    pull_from(hub, into(tmp_path), memory.request())
    assert memory.held(tmp_path) == pipeline | {"extra/config.json": b"{}"}


def test_weights_of_another_repo_in_other_folders_stay(memory: ModuleType, tmp_path: Path) -> None:
    hub, other = memory.MemoryHub(), memory.MemoryHub()
    hub.put(memory.pipeline(1, unet="single") | EXTRA)
    pull_from(hub, into(tmp_path), memory.request())
    other.put(PLAIN)
    pull_from(other, FolderLayout(tmp_path, "org/other", variant=None, on_event=ignore), memory.request())
    assert memory.held(tmp_path) == memory.pipeline(1, unet="single") | EXTRA | PLAIN


def test_weights_behind_a_link_are_not_deleted(memory: ModuleType, tmp_path: Path) -> None:
    hub, directory, outside = memory.MemoryHub(), tmp_path / "model", tmp_path / "outside"
    pipeline = memory.pipeline(1, unet="single")
    hub.put(pipeline | EXTRA)
    pull_from(hub, into(directory), memory.request())
    (directory / "extra").rename(outside)
    (directory / "extra").symlink_to(outside)
    hub.put(pipeline)
    pull_from(hub, into(directory), memory.request())
    assert {f"extra/{path}": content for path, content in memory.held(outside).items()} == EXTRA


def test_pickles_that_a_component_would_need_are_told_of(memory: ModuleType, tmp_path: Path) -> None:
    hub = memory.MemoryHub()
    lost = {"safety_checker/config.json": b"{}", "safety_checker/pytorch_model.bin": b"pickle"}
    hub.put(memory.pipeline(1, unet="single") | lost)
    events: list[Event] = []
    pull_from(hub, into(tmp_path), memory.request(on_event=events.append))
    (warning,) = [event.detail for event in events if event.kind == "warning"]
    assert "safety_checker/pytorch_model.bin" in warning
    assert "pickles" in warning
