"""The action as a Trusted Publisher: the job's identity is exchanged for a token, or it is said why not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import HfApi

from tests.action.models import Repo, model, ok
from tests.faults.proxy import lose, proxied, say

if TYPE_CHECKING:
    from tests.action.conftest import NewJob
    from tests.conftest import Hub, StartHub

pytest.importorskip("starlette")

from hubshard.hubserver import Settings, jwt

pytestmark = pytest.mark.timeout(600)  # the first one installs, and the others wait for it

SECRET = "shared with the identity provider"
CLAIMS = {
    "repository": "org/code",
    "ref": "refs/tags/v1.0",
    "environment": "release",
    "workflow_ref": "org/code/.github/workflows/release-model.yml@refs/tags/v1.0",
    "event_name": "release",
    "sub": "repo:org/code:environment:release",
}


@contextmanager
def identity_provider(claims: dict[str, str], *, status: int = 200) -> Iterator[dict[str, str]]:
    """What a runner sets for a job with `id-token: write`."""

    class Provider(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Authorization"] == "Bearer of-the-job"
            (audience,) = parse_qs(urlsplit(self.path).query)["audience"]
            token = jwt.encode({**claims, "aud": audience, "exp": time.time() + 300}, SECRET.encode())
            body = json.dumps({"value": token} if status == 200 else {"error": "no identity today"}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Provider)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield {
            "ACTIONS_ID_TOKEN_REQUEST_URL": f"http://127.0.0.1:{server.server_port}/token?api-version=2.0",
            "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "of-the-job",
        }
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def repo(start_hub: StartHub) -> Repo:
    """A private repo that trusts the releases of one project."""
    hub = start_hub(Settings(tokens={"t-org": "org"}, oidc_secret=SECRET))
    HfApi(endpoint=hub.url, token="t-org").create_repo("org/model", private=True)
    trusted = {"trustedPublishers": [{"repository": "org/code", "environment": "release"}]}
    assert hub.api("t-org")("PUT", "/api/models/org/model/settings", trusted).status == 200
    return Repo(hub, "org/model", token="t-org")


def inputs_of(job: Any) -> dict[str, str]:
    return {**model(job), "repo-id": "org/model", "token": "", "tag": "v1.0"}


def test_a_trusted_job_releases_without_a_stored_token(repo: Repo, new_job: NewJob) -> None:
    with identity_provider(CLAIMS) as identity:
        job = new_job(repo.hub, **identity)
        ran = ok(job.run({**inputs_of(job), "check": 'test -d "$MODEL_PATH"'}))
    assert repo.heads == {"main": ran.outputs["commit-oid"], "v1.0": ran.outputs["commit-oid"]}
    assert "hf_jwt_" not in ran.log
    assert "eyJ" not in ran.log, "no signed token is shown"


@pytest.mark.parametrize("changed", [{"environment": "staging"}, {"repository": "evil/code"}])
def test_a_claim_that_does_not_match_is_named_with_what_to_compare(
    repo: Repo, new_job: NewJob, changed: dict[str, str]
) -> None:
    before = repo.heads
    with identity_provider({**CLAIMS, **changed}) as identity:
        job = new_job(repo.hub, **identity)
        ran = job.run(inputs_of(job))
    assert ran.outcome == "failure"
    assert "does not take this job for a Trusted Publisher of org/model" in ran.errors
    assert "no trusted publisher of org/model matches the claims" in ran.errors, "the Hub's own words"
    for name, value in {**CLAIMS, **changed}.items():
        assert f"{name}={value}" in ran.errors
    assert "Trusted Publishers in the settings of org/model" in ran.errors
    assert "eyJ" not in ran.log
    assert repo.heads == before


@pytest.mark.slow
def test_a_busy_hub_is_asked_again_and_a_slow_exchange_is_not_called_a_wrong_claim(repo: Repo, new_job: NewJob) -> None:
    with identity_provider(CLAIMS) as identity, proxied(repo.hub.port) as proxy:
        job = new_job(repo.hub, endpoint=proxy.url, **identity)
        proxy.fail("POST /oauth/token", say(503, "busy"), say(429, "slowly"))
        proxy.fail("GET /api/models/org/model/refs", say(503, "busy"))
        for line in ("POST /api/models/org/model/branch/", "POST .*/tag/", "DELETE .*/branch/hubshard%2Fcandidate"):
            proxy.fail(line, lose)  # done, and not told: done again it must be no error
        ran = ok(job.run({**inputs_of(job), "check": "true", "verify": "false"}))
        assert not proxy.faults
        assert len(proxy.lines("POST /oauth/token")) >= 3
        assert repo.heads == {"main": ran.outputs["commit-oid"], "v1.0": ran.outputs["commit-oid"]}
        assert "Retry: cannot list the branches of org/model: busy (503) (in 1 s)" in ran.log
        proxy.always("POST /oauth/token", say(503, "busy"))
        failed = job.run({**inputs_of(job), "verify": "false"})
    assert failed.outcome == "failure"
    assert "This says nothing about the claims" in failed.errors
    assert "Compare" not in failed.errors
    assert repo.head == ran.outputs["commit-oid"]


def test_an_identity_that_github_refuses_is_not_laid_at_the_hubs_door(repo: Repo, new_job: NewJob) -> None:
    with identity_provider(CLAIMS, status=403) as identity:
        job = new_job(repo.hub, **identity)
        ran = job.run(inputs_of(job))
    assert ran.outcome == "failure"
    assert "GitHub did not give the job its identity (403)" in ran.errors


def test_a_token_that_the_hub_does_not_know_is_said_to_be_that(repo: Repo, new_job: NewJob) -> None:
    job = new_job(repo.hub)
    ran = job.run({**inputs_of(job), "token": "hf_unknown"})
    assert ran.outcome == "failure"
    assert "Invalid credentials in Authorization header (401)" in ran.errors


@pytest.mark.parametrize(("endpoint", "is_usable"), [("", True), ("no url", False), ("http://[::1", False)])
def test_an_endpoint_that_is_not_set_is_the_default_and_a_wrong_one_is_named(
    module_hub: Hub, new_job: NewJob, endpoint: str, is_usable: bool
) -> None:
    job = new_job(module_hub, HF_ENDPOINT=endpoint)
    ran = job.run({**inputs_of(job), "dry-run": "true"})
    assert is_usable or ran.outcome == "failure"
    assert not is_usable or "no URL" not in ran.errors, "it may be out of reach"
    assert is_usable or f"HF_ENDPOINT is {endpoint!r}, which is no URL of a Hub" in ran.errors
