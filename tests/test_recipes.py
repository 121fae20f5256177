"""The recipes, run as they stand against the embedded Hub."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from huggingface_hub import HfApi

import hubshard
from tests import warm
from tests.faults.proxy import Proxy, drop, say

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("starlette")
pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"

BASE = """
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
words = {word: n for n, word in enumerate(["[UNK]", "the", "old", "cat", "sat", "on", "a", "mat"])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained("base")
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
LlamaForCausalLM(config).save_pretrained("base")
"""


def run(hub: Hub, recipe: str, *arguments: str, cwd: Path) -> str:
    """What a recipe prints."""
    done = warm.run([RECIPES / recipe, *arguments], imports="torch", env=hub.client_env(cwd / "hf"), cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "UserWarning" not in done.stderr
    return done.stdout


def test_a_fine_tune_is_published_and_then_opened_piece_by_piece(module_hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    module_hub.client(BASE, cwd=tmp_path)
    (tmp_path / "text.txt").write_text("the old cat sat on a mat " * 40)
    inputs = ["--base", "base", "--text", "text.txt", "--repo", "org/tuned", "--tag", "v1", "--max-shard-size", "50KB"]
    printed = run(module_hub, "publish_fine_tune.py", *inputs, "--steps", "3", "--tokens", "16", cwd=tmp_path)
    assert re.search(r": shards: [2-9], bytes sent: [1-9]", printed)
    files = HfApi(endpoint=module_hub.url).list_repo_files("org/tuned", revision="v1")
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= set(files)
    name = "model.embed_tokens.weight"
    options = ["--revision", "v1", "--tensor", name, "--rows", "4", "--into", "copy"]
    printed = run(module_hub, "pull_and_load.py", "org/tuned", *options, cwd=tmp_path)
    assert f"{name} F32 [64, 32]" in printed
    assert ": whole, tensors: " in printed
    assert f"{name}[:4] is equal on the Hub and on disk" in printed
    assert hubshard.verify(tmp_path / "copy").ok


def test_a_script_publishes_once_and_gives_way_to_who_was_faster(module_hub: Hub, tmp_path: Path) -> None:
    options = ["--repo", "org/net", "--max-shard-size", "300KB", "--steps", "2"]
    first = run(module_hub, "push_from_script.py", *options, cwd=tmp_path)
    assert "shards of at most 300KB: 4, bytes in all: " in first
    second = run(module_hub, "push_from_script.py", *options, cwd=tmp_path)
    (commit,) = (line.split()[1].rstrip(",") for line in second.splitlines() if line.startswith("unchanged"))
    assert f"published {commit}" in first
    assert f"unchanged {commit}, bytes sent: 0\n" in second
    with pytest.raises(AssertionError, match="somebody was faster"):
        run(module_hub, "push_from_script.py", *options, "--seed", "1", "--expected-head", "0" * 40, cwd=tmp_path)


def test_a_notice_is_a_url_that_answers_and_nothing_else_ends_the_watch() -> None:
    is_noticed = runpy.run_path(str(RECIPES / "train_on_spot.py"))["is_noticed"]
    proxy = Proxy(1)
    try:
        proxy.fail("GET", say(404), drop, say(200))
        assert [is_noticed(None, f"{proxy.url}/notice") for _ in range(3)] == [False, False, True]
    finally:
        proxy.close()
    assert not is_noticed(None, f"{proxy.url}/notice"), "nobody listens any more"


def test_every_recipe_is_listed_and_every_listed_one_exists() -> None:
    text = (RECIPES / "README.md").read_text("utf-8")
    listed = {line.split("](")[1].split(")")[0] for line in text.splitlines() if line.startswith("| [")}
    there = {path.name for path in RECIPES.iterdir() if path.suffix in {".py", ".yml", ".md"}} - {"README.md"}
    assert listed == there


def test_each_training_keeps_its_steps_in_a_folder_of_its_own_that_git_ignores() -> None:
    found = {
        path.stem: re.findall(r'"--local-dir", default="(.+)"', path.read_text("utf-8"))
        for path in RECIPES.glob("train_*.py")
        if "--local-dir" in path.read_text("utf-8")
    }
    assert found == {name: [f"{name}_steps"] for name in ("train_loop", "train_fsdp2")}
    assert "/train_*_steps/" in (ROOT / ".gitignore").read_text("utf-8").splitlines()


def test_the_example_workflow_uses_what_the_action_has() -> None:
    workflow = yaml.safe_load((RECIPES / "release-model.yml").read_text("utf-8"))
    action = yaml.safe_load((ROOT / ".github" / "actions" / "publish" / "action.yml").read_text("utf-8"))
    uses = [
        step for job in workflow["jobs"].values() for step in job["steps"] if "actions/publish@" in step.get("uses", "")
    ]
    assert len(uses) == 3
    assert all(set(step["with"]) <= set(action["inputs"]) for step in uses)
    assert all(
        {name for name, one in action["inputs"].items() if one.get("required")} <= set(step["with"]) for step in uses
    )
