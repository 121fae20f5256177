from __future__ import annotations

from itertools import product

import pytest

from hubshard.sources.distributed_box import Cut, part_of, runs_of

torch = pytest.importorskip("torch")
placements = pytest.importorskip("torch.distributed.tensor.placement_types")


def chunk(positions: list[int], parts: int, coordinate: int) -> list[int]:
    pieces = torch.tensor(positions).chunk(parts) if positions else ()
    return pieces[coordinate].tolist() if coordinate < len(pieces) else []


@pytest.mark.parametrize("length", [0, 1, 5, 8, 12, 17])
def test_plain_cuts_leave_what_torch_chunks_leave(length: int) -> None:
    for first, second in product((1, 2, 3, 4), repeat=2):
        for one, other in product(range(first), range(second)):
            wanted = chunk(chunk(list(range(length)), first, one), second, other)
            found = part_of(length, [Cut(first, one), Cut(second, other)])
            assert found is not None
            assert list(found) == wanted


def cuts_unevenly() -> bool:
    """Whether this torch cuts a strided dimension also into parts of different lengths, as older ones do not."""
    try:
        placements._StridedShard(0, split_factor=1)._split_tensor(torch.arange(3), 2)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("length", [1, 5, 8, 12, 17, 144])
def test_strided_cuts_leave_what_torch_leaves_or_are_no_single_run(length: int) -> None:
    if not cuts_unevenly() and length != 144:  # every grid cuts 144 evenly
        pytest.skip(f"torch {torch.__version__} refuses strided parts of different lengths")
    runs = 0
    for data, model in product((1, 2, 3, 4), repeat=2):
        strided = placements._StridedShard(0, split_factor=model)
        for one, other in product(range(data), range(model)):
            pieces, _ = strided._split_tensor(torch.arange(length), data, with_padding=False, contiguous=False)
            wanted = chunk(pieces[one].tolist(), model, other)
            cuts = [Cut(data, one, model), Cut(model, other)]
            assert [position for run in runs_of(length, cuts) for position in run] == wanted
            found = part_of(length, cuts)
            if found is None:
                assert wanted != list(range(wanted[0], wanted[0] + len(wanted)))
            else:
                assert list(found) == wanted
                runs += 1
    assert runs > 20
