"""A saved step of a training run, opened as a checkpoint: from disk and from the branch of a repo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hubshard.errors import FormatError, IntegrityError, NotFoundError
from hubshard.lazy import Checkpoint, from_pretrained, load_into, offload, open_checkpoint
from hubshard.steps.places import LocalPlace
from hubshard.steps.source import StepSource
from hubshard.steps.step import Step, step_folder
from hubshard.steps.writing import commit_step, stage_local
from hubshard.store.hub import HubStore
from hubshard.tensors import Box
from tests.faults.models import Repo, new_repo
from tests.steps.saving import save_step

if TYPE_CHECKING:
    from tests.conftest import Hub

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("starlette")

BLOCK = 2**12


def arrays(seed: int = 0) -> dict[str, tuple[str, Any]]:
    rng = np.random.default_rng(seed)
    return {
        "model.embed.weight": ("F32", rng.standard_normal((500, 64), dtype="f4")),
        "model.bias": ("BF16", rng.integers(0, 2**15, 33).astype("u2")),
        "model.count": ("I64", np.array(2**40 + seed)),
        "model.flags": ("BOOL", rng.integers(0, 2, (7, 5)).astype(bool)),
        "model.none": ("F16", np.zeros((0, 4), "f2")),
        "optimizer.embed.weight": ("F32", rng.standard_normal((500, 64), dtype="f4")),
    }


def read_of(checkpoint: Checkpoint) -> int:
    assert isinstance(checkpoint.source, StepSource)
    return checkpoint.source.nbytes_read


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A folder with two steps of three ranks."""
    for step in (10, 20):
        save_step(tmp_path / "steps", arrays(step), step=step, world=3, dims=(0, None), block_bytes=BLOCK)
    return tmp_path / "steps"


def put_step(repo: Repo, root: Path, step: int, *, branch: str = "resume") -> None:
    store = HubStore(repo.repo_id, token="hf_test", endpoint=repo.url)
    opened = LocalPlace(root).open(step)
    folder = root / step_folder(step)
    staged = [stage_local(store, branch, folder / file.name, file, step=step) for file in opened.step.files]
    raw = (folder / "manifest.json").read_bytes()
    commit_step(store, branch, parent=store.head(branch), step=opened.step, raw=raw, staged=staged)


@pytest.fixture
def repo(module_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    """A repo of the test's own."""
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))
    return new_repo(module_hub)


def hub_of(repo: Repo) -> dict[str, Any]:
    return {"token": "hf_test", "endpoint": repo.url}


# From a folder


def test_a_step_is_a_mapping_of_the_names_of_its_model(steps: Path) -> None:
    with open_checkpoint(steps, step=20) as checkpoint:
        assert set(checkpoint) == {"embed.weight", "bias", "count", "flags", "none"}
        for name, (_, array) in arrays(20).items():
            if name.startswith("model."):
                lazy = checkpoint[name.removeprefix("model.")]
                assert lazy.shape == array.shape
                assert bytes(lazy.read()) == array.tobytes()
        assert checkpoint["bias"].dtype == torch.bfloat16
        assert int(checkpoint["count"][...]) == 2**40 + 20
    with open_checkpoint(str(steps), step="newest") as checkpoint:
        assert int(checkpoint["count"][...]) == 2**40 + 20
    with open_checkpoint(steps, step=10, part="optimizer") as checkpoint:
        assert np.array_equal(checkpoint["embed.weight"][:].numpy(), arrays(10)["optimizer.embed.weight"][1])


def test_slices_equal_those_of_numpy_and_read_the_blocks_that_they_touch(steps: Path) -> None:
    whole = arrays(20)["model.embed.weight"][1]
    rng = np.random.default_rng(1)
    with open_checkpoint(steps, step=20) as checkpoint:
        assert read_of(checkpoint) == 0
        assert np.array_equal(checkpoint["embed.weight"][7].numpy(), whole[7])
        assert 0 < read_of(checkpoint) <= 2 * BLOCK
        for _ in range(60):
            a, b = sorted(rng.integers(0, 501, 2))
            index = (slice(int(a), int(b), int(rng.integers(1, 9))), slice(None, None, int(rng.choice([-1, 1, 3]))))
            assert np.array_equal(checkpoint["embed.weight"][index].numpy(), whole[index])
        box = Box((150, 3), (60, 5))
        assert bytes(checkpoint["embed.weight"].read(box)) == whole[150:210, 3:8].tobytes()


class Module(torch.nn.Module):  # type: ignore[name-defined,misc]
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(500, 64)
        self.bias = torch.nn.Parameter(torch.zeros(33, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("flags", torch.zeros(7, 5, dtype=torch.bool))
        self.register_buffer("none", torch.zeros(0, 4, dtype=torch.float16))


def is_loaded(module: Any, seed: int) -> bool:
    same = torch.equal(module.embed.weight, torch.from_numpy(arrays(seed)["model.embed.weight"][1]))
    return bool(same and int(module.count) == 2**40 + seed)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("verify", [False, True])
def test_a_module_is_filled_from_a_step(steps: Path, device: str, *, verify: bool) -> None:
    with torch.device(device):
        module = Module()
    report = load_into(module, steps, step=10, verify=verify)
    assert is_loaded(module, 10)
    assert (report.missing, report.unexpected, report.mismatched, report.bytes_mapped) == ((), (), (), 0)
    with open_checkpoint(steps, step=20, verify=verify) as checkpoint:
        load_into(module, checkpoint, verify=verify)
        assert is_loaded(module, 20)
        half = torch.nn.Embedding(500, 64, device=device)
        load_into(half, checkpoint, prefix="embed.", dtype="bfloat16", assign=True)
        assert torch.equal(half.weight, module.embed.weight.bfloat16())


def test_a_module_is_offloaded_to_a_step(steps: Path) -> None:
    module = torch.nn.Sequential()
    module.add_module("embed", torch.nn.Embedding(500, 64))
    with offload(module, steps, step=20, budget="1MB", strict=False):
        out = module(torch.tensor([3, 499]))
    assert np.array_equal(out.numpy(), arrays(20)["model.embed.weight"][1][[3, 499]])


def test_a_flipped_byte_is_refused_before_a_parameter_is_touched(steps: Path) -> None:
    step: Step = LocalPlace(steps).open(20).step
    piece = step.pieces("model.embed.weight")[1]
    path = steps / step_folder(20) / piece.at.path
    raw = bytearray(path.read_bytes())
    raw[piece.at.start + 5000] ^= 1
    path.write_bytes(raw)
    with torch.device("meta"):
        module = Module()
    with pytest.raises(IntegrityError, match="is not as it was saved"):
        load_into(module, steps, step=20)
    assert all(parameter.is_meta for parameter in module.parameters())
    with pytest.raises(IntegrityError, match="is not as it was saved"):
        open_checkpoint(steps, step=20, verify=True)
    with open_checkpoint(steps, step=20) as checkpoint:
        checkpoint["embed.weight"][499]
        with pytest.raises(IntegrityError):
            checkpoint["embed.weight"][:]


def test_what_is_no_step_is_refused_by_what_it_is(steps: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no step 15 is saved; there are 10, 20"):
        open_checkpoint(steps, step=15)
    for wrong in (-1, True, "10", "latest", 1.0):
        with pytest.raises(FormatError, match="is no step"):
            open_checkpoint(steps, step=wrong)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="no variant 'fp16'"):
        open_checkpoint(steps, step=10, variant="fp16")
    with pytest.raises(FormatError, match="only a step has a part 'ema'"):
        open_checkpoint(steps, part="ema")
    with pytest.raises(NotFoundError, match="it holds 'model'"):
        open_checkpoint(steps, step=10, part="ema")
    with pytest.raises(FormatError, match="has no revision 'main'"):
        open_checkpoint(steps, step=10, revision="main")
    with pytest.raises(FormatError, match="a StepSource holds no steps"):
        open_checkpoint(StepSource(LocalPlace(steps).open(10)), step=10)
    with open_checkpoint(steps, step=10) as checkpoint, pytest.raises(FormatError, match="is open already"):
        load_into(Module(), checkpoint, step=20)
    with pytest.raises(NotFoundError):
        open_checkpoint(tmp_path / "nowhere", step="newest")


# From a branch


def test_of_a_remote_step_the_blocks_that_are_asked_for_are_fetched(repo: Repo, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    big = {
        f"{part}.layers.{n}.w": ("F32", rng.standard_normal((400, 500), dtype="f4"))
        for part in ("model", "optim")
        for n in range(3)
    }
    save_step(tmp_path, big, step=7, world=2, dims=(0,), block_bytes=2**16)
    put_step(repo, tmp_path, 7)
    put_step(repo, tmp_path, 7, branch="run/b")
    with open_checkpoint(repo.repo_id, step=7, **hub_of(repo)) as checkpoint:
        before = repo.nbytes_sent()
        found = checkpoint["layers.1.w"][:]
        assert np.array_equal(found.numpy(), big["model.layers.1.w"][1])
        assert found.nbytes <= read_of(checkpoint) <= found.nbytes + 4 * 2**16
        assert repo.nbytes_sent() - before <= read_of(checkpoint) + 10_000
        checkpoint["layers.2.w"][100:102]
        assert read_of(checkpoint) <= found.nbytes + 6 * 2**16
    for source, revision in (
        (f"{repo.repo_id}@run/b", None),
        (repo.repo_id, "run/b"),
        (f"hf://{repo.repo_id}@run/b", "run/b"),
    ):
        with open_checkpoint(source, step="newest", revision=revision, **hub_of(repo)) as checkpoint:
            assert isinstance(checkpoint.source, StepSource)
            assert checkpoint.source.opened.folder.where == f"{repo.repo_id}@run/b/step-00000007"
    with pytest.raises(FormatError, match="two revisions are asked for"):
        open_checkpoint(f"{repo.repo_id}@run/b", step=7, revision="resume", **hub_of(repo))
    with pytest.raises(NotFoundError, match="has no branch 'other'"):
        open_checkpoint(repo.repo_id, step=7, revision="other", **hub_of(repo))
    with pytest.raises(NotFoundError, match="there are 7"):
        open_checkpoint(repo.repo_id, step=8, **hub_of(repo))


# transformers


def llama(*, tied: bool = False) -> Any:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    return transformers.LlamaForCausalLM(config)


def save_model(root: Path, model: Any, *, tied: bool = False, world: int = 2) -> None:
    values = {f"model.{name}": ("F32", tensor.numpy()) for name, tensor in model.state_dict().items()}
    scalars: dict[str, object] = {"step": 3}
    if tied:
        del values["model.lm_head.weight"]
        scalars["values.model"] = ({"aliases": {"lm_head.weight": "model.embed_tokens.weight"}},)
    save_step(root, values, step=3, world=world, dims=(0, -1), scalars=scalars, block_bytes=BLOCK)


def same_weights(one: Any, other: Any) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_loaded_from_a_step_with_the_config_of_main(repo: Repo, tmp_path: Path, *, tied: bool) -> None:
    model = llama(tied=tied)
    save_model(tmp_path / "steps", model, tied=tied)
    put_step(repo, tmp_path / "steps", 3)
    with pytest.raises(NotFoundError, match=rf"{repo.repo_id} has no config\.json"):
        from_pretrained(repo.repo_id, step=3, **hub_of(repo))
    given = from_pretrained(repo.repo_id, step=3, config=model.config, model_class=type(model), **hub_of(repo))
    assert same_weights(given, model)
    model.config.save_pretrained(tmp_path / "config")
    generation = b'{"max_new_tokens": 7, "do_sample": false}'
    config = (tmp_path / "config" / "config.json").read_bytes()
    repo.put_files({"config.json": config, "generation_config.json": generation})
    loaded = from_pretrained(repo.repo_id, step="newest", **hub_of(repo))
    assert type(loaded).__name__ == "LlamaForCausalLM"
    assert same_weights(loaded, model)
    assert loaded.name_or_path == repo.repo_id
    assert loaded.generation_config.max_new_tokens == 7
    if tied:
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    half = from_pretrained(repo.repo_id, step=3, dtype=torch.bfloat16, device_map="cpu", **hub_of(repo))
    assert torch.equal(half.model.norm.weight, model.model.norm.weight.bfloat16())


def test_a_model_is_loaded_from_a_folder_of_steps_that_holds_its_config(tmp_path: Path) -> None:
    model = llama()
    save_model(tmp_path, model)
    with pytest.raises(NotFoundError, match=r"has no config\.json"):
        from_pretrained(tmp_path, step=3)
    model.config.save_pretrained(tmp_path)
    for device_map in (None, "auto"):
        loaded = from_pretrained(tmp_path, step=3, device_map=device_map)
        assert same_weights(loaded, model)
        assert loaded.name_or_path == str(tmp_path)


def test_experts_that_are_fused_in_memory_are_loaded_as_they_were_saved(tmp_path: Path) -> None:
    torch.manual_seed(6)
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        architectures=["MixtralForCausalLM"],
        dtype="float32",
    )
    model = transformers.MixtralForCausalLM(config)
    save_model(tmp_path, model)
    config.save_pretrained(tmp_path)
    assert same_weights(from_pretrained(tmp_path, step=3), model)
