"""Adapters of peft, published: peft itself loads them, and their base models stay where they are."""

from __future__ import annotations

import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Hub

# looked for, not imported: the clients do that
MISSING = [name for name in ("diffusers", "peft", "starlette") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the extra test is not installed: no {', '.join(MISSING)}")

ROOT = Path(__file__).parents[2]
BEGIN = """
    import json, sys
    from pathlib import Path

    import torch
    import transformers
    from huggingface_hub import HfApi
    from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
    from safetensors.torch import load_file, save_file

    import hubshard
    from tests.e2e.small_pipelines import equal, llama, lora

    place, api = Path(sys.argv[1]), HfApi()

    def files(repo):
        return sorted(set(api.list_repo_files(repo)) - {".gitattributes"})

    def same(own, repo):
        got = Path(api.snapshot_download(repo))
        for path in (path for path in own.rglob("*") if path.name.startswith("adapter_")):
            other = got / path.relative_to(own)
            if path.suffix == ".json":
                assert path.read_bytes() == other.read_bytes(), path
            else:
                a, b = load_file(path), load_file(other)
                assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a), path
"""


def run(hub: Hub, code: str, place: Path) -> str:
    """Run code as a client that has all of the above."""
    return hub.client(textwrap.dedent(BEGIN) + textwrap.dedent(code), place, cwd=ROOT)


def test_a_directory_of_an_adapter_keeps_its_name_and_is_one_file(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    model = lora(llama())
    model.save_pretrained(place / "own")
    hubshard.push_to_hub(llama(), "me/base")
    events = []
    done = hubshard.push_to_hub(place / "own", "me/lora", max_shard_size="2KB", on_event=events.append)
    assert files("me/lora") == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert any("peft reads one file alone" in event.detail for event in events if event.kind == "warning")
    assert equal(model, PeftModel.from_pretrained(llama(), "me/lora"))

    api.upload_file(path_or_fileobj=b"pickles", path_in_repo="adapter_model.bin", repo_id="me/lora")
    api.upload_file(path_or_fileobj=b"pickles", path_in_repo="old/pytorch_model.bin", repo_id="me/lora")
    assert hubshard.push_to_hub(place / "own", "me/lora").deleted == ("adapter_model.bin",)
    assert hubshard.verify("me/lora").ok
    config = json.loads((place / "own" / "adapter_config.json").read_text())
    (place / "own" / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "me/base"}))
    hubshard.push_to_hub(place / "own", "me/lora")
    loaded = hubshard.from_pretrained("me/lora")
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
    """
    run(module_hub, code, tmp_path)


def test_shards_of_an_adapter_are_joined_since_peft_reads_one_file(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    model, own = lora(llama()), place / "own"
    model.save_pretrained(own)
    tensors = load_file(own / "adapter_model.safetensors")
    (own / "adapter_model.safetensors").unlink()
    names = {name: f"adapter_model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(tensors)}
    for file in sorted(set(names.values())):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, own / file, {"format": "pt"})
    (own / "adapter_model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    hubshard.push_to_hub(own, "me/joined")
    assert files("me/joined") == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert equal(model, PeftModel.from_pretrained(llama(), "me/joined"))
    """
    run(module_hub, code, tmp_path)


def test_a_model_in_memory_gives_its_adapters_alone_as_its_own_save_pretrained_does(
    module_hub: Hub, tmp_path: Path
) -> None:
    code = """
    model = lora(llama())
    model.save_pretrained(place / "own")
    before = json.dumps(model.peft_config["default"].to_dict(), default=str)
    done = hubshard.push_to_hub(model, "me/memory", max_shard_size="2KB")
    assert json.dumps(model.peft_config["default"].to_dict(), default=str) == before
    assert files("me/memory") == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert done.total_bytes < 50_000
    same(place / "own", "me/memory")
    assert equal(model, PeftModel.from_pretrained(llama(), "me/memory"))

    several = lora(llama(), "default", "style", "tone")
    several.save_pretrained(place / "several")
    done = hubshard.push_to_hub(several, "me/several")
    assert [plan.folder for plan in done.plans] == ["", "style", "tone"]
    same(place / "several", "me/several")
    loaded = PeftModel.from_pretrained(llama(), "me/several")
    loaded.load_adapter("me/several", "style", subfolder="style")
    loaded.load_adapter("me/several", "tone", subfolder="tone")
    assert equal(several, loaded)

    named = lora(llama(), "style")
    named.save_pretrained(place / "named")
    hubshard.push_to_hub(named, "me/named")
    assert files("me/named") == ["README.md", "style/adapter_config.json", "style/adapter_model.safetensors"]
    hubshard.push_to_hub(place / "named", "me/named-folder")
    assert files("me/named-folder") == files("me/named")
    assert equal(named, PeftModel.from_pretrained(llama(), "me/named-folder", subfolder="style", adapter_name="style"))
    """
    run(module_hub, code, tmp_path)


def test_what_peft_could_not_load_is_refused_with_the_way_out(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    def refused(source, hint, **options):
        try:
            hubshard.push_to_hub(source, "me/refused", **options)
        except hubshard.FormatError as error:
            assert hint in error.hint, error.hint
            assert not api.repo_exists("me/refused")
        else:
            raise AssertionError("nothing was raised")

    model = lora(llama(), "default", "style")
    model.save_pretrained(place / "own")
    for source in (model, place / "own"):
        refused(source, "publish to another repo or branch", variant="fp16", dtype="float16")
    hubshard.push_to_hub(model, "me/half", dtype="float16")
    half = load_file(api.hf_hub_download("me/half", "style/adapter_model.safetensors"))
    assert {tensor.dtype for tensor in half.values()} == {torch.float16}
    mixed = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]), mixed=True)
    refused(mixed, "merge_and_unload")
    hubshard.push_to_hub(mixed.merge_and_unload(), "me/merged")
    """
    run(module_hub, code, tmp_path)


def test_adapters_of_other_kinds_come_out_as_peft_writes_them(module_hub: Hub, tmp_path: Path) -> None:
    code = """
    kinds = {
        "head": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
        "embedding": LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]),
        "prompt": PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "dora": LoraConfig(r=2, target_modules="all-linear", use_dora=True),
    }
    for kind, config in kinds.items():
        model = get_peft_model(llama(), config)
        hubshard.push_to_hub(model, f"me/{kind}")
        model.save_pretrained(place / kind)
        same(place / kind, f"me/{kind}")
        assert equal(model, PeftModel.from_pretrained(llama(), f"me/{kind}")), kind

    base = llama()
    base.name_or_path = "me/base"
    model = lora(base)
    hubshard.push_to_hub(torch.compile(model), "me/compiled")
    model.save_pretrained(place / "compiled")
    same(place / "compiled", "me/compiled")
    assert 'base_model: "me/base"' in Path(api.hf_hub_download("me/compiled", "README.md")).read_text()

    linears = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    tied = get_peft_model(linears, LoraConfig(target_modules=["0", "1"]))
    tied.base_model.model[1].lora_A["default"].weight = tied.base_model.model[0].lora_A["default"].weight
    tied.save_pretrained(place / "tied")
    hubshard.push_to_hub(tied, "me/tied")
    same(place / "tied", "me/tied")
    """
    run(module_hub, code, tmp_path)
