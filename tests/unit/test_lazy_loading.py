from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hubshard.errors import FormatError, IntegrityError
from hubshard.events import Event
from hubshard.lazy.checkpoint import Checkpoint
from hubshard.lazy.loading import LoadReport, load_into
from hubshard.lazy.matching import Mismatch, Slot, match
from hubshard.lazy.opening import open_checkpoint
from hubshard.tensors import Box, TensorSpec

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
nn = torch.nn


class Net(nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self, *, tied: bool = False, wide: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, wide)
        self.norm = nn.BatchNorm1d(wide)
        self.blocks = nn.ModuleList(nn.Linear(wide, wide) for _ in range(3))
        self.head = nn.Linear(wide, 1000, bias=False)
        self.register_buffer("cache", torch.zeros(4), persistent=False)
        if tied:
            self.head.weight = self.embed.weight


def state(module: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def save(tensors: Mapping[str, Any], folder: Path, *, shards: int = 1) -> Path:
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        some = names[number::shards]
        safetensors_torch.save_file({name: tensors[name].contiguous() for name in some}, folder / file)
        weight_map |= dict.fromkeys(some, file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def assert_equal(module: Any, wanted: Mapping[str, Any]) -> None:
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name


def random_state(**kwargs: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return {name: t if not t.is_floating_point() else torch.randn_like(t) for name, t in state(Net(**kwargs)).items()}


@pytest.mark.parametrize("shards", [1, 4])
def test_existing_parameters_are_filled_in_place(tmp_path: Path, shards: int) -> None:
    wanted = random_state()
    save(wanted, tmp_path, shards=shards)
    net = Net()
    pointers = {name: tensor.data_ptr() for name, tensor in net.state_dict().items()}
    report = load_into(net, tmp_path)
    assert_equal(net, wanted)
    assert pointers == {name: tensor.data_ptr() for name, tensor in net.state_dict().items()}
    nbytes = sum(t.nbytes for t in wanted.values())
    assert report == LoadReport((), (), (), report.bytes_read, 0)
    assert nbytes <= report.bytes_read <= nbytes * 1.02


def test_parameters_on_meta_become_pages_of_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = random_state()
    save(wanted, tmp_path, shards=2)
    with torch.device("meta"):
        net = Net()
    net.head.weight.requires_grad_(requires_grad=False)
    report = load_into(net, tmp_path)
    assert_equal(net, wanted)
    assert isinstance(net.embed.weight, nn.Parameter)
    assert net.embed.weight.requires_grad
    assert not net.head.weight.requires_grad
    assert net.cache.is_meta
    assert report.on_meta == ("cache",)
    assert "still on the meta device, as no checkpoint stores them: cache; build the module" in caplog.text
    assert report.bytes_mapped >= 0.99 * sum(t.nbytes for t in wanted.values())
    assert report.bytes_read + report.bytes_mapped == sum(t.nbytes for t in wanted.values())


def test_an_assigned_parameter_stays_the_same_object(tmp_path: Path) -> None:
    wanted = random_state()
    save(wanted, tmp_path)
    net = Net()
    before, pointer = net.embed.weight, net.embed.weight.data_ptr()
    load_into(net, tmp_path, assign=True)
    assert net.embed.weight is before
    assert net.embed.weight.data_ptr() != pointer
    assert_equal(net, wanted)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_tied_parameters_stay_tied_and_are_read_once(tmp_path: Path, device: str) -> None:
    wanted = random_state(tied=True)
    wanted["head.weight"] = wanted["embed.weight"]
    save({name: t for name, t in wanted.items() if name != "head.weight"}, tmp_path)
    with torch.device(device):
        net = Net(tied=True)
    report = load_into(net, tmp_path)
    assert report.missing == report.unexpected == ()
    assert net.head.weight is net.embed.weight
    assert_equal(net, wanted)


def test_a_further_name_fills_an_untied_parameter_with_memory_of_its_own(tmp_path: Path) -> None:
    wanted = random_state()
    wanted["head.weight"] = wanted["embed.weight"]
    stored = {name: t for name, t in wanted.items() if name != "head.weight"}
    safetensors_torch.save_file(stored, tmp_path / "model.safetensors", metadata={"head.weight": "embed.weight"})
    with torch.device("meta"):
        net = Net()
    report = load_into(net, tmp_path)
    assert report.missing == report.unexpected == ()
    assert_equal(net, wanted)
    with torch.no_grad():
        net.head.weight.zero_()
    assert torch.equal(net.embed.weight, wanted["embed.weight"])


def test_the_dtype_of_a_filled_parameter_is_kept_and_of_an_assigned_one_is_the_stored(tmp_path: Path) -> None:
    wanted = {name: t.bfloat16() if t.is_floating_point() else t for name, t in random_state().items()}
    save(wanted, tmp_path, shards=3)
    net = Net()
    load_into(net, tmp_path)
    assert net.embed.weight.dtype == torch.float32
    assert_equal(net, wanted)
    with torch.device("meta"):
        net = Net()
    load_into(net, tmp_path)
    assert net.embed.weight.dtype == torch.bfloat16
    assert net.norm.num_batches_tracked.dtype == torch.int64
    assert_equal(net, wanted)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_an_asked_dtype_is_that_of_all_floating_parameters(tmp_path: Path, device: str) -> None:
    wanted = random_state()
    save(wanted, tmp_path)
    with torch.device(device):
        net = Net()
    load_into(net, tmp_path, dtype=torch.bfloat16)
    assert net.blocks[1].weight.dtype == torch.bfloat16
    assert net.norm.num_batches_tracked.dtype == torch.int64
    assert_equal(net, wanted)


def test_a_part_is_loaded_by_prefix_and_renamed(tmp_path: Path) -> None:
    wanted = random_state()
    save({f"model.{name}": t for name, t in wanted.items()}, tmp_path)
    linear = nn.Linear(96, 96)
    report = load_into(linear, tmp_path, prefix="model.blocks.1.")
    assert torch.equal(linear.weight, wanted["blocks.1.weight"])
    assert torch.equal(linear.bias, wanted["blocks.1.bias"])
    assert report.bytes_read == linear.weight.nbytes + linear.bias.nbytes
    load_into(
        linear,
        tmp_path,
        rename={"model.blocks.2.weight": "weight", "model.blocks.2.bias": "bias"}.get,
    )
    assert torch.equal(linear.weight, wanted["blocks.2.weight"])
    renamed = nn.ModuleDict({"x": nn.Linear(96, 96)})
    load_into(renamed, tmp_path, prefix="model.blocks.0.", rename={"weight": "x.weight", "bias": "x.bias"})
    assert torch.equal(renamed["x"].weight, wanted["blocks.0.weight"])


def test_a_module_is_loaded_within_inference_mode(tmp_path: Path) -> None:
    wanted = random_state()
    save(wanted, tmp_path)
    with torch.inference_mode():
        for device in ("meta", "cpu"):
            with torch.device(device):
                net = Net()
            load_into(net, tmp_path, dtype="float64")
            assert_equal(net, wanted)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    save(random_state(), tmp_path)
    with pytest.raises(FormatError, match="would both be 'weight'"):
        load_into(nn.Linear(96, 96), tmp_path, rename=lambda _: "weight")


def damaged() -> dict[str, Any]:
    tensors = random_state()
    del tensors["blocks.1.bias"]
    tensors["blocks.0.weight"] = torch.zeros(96, 95)
    tensors["norm.weight"] = torch.zeros(96, dtype=torch.uint8)
    tensors["extra"] = torch.zeros(3)
    return tensors


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_does_not_fit_is_an_error_before_anything_is_changed(tmp_path: Path, device: str) -> None:
    save(damaged(), tmp_path)
    with torch.device(device):
        net = Net()
    before = None if device == "meta" else state(net)
    with pytest.raises(FormatError) as caught:
        load_into(net, tmp_path)
    for name in ("blocks.1.bias", "blocks.0.weight", "norm.weight", "extra"):
        assert name in str(caught.value)
    if before is not None:
        assert_equal(net, before)
    else:
        assert all(tensor.is_meta for tensor in net.state_dict().values())


def test_missing_names_of_a_module_that_can_tie_its_weights_say_so(tmp_path: Path) -> None:
    class Tying(Net):
        def tie_weights(self) -> None:
            self.head.weight = self.embed.weight

    save({name: tensor for name, tensor in random_state().items() if name != "head.weight"}, tmp_path)
    net = Tying()
    with pytest.raises(FormatError, match=r"1 missing from the checkpoint: head\.weight") as error:
        load_into(net, tmp_path)
    assert "tie_weights()" in str(error.value.hint)
    net.tie_weights()
    assert load_into(net, tmp_path).missing == ()


def test_what_does_not_fit_is_reported_where_that_is_allowed(tmp_path: Path) -> None:
    stored = damaged()
    save(stored, tmp_path)
    net = Net()
    before = state(net)
    report = load_into(net, tmp_path, strict=False)
    assert report.missing == ("blocks.1.bias",)
    assert report.unexpected == ("extra",)
    assert report.mismatched == (
        Mismatch("norm.weight", (96,), "U8", (96,), "F32"),
        Mismatch("blocks.0.weight", (96, 95), "F32", (96, 96), "F32"),
    )
    left = {"blocks.1.bias", "norm.weight", "blocks.0.weight"}
    assert_equal(net, {name: (before if name in left else stored)[name] for name in before})


def test_an_index_that_lies_changes_nothing(tmp_path: Path) -> None:
    save(random_state(), tmp_path, shards=3)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["head.weight"] = index["weight_map"]["embed.weight"]
    path.write_text(json.dumps(index))
    net = Net()
    before = state(net)
    with pytest.raises(FormatError, match=r"head\.weight"):
        load_into(net, tmp_path)
    assert_equal(net, before)


def test_parameters_that_are_assigned_change_only_after_all_were_read(tmp_path: Path) -> None:
    save(random_state(), tmp_path, shards=3)
    checkpoint = open_checkpoint(tmp_path)
    last = tmp_path / "model-00003-of-00003.safetensors"
    last.write_bytes(last.read_bytes()[:-4])
    with torch.device("meta"):
        net = Net()
    with pytest.raises(IntegrityError, match="00003"):
        load_into(net, checkpoint, dtype="bfloat16")
    assert all(tensor.is_meta for tensor in net.state_dict().values())


def test_devices_follow_the_longest_prefix_and_meta_is_left_alone(tmp_path: Path) -> None:
    wanted = random_state()
    save(wanted, tmp_path)
    with torch.device("meta"):
        net = Net()
    report = load_into(net, tmp_path, device_map={"": "cpu", "blocks": "meta", "blocks.1": "cpu"})
    assert report.missing == ()
    assert net.blocks[0].weight.is_meta
    assert torch.equal(net.blocks[1].weight, wanted["blocks.1.weight"])
    with pytest.raises(FormatError, match="says nothing of"):
        load_into(net, tmp_path, device_map={"blocks": "cpu"})
    with pytest.raises(FormatError, match="no device"):
        load_into(net, tmp_path, device_map="warp")
    with pytest.raises(FormatError, match="cannot be copied into"):
        load_into(net, tmp_path, assign=False)


def test_a_parameter_that_is_not_contiguous_is_filled(tmp_path: Path) -> None:
    wanted = torch.randn(64, 32)
    save({"weight": wanted}, tmp_path)
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(32, 64).t())
    assert not module.weight.is_contiguous()
    load_into(module, tmp_path)
    assert torch.equal(module.weight, wanted)


def test_progress_adds_up_to_what_is_loaded(tmp_path: Path) -> None:
    wanted = random_state()
    save(wanted, tmp_path)
    events: list[Event] = []
    load_into(Net(), tmp_path, on_event=events.append)
    assert [events[0].kind, events[-1].kind] == ["start", "end"]
    assert events[0].nbytes == sum(t.nbytes for t in wanted.values())
    assert sum(event.nbytes for event in events if event.kind == "received") >= events[0].nbytes


class InMemory:
    """A source of tensors that are in no file."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def specs(self) -> Sequence[TensorSpec]:
        codes = {torch.float32: "F32", torch.int64: "I64"}
        return [TensorSpec(name, codes[t.dtype], tuple(t.shape)) for name, t in self._tensors.items()]

    def aliases(self) -> Mapping[str, str]:
        return {}

    def read(self, name: str, box: Box) -> bytes:
        part = self._tensors[name][tuple(slice(o, s) for o, s in zip(box.offset, box.stop, strict=True))]
        raw: bytes = part.contiguous().numpy().tobytes()
        return raw


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_any_source_fills_a_module(dtype: str | None) -> None:
    wanted = random_state(wide=2500)
    net = Net(wide=2500)
    with open_checkpoint(InMemory(wanted)) as checkpoint:
        assert isinstance(checkpoint, Checkpoint)
        report = load_into(net, checkpoint, dtype=dtype)
    assert report.bytes_read == sum(t.nbytes for t in wanted.values())
    assert_equal(net, wanted)


def test_a_stored_tensor_of_several_names_is_expected_by_any_of_them() -> None:
    slots = [Slot(("head",), (2, 2), "F32"), Slot(("other",), (2,), "F32")]
    specs = {"embed": TensorSpec("embed", "F32", (2, 2)), "lone": TensorSpec("lone", "F32", (2,))}
    found = match(slots, specs, {"head": "embed"}, shape_of=lambda spec: spec.shape)
    assert found.stored == ("embed", None)
    assert found.missing == ("other",)
    assert found.unexpected == ("lone",)
