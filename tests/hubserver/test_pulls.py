"""Discussions and pull requests over plain HTTP."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from hubshard.hubserver import Settings

if TYPE_CHECKING:
    from tests.conftest import Api, Hub, StartHub

names = itertools.count()


@pytest.fixture
def api(module_hub: Hub) -> Api:
    return module_hub.api()


@pytest.fixture
def repo(api: Api) -> str:
    name = f"pulls-{next(names)}"
    assert api("POST", "/api/repos/create", {"name": name}).status == 200
    made = f"models/hubshard/{name}"
    api.commit(made, api.file("a.txt", b"one\n"), api.file("b.txt", b"two\n"))
    return made


def pull(api: Api, repo: str, *lines: tuple[str, Any], title: str = "a pull request") -> int:
    answer = api.commit(repo, *lines, query="?create_pr=1", summary=title, description="why")
    assert answer.status == 200, answer.body
    return int(answer.json["pullRequestUrl"].rpartition("/")[2])


def details(api: Api, repo: str, num: int) -> dict[str, Any]:
    found: dict[str, Any] = api("GET", f"/api/{repo}/discussions/{num}?diff=1").json
    return found


def paths(api: Api, repo: str, revision: str = "main") -> list[str]:
    listed = api("GET", f"/api/{repo}/tree/{revision}").json
    return [item["path"] for item in listed if item["path"] != ".gitattributes"]


def test_a_pull_request_takes_commits_and_is_merged_as_one(api: Api, repo: str) -> None:
    num = pull(api, repo, api.file("new.txt", b"new\n"), ("deletedFile", {"path": "b.txt"}))
    api.put(repo, "more.txt", b"more\n", revision=f"refs/pr/{num}", summary="and more")
    assert paths(api, repo) == ["a.txt", "b.txt"]
    api.put(repo, "meanwhile.txt", b"on main\n")
    before = details(api, repo, num)
    assert (before["status"], before["isPullRequest"], before["filesWithConflicts"]) == ("open", True, [])
    assert [event["type"] for event in before["events"]] == ["comment", "commit", "commit"]
    assert "+new" in before["diff"]
    assert "-two" in before["diff"]
    assert api("POST", f"/api/{repo}/discussions/{num}/merge", {"comment": "thanks"}).status == 200
    after = details(api, repo, num)
    head = api("GET", f"/api/{repo}/commits/main").json[0]
    assert (after["status"], after["changes"]["mergeCommitId"]) == ("merged", head["id"])
    assert head["title"] == f"a pull request (#{num})"
    assert "and more" in head["message"]
    assert paths(api, repo) == ["a.txt", "meanwhile.txt", "more.txt", "new.txt"]
    assert [event["type"] for event in after["events"]][-2:] == ["comment", "status-change"]
    assert api("POST", f"/api/{repo}/discussions/{num}/merge").status == 400


def test_a_conflict_is_named_and_nothing_is_merged(api: Api, repo: str) -> None:
    num = pull(api, repo, api.file("a.txt", b"theirs\n"), api.file("same.txt", b"equal\n"))
    api.commit(repo, api.file("a.txt", b"ours\n"), api.file("same.txt", b"equal\n"))
    assert details(api, repo, num)["filesWithConflicts"] == ["a.txt"]
    refused = api("POST", f"/api/{repo}/discussions/{num}/merge")
    assert refused.status == 409
    assert "a.txt" in refused.json["error"]
    assert api("GET", f"/{repo.removeprefix('models/')}/resolve/main/a.txt").body == b"ours\n"
    assert details(api, repo, num)["status"] == "open"


def test_a_pull_request_may_start_empty_as_a_draft(api: Api, repo: str) -> None:
    body = {"title": "a draft", "description": "later", "pullRequest": True}
    num = api("POST", f"/api/{repo}/discussions", body).json["num"]
    route = f"/api/{repo}/discussions/{num}"
    assert details(api, repo, num)["status"] == "draft"
    assert api("POST", f"{route}/merge").status == 400
    api.put(repo, "c.txt", b"x", revision=f"refs/pr/{num}")
    assert api("POST", f"{route}/status", {"status": "open"}).json["newStatus"]["data"]["status"] == "open"
    assert api("POST", f"{route}/merge").status == 200
    assert "c.txt" in paths(api, repo)
    assert api("POST", f"{route}/status", {"status": "closed"}).status == 400


def test_a_squashed_and_tagged_pull_request_is_still_merged(api: Api, repo: str) -> None:
    num = pull(api, repo, api.file("x.txt", b"1"))
    api.put(repo, "y.txt", b"2", revision=f"refs/pr/{num}")
    assert api("POST", f"/api/{repo}/super-squash/refs%2Fpr%2F{num}", {"message": "one"}).status == 200
    assert api("POST", f"/api/{repo}/tag/refs%2Fpr%2F{num}", {"tag": "candidate"}).status == 200
    assert len(api("GET", f"/api/{repo}/commits/refs%2Fpr%2F{num}").json) == 1
    assert api("POST", f"/api/{repo}/discussions/{num}/merge").status == 200
    assert paths(api, repo) == ["a.txt", "b.txt", "x.txt", "y.txt"]


def test_a_pull_request_starts_from_the_parent_that_is_named(api: Api, repo: str) -> None:
    first = api("GET", f"/api/{repo}").json["sha"]
    api.put(repo, "later.txt", b"x")
    answer = api.commit(repo, api.file("pr.txt", b"x"), query="?create_pr=1", parentCommit=first)
    num = answer.json["pullRequestUrl"].rpartition("/")[2]
    assert paths(api, repo, f"refs%2Fpr%2F{num}") == ["a.txt", "b.txt", "pr.txt"]
    refs = api("GET", f"/api/{repo}/refs?include_prs=1").json
    assert [ref["ref"] for ref in refs["pullRequests"]] == [f"refs/pr/{num}"]
    assert "pullRequests" not in api("GET", f"/api/{repo}/refs").json


def test_discussions_are_commented_renamed_listed_and_closed(api: Api, repo: str) -> None:
    num = api("POST", f"/api/{repo}/discussions", {"title": "a question", "description": "?"}).json["num"]
    route = f"/api/{repo}/discussions/{num}"
    comment = api("POST", f"{route}/comment", {"comment": "an answer"}).json["newMessage"]
    edited = api("POST", f"{route}/comment/{comment['id']}/edit", {"content": "better"}).json["updatedComment"]
    assert (edited["data"]["latest"]["raw"], edited["data"]["edited"]) == ("better", True)
    hidden = api("POST", f"{route}/comment/{comment['id']}/hide").json["updatedComment"]
    assert hidden["data"]["hidden"]
    renamed = api("POST", f"{route}/title", {"title": "answered"}).json["newTitle"]["data"]
    assert renamed == {"from": "a question", "to": "answered"}
    assert api("POST", f"{route}/status", {"status": "closed", "comment": "done"}).status == 200
    assert api("POST", f"{route}/status", {"status": "closed"}).status == 400
    pull(api, repo, api.file("x", b"1"))
    everything = api("GET", f"/api/{repo}/discussions").json
    assert (everything["count"], [item["num"] for item in everything["discussions"]]) == (2, [num + 1, num])
    for query, found in [("type=pull_request", [num + 1]), ("status=closed", [num]), ("author=nobody", [])]:
        assert [item["num"] for item in api("GET", f"/api/{repo}/discussions?{query}").json["discussions"]] == found
    for wrong in ("/comment", "/title"):
        assert api("POST", route + wrong, {}).status == 400
    assert api("GET", f"/api/{repo}/discussions/99").status == 404
    assert api("POST", f"{route}/comment/nope/edit", {"content": "x"}).status == 404


def test_everybody_may_propose_and_owners_merge(start_hub: StartHub) -> None:
    hub = start_hub(Settings(tokens={"t-alice": "alice", "t-bob": "bob", "t-carol": "carol", "t-read": "bob:read"}))
    alice, bob, carol = hub.api("t-alice"), hub.api("t-bob"), hub.api("t-carol")
    alice("POST", "/api/repos/create", {"name": "m"})
    num = pull(bob, "models/alice/m", bob.file("x.txt", b"1"))
    assert bob.put("models/alice/m", "y.txt", b"2", revision=f"refs/pr/{num}").status == 200
    assert carol.put("models/alice/m", "z.txt", b"3", revision=f"refs/pr/{num}").status == 403
    route = f"/api/models/alice/m/discussions/{num}"
    assert carol("POST", f"{route}/comment", {"comment": "nice"}).status == 200
    assert carol("POST", f"{route}/title", {"title": "mine"}).status == 403
    assert hub.api("t-read")("POST", f"{route}/comment", {"comment": "x"}).status == 403
    assert hub.api(None)("POST", f"{route}/comment", {"comment": "x"}).status == 401
    assert bob("POST", f"{route}/merge").status == 403
    assert alice("POST", f"{route}/merge").status == 200
    assert details(alice, "models/alice/m", num)["author"] == {"name": "bob"}
