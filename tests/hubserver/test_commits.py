"""Commits, refs and listings over plain HTTP."""

from __future__ import annotations

import base64
import hashlib
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from hubshard.hubserver import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Answer, Api, Hub, StartHub

STALE = "The branch was updated since you opened this page. Please refresh and try again."
names = itertools.count()


@pytest.fixture
def api(module_hub: Hub) -> Api:
    return module_hub.api()


@pytest.fixture
def repo(api: Api) -> str:
    return new_repo(api)


def new_repo(api: Api) -> str:
    name = f"repo-{next(names)}"
    assert api("POST", "/api/repos/create", {"name": name}).status == 200
    return f"models/hubshard/{name}"


def files(api: Api, repo: str, revision: str = "main") -> list[str]:
    listed = api("GET", f"/api/{repo}/tree/{revision}?recursive=true").json
    return [item["path"] for item in listed if item["type"] == "file" and item["path"] != ".gitattributes"]


def read(api: Api, repo: str, path: str, revision: str = "main", **headers: str) -> Answer:
    return api("GET", f"/{repo.removeprefix('models/')}/resolve/{revision}/{path}", headers=headers)


def head(api: Api, repo: str, revision: str = "main") -> str:
    return str(api("GET", f"/api/{repo}/revision/{revision}").json["sha"])


def large(api: Api, repo: str, data: bytes) -> dict[str, Any]:
    return {"algo": "sha256", "oid": api.upload(repo, data), "size": len(data)}


def test_a_commit_is_seen_whole(api: Api, repo: str) -> None:
    answer = api.commit(
        repo,
        api.file("a.txt", b"one"),
        api.file("empty", b""),
        ("lfsFile", {"path": "sub/m.bin", **large(api, repo, b"weights" * 1000)}),
        summary="the title\n\nbody of the summary",
        description="the description",
    )
    oid = answer.json["commitOid"]
    assert answer.json["commitUrl"].endswith(f"/{repo.removeprefix('models/')}/commit/{oid}")
    assert files(api, repo) == ["a.txt", "empty", "sub/m.bin"]
    assert read(api, repo, "sub/m.bin").body == b"weights" * 1000
    assert read(api, repo, "empty").body == b""
    last, first = api("GET", f"/api/{repo}/commits/main").json
    assert (last["id"], last["title"]) == (oid, "the title")
    assert last["message"] == "body of the summary\n\nthe description"
    assert read(api, repo, "a.txt", revision=first["id"]).error[:2] == (404, "EntryNotFound")


def test_a_stale_parent_is_refused_and_changes_nothing(api: Api, repo: str) -> None:
    old = head(api, repo)
    new = api.put(repo, "a.txt", b"1", parentCommit=old).json["commitOid"]
    refused = api.put(repo, "b.txt", b"2", parentCommit=old)
    assert refused.error == (412, None, STALE)
    assert (head(api, repo), files(api, repo)) == (new, ["a.txt"])
    assert api.put(repo, "b.txt", b"2", parentCommit=new).status == 200


def test_a_large_file_needs_its_content_in_this_repo(api: Api, repo: str) -> None:
    other = new_repo(api)
    line = {"path": "m.bin", **large(api, other, b"of the other repo")}
    refused = api.commit(repo, ("lfsFile", line))
    assert refused.status == 400
    assert "m.bin" in refused.json["error"]
    assert line["oid"] in refused.json["error"]
    assert api.commit(other, ("lfsFile", {**line, "size": 3})).status == 400
    assert api.commit(other, ("lfsFile", {"path": "m.bin", "algo": "sha256", "oid": line["oid"]})).status == 200


@pytest.mark.parametrize(
    "path", ["../x", "a/../b", "a\\b", "/abs", ".git/config", "a//b", "", ".", "a/./b", "nul\0", "x" * 1025]
)
def test_a_path_that_leads_elsewhere_is_unprocessable(api: Api, repo: str, path: str) -> None:
    before = head(api, repo)
    assert api.commit(repo, api.file("fine.txt", b"1"), api.file(path, b"2")).status == 422
    assert head(api, repo) == before


def test_a_path_cannot_be_a_file_and_a_folder(api: Api, repo: str) -> None:
    api.put(repo, "a", b"1")
    assert api.put(repo, "a/b", b"2").status == 422
    assert api.commit(repo, api.file("x", b"1"), api.file("x/y", b"1")).status == 422
    swap = api.commit(repo, ("deletedFile", {"path": "a"}), api.file("a/b", b"2"))
    assert swap.status == 200
    assert files(api, repo) == ["a/b"]


def test_deletions_take_files_and_folders(api: Api, repo: str) -> None:
    api.commit(repo, *(api.file(path, b"x") for path in ("1/a", "1/b/c", "10", "2", "3/d")))
    api.commit(repo, ("deletedFile", {"path": "1"}), ("deletedFolder", {"path": "3/"}), ("deletedFile", {"path": "2"}))
    assert files(api, repo) == ["10"]
    missing = api.commit(repo, ("deletedFile", {"path": "nope"}), api.file("new", b"x"))
    assert missing.error[:2] == (404, "EntryNotFound")
    assert files(api, repo) == ["10"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json\n",
        b'{"key": "header", "value": {"summary": ""}}\n',
        b'{"key": "header", "value": {"summary": "s"}}\n{"key": "odd", "value": {}}\n',
        b'{"key": "header", "value": {"summary": "s"}}\n{"key": "file", "value": {"path": "a", "content": "%%"}}\n',
        b'{"key": "header", "value": {"summary": "s"}}\n{"key": "file", "value": {"path": "a"}}\n',
        b'{"key": "header", "value": {"summary": "s"}}\n{"key": "lfsFile", "value": {"path": "a", "oid": "abc"}}\n',
        b'{"key": "file", "value": {"path": "a", "content": ""}}\n',
        b'{"key": "header", "value": 3}\n',
    ],
)
def test_a_commit_that_cannot_be_read_changes_nothing(api: Api, repo: str, body: bytes) -> None:
    before = head(api, repo)
    assert api("POST", f"/api/{repo}/commit/main", body).status == 400
    assert head(api, repo) == before


def test_a_missing_branch_is_a_missing_revision_and_a_tag_takes_no_commits(api: Api, repo: str) -> None:
    assert api.put(repo, "a", b"1", revision="nope").error == (404, "RevisionNotFound", "Invalid rev id: nope")
    api("POST", f"/api/{repo}/tag/main", {"tag": "v1"})
    assert api.put(repo, "a", b"1", revision="v1").status == 400


def test_preupload_decides_by_pattern_size_and_content(api: Api, repo: str) -> None:
    api.put(repo, "there.txt", b"hello\n")
    api.commit(repo, ("lfsFile", {"path": "there.bin", **large(api, repo, b"large")}))
    cases = {
        "m.safetensors": (b"x", 1, "lfs"),
        "notes.txt": (b"text", 4, "regular"),
        "huge.txt": (b"text", 10_000_000, "lfs"),
        "odd.dat": (b"\0\1", 2, "lfs"),
        "latin.txt": (b"caf\xe9 au lait", 12, "lfs"),
        "cut.txt": ("ab€".encode()[:-1], 600, "regular"),
        "empty.bin": (b"", 0, "regular"),
        "there.txt": (b"hello\n", 6, "regular"),
        "there.bin": (b"large", 5, "lfs"),
    }
    asked = [
        {"path": path, "sample": base64.b64encode(sample).decode(), "size": size}
        for path, (sample, size, _) in cases.items()
    ]
    answers = {
        item["path"]: item for item in api("POST", f"/api/{repo}/preupload/main", {"files": asked}).json["files"]
    }
    assert {path: item["uploadMode"] for path, item in answers.items()} == {
        path: mode for path, (_, _, mode) in cases.items()
    }
    assert answers["there.txt"]["oid"] == "ce013625030ba8dba906f756967f9e9ca394464a"
    assert answers["there.bin"]["oid"] == hashlib.sha256(b"large").hexdigest()
    assert answers["notes.txt"]["oid"] is None
    many = [{"path": str(number), "sample": "", "size": 1} for number in range(257)]
    assert api("POST", f"/api/{repo}/preupload/main", {"files": many}).status == 400


def test_gitignore_counts_in_the_repo_and_in_the_request(api: Api, repo: str) -> None:
    api.put(repo, ".gitignore", b"*.log\n")
    asked = {"files": [{"path": path, "sample": "", "size": 1} for path in ("a.log", "a.txt")]}
    route = f"/api/{repo}/preupload/main"
    assert [item["shouldIgnore"] for item in api("POST", route, asked).json["files"]] == [True, False]
    asked["gitIgnore"] = "*.txt\n"  # type: ignore[assignment]
    assert [item["shouldIgnore"] for item in api("POST", route, asked).json["files"]] == [False, True]


def test_branches_and_tags_answer_as_clients_expect(api: Api, repo: str) -> None:
    first = head(api, repo)
    second = api.put(repo, "a", b"1").json["commitOid"]
    route = f"/api/{repo}"
    assert api("POST", f"{route}/branch/resume%2Fstate", {"startingPoint": first}).status == 200
    again = api("POST", f"{route}/branch/resume%2Fstate", {})
    assert again.error == (409, None, "Reference refs/heads/resume/state already exists")
    assert api("POST", f"{route}/tag/main", {"tag": "v1", "message": "m"}).status == 200
    assert api("POST", f"{route}/tag/main", {"tag": "v1"}).status == 409
    refs = api("GET", f"{route}/refs?include_prs=1").json
    assert {ref["ref"]: ref["targetCommit"] for ref in refs["branches"] + refs["tags"]} == {
        "refs/heads/main": second,
        "refs/heads/resume/state": first,
        "refs/tags/v1": second,
    }
    assert (refs["converts"], refs["pullRequests"]) == ([], [])
    assert api("DELETE", f"{route}/branch/main").error == (403, None, "Cannot delete refs/heads/main")
    assert api("DELETE", f"{route}/branch/v1").error == (404, "RevisionNotFound", "Invalid rev id: v1")
    assert api("DELETE", f"{route}/branch/nope").error[2] == "Invalid rev id: nope"
    assert api("DELETE", f"{route}/branch/resume%2Fstate").status == 200
    assert api("DELETE", f"{route}/tag/v1").status == 200
    assert api("POST", f"{route}/tag/nope", {"tag": "v2"}).error[:2] == (404, "RevisionNotFound")
    assert api("POST", f"{route}/tag/main", {"tag": "v 2"}).status == 400
    assert api("POST", f"{route}/branch/refs%2Fpr%2F5", {}).status == 400
    assert api("POST", f"{route}/branch/x", {"startingPoint": "nope"}).error[1] == "RevisionNotFound"


@pytest.mark.parametrize(
    "name", ["a..b", "a b", "-a", "a.lock", "a/", "/a", "a~1", "a^", "HEAD", "@", "a@{b", "f" * 40]
)
def test_names_that_git_refuses_are_refused(api: Api, repo: str, name: str) -> None:
    assert api("POST", f"/api/{repo}/tag/main", {"tag": name}).status == 400


def test_revisions_are_branches_tags_refs_and_commits(api: Api, repo: str) -> None:
    oid = api.put(repo, "a", b"1").json["commitOid"]
    api("POST", f"/api/{repo}/tag/main", {"tag": "v1"})
    for revision in ("main", "v1", "refs%2Fheads%2Fmain", "refs%2Ftags%2Fv1", oid, oid[:7], "HEAD"):
        assert read(api, repo, "a", revision=revision).headers["X-Repo-Commit"] == oid, revision
    for revision in (oid[:6], "0" * 40, "nope", "refs%2Fpr%2F1"):
        assert read(api, repo, "a", revision=revision).error[:2] == (404, "RevisionNotFound"), revision


def test_super_squash_keeps_files_and_drops_history(api: Api, repo: str) -> None:
    for number in range(3):
        api.put(repo, f"f{number}", b"x")
    assert api("POST", f"/api/{repo}/super-squash/main", {"message": "squashed"}).status == 200
    assert [item["title"] for item in api("GET", f"/api/{repo}/commits/main").json] == ["squashed"]
    assert files(api, repo) == ["f0", "f1", "f2"]
    api("POST", f"/api/{repo}/tag/main", {"tag": "v1"})
    assert api("POST", f"/api/{repo}/super-squash/v1", {"message": "x"}).status == 400
    assert api("POST", f"/api/{repo}/super-squash/nope", {"message": "x"}).error[1] == "RevisionNotFound"


def test_a_file_is_served_with_the_headers_that_clients_read(api: Api, repo: str) -> None:
    data = bytes(range(256)) * 400
    line = {"path": "a b/ü.bin", **large(api, repo, data)}
    oid = api.commit(repo, ("lfsFile", line)).json["commitOid"]
    route = f"/{repo.removeprefix('models/')}/resolve/main/a%20b/%C3%BC.bin"
    found = api("HEAD", route)
    assert (found.status, found.body, found.headers["Content-Length"]) == (200, b"", str(len(data)))
    assert found.headers["X-Repo-Commit"] == oid
    assert found.headers["X-Linked-Etag"] == found.headers["ETag"] == f'"{line["oid"]}"'
    assert found.headers["X-Linked-Size"] == str(len(data))
    assert found.headers["X-Xet-Hash"] is None
    for span, part in [("0-9", data[:10]), ("100-", data[100:]), ("-7", data[-7:]), ("99-999999999", data[99:])]:
        answer = api("GET", route, headers={"Range": f"bytes={span}"})
        assert (answer.status, answer.body) == (206, part)
        start = len(data) - len(part) if span[0] == "-" else int(span.split("-")[0])
        assert answer.headers["Content-Range"] == f"bytes {start}-{start + len(part) - 1}/{len(data)}"
    past = api("GET", route, headers={"Range": f"bytes={len(data)}-"})
    assert (past.status, past.headers["Content-Range"]) == (416, f"bytes */{len(data)}")
    missing = api("HEAD", route + ".nope")
    assert (missing.status, missing.headers["X-Error-Code"], missing.headers["X-Repo-Commit"]) == (
        404,
        "EntryNotFound",
        oid,
    )


def test_a_slash_separates_and_a_quoted_one_does_not(api: Api, repo: str) -> None:
    api("POST", f"/api/{repo}/branch/a%2Fb", {})
    api.put(repo, "x/y.txt", b"1", revision="a/b")
    assert read(api, repo, "x/y.txt", revision="a%2Fb").body == b"1"
    assert read(api, repo, "b/x/y.txt", revision="a").error[1] == "RevisionNotFound"


def test_a_tree_lists_folders_then_files_with_their_last_commits(api: Api, repo: str) -> None:
    one = api.commit(repo, *(api.file(path, b"x") for path in ("b/one", "b/c/two", "top"))).json["commitOid"]
    two = api.commit(repo, api.file("b/c/two", b"y"), summary="second").json["commitOid"]
    listed = api("GET", f"/api/{repo}/tree/main?expand=true").json
    assert [(item["type"], item["path"]) for item in listed] == [
        ("directory", "b"),
        ("file", ".gitattributes"),
        ("file", "top"),
    ]
    assert [item["lastCommit"]["id"] for item in listed[::2]] == [two, one]
    inner = api("GET", f"/api/{repo}/tree/main/b?recursive=true").json
    assert [item["path"] for item in inner] == ["b/c", "b/c/two", "b/one"]
    assert api("GET", f"/api/{repo}/tree/main/nope").error[:2] == (404, "EntryNotFound")
    before = api("GET", f"/api/{repo}/tree/{one}").json[0]
    assert before["oid"] != listed[0]["oid"]


def test_paths_info_takes_a_form_and_leaves_out_what_is_missing(api: Api, repo: str) -> None:
    api.commit(repo, api.file("a&b.txt", b"x"), api.file("d/e", b"y"))
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = api("POST", f"/api/{repo}/paths-info/main", b"paths=a%26b.txt&paths=d&paths=nope&expand=True", form)
    assert [(item["path"], item["type"]) for item in answer.json] == [("a&b.txt", "file"), ("d", "directory")]
    assert all(item["lastCommit"]["title"] == "a commit" for item in answer.json)
    too_many = b"&".join(b"paths=%d" % number for number in range(1001))
    assert api("POST", f"/api/{repo}/paths-info/main", too_many, form).status == 413


def pages(api: Api, target: str) -> Iterator[list[Any]]:
    while target:
        answer = api("GET", target)
        yield answer.json
        target = (answer.headers["Link"] or "").partition(">")[0].lstrip("<")


def test_pages_are_of_one_commit_even_when_the_branch_moves(start_hub: StartHub) -> None:
    api = start_hub(Settings(page_size=3)).api()
    repo = new_repo(api)
    api("POST", f"/api/{repo}/branch/a%2Fb", {})
    api.commit(repo, *(api.file(f"f{number}", b"x") for number in range(7)), revision="a/b")
    found = pages(api, f"/api/{repo}/tree/a%2Fb?recursive=true")
    first = next(found)
    api.put(repo, "0-added-meanwhile", b"x", revision="a/b")
    rest = list(found)
    assert [len(first), *map(len, rest)] == [3, 3, 2]
    assert "0-added-meanwhile" not in [item["path"] for page in rest for item in page]
    history = list(pages(api, f"/api/{repo}/commits/a%2Fb"))
    assert [item["title"] for page in history for item in page] == ["a commit", "a commit", "initial commit"]
    for number in range(5):
        api.put(repo, "n", str(number).encode(), revision="a/b")
    assert [len(page) for page in pages(api, f"/api/{repo}/commits/a%2Fb")] == [3, 3, 2]


def test_two_thousand_files_go_in_one_commit(api: Api, repo: str) -> None:
    lines = [api.file(f"d{number % 10}/f{number}", str(number).encode()) for number in range(2000)]
    assert api.commit(repo, *lines).status == 200
    listed = [item for page in pages(api, f"/api/{repo}/tree/main?recursive=1") for item in page]
    assert len(listed) == 2000 + 10 + 1
    assert read(api, repo, "d7/f1997").body == b"1997"


def test_a_line_that_is_too_long_is_refused(api: Api, repo: str) -> None:
    answer = api.put(repo, "big.txt", bytes(30_000_000))
    assert answer.status == 413
    assert "LFS" in answer.json["error"]


def test_validate_yaml_names_what_is_wrong(api: Api) -> None:
    good = api("POST", "/api/validate-yaml", {"content": "---\nlicense: mit\n---\n", "repoType": "model"})
    assert (good.status, good.json) == (200, {"errors": [], "warnings": []})
    bad = api("POST", "/api/validate-yaml", {"content": "---\nlicense: [1]\n---\n", "repoType": "model"})
    assert bad.status == 400
    assert '"license"' in bad.json["errors"][0]["message"]
