"""The `hf` command on a Hub. Commands run one after the other in one process: starting Python takes longest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.hub.conftest import Client

RUN = """
    import contextlib, io, json, sys
    from huggingface_hub.cli.hf import main
    done = []
    for words in json.loads(sys.argv[1]):
        sys.argv, out, err, code = ["hf", *words], io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as error:
                code = error.code
        done.append([code or 0, out.getvalue(), err.getvalue()])
    print("\\n" + json.dumps(done))
"""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    def __init__(self, client: Client, folder: Path) -> None:
        self.client = client
        self.folder = folder

    def __call__(self, *commands: list[str], fails: bool = False) -> list[Done]:
        """Run commands in the test's folder."""
        env = {"HF_HUB_DISABLE_UPDATE_CHECK": "1"}
        home = self.folder.parent / f"{self.folder.name}-home"
        printed = self.client.hub.client(RUN, json.dumps(commands), home=home, cwd=self.folder, env=env)
        done = [Done(*item) for item in json.loads(printed.splitlines()[-1])]
        for words, one in zip(commands, done, strict=True):
            assert (one.code != 0) == fails, (words, one)
        return done


@pytest.fixture
def hf(client: Client, tmp_path: Path) -> Cli:
    return Cli(client, tmp_path)


def test_folders_and_files_go_up_and_down(hf: Cli, client: Client, tmp_path: Path, noise: bytes) -> None:
    (tmp_path / "up" / "w").mkdir(parents=True)
    (tmp_path / "up" / "w" / "m.safetensors").write_bytes(noise)
    (tmp_path / "up" / "a.txt").write_text("a")
    (tmp_path / "up" / "skipped.log").write_text("x")
    repo = f"hubshard/cli-{noise[:4].hex()}"
    message = ["--commit-message", "From the shell", "--exclude", "*.log"]
    whoami, *_, tree = hf(
        ["auth", "whoami", "--format", "json"],
        ["upload", repo, "up", ".", "--private", *message],
        ["upload", repo, "up/a.txt", "b/c.txt"],
        ["upload", repo, "up/a.txt", "proposed.txt", "--create-pr"],
        ["download", repo, "--local-dir", "down", "--quiet"],
        ["download", repo, "w/m.safetensors", "--local-dir", "one"],
        ["download", repo, "--include", "*.txt", "--revision", "refs/pr/1", "--local-dir", "proposed"],
        ["download", repo],
        ["cache", "verify", repo],
        ["models", "list", repo, "--format", "json"],
    )
    assert whoami.json["user"] == "hubshard"
    assert client.files(repo) == {"w/m.safetensors", "a.txt", "b/c.txt"}
    assert client.titles(repo)[1] == "From the shell"
    assert client.api.model_info(repo).private
    for folder in ("down", "one"):
        assert (tmp_path / folder / "w" / "m.safetensors").read_bytes() == noise
    assert (tmp_path / "proposed" / "proposed.txt").read_text() == "a"
    assert not (tmp_path / "one" / "a.txt").exists()
    assert "m.safetensors" in tree.out or "w" in tree.out


def test_repos_are_managed(hf: Cli, client: Client) -> None:
    repo = "hubshard/cli-managed"
    *_, tags, listed, info = hf(
        ["repos", "create", "cli-managed", "--private"],
        ["repos", "create", repo, "--exist-ok"],
        ["repos", "branch", "create", repo, "resume/state"],
        ["repos", "branch", "create", repo, "gone"],
        ["repos", "branch", "delete", repo, "gone"],
        ["repos", "tag", "create", repo, "v1", "-m", "The first"],
        ["repos", "tag", "create", repo, "v2", "--revision", "resume/state"],
        ["repos", "tag", "delete", repo, "v2", "--yes"],
        ["repos", "settings", repo, "--public", "--gated", "auto"],
        ["repos", "tag", "list", repo, "--format", "json"],
        ["repos", "list", "--format", "json"],
        ["models", "info", repo, "--format", "json"],
    )
    assert "v1" in tags.out
    assert "v2" not in tags.out
    assert repo in {item["id"] for item in listed.json}
    assert info.json["id"] == repo
    assert [ref.name for ref in client.api.list_repo_refs(repo).branches] == ["main", "resume/state"]
    found = client.api.repo_info(repo)
    assert (found.private, found.gated) == (False, "auto")
    client.commit(repo, {"a.log": "a", "b.txt": "b", "m.bin": b"\0"})
    hf(
        ["repos", "delete-files", repo, "*.log"],
        ["repos", "move", repo, "hubshard/cli-moved"],
        ["repos", "duplicate", "hubshard/cli-moved", "hubshard/cli-twin"],
        ["cp", "hf://hubshard/cli-moved/m.bin", "hf://hubshard/cli-twin/again.bin"],
        ["repos", "delete", "hubshard/cli-moved", "--yes"],
        ["repos", "delete", "hubshard/cli-moved", "--yes", "--missing-ok"],
    )
    assert client.files("hubshard/cli-twin") == {"b.txt", "m.bin", "again.bin"}
    assert client.read("hubshard/cli-twin", "again.bin") == b"\0"


def test_discussions_are_held(hf: Cli, client: Client) -> None:
    repo = client.repo()
    *_, listed, shown, diff = hf(
        ["discussions", "create", repo, "--title", "A question", "--body", "Why?"],
        ["discussions", "comment", repo, "1", "--body", "Because"],
        ["discussions", "rename", repo, "1", "An answer"],
        ["discussions", "close", repo, "1", "--yes"],
        ["discussions", "reopen", repo, "1", "--yes"],
        ["discussions", "create", repo, "--title", "A change", "--pull-request"],
        ["upload", repo, ".", ".", "--include", "nothing"],
        ["discussions", "list", repo, "--format", "json"],
        ["discussions", "info", repo, "1", "--format", "json"],
        ["discussions", "diff", repo, "2"],
    )
    assert {item["title"] for item in listed.json} == {"An answer", "A change"}
    assert (shown.json["title"], shown.json["status"]) == ("An answer", "open")
    assert diff.code == 0
    client.commit(repo, {"a.txt": "a"}, revision="refs/pr/2")
    client.api.change_discussion_status(repo, 2, "open")
    hf(["discussions", "merge", repo, "2", "--yes"])
    assert client.files(repo) == {"a.txt"}


def test_what_goes_wrong_is_said_without_a_traceback(hf: Cli, client: Client) -> None:
    repo = client.repo()
    client.api.create_tag(repo, tag="v1")
    for done, words in zip(
        hf(
            ["download", "hubshard/never-made"],
            ["download", repo, "never-made.txt"],
            ["download", repo, "--revision", "never-made"],
            ["repos", "create", repo],
            ["repos", "branch", "delete", repo, "main"],
            ["repos", "tag", "create", repo, "v1"],
            ["repos", "delete", "hubshard/never-made", "--yes"],
            fails=True,
        ),
        ["not found", "never-made.txt", "revision not found", "already", "Cannot delete", "v1", "not found"],
        strict=True,
    ):
        assert words.lower() in (done.out + done.err).lower()
        assert "Traceback" not in done.err
