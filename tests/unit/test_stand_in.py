"""Stand-ins for tensors that lie elsewhere: what views of them read is what the same views of the tensors hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hubshard.errors import FormatError  # noqa: E402
from hubshard.sources.spread import Spread  # noqa: E402
from hubshard.sources.stand_in import Placed, placed_of, stand_in  # noqa: E402
from hubshard.sources.state_dict import StateDictSource  # noqa: E402
from hubshard.tensors import Box  # noqa: E402

WHOLE = torch.arange(4 * 6 * 5, dtype=torch.float32).reshape(4, 6, 5)


def placed(whole: Any, number: int = 0) -> Any:
    asked: list[Box] = []

    def gather(_: Placed, box: Box, cast_to: Any) -> Any:
        asked.append(box)
        part = whole[tuple(map(slice, box.offset, box.stop))]
        return part.contiguous() if cast_to is None else part.to(cast_to).contiguous()

    made: Any = stand_in(Placed(number, "w", Spread.on_one(tuple(whole.shape), 0), gather), whole.dtype)
    made.asked = asked
    return made


VIEWS: list[Callable[[Any], Any]] = [
    lambda t: t,
    lambda t: t[2],
    lambda t: t[1, 3],
    lambda t: t.transpose(0, 2),
    lambda t: t.chunk(2, 1)[1],
    lambda t: t[3].chunk(2, 0)[1].T,
    lambda t: t[:, 2:3, 1:4].permute(2, 0, 1),
    lambda t: t[1:2].squeeze(0).unsqueeze(-1),
    lambda t: t.detach()[..., 4],
    lambda t: t[0, 0, 0],
]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_view_of_a_stand_in_reads_what_the_view_of_the_tensor_holds(view: Callable[[Any], Any], dtype: Any) -> None:
    held = StateDictSource({"x": view(placed(WHOLE))}, dtype=dtype)
    expected = StateDictSource({"x": view(WHOLE)}, dtype=dtype)
    (spec,) = held.specs()
    assert [spec] == list(expected.specs())
    for block in spec.box.blocks(bits=spec.bits, max_bytes=24):
        assert bytes(held.read("x", block)) == bytes(expected.read("x", block))


def test_only_the_box_that_is_asked_for_is_gathered() -> None:
    source = placed(WHOLE)
    held = StateDictSource({"x": source[2].T})
    held.read("x", Box((1, 2), (3, 4)))
    assert source.asked == [Box((2, 2, 1), (1, 4, 3))]


@pytest.mark.parametrize(
    "view", [lambda t: t.reshape(24, 5)[3:10], lambda t: t[:, ::2], lambda t: t[:1].expand(4, 6, 5)]
)
def test_a_view_that_is_no_box_is_refused_by_name(view: Callable[[Any], Any]) -> None:
    with pytest.raises(FormatError, match="tensor 'x' is no box of 'w', which lies on several ranks"):
        StateDictSource({"x": view(placed(WHOLE))})


def test_tied_stand_ins_are_stored_once_and_others_are_not_taken_for_tied() -> None:
    one, other = placed(WHOLE, 0), placed(WHOLE, 1)
    source = StateDictSource({"b": one, "a": one.detach(), "c": other, "d": one[0], "e": one[1]})
    assert source.aliases() == {"b": "a"}


def test_plain_meta_tensors_are_still_refused() -> None:
    assert placed_of(torch.empty(3, device="meta")) is None
    with pytest.raises(FormatError, match="on the meta device"):
        StateDictSource({"x": torch.empty(3, device="meta")})
