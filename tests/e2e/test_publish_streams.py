"""How many large files a publish sends at once: one, so that a kill costs one, or as many as it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Barrier, BrokenBarrierError
from typing import TYPE_CHECKING

import pytest

import hubshard
from hubshard.errors import FormatError, StoreError
from hubshard.tensors import Box, TensorSpec

if TYPE_CHECKING:
    from tests.conftest import Hub

SHARD = "300MB"


class Meeting:
    """Three tensors of a shard each, the first reads of which meet, or give each other up; then the source fails."""

    def __init__(self, seconds: float) -> None:
        self.has_met = False
        self._barrier = Barrier(2, timeout=seconds)

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec(name, "U8", (290_000_000,)) for name in "abc"]

    def aliases(self) -> Mapping[str, str]:
        return {}

    def read(self, name: str, box: Box) -> bytes:
        del box
        try:
            self._barrier.wait()
            self.has_met = True
        except BrokenBarrierError:
            pass
        raise StoreError(f"{name} was asked for")


def push(hub: Hub, source: Meeting, streams: int | None = None) -> None:
    with pytest.raises(StoreError, match="was asked for"):
        hubshard.push_to_hub(
            source, "org/model", max_shard_size=SHARD, streams=streams, endpoint=hub.url, token="hf_test"
        )


def test_one_large_shard_is_under_way_at_once(hub: Hub) -> None:
    alone = Meeting(seconds=0.5)
    push(hub, alone)
    assert not alone.has_met


def test_as_many_shards_are_under_way_at_once_as_it_is_told(hub: Hub) -> None:
    together = Meeting(seconds=30)
    push(hub, together, streams=2)
    assert together.has_met


def test_no_streams_at_all_are_refused() -> None:
    with pytest.raises(FormatError, match="streams"):
        hubshard.push_to_hub({}, "org/model", streams=0)
