"""Repos over plain HTTP: what clients branch on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from hubshard.hubserver import Settings

if TYPE_CHECKING:
    from tests.conftest import Api, Hub, StartHub

TOKENS = {"t-alice": "alice", "t-bob": "bob", "t-read": "alice:read", "t-one": "alice:repo:alice/one"}


@pytest.fixture
def api(module_hub: Hub) -> Api:
    return module_hub.api()


@pytest.fixture
def users(start_hub: StartHub) -> Hub:
    return start_hub(Settings(tokens=TOKENS, organizations={"acme": "alice"}))


def create(api: Api, name: str, **more: object) -> str:
    answer = api("POST", "/api/repos/create", {"name": name, **more})
    assert answer.status == 200, answer.body
    return str(answer.json["url"])


def test_every_answer_has_a_request_id(api: Api) -> None:
    assert api("GET", "/api/whoami-v2").headers["X-Request-Id"]
    assert api("GET", "/nothing/here").headers["X-Request-Id"]
    assert api("GET", "/api/models/a/b", headers={"X-Request-Id": "mine"}).headers["X-Request-Id"] == "mine"


def test_an_unknown_route_drains_the_body_and_keeps_the_connection_useful(api: Api) -> None:
    answer = api("POST", "/v9/unknown", b"x" * 3_000_000)
    assert answer.status == 404
    assert api("PUT", "/api/whoami-v2", b"x" * 1_000_000).status == 405


def test_a_new_repo_has_one_commit_with_the_usual_attributes(api: Api) -> None:
    assert create(api, "first").endswith("/hubshard/first")
    info = api("GET", "/api/models/hubshard/first?blobs=true").json
    assert [item["rfilename"] for item in info["siblings"]] == [".gitattributes"]
    commits = api("GET", "/api/models/hubshard/first/commits/main").json
    assert [(item["title"], item["authors"]) for item in commits] == [("initial commit", [{"user": "hubshard"}])]
    body = api("GET", "/hubshard/first/resolve/main/.gitattributes").body
    assert b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n" in body


def test_a_repo_is_found_in_any_case_and_made_once(api: Api) -> None:
    create(api, "Cased", organization="Org")
    again = api("POST", "/api/repos/create", {"name": "cASED", "organization": "ORG"})
    assert (again.status, again.json["error"]) == (409, "You already created this model repo")
    assert again.json["url"].endswith("/Org/Cased")
    assert api("GET", "/api/models/org/CASED").json["id"] == "Org/Cased"


@pytest.mark.parametrize("name", ["a/b/c", "-x", "x.git", "a..b", "a--b", "", "x" * 97, "sp ace", "é"])
def test_a_bad_name_is_refused(api: Api, name: str) -> None:
    assert api("POST", "/api/repos/create", {"name": name, "organization": "org"}).status == 400


def test_types_of_repos_are_apart(api: Api) -> None:
    create(api, "same")
    assert create(api, "same", type="dataset").endswith("/datasets/hubshard/same")
    assert create(api, "same", type="space", sdk="static").endswith("/spaces/hubshard/same")
    assert api("GET", "/api/spaces/hubshard/same").json["sdk"] == "static"
    assert api("POST", "/api/repos/create", {"name": "x", "type": "bucket"}).status == 400


def test_a_missing_repo_is_named_by_its_code(api: Api) -> None:
    for method, path in [
        ("GET", "/api/models/no/such"),
        ("GET", "/api/models/bare"),
        ("GET", "/no/such/resolve/main/x"),
        ("POST", "/api/models/no/such/preupload/main"),
        ("POST", "/api/models/no/such/commit/main"),
        ("POST", "/no/such.git/info/lfs/objects/batch"),
        ("GET", "/api/datasets/no/such/tree/main"),
    ]:
        body = {"operation": "upload"} if method == "POST" else None
        assert api(method, path, body).error == (404, "RepoNotFound", "Repository not found"), path
    gone = api("DELETE", "/api/repos/delete", {"name": "such", "organization": "no"})
    assert gone.error[:2] == (404, "RepoNotFound")


def test_a_moved_repo_is_found_under_both_names(api: Api) -> None:
    create(api, "old")
    assert api("POST", "/api/repos/move", {"fromRepo": "hubshard/old", "toRepo": "other/new"}).status == 200
    assert api("GET", "/api/models/hubshard/old").json["id"] == "other/new"
    create(api, "old")
    assert api("GET", "/api/models/hubshard/old").json["id"] == "hubshard/old"
    taken = api("POST", "/api/repos/move", {"fromRepo": "hubshard/old", "toRepo": "other/new"})
    assert taken.status == 409


def test_visibility_can_be_changed_both_ways(users: Hub) -> None:
    alice, nobody = users.api("t-alice"), users.api(None)
    create(alice, "one")
    for body, seen in [({"private": True}, 401), ({"visibility": "public"}, 200), ({"visibility": "private"}, 401)]:
        assert alice("PUT", "/api/models/alice/one/settings", body).status == 200
        assert nobody("GET", "/api/models/alice/one").status == seen
    assert alice("PUT", "/api/models/alice/one/settings", {"visibility": "odd"}).status == 400
    assert alice("PUT", "/api/models/alice/one/settings", {"gated": "auto"}).json["gated"] == "auto"


def test_a_private_repo_looks_missing_without_the_right_token(users: Hub) -> None:
    create(users.api("t-alice"), "one", visibility="private")
    for path in ("/api/models/alice/one", "/alice/one/resolve/main/.gitattributes", "/api/models/alice/one/refs"):
        assert users.api("t-bob")("GET", path).error == (404, "RepoNotFound", "Repository not found")
        assert users.api(None)("GET", path).error[:2] == (401, "RepoNotFound")
        assert users.api("t-read")("GET", path).status == 200
    listed = {user: users.api(user)("GET", "/api/models?author=alice").json for user in ("t-bob", "t-alice")}
    assert [len(listed["t-bob"]), len(listed["t-alice"])] == [0, 1]


def test_a_gated_repo_shows_itself_and_keeps_its_files(users: Hub) -> None:
    alice, bob, nobody = users.api("t-alice"), users.api("t-bob"), users.api(None)
    create(alice, "one")
    assert alice("POST", "/api/models/alice/one/user-access-request/grant", {"user": "bob"}).status == 400
    alice("PUT", "/api/models/alice/one/settings", {"gated": "manual"})
    file, token = "/alice/one/resolve/main/.gitattributes", "/api/models/alice/one/xet-read-token/main"
    assert bob("GET", "/api/models/alice/one").json["gated"] == "manual"
    for path in (file, token, "/api/models/alice/one/auth-check"):
        assert bob("GET", path).error[:2] == (403, "GatedRepo"), path
        assert nobody("GET", path).error[:2] == (401, "GatedRepo"), path
    assert alice("GET", file).status == 200
    assert bob("POST", "/api/models/alice/one/user-access-request/grant", {"user": "bob"}).status == 403
    assert alice("POST", "/api/models/alice/one/user-access-request/grant", {"user": "Bob"}).status == 200
    assert [bob("GET", path).status for path in (file, token)] == [200, 200]


def test_refusals_name_the_missing_permission(users: Hub) -> None:
    create(users.api("t-alice"), "one")
    create(users.api("t-alice"), "two")
    create(users.api("t-alice"), "shared", organization="acme")
    assert users.api("t-alice").put("models/acme/shared", "x.txt", b"x").status == 200
    refused = [
        (users.api("t-read").put("models/alice/one", "x.txt", b"x"), "needs the role 'write'"),
        (users.api("t-one").put("models/alice/two", "x.txt", b"x"), "models/alice/one only"),
        (users.api("t-bob").put("models/alice/one", "x.txt", b"x"), "bob may not write to the namespace alice"),
        (users.api("t-read")("POST", "/api/repos/create", {"name": "x"}), "the role 'write' is needed"),
        (users.api("t-bob")("POST", "/api/repos/create", {"name": "x", "organization": "acme"}), 'namespace "acme"'),
    ]
    for answer, reason in refused:
        assert answer.status == 403
        assert reason in answer.json["error"]
        assert answer.headers["X-Error-Message"] == answer.json["error"]
    assert users.api("t-one").put("models/alice/one", "x.txt", b"x").status == 200
    assert users.api(None).put("models/alice/one", "x.txt", b"x").status == 401
    assert users.api("t-wrong")("GET", "/api/whoami-v2").headers["X-Error-Message"] == (
        "Invalid credentials in Authorization header"
    )


def test_whoami_names_user_organisations_and_role(users: Hub) -> None:
    alice = users.api("t-alice")("GET", "/api/whoami-v2").json
    assert (alice["name"], [org["name"] for org in alice["orgs"]]) == ("alice", ["acme"])
    assert users.api("t-one")("GET", "/api/whoami-v2").json["auth"]["accessToken"]["role"] == "fineGrained"
    assert users.api(None)("GET", "/api/whoami-v2").status == 401


def test_a_duplicate_holds_the_same_files_and_contents(api: Api) -> None:
    create(api, "source")
    api.put("models/hubshard/source", "a.txt", b"text")
    sha256 = api.upload("models/hubshard/source", b"large" * 100)
    api.commit("models/hubshard/source", ("lfsFile", {"path": "m.bin", "algo": "sha256", "oid": sha256}))
    made = api("POST", "/api/models/hubshard/source/duplicate", {"repository": "hubshard/twin"})
    assert made.json["url"].endswith("/hubshard/twin")
    api("DELETE", "/api/repos/delete", {"name": "source", "organization": "hubshard"})
    assert api("GET", "/hubshard/twin/resolve/main/m.bin").body == b"large" * 100
    assert api("GET", "/hubshard/twin/resolve/main/a.txt").body == b"text"


def test_info_shows_card_and_expands(api: Api) -> None:
    create(api, "carded")
    card = b"---\nlicense: mit\ntags: [a]\nlibrary_name: x\ndate: 2026-01-01\n---\n"
    api.put("models/hubshard/carded", "README.md", card)
    info = api("GET", "/api/models/hubshard/carded").json
    assert (info["cardData"]["license"], info["tags"], info["library_name"]) == ("mit", ["a"], "x")
    expanded = api("GET", "/api/models/hubshard/carded?expand=sha&expand=tags").json
    assert set(expanded) == {"_id", "id", "sha", "tags"}


def test_pages_of_repos_are_linked(start_hub: StartHub) -> None:
    hub = start_hub(Settings(page_size=2))
    api = hub.api()
    for number in range(5):
        create(api, f"r{number}")
    found, target = [], "/api/models?author=hubshard"
    while target:
        answer = api("GET", target)
        found += [item["id"] for item in answer.json]
        target = (answer.headers["Link"] or "").partition(">")[0].lstrip("<")
    assert sorted(found) == [f"hubshard/r{number}" for number in range(5)]


def test_counters_count_and_start_again(hub: Hub) -> None:
    api = hub.api()
    create(api, "counted")
    api.put("models/hubshard/counted", "a.txt", b"12345")
    api.upload("models/hubshard/counted", b"1234567890")
    api("GET", "/hubshard/counted/resolve/main/a.txt", headers={"Range": "bytes=0-2"})
    counted = hub.counters("models/hubshard/counted")
    assert counted == {
        "lfs_received": 10,
        "xet_received": 0,
        "regular_received": 5,
        "resolve_sent": 3,
        "xet_sent": 0,
        "commits": 1,
    }
    assert hub.counters()["requests"]["commit"] == 1
    hub.reset_counters()
    assert hub.counters() == {"repos": {}, "requests": {}, "total": dict.fromkeys(counted, 0)}


def test_what_is_not_json_is_a_bad_request(api: Api) -> None:
    for body in (b"{", b"[]", b"3"):
        assert api("POST", "/api/repos/create", body).status == 400
    assert json.loads(api("POST", "/api/repos/create", b"{").body)["error"].startswith("the body is not JSON")
