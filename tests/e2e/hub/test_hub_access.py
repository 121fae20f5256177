"""Tokens: what who may see and change, and what the client is told when not."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from hubshard.hubserver import Settings, jwt, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Hub, StartHub

TOKENS = {
    "t-alice": "alice",
    "t-bob": "bob",
    "t-read": "alice:read",
    "t-one": "alice:repo:alice/one",
    "t-admin": "root:admin",
}
SECRET = "shared with the test's identity provider"
NUMBERS = itertools.count()

Login = Callable[[str], HfApi]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = Settings(tokens=TOKENS, organizations={"acme": "alice"})
    with running(tmp_path_factory.mktemp("users"), settings=settings) as found:
        yield found


@pytest.fixture
def login(url: str) -> Login:
    return lambda token: HfApi(endpoint=url, token=token)


def new(api: HfApi, namespace: str = "alice", **options: Any) -> str:
    repo = api.create_repo(f"{namespace}/repo-{next(NUMBERS)}", **options).repo_id
    put(api, repo)
    return repo


def put(api: HfApi, repo: str, **options: Any) -> Any:
    data = b"\0%d" % next(NUMBERS)
    return api.upload_file(repo_id=repo, path_or_fileobj=data, path_in_repo="m.bin", **options)


def refused(status: int, *words: str) -> pytest.RaisesExc[HfHubHTTPError]:
    """An error with this status, and with all these words in what the user reads."""

    def fits(error: HfHubHTTPError) -> bool:
        return error.response.status_code == status and all(word in str(error) for word in words)

    return pytest.RaisesExc(HfHubHTTPError, check=fits)


def test_tokens_name_their_users(login: Login) -> None:
    alice = login("t-alice").whoami()
    assert (alice["name"], [org["name"] for org in alice["orgs"]]) == ("alice", ["acme"])
    assert login("t-read").whoami()["auth"]["accessToken"]["role"] == "read"
    assert login("t-one").whoami()["auth"]["accessToken"]["role"] == "fineGrained"
    assert login("t-bob").get_full_repo_name("model") == "bob/model"
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        login("t-unknown").whoami()


def test_a_private_repo_looks_missing_without_the_right_token(login: Login, tmp_path: Path) -> None:
    repo = new(login("t-alice"), private=True)
    url = login("t-alice").endpoint
    for stranger in (login("t-bob"), login("t-one"), HfApi(endpoint=url, token=False)):
        assert not stranger.repo_exists(repo)
        calls: tuple[Callable[[HfApi], object], ...] = (
            lambda api: api.repo_info(repo),
            lambda api: api.list_repo_files(repo),
            lambda api: api.list_repo_refs(repo),
            lambda api: api.hf_hub_download(repo, "m.bin", cache_dir=tmp_path),
            lambda api: api.snapshot_download(repo, cache_dir=tmp_path),
            lambda api: api.auth_check(repo),
            lambda api: put(api, repo),
            lambda api: api.create_branch(repo, branch="b"),
        )
        for call in calls:
            with pytest.raises(RepositoryNotFoundError):
                call(stranger)
    for owner in (login("t-alice"), login("t-read"), login("t-admin")):
        assert Path(owner.hf_hub_download(repo, "m.bin", cache_dir=tmp_path)).is_file()
    assert repo not in {info.id for info in login("t-bob").list_models(author="alice")}
    assert repo in {info.id for info in login("t-read").list_models(author="alice")}


def test_a_read_token_writes_nothing_and_says_why(login: Login) -> None:
    repo = new(login("t-alice"))
    reader = login("t-read")
    for call in (
        lambda: put(reader, repo),
        lambda: put(reader, repo, create_pr=True),
        lambda: reader.create_branch(repo, branch="b"),
        lambda: reader.create_tag(repo, tag="t"),
        lambda: reader.delete_file("m.bin", repo),
        lambda: reader.super_squash_history(repo),
        lambda: reader.update_repo_settings(repo, private=True),
        lambda: reader.delete_repo(repo),
        lambda: reader.auth_check(repo, write=True),
        lambda: reader.create_repo("alice/another"),
    ):
        with refused(403, "403 Forbidden", "'write'", "Make sure your token has the correct permissions"):
            call()
    with refused(403, "'write'"):
        reader.create_discussion(repo, "A title")
    reader.auth_check(repo)
    assert login("t-alice").list_repo_files(repo) == [".gitattributes", "m.bin"]


def test_others_propose_and_do_not_write(login: Login, tmp_path: Path, way: str) -> None:
    repo = new(login("t-alice"))
    bob = login("t-bob")
    with refused(403, "bob may not write to the namespace alice", "create_pr=1"):
        put(bob, repo)
    made = put(bob, repo, create_pr=True)
    assert made.pr_revision == "refs/pr/1"
    put(bob, repo, revision="refs/pr/1")
    with refused(403):
        bob.merge_pull_request(repo, 1)
    with refused(403):
        bob.update_repo_settings(repo, private=True)
    login("t-alice").merge_pull_request(repo, 1)
    commits = login("t-alice").list_repo_commits(repo)
    assert commits[0].authors == ["alice"]
    assert login("t-alice").list_repo_commits(repo, revision="refs/pr/1")[0].authors == ["bob"]
    folder = tmp_path / "up"
    folder.mkdir()
    (folder / "x.bin").write_bytes(b"\0by a folder")
    bob.upload_folder(repo_id=repo, folder_path=folder, create_pr=True)
    assert "x.bin" in bob.list_repo_files(repo, revision="refs/pr/2")


def test_an_organisation_is_its_members(login: Login) -> None:
    repo = new(login("t-alice"), namespace="acme", private=True)
    assert not login("t-bob").repo_exists(repo)
    with refused(403, 'under the namespace "acme"'):
        login("t-bob").create_repo("acme/another")
    with refused(403, 'under the namespace "bob"'):
        login("t-alice").create_repo("bob/another")
    login("t-admin").create_repo("anybody/anything")


def test_a_token_of_one_repo_writes_to_that_one_alone(login: Login) -> None:
    alice, one = login("t-alice"), login("t-one")
    alice.create_repo("alice/one", private=True)
    other = new(alice)
    put(one, "alice/one")
    put(one, "Alice/ONE")
    one.create_branch("alice/one", branch="b")
    one.create_tag("alice/one", tag="v1")
    with refused(403, "may write to models/alice/one only"):
        put(one, other)
    with refused(403):
        one.create_repo("alice/another")


@pytest.mark.skipif(
    huggingface_hub.__version__.startswith("2.0."), reason="huggingface_hub 2.0 grants access at its own endpoint alone"
)
def test_a_gated_repo_is_seen_and_not_read(login: Login, tmp_path: Path) -> None:
    alice, bob = login("t-alice"), login("t-bob")
    repo = new(alice)
    alice.update_repo_settings(repo, gated="manual")
    assert bob.model_info(repo).gated == "manual"
    for number, call in enumerate((bob.hf_hub_download, HfApi(endpoint=bob.endpoint, token=False).hf_hub_download)):
        with pytest.raises(GatedRepoError, match="restricted"):
            call(repo, "m.bin", cache_dir=tmp_path / f"{number}")
    with pytest.raises(GatedRepoError):
        bob.auth_check(repo)
    alice.grant_access(repo, "bob")
    bob.auth_check(repo)
    assert Path(bob.hf_hub_download(repo, "m.bin", cache_dir=tmp_path / "granted")).is_file()


def test_a_wrong_token_is_not_a_missing_repo(login: Login) -> None:
    repo = new(login("t-alice"))
    with refused(401, "Invalid credentials in Authorization header"):
        login("t-unknown").repo_info(repo)


class Provider(BaseHTTPRequestHandler):
    """What a CI provider answers to a job that asks for its identity."""

    def do_GET(self) -> None:
        (audience,) = parse_qs(urlsplit(self.path).query)["audience"]
        assert self.headers["Authorization"] == "Bearer of-the-job"
        claims = {"aud": audience, "repository": "org/code", "sub": "repo:org/code", "exp": time.time() + 300}
        body = json.dumps({"value": jwt.encode(claims, SECRET.encode())}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""


@contextmanager
def provider() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Provider)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/token"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


PUBLISH = """
    from huggingface_hub import HfApi
    api = HfApi()
    assert api.create_repo("org/model", exist_ok=True).repo_id == "org/model"
    api.upload_file(repo_id="org/model", path_or_fileobj=b"\\0weights", path_in_repo="m.bin")
    api.create_tag("org/model", tag="v1")
    try:
        api.upload_file(repo_id="org/other", path_or_fileobj=b"x", path_in_repo="x.txt")
    except Exception as error:
        print(type(error).__name__, api.whoami()["name"])
"""


@pytest.fixture
def trusting(start_hub: StartHub) -> Hub:
    hub = start_hub(Settings(tokens={"t-org": "org"}, oidc_secret=SECRET))
    api = HfApi(endpoint=hub.url, token="t-org")
    for name in ("org/model", "org/other"):
        api.create_repo(name, private=True)
    trusted = {"trustedPublishers": [{"repository": "org/code"}]}
    assert hub.api("t-org")("PUT", "/api/models/org/model/settings", trusted).status == 200
    return hub


def test_a_ci_job_publishes_without_a_stored_token(trusting: Hub) -> None:
    job = {"HF_OIDC_RESOURCE": "org/model", "GITHUB_ACTIONS": "true", "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "of-the-job"}
    with provider() as address:
        env = {**job, "ACTIONS_ID_TOKEN_REQUEST_URL": address}
        assert trusting.client(PUBLISH, env=env, token="").split() == ["RepositoryNotFoundError", "org"]
        denied = trusting.try_client(PUBLISH, env={**env, "HF_OIDC_RESOURCE": "org/other"}, token="")
    assert denied.returncode != 0
    assert "no trusted publisher of org/other matches" in denied.stderr
    api = HfApi(endpoint=trusting.url, token="t-org")
    assert api.file_exists("org/model", "m.bin", revision="v1")
    assert api.list_repo_files("org/other") == [".gitattributes"]


def test_a_job_may_bring_its_identity_token(trusting: Hub) -> None:
    claims = {"aud": trusting.url, "repository": "org/code", "exp": time.time() + 300}
    token = jwt.encode(claims, SECRET.encode())
    env = {"HF_OIDC_RESOURCE": "org/model", "HF_OIDC_ID_TOKEN": token}
    assert trusting.client(PUBLISH, env=env, token="").split() == ["RepositoryNotFoundError", "org"]
