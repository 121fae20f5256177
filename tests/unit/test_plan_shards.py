"""Which tensor goes into which shard: bounds, names, order, aliases."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubshard.errors import FormatError
from hubshard.header import MAX_WRITE_HEADER_BYTES, decode_header
from hubshard.index import decode_index
from hubshard.manifest import manifest_of_headers
from hubshard.plan import MAX_FILE_BYTES, Shard, ShardPlan, natural_key, plan_shards
from hubshard.tensors import DTYPE_BITS, TensorSpec

NAMES = st.lists(
    st.one_of(
        st.builds("model.layers.{}.{}".format, st.integers(0, 120), st.sampled_from(["weight", "bias"])),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(lambda name: name != "__metadata__"),
    ),
    unique=True,
    min_size=1,
    max_size=12,
)


@st.composite
def specs_lists(draw: st.DrawFn) -> list[TensorSpec]:
    specs = []
    for name in draw(NAMES):
        dtype = draw(st.sampled_from(list(DTYPE_BITS)))
        shape = (*draw(st.lists(st.integers(0, 9), max_size=2)), 4)
        specs.append(TensorSpec(name, dtype, shape))
    return specs


def _files(plan: ShardPlan) -> list[tuple[str, bytes]]:
    return [(shard.path, shard.header + bytes(shard.nbytes - len(shard.header))) for shard in plan.shards]


@given(specs_lists(), st.integers(1, 3000), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_every_tensor_stands_once_within_the_bound_in_an_order_of_its_own(
    specs: list[TensorSpec], max_shard_bytes: int, shuffle: random.Random
) -> None:
    plan = plan_shards(specs, max_shard_bytes=max_shard_bytes)
    placed = [spec for shard in plan.shards for spec in shard.specs]
    assert sorted(placed, key=repr) == sorted(specs, key=repr)
    too_large = [shard for shard in plan.shards if shard.nbytes > max_shard_bytes]
    assert all(len(shard.specs) == 1 for shard in too_large)
    assert plan.oversized == tuple(shard.specs[0].name for shard in too_large)
    mixed = list(specs)
    shuffle.shuffle(mixed)
    again = plan_shards(mixed, max_shard_bytes=max_shard_bytes)
    assert again == plan
    assert [shard.header for shard in again.shards] == [shard.header for shard in plan.shards]
    assert again.index() == plan.index()


@given(specs_lists(), st.integers(200, 3000))
@settings(max_examples=80, deadline=None)
def test_the_files_of_a_plan_are_the_checkpoint_that_its_index_describes(
    specs: list[TensorSpec], max_shard_bytes: int
) -> None:
    plan = plan_shards(specs, max_shard_bytes=max_shard_bytes, metadata={"by": "somebody"})
    files = _files(plan)
    headers = [(path, decode_header(raw, file_nbytes=len(raw), path=path)) for path, raw in files]
    manifest = manifest_of_headers(headers).validate()
    assert manifest.tensors == {spec.name: spec for spec in specs}
    index = decode_index(plan.index(), path="i")
    assert index.weight_map == {piece.tensor: piece.at.path for piece in manifest.pieces}
    assert index.metadata == {
        "total_parameters": sum(spec.numel for spec in specs),
        "total_size": sum(spec.nbytes for spec in specs),
    }
    assert plan.nbytes == sum(len(raw) for _, raw in files)
    assert all(header.metadata == {"by": "somebody", "format": "pt"} for _, header in headers)


def test_shards_are_filled_in_natural_order() -> None:
    names = [f"layers.{number}.w" for number in (10, 2, 1, 11, 0, 9)]
    plan = plan_shards([TensorSpec(name, "U8", (300,)) for name in names], max_shard_bytes=900)
    groups = [[spec.name for spec in shard.specs] for shard in plan.shards]
    assert groups == [[f"layers.{a}.w", f"layers.{b}.w"] for a, b in ((0, 1), (2, 9), (10, 11))]


@given(st.lists(st.text("ab.019", max_size=6), unique=True))
@settings(max_examples=100, deadline=None)
def test_the_natural_key_tells_all_names_apart(names: list[str]) -> None:
    assert len({natural_key(name) for name in names}) == len(names)


def test_the_natural_key_orders_numbers_by_value_wherever_they_stand() -> None:
    names = ["layers.10", "a10b1", "a1b2", "layers.100", "a", "a1b10", "layers.2", "a2b1"]
    ordered = ["a", "a1b2", "a1b10", "a2b1", "a10b1", "layers.2", "layers.10", "layers.100"]
    assert sorted(names, key=natural_key) == ordered


def test_wide_elements_come_first_so_that_each_tensor_is_aligned() -> None:
    specs = [
        TensorSpec(name, dtype, (4, 3))
        for name, dtype in zip("abcdef", ("U8", "F4", "F64", "BF16", "F32", "F6_E2M3"), strict=True)
    ]
    (shard,) = plan_shards(specs, max_shard_bytes=10_000).shards
    assert [spec.dtype for spec in shard.specs] == ["F64", "F32", "BF16", "U8", "F6_E2M3", "F4"]
    header = decode_header(shard.header, file_nbytes=shard.nbytes, path="f")
    for spec, start in zip(header.specs, header.starts, strict=True):
        assert start * 8 % min(spec.bits, 64) == 0 or spec.bits < 8


def test_files_and_index_are_named_for_count_and_variant() -> None:
    specs = [TensorSpec(name, "U8", (300,)) for name in "ab"]
    one = plan_shards(specs, max_shard_bytes=10_000)
    assert ([shard.path for shard in one.shards], one.index_path) == (["model.safetensors"], None)
    two = plan_shards(specs, max_shard_bytes=500, variant="fp16")
    assert [shard.path for shard in two.shards] == [f"model.fp16-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert two.index_path == "model.safetensors.index.fp16.json"


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_stem_and_folder_are_in_every_path_and_change_no_byte(variant: str | None) -> None:
    specs = [TensorSpec(f"w{n}", "U8", (300,)) for n in range(4)]
    plain = plan_shards(specs, max_shard_bytes=800, variant=variant)
    plan = plan_shards(specs, max_shard_bytes=800, variant=variant, stem="diffusion_pytorch_model", folder="unet")
    assert [shard.path for shard in plan.shards] == [
        shard.path.replace("model", "unet/diffusion_pytorch_model") for shard in plain.shards
    ]
    assert plain.index_path is not None
    assert plan.index_path == plain.index_path.replace("model", "unet/diffusion_pytorch_model")
    assert [shard.header for shard in plan.shards] == [shard.header for shard in plain.shards]
    assert plan.index() == plain.index().replace(b"model", b"diffusion_pytorch_model")
    assert plan.path_of("config.json") == "unet/config.json"


def test_files_of_the_same_folder_stem_and_variant_are_replaced() -> None:
    plan = plan_shards([TensorSpec("w", "U8", (1,))], max_shard_bytes=900, stem="adapter_model", folder="a/b")
    paths = ["a/b/adapter_model.bin", "a/b/adapter_model-1-of-2.safetensors", "a/b/adapter_model.safetensors"]
    others = ["adapter_model.bin", "b/adapter_model.bin", "a/b/c/adapter_model.bin", "a/b/model.safetensors"]
    others += ["a/b/adapter_model.fp16.safetensors", "a/b/adapter_config.json"]
    assert [path for path in paths + others if plan.replaces(path)] == paths


def test_an_adapter_is_one_file_whatever_the_bound() -> None:
    specs = [TensorSpec(f"w{n}", "U8", (300,)) for n in range(4)]
    plan = plan_shards(specs, max_shard_bytes=400, stem="adapter_model")
    assert [shard.path for shard in plan.shards] == ["adapter_model.safetensors"]
    assert plan.oversized == ()
    huge = [TensorSpec(f"w{n}", "U8", (MAX_FILE_BYTES * 2 // 3,)) for n in range(2)]
    with pytest.raises(FormatError, match="peft reads but one adapter_model"):
        plan_shards(huge, max_shard_bytes=10**9, stem="adapter_model")


def test_a_tensor_over_the_bound_has_its_own_shard_and_is_named() -> None:
    specs = [TensorSpec("a", "U8", (10,)), TensorSpec("b", "U8", (5000,)), TensorSpec("c", "U8", (10,))]
    plan = plan_shards(specs, max_shard_bytes=1000)
    assert [[spec.name for spec in shard.specs] for shard in plan.shards] == [["a"], ["b"], ["c"]]
    assert plan.oversized == ("b",)


def test_a_tensor_that_only_its_header_takes_over_the_bound_is_named_too() -> None:
    plan = plan_shards([TensorSpec("a", "U8", (1000,))], max_shard_bytes=1000)
    assert plan.shards[0].nbytes > 1000
    assert plan.oversized == ("a",)


def test_a_tensor_over_the_hubs_limit_is_refused() -> None:
    with pytest.raises(FormatError, match="'w' has 500000000000 bytes"):
        plan_shards([TensorSpec("w", "U8", (MAX_FILE_BYTES,))], max_shard_bytes=10**15)


def test_no_file_is_larger_than_the_hub_takes_whatever_bound_is_asked_for() -> None:
    specs = [TensorSpec(name, "U8", (200 * 10**9,)) for name in "abc"]
    plan = plan_shards(specs, max_shard_bytes=10**15)
    assert [len(shard.specs) for shard in plan.shards] == [2, 1]


def test_the_header_of_very_many_tensors_is_cut_before_it_is_too_large_for_readers() -> None:
    specs = [TensorSpec(f"model.layers.{number}.mlp.experts.weight", "U8", (1,)) for number in range(300_000)]
    plan = plan_shards(specs, max_shard_bytes=10**12)
    sizes = [len(shard.header) for shard in plan.shards]
    assert len(sizes) == 2
    assert max(sizes) <= MAX_WRITE_HEADER_BYTES
    assert sum(len(shard.specs) for shard in plan.shards) == 300_000


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ([], "no tensor to store"),
        ([TensorSpec("w", "U8", (1,)), TensorSpec("v", "U8", (1,)), TensorSpec("w", "F32", (2,))], "'w' stands twice"),
        ([TensorSpec("__metadata__", "U8", (1,))], "__metadata__"),
        ([TensorSpec("w", "C128", (1,))], "'w' has dtype 'C128'"),
        ([TensorSpec("w", "F4", (1,))], "'w': 1 elements of F4"),
        ([TensorSpec("w", "U8", (-1,))], "'w' has the negative shape"),
        ([TensorSpec("w\udc80", "U8", (1,))], "no valid Unicode"),
        ([TensorSpec("w" * MAX_WRITE_HEADER_BYTES, "U8", (1,))], "the header of a file with tensor"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(specs: Sequence[TensorSpec], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        plan_shards(specs, max_shard_bytes=1000)


@pytest.mark.parametrize(
    "knobs",
    [
        {"max_shard_bytes": 0},
        {"max_shard_bytes": 9, "variant": "../x"},
        {"max_shard_bytes": 9, "metadata": {"k": "\ud800"}},
    ],
)
def test_knobs_that_make_no_sense_are_refused(knobs: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        plan_shards([TensorSpec("w", "U8", (1,))], **knobs)  # type: ignore[arg-type]


def test_names_that_differ_only_by_case_are_two_tensors() -> None:
    (shard,) = plan_shards([TensorSpec("W", "U8", (1,)), TensorSpec("w", "U8", (1,))], max_shard_bytes=1000).shards
    assert [spec.name for spec in shard.specs] == ["W", "w"]


def test_aliases_go_where_their_tensor_goes_and_into_the_index() -> None:
    specs = [TensorSpec("emb", "U8", (300,)), TensorSpec("w", "U8", (300,))]
    plan = plan_shards(specs, max_shard_bytes=600, aliases={"head": "w", "tied": "emb"})
    assert [shard.metadata for shard in plan.shards] == [{"format": "pt", "tied": "emb"}, {"format": "pt", "head": "w"}]
    metadata = json.loads(plan.index())["metadata"]
    assert metadata == {"head": "w", "tied": "emb", "total_parameters": 600, "total_size": 600}


def test_a_tensor_named_as_the_format_makes_no_alias() -> None:
    plan = plan_shards([TensorSpec("pt", "U8", (300,)), TensorSpec("w", "U8", (300,))], max_shard_bytes=600)
    assert json.loads(plan.index())["metadata"].keys() == {"total_parameters", "total_size"}


@pytest.mark.parametrize(
    ("aliases", "metadata", "reason"),
    [
        ({"a": "nothing"}, {}, "names no stored tensor"),
        ({"v": "w"}, {}, "or is one itself"),
        ({"__metadata__": "w"}, {}, "__metadata__"),
        ({"format": "w"}, {}, "'format' cannot be recorded"),
        ({"total_size": "w"}, {}, "'total_size' cannot be recorded"),
        ({"author": "w"}, {"author": "me"}, "'author' cannot be recorded"),
        ({}, {"author": "w"}, "would be read as a further name of the tensor 'w'"),
        ({"author": "v"}, {"author": "w"}, "'author' cannot be recorded"),
    ],
)
def test_an_alias_that_would_be_lost_or_invented_is_refused(
    aliases: dict[str, str], metadata: dict[str, str], reason: str
) -> None:
    specs = [TensorSpec("w", "U8", (1,)), TensorSpec("v", "U8", (1,))]
    with pytest.raises(FormatError, match=reason):
        plan_shards(specs, max_shard_bytes=1000, aliases=aliases, metadata=metadata)


def test_an_alias_that_the_metadata_records_already_is_taken() -> None:
    (shard,) = plan_shards(
        [TensorSpec("w", "U8", (1,))], max_shard_bytes=1000, aliases={"a": "w"}, metadata={"a": "w"}
    ).shards
    assert shard.metadata == {"a": "w", "format": "pt"}


def test_headers_with_many_aliases_keep_the_bound() -> None:
    specs = [TensorSpec(f"w{number}", "U8", (1,)) for number in range(50)]
    aliases = {f"alias {number} é {tail}": f"w{number}" for number in range(50) for tail in "xyz"}
    plan = plan_shards(specs, max_shard_bytes=2000, aliases=aliases)
    assert all(shard.nbytes <= 2000 for shard in plan.shards)
    assert not plan.oversized
    found = {alias: name for shard in plan.shards for alias, name in shard.metadata.items() if alias != "format"}
    assert found == aliases


def test_parameters_may_be_counted_by_who_knows_better() -> None:
    plan = plan_shards([TensorSpec("w", "U8", (4,))], max_shard_bytes=1000)
    assert json.loads(plan.index(total_parameters=8))["metadata"]["total_parameters"] == 8


def test_a_shard_is_the_same_however_it_came_about() -> None:
    spec = TensorSpec("w", "U8", (4,))
    (planned,) = plan_shards([spec], max_shard_bytes=1000).shards
    assert planned == Shard("model.safetensors", (spec,), {"format": "pt"})
