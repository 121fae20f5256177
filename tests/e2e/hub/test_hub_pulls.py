"""Discussions and pull requests, as huggingface_hub makes, reads and merges them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import CommitOperationDelete, DiscussionComment, DiscussionCommit, DiscussionStatusChange
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, RevisionNotFoundError

if TYPE_CHECKING:
    from tests.e2e.hub.conftest import Client


def test_a_commit_opens_a_pull_request(client: Client, way: str, noise: bytes) -> None:
    repo = client.repo()
    head = client.head(repo)
    made = client.commit(
        repo, {"a.txt": "a", "m.bin": noise}, "Proposed", create_pr=True, commit_description="Because."
    )
    assert (made.pr_num, made.pr_revision) == (1, "refs/pr/1")
    assert made.pr_url == f"{client.hub.url}/{repo}/discussions/1"
    assert client.head(repo) == head
    assert client.files(repo) == set()
    assert client.titles(repo) == ["initial commit"]
    assert client.files(repo, revision="refs/pr/1") == {"a.txt", "m.bin"}
    assert client.read(repo, "m.bin", revision="refs/pr/1") == noise
    refs = client.api.list_repo_refs(repo, include_pull_requests=True)
    assert [(ref.name, ref.target_commit) for ref in refs.pull_requests or []] == [("refs/pr/1", made.oid)]
    details = client.api.get_discussion_details(repo, 1)
    assert (details.title, details.status, details.author) == ("Proposed", "open", "hubshard")
    assert (details.is_pull_request, details.target_branch, details.conflicting_files) == (True, "refs/heads/main", [])
    comment, commit = details.events
    assert isinstance(comment, DiscussionComment)
    assert isinstance(commit, DiscussionCommit)
    assert (comment.content, commit.oid, commit.summary) == ("Because.", made.oid, "Proposed")
    assert "+a" in (details.diff or "")


def test_a_pull_request_takes_commits_and_is_merged(client: Client, way: str, noise: bytes) -> None:
    repo = client.repo()
    client.commit(repo, {"a.txt": "1", "gone.txt": "g"})
    client.commit(repo, {"a.txt": "2"}, "First of it", create_pr=True)
    client.commit(repo, {"m.bin": noise}, "Second of it", revision="refs/pr/1")
    client.api.create_commit(
        repo, [CommitOperationDelete("gone.txt")], commit_message="Third of it", revision="refs/pr/1"
    )
    client.commit(repo, {"b.txt": "on main"}, "Meanwhile")
    assert client.titles(repo) == ["Meanwhile", "a commit", "initial commit"]
    client.api.merge_pull_request(repo, 1, comment="Thank you")
    assert client.files(repo) == {"a.txt", "b.txt", "m.bin"}
    assert (client.read(repo, "a.txt"), client.read(repo, "m.bin")) == (b"2", noise)
    assert client.titles(repo)[0] == "First of it (#1)"
    details = client.api.get_discussion_details(repo, 1)
    assert (details.status, details.merge_commit_oid) == ("merged", client.head(repo))
    last, before = details.events[-1], details.events[-2]
    assert isinstance(last, DiscussionStatusChange)
    assert isinstance(before, DiscussionComment)
    assert (last.new_status, before.content) == ("merged", "Thank you")
    with pytest.raises(BadRequestError):
        client.api.merge_pull_request(repo, 1)


def test_a_pull_request_may_start_empty_as_a_draft(client: Client) -> None:
    repo = client.repo()
    made = client.api.create_pull_request(repo, "An idea", description="What I mean")
    assert (made.num, made.status, made.git_reference) == (1, "draft", "refs/pr/1")
    assert made.url == f"{client.hub.url}/{repo}/discussions/1"
    assert client.head(repo, "refs/pr/1") == client.head(repo)
    with pytest.raises(BadRequestError):
        client.api.merge_pull_request(repo, 1)
    client.commit(repo, {"a.txt": "a"}, revision="refs/pr/1")
    assert client.api.get_discussion_details(repo, 1).status == "draft"
    client.api.change_discussion_status(repo, 1, "open")
    client.api.merge_pull_request(repo, 1)
    assert client.files(repo) == {"a.txt"}


def test_a_folder_is_proposed_in_one_pull_request(client: Client, tmp_path: Path) -> None:
    repo = client.repo()
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(str(number))
    made = client.api.upload_folder(repo_id=repo, folder_path=tmp_path, allow_patterns="*.txt", create_pr=True)
    assert made.pr_url == f"{client.hub.url}/{repo}/discussions/1"
    assert client.files(repo) == set()
    assert client.files(repo, revision="refs/pr/1") == {"0.txt", "1.txt", "2.txt"}
    again = client.api.upload_file(repo_id=repo, path_or_fileobj=b"4", path_in_repo="4.txt", create_pr=True)
    assert again.pr_num == 2


def test_discussions_are_commented_renamed_and_closed(client: Client) -> None:
    repo = client.repo()
    made = client.api.create_discussion(repo, "A question", description="Why?")
    assert (made.num, made.status, made.is_pull_request, made.git_reference) == (1, "open", False, None)
    comment = client.api.comment_discussion(repo, 1, "Because **so**")
    assert (comment.content, comment.author) == ("Because **so**", "hubshard")
    assert (comment.edited, comment.hidden, comment.number_of_edits) == (False, False, 0)
    edited = client.api.edit_discussion_comment(repo, 1, comment.id, "Because")
    assert (edited.content, edited.edited, edited.number_of_edits) == ("Because", True, 1)
    assert [text["raw"] for text in edited.edit_history] == ["Because **so**"]
    assert edited.last_edited_by == "hubshard"
    title = client.api.rename_discussion(repo, 1, "An answer")
    assert (title.old_title, title.new_title) == ("A question", "An answer")
    closed = client.api.change_discussion_status(repo, 1, "closed", comment="Done")
    assert closed.new_status == "closed"
    with pytest.raises(BadRequestError):
        client.api.change_discussion_status(repo, 1, "closed")
    client.api.change_discussion_status(repo, 1, "open")
    with pytest.warns(UserWarning, match="irreversible"):
        hidden = client.api.hide_discussion_comment(repo, 1, comment.id)
    assert (hidden.hidden, hidden.number_of_edits) == (True, 0)
    details = client.api.get_discussion_details(repo, 1)
    assert [event.type for event in details.events] == [
        "comment",
        "comment",
        "title-change",
        "comment",
        "status-change",
        "status-change",
    ]
    assert (details.title, details.status, details.target_branch, details.diff) == ("An answer", "open", None, None)


def test_discussions_are_listed_and_chosen(client: Client) -> None:
    repo = client.repo()
    assert list(client.api.get_repo_discussions(repo)) == []
    for number in range(60):
        client.api.create_discussion(repo, f"Number {number}")
    client.api.create_pull_request(repo, "The request")
    client.api.change_discussion_status(repo, 1, "closed")
    found = list(client.api.get_repo_discussions(repo))
    assert sorted(item.num for item in found) == list(range(1, 62))
    pulls = client.api.get_repo_discussions(repo, discussion_type="pull_request")
    assert [(item.num, item.repo_id, item.repo_type) for item in pulls] == [(61, repo, "model")]
    closed = client.api.get_repo_discussions(repo, discussion_status="closed", discussion_type="discussion")
    assert [item.title for item in closed] == ["Number 0"]
    assert list(client.api.get_repo_discussions(repo, author="nobody")) == []


def test_a_conflict_is_named_and_nothing_is_merged(client: Client) -> None:
    repo = client.repo()
    client.commit(repo, {"a.txt": "1"})
    client.commit(repo, {"a.txt": "2", "b.txt": "2"}, create_pr=True)
    head = client.commit(repo, {"a.txt": "3"}).oid
    assert client.api.get_discussion_details(repo, 1).conflicting_files == ["a.txt"]
    with pytest.raises(HfHubHTTPError, match=r"a\.txt"):
        client.api.merge_pull_request(repo, 1)
    assert client.head(repo) == head
    assert client.api.get_discussion_details(repo, 1).status == "open"


def test_a_pull_request_is_squashed_and_tagged(client: Client) -> None:
    repo = client.repo()
    client.commit(repo, {"a.txt": "1"}, create_pr=True)
    client.commit(repo, {"a.txt": "2"}, revision="refs/pr/1")
    client.api.create_tag(repo, tag="candidate", revision="refs/pr/1")
    assert client.read(repo, "a.txt", revision="candidate") == b"2"
    client.api.super_squash_history(repo, branch="refs/pr/1", commit_message="One")
    assert client.titles(repo, revision="refs/pr/1") == ["One"]
    client.api.merge_pull_request(repo, 1)
    assert client.read(repo, "a.txt") == b"2"


def test_a_pull_request_guards_its_parent(client: Client) -> None:
    repo = client.repo()
    first = client.head(repo)
    client.commit(repo, {"a.txt": "1"})
    made = client.commit(repo, {"b.txt": "1"}, create_pr=True, parent_commit=first)
    assert client.files(repo, revision=made.pr_revision) == {"b.txt"}
    with pytest.raises(HfHubHTTPError, match="was updated since"):
        client.commit(repo, {"b.txt": "2"}, revision="refs/pr/1", parent_commit=first)
    client.commit(repo, {"b.txt": "2"}, revision="refs/pr/1", parent_commit=made.oid)


def test_a_pull_request_outlives_both_histories(client: Client, noise: bytes) -> None:
    repo = client.repo()
    client.commit(repo, {"a.txt": "1", "b.txt": "1"})
    client.commit(repo, {"a.txt": "2", "m.bin": noise}, create_pr=True)
    client.api.super_squash_history(repo, branch="refs/pr/1")
    client.commit(repo, {"b.txt": "2"})
    client.api.super_squash_history(repo)
    client.hub.gc(grace_seconds=-1)
    assert client.api.get_discussion_details(repo, 1).conflicting_files == []
    client.api.merge_pull_request(repo, 1)
    assert {path: client.read(repo, path) for path in ("a.txt", "b.txt", "m.bin")} == {
        "a.txt": b"2",
        "b.txt": b"2",
        "m.bin": noise,
    }


def test_a_pull_request_is_for_the_branch_that_it_names(client: Client) -> None:
    repo = client.repo()
    client.api.create_branch(repo, branch="next")
    made = client.commit(repo, {"a.txt": "1"}, revision="next", create_pr=True)
    assert client.api.get_discussion_details(repo, 1).target_branch == "refs/heads/next"
    client.api.merge_pull_request(repo, 1)
    assert (client.files(repo), client.files(repo, revision="next")) == (set(), {"a.txt"})
    assert client.head(repo, "refs/pr/1") == made.oid
    client.commit(repo, {"b.txt": "1"}, "Too late", revision="next", create_pr=True)
    client.api.delete_branch(repo, branch="next")
    assert client.api.get_discussion_details(repo, 2).title == "Too late"
    with pytest.raises(RevisionNotFoundError):
        client.api.merge_pull_request(repo, 2)


def test_a_deletion_is_proposed_too(client: Client) -> None:
    repo = client.repo()
    client.commit(repo, {"a.txt": "1", "w/b.bin": b"\0", "w/c.bin": b"\1"})
    client.api.delete_folder("w", repo, create_pr=True)
    client.api.delete_file("a.txt", repo, revision="refs/pr/1")
    assert client.files(repo) == {"a.txt", "w/b.bin", "w/c.bin"}
    diff = client.api.get_discussion_details(repo, 1).diff or ""
    assert "-1" in diff
    client.api.merge_pull_request(repo, 1)
    assert client.files(repo) == set()


def test_a_missing_pull_request_is_missing(client: Client) -> None:
    repo = client.repo()
    with pytest.raises(HfHubHTTPError) as caught:
        client.api.get_discussion_details(repo, 9)
    assert caught.value.response.status_code == 404
    with pytest.raises(RevisionNotFoundError):
        client.commit(repo, {"a.txt": "1"}, revision="refs/pr/9")
