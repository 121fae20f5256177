"""Branches, tags and history, as huggingface_hub sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, RevisionNotFoundError

from hubshard.hubserver import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import StartHub
    from tests.e2e.hub.conftest import Client


def names(client: Client, repo: str) -> tuple[list[str], list[str]]:
    found = client.api.list_repo_refs(repo)
    return [ref.name for ref in found.branches], [ref.name for ref in found.tags]


def test_a_new_repo_has_main_and_one_commit(client: Client) -> None:
    repo = client.repo()
    refs = client.api.list_repo_refs(repo)
    assert [(ref.name, ref.ref) for ref in refs.branches] == [("main", "refs/heads/main")]
    assert (refs.tags, refs.converts, refs.pull_requests) == ([], [], None)
    (commit,) = client.api.list_repo_commits(repo)
    assert (commit.commit_id, commit.authors) == (refs.branches[0].target_commit, ["hubshard"])
    assert [item.path for item in client.api.list_repo_tree(repo)] == [".gitattributes"]


def test_branches_are_made_anywhere_and_deleted(client: Client) -> None:
    repo = client.repo()
    first = client.head(repo)
    second = client.commit(repo, {"a.txt": "a"}).oid
    client.api.create_tag(repo, tag="v1", revision=first)
    for branch, start in [("of-main", None), ("of-commit", first), ("of-tag", "v1"), ("of-short", first[:7])]:
        client.api.create_branch(repo, branch=branch, revision=start)
        assert client.head(repo, branch) == (second if start is None else first)
    client.api.create_branch(repo, branch="of-branch", revision="of-main")
    assert names(client, repo)[0] == ["main", "of-branch", "of-commit", "of-main", "of-short", "of-tag"]
    client.api.delete_branch(repo, branch="of-main")
    assert "of-main" not in names(client, repo)[0]
    with pytest.raises(RevisionNotFoundError):
        client.head(repo, "of-main")


def test_an_existing_branch_is_a_conflict(client: Client) -> None:
    repo = client.repo()
    client.api.create_branch(repo, branch="twice")
    with pytest.raises(HfHubHTTPError, match="Reference refs/heads/twice already exists") as caught:
        client.api.create_branch(repo, branch="twice")
    assert caught.value.response.status_code == 409
    client.api.create_branch(repo, branch="twice", exist_ok=True)
    with pytest.raises(HfHubHTTPError, match="Reference refs/heads/main already exists"):
        client.api.create_branch(repo, branch="main")


def test_a_branch_needs_a_revision_to_start_from(client: Client) -> None:
    with pytest.raises(RevisionNotFoundError, match="Invalid rev id: never-made"):
        client.api.create_branch(client.repo(), branch="new", revision="never-made")


def test_branches_that_cannot_be_deleted(client: Client) -> None:
    repo = client.repo()
    client.api.create_tag(repo, tag="v1")
    with pytest.raises(HfHubHTTPError, match="Cannot delete refs/heads/main"):
        client.api.delete_branch(repo, branch="main")
    with pytest.raises(HfHubHTTPError, match="Invalid rev id"):
        client.api.delete_branch(repo, branch="never-made")
    with pytest.raises(HfHubHTTPError, match="Invalid rev id"):
        client.api.delete_branch(repo, branch="v1")
    assert names(client, repo) == (["main"], ["v1"])


def test_tags_are_made_anywhere_and_deleted(client: Client) -> None:
    repo = client.repo()
    first = client.head(repo)
    second = client.commit(repo, {"a.txt": "a"}).oid
    client.api.create_branch(repo, branch="b", revision=first)
    client.api.create_tag(repo, tag="head", tag_message="what it is")
    client.api.create_tag(repo, tag="commit", revision=first)
    client.api.create_tag(repo, tag="short", revision=first[:7])
    client.api.create_tag(repo, tag="branch", revision="b")
    client.api.create_tag(repo, tag="releases/v1.0", revision="head")
    found = {ref.name: ref.target_commit for ref in client.api.list_repo_refs(repo).tags}
    assert found == {"head": second, "commit": first, "short": first, "branch": first, "releases/v1.0": second}
    client.commit(repo, {"a.txt": "b"})
    assert client.read(repo, "a.txt", revision="releases/v1.0") == b"a"
    client.api.delete_tag(repo, tag="releases/v1.0")
    client.api.delete_tag(repo, tag="head")
    assert names(client, repo)[1] == ["branch", "commit", "short"]
    with pytest.raises(RevisionNotFoundError):
        client.api.delete_tag(repo, tag="head")


def test_tags_that_cannot_be_made(client: Client) -> None:
    repo = client.repo()
    client.api.create_tag(repo, tag="v1")
    with pytest.raises(HfHubHTTPError, match="Reference refs/tags/v1 already exists") as caught:
        client.api.create_tag(repo, tag="v1")
    assert caught.value.response.status_code == 409
    client.api.create_tag(repo, tag="v1", exist_ok=True)
    with pytest.raises(RevisionNotFoundError):
        client.api.create_tag(repo, tag="v2", revision="never-made")
    with pytest.raises(HfHubHTTPError):
        client.api.create_tag(repo, tag="with space")
    assert names(client, repo)[1] == ["v1"]


def test_a_branch_may_have_a_slash_and_unusual_letters(client: Client) -> None:
    repo = client.repo()
    for branch in ("resume/state", "a/b/c", "ünï-cöde", "100%", "a+b&c=d", "x#y", "o'clock", "v1.0_rc-1"):
        client.api.create_branch(repo, branch=branch)
        made = client.commit(repo, {"folder/a.txt": branch, "m.bin": b"\0" + branch.encode()}, revision=branch)
        assert client.head(repo, branch) == made.oid
        assert client.read(repo, "folder/a.txt", revision=branch) == branch.encode()
        assert client.read(repo, "m.bin", revision=branch) == b"\0" + branch.encode()
        assert [item.path for item in client.api.list_repo_tree(repo, "folder", revision=branch)] == ["folder/a.txt"]
        assert [item.path for item in client.api.get_paths_info(repo, "m.bin", revision=branch)] == ["m.bin"]
        assert client.titles(repo, revision=branch) == ["a commit", "initial commit"]
        client.api.create_tag(repo, tag=f"{branch}-tag", revision=branch)
        client.api.super_squash_history(repo, branch=branch)
        client.api.delete_tag(repo, tag=f"{branch}-tag")
        client.api.delete_branch(repo, branch=branch)
    assert names(client, repo) == (["main"], [])
    assert client.titles(repo) == ["initial commit"]


def test_a_branch_is_not_a_folder_of_branches(client: Client) -> None:
    repo = client.repo()
    client.api.create_branch(repo, branch="resume")
    client.api.create_branch(repo, branch="a/b/c")
    for branch in ("resume/state", "a", "a/b", "a/b/c/d"):
        with pytest.raises(BadRequestError, match="cannot exist beside"):
            client.api.create_branch(repo, branch=branch, exist_ok=True)
    client.api.create_branch(repo, branch="resume-state")
    client.api.create_branch(repo, branch="a/b-c")
    client.api.create_tag(repo, tag="resume/state")
    with pytest.raises(BadRequestError):
        client.api.create_tag(repo, tag="resume")
    client.api.delete_branch(repo, branch="resume")
    client.api.create_branch(repo, branch="resume/state")
    assert names(client, repo)[0] == ["main", "a/b-c", "a/b/c", "resume-state", "resume/state"]


def test_branches_do_not_see_each_others_commits(client: Client) -> None:
    repo = client.repo()
    client.api.create_branch(repo, branch="b")
    client.commit(repo, {"main.txt": "m"}, "on main")
    client.commit(repo, {"branch.txt": "b"}, "on b", revision="b")
    assert (client.files(repo), client.files(repo, revision="b")) == ({"main.txt"}, {"branch.txt"})
    assert client.titles(repo, revision="b") == ["on b", "initial commit"]


def test_history_comes_whole_over_pages(start_hub: StartHub) -> None:
    hub = start_hub(Settings(page_size=3))
    api = HfApi(endpoint=hub.url, token="hf_test")
    repo = api.create_repo("history").repo_id
    for number in range(10):
        api.upload_file(
            repo_id=repo, path_or_fileobj=str(number).encode(), path_in_repo="n.txt", commit_message=f"{number}"
        )
    commits = api.list_repo_commits(repo)
    assert [commit.title for commit in commits] == [*map(str, reversed(range(10))), "initial commit"]
    assert [commit.created_at for commit in commits] == sorted((commit.created_at for commit in commits), reverse=True)
    assert hub.counters()["requests"]["commits"] == 4
    middle = commits[5].commit_id
    assert [commit.title for commit in api.list_repo_commits(repo, revision=middle)][:2] == ["4", "3"]


def test_a_commit_has_a_title_a_text_and_an_author(client: Client) -> None:
    repo = client.repo()
    made = client.commit(repo, {"a.txt": "a"}, "The title", commit_description="First line.\n\nMore <b>text</b>.")
    assert made.commit_url == f"{client.hub.url}/{repo}/commit/{made.oid}"
    assert (made.commit_message, made.pr_url, made.repo_url.repo_id) == ("The title", None, repo)
    commit = client.api.list_repo_commits(repo, formatted=True)[0]
    assert (commit.commit_id, commit.title) == (made.oid, "The title")
    assert commit.message == "First line.\n\nMore <b>text</b>."
    assert commit.authors == ["hubshard"]
    assert commit.formatted_title == "The title"
    with pytest.raises(RevisionNotFoundError):
        client.api.list_repo_commits(repo, revision="never-made")


def test_a_squash_leaves_one_commit_with_all_files(client: Client) -> None:
    repo = client.repo()
    for number in range(3):
        client.commit(repo, {f"{number}.txt": "x", "m.bin": bytes(1000) + bytes([number])})
    before = client.head(repo)
    client.api.create_tag(repo, tag="before")
    client.api.super_squash_history(repo, commit_message="All of it")
    assert client.titles(repo) == ["All of it"]
    assert client.files(repo) == {"0.txt", "1.txt", "2.txt", "m.bin"}
    assert client.read(repo, "m.bin") == bytes(1000) + b"\2"
    assert client.head(repo, "before") == before
    assert len(client.titles(repo, revision="before")) == 4
    client.api.super_squash_history(repo)
    assert client.titles(repo) == ["Super-squash branch 'main' using huggingface_hub"]
    with pytest.raises(RevisionNotFoundError):
        client.api.super_squash_history(repo, branch="never-made")


def test_a_snapshot_of_a_tag_outlives_its_branch(client: Client, tmp_path: Path) -> None:
    repo = client.repo()
    client.api.create_branch(repo, branch="work")
    client.commit(repo, {"m.bin": b"\0one"}, revision="work")
    client.api.create_tag(repo, tag="v1", revision="work")
    client.api.delete_branch(repo, branch="work")
    client.hub.gc(grace_seconds=-1)
    assert client.read(repo, "m.bin", revision="v1") == b"\0one"
