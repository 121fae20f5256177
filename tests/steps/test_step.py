"""The step format: planned, merged, written, read, and refused where it does not describe a whole state."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubshard.errors import FormatError, IntegrityError
from hubshard.header import decode_header
from hubshard.manifest import Extent
from hubshard.protocols import Revision
from hubshard.reads import Copy, plan_reads
from hubshard.steps.canonical import encode
from hubshard.steps.columns import Column
from hubshard.steps.parts import FileReceipt, Part, block_bytes_for, merge, plan_files
from hubshard.steps.places import LocalPlace
from hubshard.steps.reading import LOCAL, StepFolder, copy_runs, part_manifest, read_boxes
from hubshard.steps.step import Placement, Step, StepFile, piece_key, step_folder, step_number
from hubshard.steps.step_json import NewerVersionError, StepHead, decode_head, decode_step, encode_step
from hubshard.steps.tiling import Tiling
from hubshard.steps.writing import PieceStream, prepare_folder, write_local, write_manifest
from hubshard.store.local import LocalStore
from hubshard.tensors import Box, TensorSpec

GOLDEN = Path(__file__).parent / "golden_step_1"

SPECS = {
    "model.w": TensorSpec("model.w", "F32", (7, 5)),
    "model.b": TensorSpec("model.b", "BF16", (5,)),
    "optim.step": TensorSpec("optim.step", "I64", ()),
    "empty": TensorSpec("empty", "F32", (0, 3)),
    "w@0,0": TensorSpec("w@0,0", "U8", (4, 4)),
    "__metadata__": TensorSpec("__metadata__", "BOOL", (3,)),
}


def values_of(spec: TensorSpec) -> bytes:
    data = hashlib.shake_256(spec.name.encode()).digest(spec.nbytes)
    return bytes(byte & 1 for byte in data) if spec.dtype == "BOOL" else data


def box_bytes(spec: TensorSpec, box: Box) -> bytes:
    """The row-major bytes of a box, element by element."""
    whole, size = values_of(spec), spec.bits // 8
    found = [b""]
    for at in range(box.numel):
        position, rest = 0, at
        index = []
        for n in reversed(box.shape):
            rest, i = divmod(rest, n)
            index.append(i)
        for offset, i, n in zip(box.offset, reversed(index), spec.shape, strict=True):
            position = position * n + offset + i
        found.append(whole[position * size : (position + 1) * size])
    return b"".join(found)


def rows(spec: TensorSpec, rank: int, world: int) -> Box:
    """As torch.chunk cuts."""
    count = -(-spec.shape[0] // world)
    start = min(rank * count, spec.shape[0])
    return Box((start, *(0,) * (len(spec.shape) - 1)), (min(count, spec.shape[0] - start), *spec.shape[1:]))


def parts_of(rank: int, world: int) -> list[Part]:
    cut = [Part(SPECS[name], rows(SPECS[name], rank, world)) for name in ("model.w", "model.b", "w@0,0")]
    whole = [spec for number, spec in enumerate(SPECS.values()) if number >= 2 and spec.name != "w@0,0"]
    return cut + [Part(spec, spec.box) for number, spec in enumerate(whole) if number % world == rank]


def write(root: Path, world: int, *, max_file_bytes: int = 10_000, block_bytes: int = 64) -> Step:
    folder = root / step_folder(40)
    folder.mkdir(parents=True, exist_ok=True)
    receipts: list[FileReceipt] = []
    for rank in range(world):
        for number, planned in enumerate(plan_files(parts_of(rank, world), max_file_bytes=max_file_bytes), start=1):
            stream = PieceStream(
                planned,
                stem=f"rank-{rank:05d}-{number:05d}",
                read=lambda part, box: box_bytes(part.spec, box),
                block_bytes=block_bytes,
            )
            write_local(folder, stream)
            receipts.append(stream.receipt)
    step = merge(
        receipts,
        step=40,
        world_size=world,
        scalars={"epoch": 3, "lr": [0.1, float("inf")], "big": 2**70},
        paths={"model.w": ("model", "w"), "lr": ("optim", 0, "lr")},
        metadata={"saved by": "a test"},
    )
    write_manifest(folder, encode_step(step), step.file_of)
    return step


def read(root: Path, wanted: list[tuple[str, Box]]) -> list[bytes]:
    opened = LocalPlace(root).open(40)
    into = [bytearray(box.numel * SPECS[name].bits // 8) for name, box in wanted]

    def take(number: int, copy: Copy, raw: memoryview) -> None:
        copy_runs(copy, raw, memoryview(into[number]))

    read_boxes(opened.folder, opened.step, wanted, take)
    return [bytes(raw) for raw in into]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_boxes_of_another_number_of_ranks_are_read_bit_by_bit(tmp_path: Path, world: int) -> None:
    write(tmp_path, world)
    for others in (1, 2, 4):
        for rank in range(others):
            wanted = [(name, rows(SPECS[name], rank, others)) for name in ("model.w", "model.b", "w@0,0")]
            wanted += [(name, SPECS[name].box) for name in ("optim.step", "empty", "__metadata__", "model.w")]
            assert read(tmp_path, wanted) == [box_bytes(SPECS[name], box) for name, box in wanted]
    column = Box((2, 3), (4, 2))
    assert read(tmp_path, [("model.w", column)]) == [box_bytes(SPECS["model.w"], column)]


def test_the_manifest_comes_back_and_describes_each_piece(tmp_path: Path) -> None:
    step = write(tmp_path, 3, max_file_bytes=200)
    raw = (tmp_path / step_folder(40) / "manifest.json").read_bytes()
    again = decode_step(raw, path="m")
    assert encode_step(again) == raw
    assert (again.scalars, again.metadata) == (step.scalars, step.metadata)
    assert again.tensors["model.w"].path == ("model", "w")
    assert again.scalar_paths == {"epoch": ("epoch",), "lr": ("optim", 0, "lr"), "big": ("big",)}
    manifest = again.manifest().validate()
    assert manifest.tensors == SPECS
    for piece in manifest.pieces:
        content = (tmp_path / step_folder(40) / piece.at.path).read_bytes()
        assert content[piece.at.start : piece.at.stop] == box_bytes(SPECS[piece.tensor], piece.box)
        header = decode_header(content, file_nbytes=len(content), path=piece.at.path)
        at = header.starts.index(piece.at.start)
        names = [spec.name for spec, start in zip(header.specs, header.starts, strict=True) if start == piece.at.start]
        assert piece_key(SPECS[piece.tensor], piece.box) in names, at
    json.loads(raw)


def test_the_golden_step_is_written_to_the_byte_as_ever_and_read(tmp_path: Path) -> None:
    write(tmp_path, 2, max_file_bytes=400)
    written = {path.name: path.read_bytes() for path in (tmp_path / step_folder(40)).iterdir()}
    golden = {path.name: path.read_bytes() for path in (GOLDEN / step_folder(40)).iterdir()}
    assert written == golden
    wanted = [(name, spec.box) for name, spec in SPECS.items()]
    assert read(GOLDEN, wanted) == [values_of(spec) for spec in SPECS.values()]


def test_a_flipped_byte_anywhere_in_what_is_read_is_named_by_file_and_block(tmp_path: Path) -> None:
    step = write(tmp_path, 2)
    wanted = [(name, spec.box) for name, spec in SPECS.items()]
    for file in step.files:
        path = tmp_path / step_folder(40) / file.name
        raw = path.read_bytes()
        for at in range(file.data_start, file.nbytes):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
            with pytest.raises(IntegrityError, match=f"{file.name}: block {at // 64} "):
                read(tmp_path, wanted)
        path.write_bytes(raw)
    read(tmp_path, wanted)


def test_each_block_is_read_once_and_only_those_that_are_wanted(tmp_path: Path) -> None:
    write(tmp_path, 1)
    opened = LocalPlace(tmp_path).open(40)
    asked: list[tuple[int, int]] = []

    class Counting(LocalStore):
        def read(self, at: Revision, path: str, start: int, stop: int, into: memoryview) -> None:
            asked.append((start, stop))
            super().read(at, path, start, stop, into)

    store = Counting(tmp_path / step_folder(40))
    at = store.head("main")
    assert at is not None
    pace = replace(LOCAL, max_gap_bytes=0, max_read_bytes=20)
    folder = StepFolder(store, at, "", "here", pace)
    (piece,) = opened.step.pieces("model.w")
    count = read_boxes(folder, opened.step, [("model.w", SPECS["model.w"].box)], lambda *_: None)
    blocks = range(piece.at.start // 64, -(-piece.at.stop // 64))
    assert sorted(asked) == [(block * 64, min(block * 64 + 64, opened.step.nbytes)) for block in blocks]
    assert count == sum(stop - start for start, stop in asked)


def _one() -> Step:
    spec = TensorSpec("w", "F32", (6,))
    tiling = Tiling((6,), (Column.of([0, 2, 4]),), (Column.of([2, 2, 2]),))
    file = StepFile("rank-00000-00001-0.safetensors", 100, 64, "0" * 64, 2**18, b"")
    return Step(1, 1, [file], {"w": Placement(spec, tiling, Column.of([0, 0, 0]), Column.of([0, 8, 16]), ("w",))})


def _with(**changes: Any) -> Step:
    step = _one()
    placement = step.tensors["w"]
    tiling = replace(placement.tiling, **{key: changes.pop(key) for key in ("offsets", "sizes") if key in changes})
    files = [replace(step.files[0], **{key: changes.pop(key) for key in list(changes) if hasattr(StepFile, key)})]
    where = {key: changes.pop(f"of_{key}") for key in ("files", "starts", "spec") if f"of_{key}" in changes}
    placed = replace(placement, tiling=tiling, **where)
    return replace(step, **({"files": files, "tensors": {"w": placed}} | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sizes": (Column.of([2, 2, 1]),)}, "hold 5 of its 6"),
        ({"sizes": (Column.of([3, 2, 2]),)}, "overlap"),
        ({"offsets": (Column.of([0, 2, 2]),)}, "overlap"),
        ({"of_files": Column.of([0, 0, 1])}, "a file that the manifest does not name"),
        ({"of_files": Column.of([0, 0])}, "no place for each of its 3 pieces"),
        ({"of_starts": Column.of([0, 8, 32])}, "lies outside its file"),
        ({"of_spec": TensorSpec("w", "F32", (7,))}, "no place for each"),
        ({"of_spec": TensorSpec("w", "F33", (6,))}, "safetensors cannot store"),
        ({"of_spec": TensorSpec("w", "F4", (6,)), "sizes": (Column.of([2, 3, 1]),)}, "does not fill whole bytes"),
        ({"name": "../x"}, "not a plain path"),
        ({"name": "a/b"}, "describes no file of a step"),
        ({"name": "manifest.json"}, "sorted by name"),
        ({"nbytes": 60}, "describes no file of a step"),
        ({"sha256": "x"}, "describes no file of a step"),
        ({"blocks": b"short"}, "one hash per block"),
        ({"block_bytes": 50}, "one hash per block"),
        ({"scalars": {"w": 1}}, "'w' is a tensor and none"),
    ],
)
def test_a_step_that_is_not_whole_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert _one().validate()
    with pytest.raises(FormatError, match=reason):
        _with(**changes).validate()


def test_a_tiling_that_is_no_grid_is_accepted_where_it_is_exact() -> None:
    # a pinwheel: no line goes through all of it
    boxes = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((1, 0), (2, 1)), ((1, 1), (1, 1)), ((2, 1), (1, 2))]

    def step_of(boxes: list[tuple[tuple[int, int], tuple[int, int]]]) -> Step:
        offsets, sizes = (tuple(Column.of([box[kind][dim] for box in boxes]) for dim in (0, 1)) for kind in (0, 1))
        tiling = Tiling((3, 3), offsets, sizes)
        assert not tiling.is_grid
        file = StepFile("f", 100, 64, "0" * 64, 2**18, b"")
        places = Column.of([0] * len(boxes)), Column.of([2 * number for number in range(len(boxes))])
        return Step(1, 1, [file], {"w": Placement(TensorSpec("w", "U8", (3, 3)), tiling, *places, ("w",))})

    step_of(boxes).validate()
    with pytest.raises(FormatError, match="hold 8 of its 9"):
        step_of([*boxes[:3], *boxes[4:]]).validate()
    with pytest.raises(FormatError, match="overlap"):
        step_of([*boxes[:3], boxes[0], *boxes[4:]]).validate()


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw[:-2],
        lambda raw: raw.replace(b'"step":40', b'"step":41'),
        lambda raw: raw.replace(b'"version":1', b'"version":2'),
        lambda raw: raw.replace(b"hubshard-step", b"somebody-else"),
        lambda raw: raw.replace(b',"version"', b' ,"version"'),
        lambda _: b"",
        lambda _: b"{}",
        lambda _: b"[]",
        lambda _: b"\x80\x04K\x01.",
    ],
)
def test_a_manifest_that_was_changed_is_refused(tmp_path: Path, change: Any) -> None:
    raw = encode_step(write(tmp_path, 2))
    with pytest.raises(FormatError, match="the/manifest"):
        decode_step(change(raw), path="the/manifest")
    with pytest.raises(FormatError, match="the/manifest"):
        decode_head(change(raw), path="the/manifest")


def test_a_manifest_of_a_later_version_says_so(tmp_path: Path) -> None:
    raw = encode_step(write(tmp_path, 1)).replace(b'"version":1}', b'"version":2}')
    with pytest.raises(FormatError, match="version 2 of the step format") as caught:
        decode_step(raw, path="m")
    assert caught.value.hint == "update hubshard, or name an older step"
    with pytest.raises(NewerVersionError, match="version 2 of the step format"):
        decode_head(raw, path="m")


def test_the_head_of_a_manifest_is_what_a_list_of_steps_shows(tmp_path: Path) -> None:
    step = write(tmp_path, 3, max_file_bytes=200)
    head = decode_head(encode_step(step), path="m")
    assert head == StepHead(step.step, 3, step.files)


@pytest.mark.parametrize(("key", "value"), [("files", {}), ("files", [["a", 1]]), ("world_size", -1), ("step", "1")])
def test_a_head_that_is_none_is_refused(key: str, value: object) -> None:
    body = json.loads(encode_step(_one()))["step"] | {key: value}
    with pytest.raises(FormatError, match="m: the manifest lacks"):
        decode_head(_signed(body), path="m")
    with pytest.raises(FormatError, match="m: the manifest lacks"):
        decode_step(_signed(body), path="m")


def test_a_manifest_with_huge_columns_is_refused_before_they_fill_the_memory() -> None:
    body = json.loads(encode_step(_one()))["step"]
    body["tilings"][0][1] = [[[0, 0, 2**60]]]
    with pytest.raises(FormatError, match="at most"):
        decode_step(_signed(body), path="m")


def _signed(body: object) -> bytes:
    """A manifest whose hash is right, whatever it holds."""
    raw = encode(body)
    sha256 = hashlib.sha256(raw).hexdigest().encode()
    return b'{"format":"hubshard-step","sha256":"%b","step":%b,"version":1}\n' % (sha256, raw)


@given(st.lists(st.integers(0, 6), max_size=60) | st.lists(st.sampled_from([0, 7, 2**40]), max_size=40))
@settings(max_examples=200, deadline=None)
def test_columns_come_back(values: list[int]) -> None:
    column = Column.of(values)
    assert list(column) == values
    assert [column[at] for at in range(len(column))] == values
    again = Column.from_json(json.loads(json.dumps(column.to_json())), path="m")
    assert again == column
    assert len(column.runs) <= max(1, len(values))


@pytest.mark.parametrize("wrong", [5, ["1"], [[1, 2]], [[1, 2, 1]], [-1], [[5, -2, 4]], [True], [[0, 1, 2.0]]])
def test_what_is_no_column_is_refused(wrong: Any) -> None:
    with pytest.raises(FormatError, match="the/manifest"):
        Column.from_json(wrong, path="the/manifest")


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.data())
@settings(max_examples=100, deadline=None)
def test_pieces_that_touch_a_box_are_those_that_share_an_element(
    height: int, width: int, cuts: int, data: st.DataObject
) -> None:
    boxes = [
        Box((y, x), (min(cuts, height - y), min(cuts, width - x)))
        for y in range(0, height, cuts)
        for x in range(0, width, cuts)
    ]
    tiling = Tiling(
        (height, width),
        tuple(Column.of([box.offset[d] for box in boxes]) for d in (0, 1)),
        tuple(Column.of([box.shape[d] for box in boxes]) for d in (0, 1)),
    )
    assert tiling.is_grid
    corner = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    size = data.draw(st.integers(1, height - corner[0])), data.draw(st.integers(1, width - corner[1]))
    wanted = Box(corner, size)
    assert tiling.touching(wanted) == [number for number, box in enumerate(boxes) if box & wanted]


def test_files_are_bounded_and_a_large_part_is_cut() -> None:
    large = TensorSpec("w", "F32", (100, 1000))
    for bound in (2_000, 10_000, 100_000, 10**9):
        planned = plan_files(
            [Part(large, large.box), Part(SPECS["model.b"], SPECS["model.b"].box)], max_file_bytes=bound
        )
        assert all(file.nbytes <= bound for file in planned)
        assert sum(part.box.numel for file in planned for part in file.parts if part.spec == large) == 100_000
    assert [part.spec.name for part in planned[0].parts] == ["w", "model.b"]


@pytest.mark.parametrize("saved_on", [1, 2, 3, 4])
def test_a_rank_of_four_reads_at_most_two_percent_more_than_its_share_of_a_large_state(saved_on: int) -> None:
    shapes = [(32000, 2048), *[(2048, 2048), (512, 2048), (5632, 2048), (2048, 5632), (2048,)] * 8]
    specs = [TensorSpec(f"{number}.{kind}", "F32", s) for number, s in enumerate(shapes) for kind in ("w", "m", "v")]
    size = block_bytes_for(sum(spec.nbytes for spec in specs))
    receipts = []
    for rank in range(saved_on):
        (planned,) = plan_files([Part(spec, rows(spec, rank, saved_on)) for spec in specs], max_file_bytes=10**11)
        hashes = bytes(32 * -(-planned.nbytes // size))
        file = StepFile(f"rank-{rank}", planned.nbytes, len(planned.header), "0" * 64, size, hashes)
        receipts.append(FileReceipt.of(planned, file))
    step = merge(receipts, step=1, world_size=saved_on, scalars={}, paths={}, metadata={})
    for rank in range(4):
        wanted = [(spec.name, rows(spec, rank, 4)) for spec in specs]
        manifest, boxes = part_manifest(step, wanted)
        pace = LOCAL
        plan = plan_reads(manifest, boxes, max_gap_bytes=pace.max_gap_bytes, max_read_bytes=pace.max_read_bytes)
        blocks = {(read.path, at) for read in plan.reads for at in range(read.start // size, -(-read.stop // size))}
        assert len(blocks) * size <= 1.02 * sum(4 * box.numel for _, box in wanted)


def test_a_state_has_at_most_some_hundred_thousand_blocks_of_bounded_size() -> None:
    assert block_bytes_for(0) == block_bytes_for(4 * 10**9) == 2**16
    for total in (10**11, 10**12, 10**13):
        assert total / block_bytes_for(total) <= 2**19
    assert block_bytes_for(10**15) == 2**26


def test_ranks_that_differ_in_a_tensor_or_leave_a_part_out_are_told() -> None:
    def receipts(parts: list[Part]) -> list[FileReceipt]:
        return [
            FileReceipt.of(file, StepFile(f"f{number}", file.nbytes, len(file.header), "0" * 64, 2**18, b""))
            for number, part in enumerate(parts)
            for file in plan_files([part], max_file_bytes=10**6)
        ]

    def merged(parts: list[Part]) -> Step:
        return merge(receipts(parts), step=1, world_size=2, scalars={}, paths={}, metadata={})

    one, other = TensorSpec("w", "F32", (4,)), TensorSpec("w", "BF16", (4,))
    halves = [Part(one, Box((0,), (2,))), Part(one, Box((2,), (2,)))]
    first, second = merged(halves).pieces("w")
    assert (first.at.path, second.at) == ("f0", Extent("f1", second.at.start, second.at.start + 8))
    with pytest.raises(FormatError, match=r"is F32 of shape .* on one rank and BF16"):
        merged([halves[0], Part(other, Box((2,), (2,)))])
    with pytest.raises(FormatError, match="hold 2 of its 4 elements"):
        merged(halves[:1])
    with pytest.raises(FormatError, match="overlap"):
        merged([*halves, halves[0]])


SHOW = """
import os, sys
from pathlib import Path
from hubshard.steps.writing import write_manifest
os.chdir(sys.argv[1])
os.setuid(65534)
write_manifest(Path(), b"new", set())
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root alone can be somebody else")
def test_a_file_of_an_older_save_that_cannot_be_removed_is_said_when_the_step_is_saved(tmp_path: Path) -> None:
    old = tmp_path / f"rank-00000-00001-{'0' * 12}.safetensors"
    old.write_bytes(b"old")
    tmp_path.chmod(0o1777)  # everybody may write there, and remove what is their own
    done = subprocess.run([sys.executable, "-c", SHOW, str(tmp_path)], capture_output=True, text=True, check=True)
    assert f"{old.name} is of no use any more, and cannot be removed: " in done.stderr
    assert (tmp_path / "manifest.json").read_bytes() == b"new"
    assert old.exists()


def test_folders_are_named_by_their_step() -> None:
    assert step_folder(1000) == "step-00001000"
    assert [step_number(name) for name in ("step-00001000", "step-1000", "step-0000000001000", "x")] == [
        1000,
        None,
        None,
        None,
    ]
    assert step_number(step_folder(10**12)) == 10**12
    with pytest.raises(FormatError):
        step_folder(-1)


def test_the_step_format_is_read_and_written_without_torch_and_numpy() -> None:
    code = (
        "import sys, hubshard.steps.places, hubshard.steps.writing, hubshard.steps.parts\n"
        "print([name for name in ('torch', 'numpy', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_kill_at_any_moment_of_saving_a_step_again_leaves_it_whole(tmp_path: Path) -> None:
    write(tmp_path, 2)
    wanted = [(name, spec.box) for name, spec in SPECS.items()]
    random = Random(7)
    seen = set()
    for _ in range(12):
        process = subprocess.Popen([sys.executable, __file__, tmp_path], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        time.sleep(random.random() * 0.05)
        process.kill()
        process.wait()
        process.stdout.close()
        assert read(tmp_path, wanted) == [values_of(spec) for spec in SPECS.values()]
        seen.add(len(LocalPlace(tmp_path).open(40).step.files))
    write(tmp_path, 2)
    for rank in range(2):
        prepare_folder(tmp_path / step_folder(40), rank=rank, nbytes=0)
    step = LocalPlace(tmp_path).open(40)
    assert step.ignored == ()
    assert seen <= {2, 4, 11}


def _save_for_ever(root: Path) -> None:
    print("begun", flush=True)
    while True:
        for bound in (10_000, 400, 100):
            write(root, 2, max_file_bytes=bound)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _save_for_ever(Path(sys.argv[1]))
    write(GOLDEN, 2, max_file_bytes=400)  # writes the golden step anew
