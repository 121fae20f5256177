"""What a repo as a store does beyond the contract: pages, parts, tokens, refs, pull requests, cards, counted bytes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import HfApi

from hubshard.errors import ConflictError, FormatError, IntegrityError, NotFoundError, StoreError
from hubshard.hubserver import Settings
from hubshard.protocols import Revision, Staged
from hubshard.store.hub import HubStore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Hub, StartHub

WEIGHTS = random.Random(1).randbytes(1_000_000)


@pytest.fixture(autouse=True)
def _xet_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))


@pytest.fixture
def store(module_hub: Hub) -> HubStore:
    made = HubStore(f"org/repo-{random.getrandbits(64):x}", endpoint=module_hub.url, token="hf_test")
    made.create_repo()
    return made


def head(store: HubStore, branch: str = "main") -> Revision:
    found = store.head(branch)
    assert found is not None
    return found


def stage(store: HubStore, path: str, content: bytes, *, create_pr: bool = False) -> Staged:
    return store.stage("main", path, lambda: [content], nbytes=len(content), create_pr=create_pr)


def commit(store: HubStore, files: dict[str, bytes], *, publish_id: str = "p", create_pr: bool = False) -> Revision:
    add = [stage(store, path, content, create_pr=create_pr) for path, content in files.items()]
    return store.commit(
        "main",
        parent=head(store),
        add=add,
        remove=[],
        message="Title of it\n\nThe body",
        publish_id=publish_id,
        create_pr=create_pr,
    )


# Repos and refs


@pytest.mark.parametrize(
    "repo_id", ["", "a/b/c", "org/na me", "org/--x", "-org/x", "org/x.git", "../x", "org/" + "x" * 99]
)
def test_a_bad_repo_id_is_refused_before_anything_is_sent(repo_id: str) -> None:
    with pytest.raises(FormatError, match="is no repo id"):
        HubStore(repo_id, endpoint="http://127.0.0.1:9")


def test_a_bad_repo_type_is_refused() -> None:
    with pytest.raises(FormatError, match="is no type of repo"):
        HubStore("org/x", repo_type="bucket")


def test_a_missing_repo_is_told_with_both_reasons(module_hub: Hub) -> None:
    store = HubStore("org/missing", endpoint=module_hub.url, token="hf_test")
    assert not store.repo_exists()
    for call in (lambda: store.head("main"), store.branches, store.is_private, lambda: stage(store, "a.json", b"1")):
        with pytest.raises(NotFoundError, match="org/missing does not exist, or it is private"):
            call()


def test_a_repo_is_made_once_and_keeps_its_visibility(module_hub: Hub) -> None:
    store = HubStore("org/made", endpoint=module_hub.url, token="hf_test")
    assert store.create_repo(private=True) == "org/made"
    assert store.create_repo(private=False) == "org/made"
    assert store.is_private()
    with pytest.raises(ConflictError):
        store.create_repo(exist_ok=False)


def test_a_bare_name_gets_the_namespace_of_the_token(start_hub: StartHub) -> None:
    hub = start_hub(Settings(tokens={"hf_ann": "ann:write"}))
    store = HubStore("mine", endpoint=hub.url, token="hf_ann")
    assert store.create_repo() == store.repo_id == "ann/mine"
    assert store.head("main") is not None


@pytest.mark.parametrize("repo_type", ["dataset", "space"])
def test_datasets_and_spaces_are_stores_too(module_hub: Hub, repo_type: str) -> None:
    store = HubStore(f"org/of-{repo_type}", repo_type=repo_type, endpoint=module_hub.url, token="hf_test")
    sdk = "static" if repo_type == "space" else None
    HfApi(endpoint=module_hub.url, token="hf_test").create_repo(
        f"org/of-{repo_type}", repo_type=repo_type, space_sdk=sdk
    )
    made = commit(store, {"m.safetensors": WEIGHTS, "a.json": b"1"})
    into = bytearray(10)
    store.read(made, "m.safetensors", 5, 15, memoryview(into))
    assert into == WEIGHTS[5:15]
    assert f"/{repo_type}s/org/of-{repo_type}/tree/" in store.url_of(made)


def test_branches_are_made_listed_and_deleted(store: HubStore) -> None:
    at = head(store)
    assert store.create_branch("hubshard/staging/1", at) == Revision("hubshard/staging/1", at.commit)
    store.create_branch("hubshard/staging/1", at)
    assert store.branches() == {"main": at.commit, "hubshard/staging/1": at.commit}
    moved = commit(store, {"a.json": b"1"})
    with pytest.raises(ConflictError, match="already exists"):
        store.create_branch("hubshard/staging/1", moved)
    store.delete_branch("hubshard/staging/1")
    store.delete_branch("hubshard/staging/1")
    assert store.branches() == {"main": moved.commit}
    with pytest.raises(StoreError, match="Cannot delete refs/heads/main"):
        store.delete_branch("main")


def test_a_new_branch_starts_from_nothing_of_main(store: HubStore) -> None:
    commit(store, {"m.safetensors": WEIGHTS})
    made = store.commit(
        "resume",
        parent=None,
        add=[Staged("again.safetensors", len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest())],
        remove=[],
        message="m",
        publish_id="p",
    )
    assert [entry.path for entry in store.list(made)] == [".gitattributes", "again.safetensors"]


def test_tags_are_made_kept_and_moved(store: HubStore) -> None:
    first, second = head(store), commit(store, {"a.json": b"1"})
    assert store.tag("v1", first, "the first") == Revision("v1", first.commit)
    assert store.tag("v1", first).commit == first.commit
    with pytest.raises(ConflictError, match="the tag 'v1' is at") as caught:
        store.tag("v1", second)
    assert caught.value.hint
    assert store.tag("v1", second, exist_ok=True).commit == first.commit
    assert store.tag("v1", second, move=True).commit == second.commit
    assert store.tags() == {"v1": second.commit}
    assert store.head("v1") == Revision("v1", second.commit)


def test_a_tag_name_that_git_refuses_is_refused_with_its_reason(store: HubStore) -> None:
    with pytest.raises(StoreError, match="Invalid reference for a tag"):
        store.tag("a b", head(store))


# Commits


def test_a_commit_carries_title_body_and_publish_id(store: HubStore, module_hub: Hub) -> None:
    made = commit(store, {"a.json": b"1"}, publish_id="1234-abc")
    assert store.publish_id_of(made) == "1234-abc"
    found = module_hub.api()("GET", f"/api/models/{store.repo_id}/commits/main").json[0]
    assert (found["id"], found["title"]) == (made.commit, "Title of it")
    assert found["message"] == "The body\n\nHubshard-Publish-Id: 1234-abc"


def test_a_commit_of_others_has_no_publish_id(store: HubStore) -> None:
    assert store.publish_id_of(head(store)) is None


def test_a_conflict_says_who_moved_the_branch_and_how(store: HubStore) -> None:
    first = head(store)
    commit(store, {"a.json": b"1"})
    with pytest.raises(ConflictError, match=r"'main' moved on from .* by hubshard: 'Title of it'"):
        store.commit("main", parent=first, add=[], remove=[], message="m", publish_id="other")


def test_the_same_path_twice_in_a_commit_is_refused(store: HubStore) -> None:
    staged = stage(store, "a.json", b"1")
    with pytest.raises(FormatError, match=r"a\.json is added twice"):
        store.commit("main", parent=head(store), add=[staged, staged], remove=[], message="m", publish_id="p")


def test_a_pull_request_is_opened_by_a_commit(store: HubStore) -> None:
    base = head(store)
    made = commit(store, {"m.safetensors": WEIGHTS, "a.json": b"1"}, create_pr=True, publish_id="pr-1")
    assert made.branch == "refs/pr/1"
    assert store.head("refs/pr/1") == made
    assert store.head("main") == base
    assert store.url_of(made).endswith("/discussions/1")
    again = store.commit(
        "refs/pr/1", parent=made, add=[stage(store, "b.json", b"2")], remove=["a.json"], message="m", publish_id="pr-2"
    )
    assert [entry.path for entry in store.list(again)] == [".gitattributes", "b.json", "m.safetensors"]


@pytest.mark.parametrize("xet", [True, False])
def test_who_may_not_write_may_open_a_pull_request(start_hub: StartHub, xet: bool) -> None:
    hub = start_hub(Settings(tokens={"hf_ann": "ann:write", "hf_bob": "bob:write"}))
    HubStore("ann/x", endpoint=hub.url, token="hf_ann").create_repo()
    store = HubStore("ann/x", endpoint=hub.url, token="hf_bob", xet=xet)
    made = commit(store, {"m.safetensors": WEIGHTS, "a.json": b"1"}, create_pr=True)
    assert made.branch == "refs/pr/1"
    with pytest.raises(StoreError, match=r"not allowed to .*: the token must have write access to ann/x") as caught:
        commit(store, {"a.json": b"1"})
    assert not caught.value.retryable


# Tokens


@pytest.fixture(scope="module")
def accounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from hubshard.hubserver import running

    tokens = {"hf_ann": "ann:write", "hf_read": "ann:read", "hf_bob": "bob:write", "hf_one": "ann:repo:ann/other"}
    with running(tmp_path_factory.mktemp("accounts"), settings=Settings(tokens=tokens)) as url:
        HubStore("ann/x", endpoint=url, token="hf_ann").create_repo()
        HubStore("ann/hidden", endpoint=url, token="hf_ann").create_repo(private=True)
        yield url


@pytest.mark.parametrize("token", ["hf_read", "hf_bob", "hf_one"])
def test_a_token_without_the_scope_is_told_which_scope(accounts: str, token: str) -> None:
    store = HubStore("ann/x", endpoint=accounts, token=token)
    calls = (
        lambda: stage(store, "a.json", b"1"),
        lambda: store.commit("main", parent=head(store), add=[], remove=[], message="m", publish_id="p"),
        lambda: store.create_branch("b", head(store)),
        lambda: store.tag("t", head(store)),
    )
    for call in calls:
        with pytest.raises(StoreError, match="the token must have write access to ann/x; the server says") as caught:
            call()
        assert not caught.value.retryable
        assert "pass a token with write access to ann/x" in str(caught.value.hint)


def test_no_token_is_told_as_such(accounts: str) -> None:
    with pytest.raises(StoreError, match=r"not allowed to .*there is no token; the server says") as caught:
        stage(HubStore("ann/x", endpoint=accounts, token=False), "a.json", b"1")
    assert not caught.value.retryable


def test_a_wrong_token_is_told_as_such(accounts: str) -> None:
    with pytest.raises(StoreError, match="Invalid credentials in Authorization header"):
        HubStore("ann/x", endpoint=accounts, token="hf_nonsense").head("main")


@pytest.mark.parametrize("token", ["hf_bob", False])
def test_a_private_repo_looks_like_a_missing_one(accounts: str, token: str | bool) -> None:
    store = HubStore("ann/hidden", endpoint=accounts, token=token)
    assert not store.repo_exists()
    with pytest.raises(NotFoundError, match="does not exist, or it is private and the token may not see it"):
        store.head("main")


def test_a_token_may_be_a_function_that_is_asked_each_time(accounts: str) -> None:
    asked: list[str] = []

    def token() -> str:
        asked.append("hf_ann" if asked else "hf_read")
        return asked[-1]

    store = HubStore("ann/x", endpoint=accounts, token=token)
    assert store.head("main") is not None
    stage(store, "a.json", b"1")
    assert asked[0] == "hf_read"
    assert set(asked[1:]) == {"hf_ann"}


# Files


def test_a_gitignore_that_refuses_a_file_is_named(store: HubStore) -> None:
    commit(store, {".gitignore": b"*.bin\nsecret/\n"})
    for path in ("a/model.bin", "secret/x.json"):
        with pytest.raises(StoreError, match=rf"{path}: the \.gitignore of .* refuses it"):
            stage(store, path, b"1")
    stage(store, "model.safetensors", WEIGHTS)


def test_advice_tells_how_files_would_be_sent(store: HubStore) -> None:
    commit(store, {".gitignore": b"*.log\n", "m.safetensors": WEIGHTS, "a.json": b"1"})
    files = {f"n/{number}.txt": (3, b"abc") for number in range(300)}
    files |= {
        "m.safetensors": (9, b"x"),
        "a.json": (1, b"1"),
        "x.log": (1, b"x"),
        "raw": (9, b"\0\1"),
        "e.bin": (0, b""),
    }
    advice = store.advice("main", files)
    assert len(advice) == 305
    assert (advice["m.safetensors"].is_large, advice["m.safetensors"].blob) == (
        True,
        hashlib.sha256(WEIGHTS).hexdigest(),
    )
    assert (advice["a.json"].is_large, advice["e.bin"].is_large, advice["raw"].is_large) == (False, False, True)
    assert [path for path, found in advice.items() if found.is_ignored] == ["x.log"]


def test_trees_and_histories_of_many_pages_are_read_whole(start_hub: StartHub) -> None:
    hub = start_hub(Settings(page_size=3))
    store = HubStore("org/x", endpoint=hub.url, token="hf_test")
    store.create_repo()
    root = head(store)
    for number in range(5):
        commit(store, {f"f/{number}-{part}.json": b"1" for part in "abc"})
    assert len(store.list(head(store))) == 16
    made = store.commit("new", parent=None, add=[], remove=[], message="m", publish_id="p")
    assert [entry.path for entry in store.list(made)] == [".gitattributes"]
    with pytest.raises(ConflictError, match="and 2 more"):
        store.commit("main", parent=root, add=[], remove=[], message="m", publish_id="other")


@pytest.mark.parametrize("nbytes", [1, 299_999, 300_000, 300_001, 600_000, 1_000_000])
def test_large_files_go_in_parts_where_the_hub_wants_parts(start_hub: StartHub, nbytes: int) -> None:
    hub = start_hub(Settings(lfs_part_bytes=300_000))
    store = HubStore("org/x", endpoint=hub.url, token="hf_test", xet=False)
    store.create_repo()
    content = WEIGHTS[:nbytes]
    staged = store.stage("main", "m.safetensors", lambda: [content[:7], content[7:]], nbytes=nbytes)
    assert staged.nbytes_sent == nbytes
    made = store.commit("main", parent=head(store), add=[staged], remove=[], message="m", publish_id="p")
    assert b"".join(map(bytes, store.stream(made, "m.safetensors", 0, nbytes))) == content
    assert hub.counters("models/org/x")["lfs_received"] == nbytes


def test_what_is_said_to_be_sent_is_what_the_hub_received(module_hub: Hub, store: HubStore) -> None:
    mixed = WEIGHTS + bytes(500_000) + WEIGHTS[:300_000]
    first = stage(store, "a.safetensors", mixed)
    again = stage(store, "b.safetensors", mixed)
    part_new = stage(store, "c.safetensors", WEIGHTS + random.Random(2).randbytes(400_000))
    received = module_hub.counters(f"models/{store.repo_id}")
    assert 0 < first.nbytes_sent < len(mixed)
    assert again.nbytes_sent == 0
    assert 400_000 <= part_new.nbytes_sent < 600_000
    assert received["xet_received"] == first.nbytes_sent + part_new.nbytes_sent


def test_a_stream_holds_nothing_but_the_piece_at_hand(store: HubStore) -> None:
    made = commit(store, {"m.safetensors": WEIGHTS})
    pieces = [bytes(piece) for piece in store.stream(made, "m.safetensors", 10, 900_010)]
    assert b"".join(pieces) == WEIGHTS[10:900_010]
    assert max(map(len, pieces)) <= 1 << 20
    half_read = store.stream(made, "m.safetensors", 0, len(WEIGHTS))
    next(half_read)
    half_read.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("xet", [True, False])
def test_large_ranges_come_by_xet_where_it_is_on_and_are_the_same(module_hub: Hub, store: HubStore, xet: bool) -> None:
    content = random.Random(9).randbytes(19_000_000) + bytes(3_000_000)
    made = commit(store, {"m.safetensors": content})
    reader = HubStore(store.repo_id, endpoint=module_hub.url, token="hf_test", xet=xet)
    assert {entry.path for entry in reader.list(made)} >= {"m.safetensors"}
    for start, stop in (
        (0, len(content)),
        (5, 16_777_300),
        (100, 100 + (4 << 20)),
        (len(content) - (5 << 20), len(content)),
    ):
        into = bytearray(stop - start)
        reader.read(made, "m.safetensors", start, stop, memoryview(into))
        assert into == content[start:stop]
    before = module_hub.counters(f"models/{store.repo_id}")
    assert (before["xet_sent"] > 0, before["resolve_sent"] > 0) == (xet, not xet)
    reader.read(made, "m.safetensors", 7, 1007, memoryview(bytearray(1000)))
    after = module_hub.counters(f"models/{store.repo_id}")
    assert (after["xet_sent"] - before["xet_sent"], after["resolve_sent"] - before["resolve_sent"]) == (0, 1000)
    with pytest.raises(IntegrityError, match=r"m\.safetensors: asked for"):
        reader.read(made, "m.safetensors", 0, len(content) + 1, memoryview(bytearray(len(content) + 1)))


def test_a_card_is_checked_by_the_hub(store: HubStore) -> None:
    assert store.check_card("---\nlicense: mit\n---\n# Model\n") == []
    assert len(store.check_card("# No metadata\n")) <= 1
    with pytest.raises(FormatError, match=r"README\.md"):
        store.check_card("---\nlicense: [\n---\n")
