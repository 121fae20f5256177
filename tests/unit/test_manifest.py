"""Pieces tile tensors exactly, or the manifest is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubshard.errors import FormatError, IntegrityError
from hubshard.header import decode_header, encode_header
from hubshard.manifest import Extent, FileDigest, Manifest, Piece, manifest_of_headers
from hubshard.tensors import Box, TensorSpec


@st.composite
def tilings(draw: st.DrawFn) -> list[Box]:
    """Boxes that tile a tensor, made by cutting again and again anywhere: far more than grids."""
    shape = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        if box.shape[dim] == 1:
            boxes.append(box)
            continue
        first = draw(st.integers(1, box.shape[dim] - 1))
        for start, size in ((0, first), (first, box.shape[dim] - first)):
            offset = (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :])
            boxes.append(Box(offset, (*box.shape[:dim], size, *box.shape[dim + 1 :])))
    return draw(st.permutations(boxes))


def _manifest(boxes: list[Box], shape: tuple[int, ...]) -> Manifest:
    pieces, start = [], 0
    for box in boxes:
        pieces.append(Piece("w", box, Extent("f", start, start + 2 * box.numel)))
        start += 2 * box.numel
    return Manifest({"w": TensorSpec("w", "F16", shape)}, pieces, {"f": FileDigest(start)})


def _shape(boxes: list[Box]) -> tuple[int, ...]:
    return tuple(map(max, zip(*(box.stop for box in boxes), strict=True)))


@given(tilings())
@settings(max_examples=150, deadline=None)
def test_every_tiling_is_accepted(boxes: list[Box]) -> None:
    manifest = _manifest(boxes, _shape(boxes))
    assert manifest.validate() is manifest


@given(tilings(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_tiling_with_a_piece_removed_doubled_or_shifted_is_refused(boxes: list[Box], data: st.DataObject) -> None:
    shape = _shape(boxes)
    at = data.draw(st.integers(0, len(boxes) - 1))
    box = boxes[at]
    dim = data.draw(st.integers(0, len(shape) - 1))
    by = data.draw(st.sampled_from([-1, 1]))
    shifted = Box((*box.offset[:dim], box.offset[dim] + by, *box.offset[dim + 1 :]), box.shape)
    wrong = {
        "removed": boxes[:at] + boxes[at + 1 :],
        "doubled": [*boxes, box],
        "shifted": [*boxes[:at], shifted, *boxes[at + 1 :]],
        "one doubled for another": [boxes[at - 1] if number == at else one for number, one in enumerate(boxes)],
    }
    tilings_after_all = [
        how for how, changed in wrong.items() if sorted(map(repr, changed)) == sorted(map(repr, boxes))
    ]
    accepted = [how for how, changed in wrong.items() if not _is_refused(_manifest(changed, shape))]
    assert accepted == tilings_after_all


def _is_refused(manifest: Manifest) -> bool:
    try:
        manifest.validate()
    except FormatError as error:
        return "'w'" in error.message
    return False


def test_scalars_and_empty_tensors_have_their_tilings() -> None:
    scalar = Box((), ())
    _manifest([scalar], ()).validate()
    _manifest([], (0, 3)).validate()
    _manifest([Box((0, 0), (0, 3))], (0, 3)).validate()
    for boxes in ([], [scalar, scalar]):
        with pytest.raises(FormatError, match="'w'"):
            _manifest(boxes, ()).validate()


@pytest.mark.parametrize(
    "box", [Box((0,), (-2,)), Box((0, 0), (-2, -2)), Box((-1, 0), (2, 2)), Box((0,), (2, 2)), Box((0, 0), (2,))]
)
def test_a_box_that_is_none_within_the_tensor_is_refused(box: Box) -> None:
    piece = Piece("w", box, Extent("f", 0, 8))
    with pytest.raises(FormatError, match="f: a piece of 'w' lies outside"):
        Manifest({"w": TensorSpec("w", "F16", (2, 2))}, [piece], {"f": FileDigest(8)}).validate()


@pytest.mark.parametrize(
    ("extent", "reason"),
    [
        (Extent("g", 0, 8), "g: holds 'w', but is not among the files"),
        (Extent("f", 4, 12), "f: bytes 4 to 12 of 'w' lie outside"),
        (Extent("f", -8, 0), "f: bytes -8 to 0"),
        (Extent("f", 8, 0), "f: bytes 8 to 0"),
        (Extent("f", 0, 6), "f: 6 bytes do not hold the 4 elements of 'w'"),
    ],
)
def test_bytes_that_are_not_there_are_refused(extent: Extent, reason: str) -> None:
    manifest = _manifest([Box((0, 0), (2, 2))], (2, 2))
    with pytest.raises(FormatError, match=reason):
        replace(manifest, pieces=[Piece("w", Box((0, 0), (2, 2)), extent)]).validate()


@pytest.mark.parametrize("path", ["../f", "/f", "C:/f", "a\\f", "nul"])
def test_a_file_outside_the_folder_is_refused(path: str) -> None:
    piece = Piece("w", Box((), ()), Extent(path, 0, 2))
    with pytest.raises(FormatError, match="the manifest: the file name"):
        Manifest({"w": TensorSpec("w", "F16", ())}, [piece], {path: FileDigest(2)}).validate()


def test_a_piece_of_no_tensor_is_refused() -> None:
    manifest = _manifest([Box((), ())], ())
    with pytest.raises(FormatError, match="f: holds a piece of 'x'"):
        replace(manifest, pieces=[Piece("x", Box((), ()), Extent("f", 0, 2))]).validate()


@pytest.mark.parametrize("aliases", [{"a": "x"}, {"w": "w"}])
def test_an_alias_of_nothing_is_refused(aliases: dict[str, str]) -> None:
    with pytest.raises(FormatError, match="alias"):
        replace(_manifest([Box((), ())], ()), aliases=aliases).validate()


def test_tiles_of_many_ranks_along_a_later_dimension_are_checked_without_comparing_all_pairs() -> None:
    # of 20,000 column blocks, comparing all pairs would take minutes
    boxes = [Box((0, number), (3, 1)) for number in range(20_000)]
    _manifest(boxes, (3, 20_000)).validate()


def _header(path: str, names: dict[str, int], metadata: dict[str, str]) -> tuple[str, bytes]:
    specs = [TensorSpec(name, "U8", (size,)) for name, size in names.items()]
    return path, encode_header(specs, metadata) + bytes(sum(names.values()))


def _manifest_of(*files: tuple[str, bytes], digests: dict[str, FileDigest] | None = None) -> Manifest:
    headers = [(path, decode_header(raw, file_nbytes=len(raw), path=path)) for path, raw in files]
    return manifest_of_headers(headers, digests=digests)


def test_headers_make_a_valid_manifest_whose_aliases_come_from_their_metadata() -> None:
    one = _header("a", {"emb": 3, "pt": 1}, {"format": "pt", "head": "emb", "author": "me", "x": "other"})
    two = _header("b", {"other": 2, "head2": 1}, {"format": "pt", "head2": "other"})
    manifest = _manifest_of(one, two).validate()
    assert manifest.aliases == {"head": "emb"}
    assert list(manifest.tensors) == ["emb", "pt", "other", "head2"]
    assert {piece.tensor: piece.at.nbytes for piece in manifest.pieces} == {"emb": 3, "pt": 1, "other": 2, "head2": 1}
    assert {path: digest.nbytes for path, digest in manifest.files.items()} == {"a": len(one[1]), "b": len(two[1])}


def test_a_tensor_in_two_files_is_refused() -> None:
    with pytest.raises(FormatError, match="'w' stands in two files, a and b"):
        _manifest_of(_header("a", {"w": 1}, {}), _header("b", {"w": 1}, {}))


def test_an_alias_of_two_tensors_is_refused() -> None:
    with pytest.raises(FormatError, match="b: its metadata makes 'x' a name of 'v', another file one of 'w'"):
        _manifest_of(_header("a", {"w": 1}, {"x": "w"}), _header("b", {"v": 1}, {"x": "v"}))


def test_a_file_of_another_size_than_promised_is_refused() -> None:
    with pytest.raises(IntegrityError, match="a: has"):
        _manifest_of(_header("a", {"w": 1}, {}), digests={"a": FileDigest(5)})
