"""What is to be published: which files go along, and what is said of what is unusual. Nothing is sent here."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hubshard.errors import FormatError
from hubshard.plan import MAX_INDEX_BYTES, MAX_SHARDS
from hubshard.publish.from_store import from_store
from hubshard.publish.left_out import Choice
from hubshard.publish.outgoing import Layout, Outgoing, from_memory
from hubshard.store.opening import open_path
from hubshard.tensors import Box, TensorSpec

SECRETS = [
    *(".env", ".env.local", ".envrc", "sub/.ENV", ".netrc", "_netrc", ".git-credentials", ".npmrc", ".pypirc"),
    *("id_rsa", "keys/id_ed25519", "server.pem", "a/b.KEY", "cert.p12", ".ssh/known_hosts", ".aws/credentials"),
]
OF_TOOLS = [
    *(".git/config", "sub/.git/HEAD", "sub/.git", ".cache/huggingface/x", "a/.cache/y", "__pycache__/a.pyc"),
    *("a/__pycache__/b.pyc", ".DS_Store", "a/.DS_Store"),
]
OF_TRAINERS = ["optimizer.pt", "scheduler.pt", "rng_state_3.pth", "training_args.bin", "trainer_state.json"]
OF_THE_MODEL = [
    *("config.json", "README.md", ".gitattributes", "modeling.py", "environment.yml", "id_rsa.pub"),
    *("onnx/model.onnx", "unet/optimizer.md", "monkey.json", "keys.json", "steps/1.txt", "checkpoint/a.json"),
]


def taken(paths: Sequence[str], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[str]:
    choice = Choice(include, exclude)
    return [path for path in paths if choice.takes(path)]


def test_what_belongs_to_a_model_goes_along_and_nothing_is_said() -> None:
    choice = Choice((), ())
    assert all(map(choice.takes, OF_THE_MODEL))
    assert not any(map(choice.takes, OF_TOOLS + OF_TRAINERS))
    assert choice.notes() == []


@pytest.mark.parametrize("path", SECRETS)
def test_what_holds_secrets_stays_and_is_named(path: str) -> None:
    for include in ((), ("*",), ("*", "config.json"), (f"{path[:1]}*",)):
        choice = Choice(include, ())
        assert not choice.takes(path)
        [note] = choice.notes()
        told = f"{path}: left out, since such files hold secrets; to publish {path} too: `--include "
        assert note.startswith(told)


@pytest.mark.parametrize(
    ("path", "include", "advice"),
    [
        (".gitignore", (), '`--include "*" --include ".gitignore"`, in Python include=["*", ".gitignore"]'),
        ("certs/ca.pem", (), '`--include "*" --include "certs/ca.pem"`, in Python include=["*", "certs/ca.pem"]'),
        ("checkpoint-500/a.json", (), '`--include "*" --include "checkpoint-500/*"`, '),
        (".env", ("c*", ".e*"), '`--include "c*" --include ".e*" --include ".env"`, '),
    ],
)
def test_who_follows_a_note_publishes_the_config_all_the_same(path: str, include: Sequence[str], advice: str) -> None:
    choice = Choice(include, ())
    assert (choice.takes("config.json"), choice.takes(path)) == (True, False)
    [note] = choice.notes()
    assert advice in note
    patterns = shlex.split(note.partition("`")[2].partition("`")[0].replace("--include", ""))
    assert taken(["config.json", path], patterns) == ["config.json", path]


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        (".env.example", ".env.example"),
        (".env.example", ".env.*"),
        ("certs/ca.pem", "*.pem"),
        ("optimizer.pt", "optimizer.pt"),
        ("checkpoint-500/model.safetensors", "checkpoint-500/*"),
    ],
)
def test_whoever_names_it_gets_it(path: str, pattern: str) -> None:
    assert taken([path, "config.json"], ["*", pattern]) == [path, "config.json"]
    assert taken([path], ["*", pattern], [path]) == []


def test_what_git_ignores_in_the_folder_is_no_matter_of_the_repo() -> None:
    choice = Choice((), ())
    assert not any(map(choice.takes, [".gitignore", "logs/.gitignore"]))
    [note] = choice.notes()
    assert note.startswith(".gitignore, logs/.gitignore: left out, since a Hub refuses files by it")
    assert taken([".gitignore"], ["*"]) == []
    assert taken([".gitignore", "a.json"], ["*", ".gitignore"]) == [".gitignore", "a.json"]


def test_folders_of_a_training_run_stay_and_are_named_once() -> None:
    choice = Choice((), ())
    names = ("model.safetensors", "optimizer.pt", "deep/x.json")
    paths = [
        f"{folder}/{name}" for folder in ("checkpoint-500", "global_step4", "runs/step-00000016") for name in names
    ]
    assert not any(map(choice.takes, paths))
    [note] = choice.notes()
    assert note.startswith("checkpoint-500/, global_step4/, runs/step-00000016/: left out")


def test_include_chooses_among_the_rest_and_exclude_has_the_last_word() -> None:
    assert taken(["a.json", "b.md", "c.py"], ["*.json", "*.py"]) == ["a.json", "c.py"]
    assert taken(["a.json", "b.md", "c.py"], ["*"], ["*.json"]) == ["b.md", "c.py"]


@dataclass(frozen=True)
class Planned:
    """A source that promises tensors, and has none of their bytes."""

    stored: Sequence[TensorSpec]

    def specs(self) -> Sequence[TensorSpec]:
        return self.stored

    def aliases(self) -> Mapping[str, str]:
        return {}

    def read(self, name: str, box: Box) -> bytes:
        raise AssertionError(f"{name} {box} was read, and nothing should be")


def planned(count: int, name: str, max_shard_bytes: int) -> Outgoing:
    specs = [TensorSpec(f"{number:06}.{name}", "F32", (16,)) for number in range(count)]
    return from_memory(Planned(specs), Layout(max_shard_bytes))


def test_an_index_that_the_hub_may_not_read_is_told() -> None:
    outgoing = planned(40_000, "x" * 250, 10**7)
    [index] = outgoing.files
    assert index.nbytes > MAX_INDEX_BYTES
    [note] = outgoing.notes
    assert note.startswith("model.safetensors.index.json has 1")
    assert planned(1000, "x" * 250, 10**5).notes == ()


def test_more_shards_than_a_folder_should_hold_are_told() -> None:
    outgoing = planned(MAX_SHARDS + 1, "w", 200)
    assert len(outgoing.shards) == MAX_SHARDS + 1
    [note] = outgoing.notes
    assert note.startswith("there are 10001 shards")
    assert planned(MAX_SHARDS, "w", 200).notes == ()


def test_a_folder_goes_without_its_secrets_and_says_so(tmp_path: Path) -> None:
    save_one(tmp_path)
    (tmp_path / ".env").write_text("HF_TOKEN=hf_secret")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "module" / ".git").mkdir(parents=True)
    (tmp_path / "module" / ".git" / "config").write_text("[core]")
    outgoing = from_store(open_path(tmp_path), Layout(10**9))
    assert [file.path for file in outgoing.all_files] == ["model.safetensors", "config.json"]
    assert any(note.startswith(".env: left out") for note in outgoing.notes)
    named = from_store(open_path(tmp_path), Layout(10**9), include=[".env"])
    assert [file.path for file in named.all_files] == ["model.safetensors", ".env"]


def test_what_no_repo_takes_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_one(tmp_path)
    (tmp_path / "module" / ".git").mkdir(parents=True)
    (tmp_path / "module" / ".git" / "config").write_text("[core]")
    with pytest.raises(FormatError, match=r"\.git folder"):
        from_store(open_path(tmp_path), Layout(10**9), include=["module/.git/*"])


def save_one(folder: Path) -> None:
    [plan] = from_memory(Planned([TensorSpec("w", "F32", (4,))]), Layout(10**9)).plans
    (folder / "model.safetensors").write_bytes(plan.shards[0].header + bytes(16))
