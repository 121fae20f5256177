"""The exchange of an identity token of a CI job for an access token to one repo."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from hubshard.hubserver import Settings, jwt

if TYPE_CHECKING:
    from tests.conftest import Answer, Hub, StartHub

SECRET = "shared with the test's identity provider"
CLAIMS = {"sub": "repo:org/code:ref:refs/heads/main", "repository": "org/code", "ref": "refs/heads/main"}


@pytest.fixture
def hub(start_hub: StartHub) -> Hub:
    found = start_hub(Settings(tokens={"t-org": "org"}, oidc_secret=SECRET))
    api = found.api("t-org")
    for name in ("model", "other"):
        assert api("POST", "/api/repos/create", {"name": name, "private": True}).status == 200
    trusted = {"trustedPublishers": [{"repository": "org/code", "ref": "refs/heads/main"}]}
    assert api("PUT", "/api/models/org/model/settings", trusted).status == 200
    return found


def exchange(hub: Hub, *, secret: str = SECRET, resource: str = "org/model", **changes: Any) -> Answer:
    claims = {**CLAIMS, "aud": hub.url, "exp": time.time() + 300, **changes}
    body = {
        "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
        "subject_token_type": "urn:ietf:params:oauth:token-type:id_token",
        "subject_token": jwt.encode(claims, secret.encode()),
        "resource": resource,
    }
    return hub.api(None)("POST", "/oauth/token", body, {"Content-Type": "application/json"})


def test_a_trusted_job_gets_a_token_for_its_repo_alone(hub: Hub) -> None:
    answer = exchange(hub)
    assert (answer.status, answer.json["expires_in"], answer.json["token_type"]) == (200, 3600, "bearer")
    api = hub.api(answer.json["access_token"])
    assert api.put("models/org/model", "x.txt", b"1").status == 200
    assert api("GET", "/api/models/org/other").status == 404
    assert api("POST", "/api/repos/create", {"name": "new"}).status == 403


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"repository": "evil/code"}, 403),
        ({"ref": "refs/heads/feature"}, 403),
        ({"resource": "org/other"}, 403),
        ({"resource": "org/missing"}, 403),
        ({"resource": "org"}, 400),
        ({"aud": "https://elsewhere.example"}, 401),
        ({"exp": 1}, 401),
        ({"secret": "forged"}, 401),
    ],
)
def test_a_job_that_is_not_trusted_gets_none(hub: Hub, changes: dict[str, Any], status: int) -> None:
    answer = exchange(hub, **changes)
    assert answer.status == status
    assert "access_token" not in answer.json


def test_without_a_secret_nothing_is_exchanged(module_hub: Hub) -> None:
    assert exchange(module_hub).status == 400
    assert module_hub.api()("POST", "/oauth/token", {"grant_type": "password"}).status == 400


def test_the_client_exchanges_and_publishes(hub: Hub) -> None:
    token = jwt.encode({**CLAIMS, "aud": hub.url, "exp": time.time() + 300}, SECRET.encode())
    code = """
        import sys
        from huggingface_hub import HfApi
        from huggingface_hub._oidc import oidc_login
        answer = oidc_login(resource="org/model", subject_token=sys.argv[1])
        api = HfApi(token=answer["access_token"])
        print(api.upload_file(path_or_fileobj=b"x", path_in_repo="x.txt", repo_id="org/model").oid)
    """
    assert len(hub.client(code, token, token="").strip()) == 40
