"""A checkpoint that is saved anew while it is open: what is read is of the save that was opened, or an error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hubshard.errors import HubshardError, NotFoundError
from hubshard.lazy import Checkpoint, load_into, open_checkpoint
from hubshard.plan import plan_shards
from hubshard.shardfile import stream_shard
from hubshard.sources.state_dict import StateDictSource

torch = pytest.importorskip("torch")

NAMES = ("a", "b")
SINGLE = "model.safetensors"


def save(folder: Path, *, rows: int = 16, value: float = 0.0, in_place: bool = False) -> None:
    """A checkpoint of one file: of other `rows` it has as many bytes, at other places."""
    source = StateDictSource({"a": torch.full((rows, 40), value), "b": torch.full((64 - rows, 40), value + 1)})
    (shard,) = plan_shards(source.specs(), max_shard_bytes=10**9).shards
    content = b"".join(map(bytes, stream_shard(shard, source, max_read_bytes=2**20)))
    path = folder / SINGLE
    if in_place:
        path.write_bytes(content)
    else:
        path.with_suffix(".new").write_bytes(content)
        path.with_suffix(".new").replace(path)


def save_like_before(folder: Path, **how: Any) -> None:
    before = (folder / SINGLE).stat()
    save(folder, **how)
    assert (folder / SINGLE).stat().st_size == before.st_size
    # a disk whose clock is coarse shows no other time
    os.utime(folder / SINGLE, ns=(before.st_atime_ns, before.st_mtime_ns + (1_000_000 if how.get("in_place") else 0)))


READS: dict[str, Callable[[Checkpoint], Any]] = {
    "whole": lambda checkpoint: checkpoint["b"][:],
    "part": lambda checkpoint: checkpoint["b"][1:3],
    "bytes": lambda checkpoint: checkpoint["b"].read(),
    "source": lambda checkpoint: checkpoint.source.read("b", checkpoint["b"].spec.box),
    "module": lambda checkpoint: load_into(
        torch.nn.ParameterDict({"b": torch.empty(48, 40)}), checkpoint, strict=False
    ),
}


@pytest.fixture(params=[False, True], ids=["directory", "file"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Checkpoint]:
    save(tmp_path)
    with open_checkpoint(tmp_path / SINGLE if request.param else tmp_path) as checkpoint:
        yield checkpoint


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("in_place", [False, True], ids=["replaced", "written"])
def test_what_was_saved_anew_before_its_first_read_is_refused(
    opened: Checkpoint, tmp_path: Path, read: Callable[[Checkpoint], Any], *, in_place: bool
) -> None:
    save_like_before(tmp_path, rows=32, value=5.0, in_place=in_place)
    with pytest.raises(HubshardError, match=r"since it was (looked at|opened)") as caught:
        read(opened)
    assert SINGLE in str(caught.value)
    assert "open it again" in str(caught.value.hint)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_is_gone_is_an_error_of_the_house(
    opened: Checkpoint, tmp_path: Path, read: Callable[[Checkpoint], Any]
) -> None:
    (tmp_path / SINGLE).unlink()
    with pytest.raises(NotFoundError, match=SINGLE):
        read(opened)


def test_what_is_written_in_place_between_two_reads_is_refused(opened: Checkpoint, tmp_path: Path) -> None:
    assert opened["a"][:].sum() == 0
    save_like_before(tmp_path, rows=32, value=5.0, in_place=True)
    with pytest.raises(HubshardError, match=r"since it was (looked at|opened)"):
        opened["b"][:]


def test_a_config_that_was_saved_anew_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1}')
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read_file("config.json") == b'{"a": 1}'
        (tmp_path / "config.json").write_text('{"a": 22}')
        with pytest.raises(HubshardError, match=r"config\.json was written since"):
            checkpoint.read_file("config.json")
