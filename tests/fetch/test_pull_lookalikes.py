"""What lies in a repo under the name of safetensors and is something else is refused before it is shown."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from hubshard.errors import FormatError, StoreError, UnsafeFormatError
from hubshard.events import ignore
from hubshard.fetch.folder import FolderLayout
from hubshard.fetch.hf_cache import CacheLayout
from hubshard.fetch.layout import Layout
from hubshard.fetch.pulling import pull_from
from hubshard.fetch.weights import check_safetensors
from hubshard.header import check_framing

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 5\n"
WRONG: dict[str, tuple[bytes, str]] = {
    "a page": (b"<!DOCTYPE html><html>not found</html>", "HTML"),
    "a pointer": (POINTER, "Git LFS pointer"),
    "a pickle": (b"\x80\x04" + bytes(100), "pickle"),
    "nothing": (b"", "0 bytes"),
    "text": (b"not found, sorry", "not a safetensors"),
}


def layout_of(kind: str, folder: Path) -> Layout:
    if kind == "cache":
        return CacheLayout(folder, "org/model")
    return FolderLayout(folder, "org/model", variant=None, on_event=ignore)


@pytest.mark.parametrize("kind", ["cache", "directory"])
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("path", ["model.safetensors", "adapter_model.safetensors", "sub/extra.SafeTensors"])
def test_what_is_called_safetensors_and_is_none_is_not_shown(
    memory: ModuleType, tmp_path: Path, kind: str, what: str, path: str
) -> None:
    content, said = WRONG[what]
    hub = memory.MemoryHub()
    hub.put(memory.single(1, 500))
    folder = pull_from(hub, layout_of(kind, tmp_path), memory.request())
    hub.put(memory.single(2, 600) | {path: content})
    include = ["*"] if path.startswith("sub/") else None
    for _ in range(2):  # also when it has arrived
        with pytest.raises(FormatError, match=said) as caught:
            pull_from(hub, layout_of(kind, tmp_path), memory.request(include=include))
        assert f"org/model@main: {path}" in str(caught.value)
        assert f"(--exclude {path}, in Python exclude=['{path}'])" in str(caught.value.hint)
        assert isinstance(caught.value, UnsafeFormatError) == (what == "a pickle")
    assert memory.held(folder) == memory.single(1, 500)
    without = memory.request(include=include, exclude=[path])
    new = memory.single(2, 600)
    if path in new:
        del new[path]
    assert memory.held(pull_from(hub, layout_of(kind, tmp_path), without)).items() >= new.items()


def test_a_truncated_file_that_the_repo_holds_is_refused(memory: ModuleType, tmp_path: Path) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.single(1, 500) | {"model.safetensors": memory.weights(1, 500)[:-1]})
    with pytest.raises(FormatError, match=r"describes 500 bytes, the file has 499"):
        pull_from(hub, layout_of("directory", tmp_path), memory.request())
    assert memory.held(tmp_path) == {}


def test_weights_of_a_dtype_that_is_not_known_yet_are_pulled(memory: ModuleType, tmp_path: Path) -> None:
    files = memory.single(1, 500)
    files["model.safetensors"] = files["model.safetensors"].replace(b'"U8"', b'"F2"')
    hub = memory.MemoryHub()
    hub.put(files)
    assert memory.held(pull_from(hub, layout_of("directory", tmp_path), memory.request())) == files


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b'{"w":{"data_offsets":[0,4]}}', r"describes 40 bytes, the file has 44"),
        (b'{"w":{"data_offsets":[1,8]}}', "overlap or gap"),
        (b'{"w":{"data_offsets":[8,0]}}', "two counts"),
        (b'{"w":{"data_offsets":"x"}}', "two counts"),
        (b'{"w":[0,8]}', "two counts"),
        (b'{"w":', "no valid JSON"),
    ],
)
def test_what_is_not_as_long_as_its_header_says_is_refused(header: bytes, said: str) -> None:
    raw = len(header).to_bytes(8, "little") + header
    with pytest.raises(FormatError, match=said):
        check_framing(raw, file_nbytes=len(raw) + 8, path="f")


def test_a_file_that_cannot_be_read_is_told_with_its_place(memory: ModuleType, tmp_path: Path) -> None:
    entry = memory.entry_of("model.safetensors", memory.weights(1, 500))
    with pytest.raises(StoreError, match=r"gone\.safetensors: No such file"):
        check_safetensors(tmp_path / "gone.safetensors", entry, "org/model@main")


def test_what_another_tool_has_put_there_is_looked_at_too(memory: ModuleType, tmp_path: Path) -> None:
    hub = memory.MemoryHub()
    hub.put(memory.single(1, 500) | {"model.safetensors": POINTER})
    (tmp_path / "model.safetensors").write_bytes(POINTER)
    with pytest.raises(FormatError, match="Git LFS pointer"):
        pull_from(hub, layout_of("directory", tmp_path), memory.request())
