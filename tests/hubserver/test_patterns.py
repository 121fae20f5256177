"""The patterns of .gitignore and .gitattributes, with git as the oracle."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hubshard.hubserver.patterns import INITIAL_ATTRIBUTES, is_ignored, is_lfs

if TYPE_CHECKING:
    from pathlib import Path

PATHS = [
    "a.log",
    "b.txt",
    "logs/a.log",
    "logs/keep.txt",
    "x/logs/b.log",
    "x/y/deep.txt",
    "build/out.bin",
    "x/build/out.bin",
    "name with space.txt",
    "#hash",
    "!bang",
    "[a].txt",
    "a1.txt",
    "foo/bar/baz.txt",
    "foo/x/bar",
]
RULES = [
    "*.log",
    "logs/",
    "/build",
    "build",
    "!logs/keep.txt",
    "!a.log",
    "x/**/deep.txt",
    "**/logs",
    "foo/**",
    "foo/*/bar",
    "a?.txt",
    "[a-c].txt",
    "[!a]*.txt",
    "\\#hash",
    "\\!bang",
    "# comment",
    "",
    "*.txt",
    "!b.txt",
    "name with space.txt",
    "x/*",
    "!x/y/",
    "*",
    "!*/",
]


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repo")
    subprocess.run(["git", "init", "-q", folder], check=True)
    for path in PATHS:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    return folder


def git_lines(repo: Path, *command: str) -> list[str]:
    done = subprocess.run(
        ["git", *command, "--stdin", "-z"],
        cwd=repo,
        input="\0".join(PATHS) + "\0",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {0, 1}, done.stderr
    return done.stdout.split("\0")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=st.lists(st.sampled_from(RULES), min_size=1, max_size=6))
def test_git_and_the_hub_ignore_the_same_paths(repo: Path, chosen: list[str]) -> None:
    rules = "\n".join(chosen) + "\n"
    (repo / ".gitignore").write_text(rules)
    ignored = set(git_lines(repo, "check-ignore", "--no-index"))
    assert {path for path in PATHS if is_ignored(path, rules)} == ignored - {""}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chosen=st.lists(
        st.tuples(
            st.sampled_from(
                ["*.log", "*.txt", "/a.log", "logs/*", "x/**", "*", "a?.txt", "foo/**/baz.txt", "[a-c].txt"]
            ),
            st.sampled_from(["filter=lfs -text", "-filter", "!filter", "text", "filter=other"]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_git_and_the_hub_send_the_same_paths_to_lfs(repo: Path, chosen: list[tuple[str, str]]) -> None:
    attributes = "".join(f"{pattern} {words}\n" for pattern, words in chosen)
    (repo / ".gitattributes").write_text(attributes)
    fields = git_lines(repo, "check-attr", "filter")[:-1]
    wanted = {path: value == "lfs" for path, value in zip(fields[::3], fields[2::3], strict=True)}
    assert {path: is_lfs(path, attributes) for path in PATHS} == wanted


@pytest.mark.parametrize("path", ["model.safetensors", "a/b/pytorch_model.bin", "saved_model/x/y.txt", "x.tar.gz"])
def test_weights_go_to_lfs_in_a_new_repo(path: str) -> None:
    assert is_lfs(path, INITIAL_ATTRIBUTES)


@pytest.mark.parametrize("path", ["config.json", "README.md", "model.safetensors.index.json", ".gitattributes"])
def test_texts_do_not_go_to_lfs_in_a_new_repo(path: str) -> None:
    assert not is_lfs(path, INITIAL_ATTRIBUTES)
