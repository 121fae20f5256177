"""Repos, as huggingface_hub sees them: made, found, shown, changed, moved, deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hubshard.hubserver import Settings

if TYPE_CHECKING:
    from tests.conftest import StartHub
    from tests.e2e.hub.conftest import Client


def status_of(error: HfHubHTTPError) -> int:
    return int(error.response.status_code)


def test_whoami_names_the_user(client: Client) -> None:
    assert client.api.whoami()["name"] == "hubshard"
    assert client.api.whoami(cache=True)["auth"]["accessToken"]["role"] == "write"


def test_a_bare_name_gets_the_users_namespace(client: Client) -> None:
    url = client.api.create_repo("bare-name")
    assert (url.repo_id, url.namespace, url.repo_type) == ("hubshard/bare-name", "hubshard", "model")
    assert url.endpoint == client.hub.url
    assert client.api.create_repo("bare-name", exist_ok=True).repo_id == "hubshard/bare-name"
    client.api.delete_repo("bare-name")
    assert not client.api.repo_exists("hubshard/bare-name")


def test_a_repo_is_made_once(client: Client) -> None:
    repo = client.repo()
    with pytest.raises(HfHubHTTPError, match="already created this model repo") as caught:
        client.api.create_repo(repo)
    assert status_of(caught.value) == 409
    assert client.api.create_repo(repo, exist_ok=True).repo_id == repo
    assert client.api.create_repo(repo, private=True, exist_ok=True).repo_id == repo
    assert client.api.repo_info(repo).private is False


@pytest.mark.parametrize("kind", ["model", "dataset", "space"])
def test_every_type_of_repo_has_the_same_life(client: Client, kind: str) -> None:
    sdk = {"space_sdk": "static"} if kind == "space" else {}
    repo = client.repo("typed", repo_type=kind, visibility="private", **sdk)
    info = client.api.repo_info(repo, repo_type=kind)
    assert (info.id, info.private, info.author) == (repo, True, "hubshard")
    client.commit(repo, {"a.txt": "a", "b.bin": b"\0" * 100}, repo_type=kind)
    assert client.read(repo, "b.bin", repo_type=kind) == b"\0" * 100
    assert client.read(repo, "a.txt", repo_type=kind) == b"a"
    client.api.create_branch(repo, branch="b", repo_type=kind)
    client.api.create_tag(repo, tag="t", repo_type=kind)
    assert not client.api.repo_exists(repo, repo_type={"model": "dataset"}.get(kind, "model"))
    assert client.api.file_exists(repo, "a.txt", repo_type=kind, revision="t")
    assert client.api.create_pull_request(repo, "A title", repo_type=kind).git_reference == "refs/pr/1"
    client.api.delete_repo(repo, repo_type=kind)
    with pytest.raises(RepositoryNotFoundError):
        client.api.repo_info(repo, repo_type=kind)


def test_deleting_a_missing_repo_can_be_fine(client: Client) -> None:
    with pytest.raises(RepositoryNotFoundError):
        client.api.delete_repo("hubshard/never-made")
    client.api.delete_repo("hubshard/never-made", missing_ok=True)


def test_visibility_and_gating_are_settings(client: Client) -> None:
    repo = client.repo(private=True)
    client.api.update_repo_settings(repo, private=False)
    assert client.api.repo_info(repo).private is False
    client.api.update_repo_settings(repo, visibility="private", gated="manual")
    info = client.api.repo_info(repo)
    assert (info.private, info.gated) == (True, "manual")
    client.api.update_repo_settings(repo, gated=False)
    assert client.api.repo_info(repo).gated is False


def test_info_shows_files_with_their_sizes_and_ids(client: Client) -> None:
    repo = client.repo()
    made = client.commit(repo, {"a.txt": "text", "folder/m.bin": b"\0" * 1000})
    plain = client.api.model_info(repo)
    assert plain.sha == made.oid
    assert [(item.rfilename, item.size) for item in plain.siblings or []] == [
        (".gitattributes", None),
        ("a.txt", None),
        ("folder/m.bin", None),
    ]
    _, text, large = client.api.model_info(repo, files_metadata=True).siblings or []
    assert (text.size, text.blob_id, text.lfs) == (4, "f3a34851d44d6b97c90fbb99dd3d18c261b9a237", None)
    assert large.lfs is not None
    assert (large.size, large.lfs.size, large.lfs.pointer_size) == (1000, 1000, 129)
    assert large.lfs.sha256 == "541b3e9daa09b20bf85fa273e5cbd3e80185aa4ec298e765db87742b70138a53"


def test_info_can_be_asked_for_parts(client: Client) -> None:
    repo = client.repo()
    info = client.api.model_info(repo, expand=["sha", "usedStorage", "siblings", "createdAt"])
    assert info.sha == client.head(repo)
    assert info.used_storage == 0
    assert info.created_at is not None
    assert [item.rfilename for item in info.siblings or []] == [".gitattributes"]
    assert info.private is None
    assert info.last_modified is None


def test_a_revision_is_asked_for_by_any_name(client: Client) -> None:
    repo = client.repo()
    first, second = client.head(repo), client.commit(repo, {"a.txt": "a"}).oid
    client.api.create_tag(repo, tag="v1", revision=first)
    client.api.create_branch(repo, branch="resume/state", revision=first)
    for name in ("v1", "resume/state", first, first[:8], "refs/heads/resume/state"):
        assert client.head(repo, name) == first
        assert client.files(repo, revision=name) == set()
    for name in ("main", second, "refs/heads/main"):
        assert client.head(repo, name) == second
    assert client.api.revision_exists(repo, "v1")
    assert not client.api.revision_exists(repo, "v2")
    with pytest.raises(RevisionNotFoundError):
        client.head(repo, "0" * 40)


def test_what_is_missing_is_told_apart(client: Client) -> None:
    repo = client.repo()
    with pytest.raises(RepositoryNotFoundError):
        client.read("hubshard/never-made", "a.txt")
    with pytest.raises(RevisionNotFoundError):
        client.read(repo, "a.txt", revision="never-made")
    with pytest.raises(EntryNotFoundError):
        client.read(repo, "a.txt")
    assert not client.api.file_exists(repo, "a.txt")
    assert not client.api.file_exists("hubshard/never-made", "a.txt")
    with pytest.raises(RepositoryNotFoundError):
        client.api.model_info("bare-and-missing")


def test_ids_are_matched_without_regard_to_case(client: Client) -> None:
    repo = client.api.create_repo("Hubshard/Mixed-Case").repo_id
    assert repo == "Hubshard/Mixed-Case"
    assert client.api.create_repo("hubshard/mixed-case", exist_ok=True).repo_id == repo
    client.commit("HUBSHARD/mixed-CASE", {"a.txt": "a", "m.bin": b"\0" * 5000})
    assert client.api.repo_info("hubshard/MIXED-case").id == repo
    assert client.read("hubshard/mixed-case", "m.bin") == b"\0" * 5000
    client.api.delete_repo("hubshard/mixed-case")
    assert not client.api.repo_exists(repo)


def test_a_moved_repo_is_found_under_both_names(client: Client) -> None:
    repo = client.repo("before")
    client.commit(repo, {"a.txt": "a", "m.bin": b"\0" * 100})
    client.api.move_repo(repo, "another/after")
    assert client.api.repo_info("another/after").id == "another/after"
    assert client.read("another/after", "m.bin") == b"\0" * 100
    assert client.api.repo_info(repo).id == "another/after"
    assert client.read(repo, "a.txt") == b"a"
    with pytest.raises(RepositoryNotFoundError):
        client.api.move_repo("hubshard/never-made", "hubshard/anything")
    taken = client.repo()
    with pytest.raises(HfHubHTTPError, match="already exists"):
        client.api.move_repo(taken, "another/after")


def test_a_duplicate_is_a_repo_of_its_own(client: Client) -> None:
    repo = client.repo()
    client.commit(repo, {"a.txt": "a", "m.bin": b"\0" * 100})
    twin = client.api.duplicate_repo(repo, f"{repo}-twin").repo_id
    client.api.delete_repo(repo)
    assert client.files(twin) == {"a.txt", "m.bin"}
    assert client.read(twin, "m.bin") == b"\0" * 100


@pytest.mark.parametrize("name", ["a--b", "ends.git"])
def test_a_name_that_cannot_be_is_refused(client: Client, name: str) -> None:
    answer = client.hub.api()("POST", "/api/repos/create", {"name": name})
    assert answer.status == 400


def test_lists_of_repos_are_searched_and_paged(start_hub: StartHub) -> None:
    hub = start_hub(Settings(page_size=3))
    api = HfApi(endpoint=hub.url, token="hf_test")
    for number in range(7):
        api.create_repo(f"someone/model-{number}")
    api.create_repo("someone/data", repo_type="dataset")
    assert {info.id for info in api.list_models(author="someone")} == {f"someone/model-{n}" for n in range(7)}
    assert [info.id for info in api.list_models(search="model-3")] == ["someone/model-3"]
    assert len(list(api.list_models(author="someone", limit=4))) == 4
    assert [info.id for info in api.list_datasets(author="someone")] == ["someone/data"]
    assert list(api.list_models(author="nobody")) == []


def test_lists_of_repos_are_filtered_and_sorted(client: Client) -> None:
    api = client.api
    first, second = client.repo("listed"), client.repo("listed", private=True)
    card = "---\nlicense: mit\nlanguage: [en]\ntags: [rare]\npipeline_tag: text-generation\nlibrary_name: x\n---\n"
    client.commit(second, {"README.md": card})
    client.commit(first, {"a.txt": "a"})

    def listed(**options: Any) -> list[str]:
        return [info.id for info in api.list_models(search="listed", **options)]

    assert listed(sort="created_at") == [second, first]
    assert listed(sort="last_modified") == [first, second]
    for tags in ("rare", ["rare", "license:mit", "en"], "x", "text-generation"):
        assert listed(filter=tags) == [second]
    assert listed(pipeline_tag="text-generation") == [second]
    assert listed(filter=["rare", "common"]) == []
    api.update_repo_settings(first, gated="auto")
    assert (listed(gated=True), listed(gated=False)) == ([first], [second])
    (full,) = api.list_models(search="listed", filter="rare", full=True, cardData=True)
    assert full.sha == client.head(second)
    assert [item.rfilename for item in full.siblings or []] == [".gitattributes", "README.md"]
    assert full.card_data is not None
    (expanded,) = api.list_models(search="listed", filter="rare", expand=["sha"])
    assert (expanded.sha, expanded.private) == (full.sha, None)


def test_auth_check_says_who_may_do_what(client: Client) -> None:
    repo = client.repo()
    client.api.auth_check(repo)
    client.api.auth_check(repo, write=True)
    with pytest.raises(RepositoryNotFoundError):
        client.api.auth_check("hubshard/never-made")


def test_the_default_card_names_nothing(client: Client) -> None:
    repo = client.repo()
    with pytest.raises(EntryNotFoundError):
        client.read(repo, "README.md")
    assert client.api.model_info(repo).card_data is None


def test_a_bad_request_is_a_bad_request(client: Client) -> None:
    with pytest.raises(BadRequestError):
        client.api.create_branch(client.repo(), branch="two  spaces")
