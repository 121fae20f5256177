"""The routes of Xet storage over plain HTTP: who may do what, and what is refused."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from hubshard.hubserver import Settings
from hubshard.hubserver.xet.tokens import XetToken, XorbGrant, sign_grant, sign_token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.conftest import Hub, StartHub
    from tests.hubserver.conftest import Golden


TOKEN = "hf_test"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    hub: Hub, method: str, url: str, *, token: str | None = None, body: bytes | None = None, span: str | None = None
) -> Answer:
    """One request; `url` may be a path."""
    parts = urlsplit(url)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if span is not None:
        headers["Range"] = span
    with closing(HTTPConnection("127.0.0.1", hub.port, timeout=60)) as connection:
        connection.request(method, f"{parts.path}?{parts.query}" if parts.query else parts.path, body, headers)
        answer = connection.getresponse()
        return Answer(answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read())


def create_repo(hub: Hub, name: str, *, token: str = TOKEN, private: bool = False) -> None:
    body = json.dumps({"name": name, "private": private}).encode()
    assert ask(hub, "POST", "/api/repos/create", token=token, body=body).status == 200


def xet_token(hub: Hub, repo: str, scope: str, *, token: str = TOKEN, revision: str = "main") -> Answer:
    return ask(hub, "GET", f"/api/models/hubshard/{repo}/xet-{scope}-token/{revision}", token=token)


@dataclass(frozen=True)
class Cas:
    """A repo's Xet storage, as a client sees it."""

    hub: Hub
    base: str
    write: str
    read: str

    def post(self, path: str, body: bytes, *, token: str | None = None) -> Answer:
        return ask(self.hub, "POST", f"{self.base}{path}", token=token or self.write, body=body)

    def get(self, path: str, *, span: str | None = None, token: str | None = None) -> Answer:
        return ask(self.hub, "GET", f"{self.base}{path}", token=token or self.read, span=span)

    def reconstruct(self, file_hash: str, *, span: str | None = None) -> Answer:
        return self.get(f"/v1/reconstructions/{file_hash}", span=span)


def open_cas(hub: Hub, repo: str) -> Cas:
    create_repo(hub, repo)
    write, read = xet_token(hub, repo, "write").json(), xet_token(hub, repo, "read").json()
    return Cas(hub, urlsplit(write["casUrl"]).path, write["accessToken"], read["accessToken"])


def upload_golden(cas: Cas, golden: Golden) -> None:
    assert cas.post(f"/v1/xorbs/default/{golden.xorb_hash}", golden.xorb).status == 200
    assert cas.post("/v1/shards", golden.shard).status == 200


def secret_of(hub: Hub) -> bytes:
    with closing(sqlite3.connect(hub.root / "hub.sqlite3")) as connection:
        return bytes.fromhex(connection.execute("SELECT value FROM settings WHERE key = 'secret'").fetchone()[0])


def test_a_token_comes_as_json_and_as_headers(module_hub: Hub) -> None:
    create_repo(module_hub, "tokens")
    for scope in ("read", "write"):
        answer = xet_token(module_hub, "tokens", scope, revision="resume%2Fstate")
        body = answer.json()
        assert answer.headers["x-xet-cas-url"] == body["casUrl"]
        assert answer.headers["x-xet-access-token"] == body["accessToken"]
        assert answer.headers["x-xet-token-expiration"] == str(body["exp"])
        assert body["casUrl"].startswith(module_hub.url)
        assert time.time() < body["exp"] < time.time() + 24 * 3600
    assert xet_token(module_hub, "missing", "read").headers["x-error-code"] == "RepoNotFound"


def test_uploads_are_counted_and_new_only_once(module_hub: Hub, golden: Golden) -> None:
    cas = open_cas(module_hub, "counted")
    first = cas.post(f"/v1/xorbs/default/{golden.xorb_hash}", golden.xorb)
    again = cas.post(f"/v1/xorbs/default/{golden.xorb_hash}", golden.xorb)
    assert (first.status, again.status) == (200, 200)
    assert again.json() == {"was_inserted": False}
    assert module_hub.counters("models/hubshard/counted")["xet_received"] == 2 * len(golden.xorb)
    assert cas.post("/v1/shards", golden.shard).json() == {"result": 1}
    assert cas.post("/v1/shards", golden.shard).json() == {"result": 0}


def test_a_new_xorb_is_told_to_be_new(hub: Hub, golden: Golden) -> None:
    cas = open_cas(hub, "new")
    assert cas.post(f"/v1/xorbs/default/{golden.xorb_hash}", golden.xorb).json() == {"was_inserted": True}


def test_tampered_xorbs_and_shards_are_refused(hub: Hub, golden: Golden) -> None:
    cas = open_cas(hub, "tampered")
    path = f"/v1/xorbs/default/{golden.xorb_hash}"
    tampered = golden.xorb[:5000] + bytes([golden.xorb[5000] ^ 1]) + golden.xorb[5001:]
    for body in (tampered, golden.xorb[:-1], b"", golden.xorb[::-1]):
        assert cas.post(path, body).status == 400
    assert cas.post(f"/v1/xorbs/default/{'0' * 64}", golden.xorb).status == 400
    assert cas.post("/v1/xorbs/default/nonsense", golden.xorb).status == 400
    refused = cas.post("/v1/shards", golden.shard)
    assert refused.status == 400
    assert "was not uploaded" in refused.json()["error"]
    assert cas.post(path, golden.xorb).json() == {"was_inserted": True}
    for at in (48, 96, 132, 136, 140, 144, 192):  # hash, xorb, bytes, start, stop, proof, sha256 of a file
        damaged = golden.shard[:at] + bytes([golden.shard[at] ^ 1]) + golden.shard[at + 1 :]
        assert cas.post("/v1/shards", damaged).status == 400, at
    for data in golden.files.values():
        assert not list(hub.root.glob(f"objects/*/{hashlib.sha256(data).hexdigest()}"))
    assert cas.post("/v1/shards", golden.shard).status == 200


def test_only_the_right_token_opens_a_route(module_hub: Hub, golden: Golden) -> None:
    cas = open_cas(module_hub, "rights")
    path = f"/v1/xorbs/default/{golden.xorb_hash}"
    for post in (path, "/v1/shards"):
        assert cas.post(post, golden.xorb, token=cas.read).status == 403
        assert cas.post(post, golden.xorb, token="hf_test").status == 401
        assert cas.post(post, golden.xorb, token=cas.write[:-2]).status == 401
        assert ask(module_hub, "POST", f"{cas.base}{post}", body=golden.xorb).status == 401
    upload_golden(cas, golden)
    file_hash = golden.file_hashes["text"]
    assert cas.reconstruct(file_hash).status == 200
    assert cas.get(f"/v1/reconstructions/{file_hash}", token="hf_test").status == 401
    other = open_cas(module_hub, "rights-other")
    assert other.reconstruct(file_hash).status == 404  # it never was uploaded there
    old = XetToken(1, "models/hubshard/rights", "hubshard", "write", int(time.time()) - 1)
    expired = cas.post(path, golden.xorb, token=sign_token(old, secret_of(module_hub)))
    assert expired.status == 401
    assert "expired" in expired.json()["error"]
    # A signature for one use is none for another.
    grant = XorbGrant(golden.xorb_hash, 0, 10, "models/hubshard/rights", int(time.time()) + 60)
    assert cas.post(path, golden.xorb, token=sign_grant(grant, secret_of(module_hub))).status == 401


def test_tokens_follow_the_rights_on_the_repo(start_hub: StartHub) -> None:
    hub = start_hub(Settings(tokens={"t_owner": "hubshard", "t_other": "other", "t_reader": "hubshard:read"}))
    create_repo(hub, "hubshard/public", token="t_owner")
    create_repo(hub, "hubshard/secret", token="t_owner", private=True)
    asked = {
        (repo, scope, who): xet_token(hub, repo, scope, token=f"t_{who}").status
        for repo in ("public", "secret")
        for scope in ("read", "write")
        for who in ("owner", "other", "reader")
    }
    assert {key for key, status in asked.items() if status == 200} == {
        ("public", "read", "owner"),
        ("public", "read", "other"),
        ("public", "read", "reader"),
        ("public", "write", "owner"),
        ("secret", "read", "owner"),
        ("secret", "read", "reader"),
        ("secret", "write", "owner"),
    }
    assert asked["public", "write", "other"] == 403
    assert asked["secret", "read", "other"] == 404
    # Whoever opens a pull request uploads to a repo that is not theirs.
    assert xet_token(hub, "public", "write", token="t_other", revision="None").status == 200
    assert xet_token(hub, "public", "write", token="t_other", revision="refs%2Fpr%2F1").status == 200
    assert xet_token(hub, "secret", "write", token="t_other", revision="None").status == 404


def fetch(hub: Hub, plan: Mapping[str, Any]) -> bytes:
    """What a client makes of a reconstruction, chunk by chunk."""
    from hubshard.hubserver.xet.xorb import decode_chunks

    parts = []
    for term in plan["terms"]:
        for entry in plan["fetch_info"][term["hash"]]:
            if entry["range"]["start"] <= term["range"]["start"] and term["range"]["end"] <= entry["range"]["end"]:
                span = f"bytes={entry['url_range']['start']}-{entry['url_range']['end']}"
                answer = ask(hub, "GET", entry["url"], span=span)
                assert answer.status == 206
                chunks = [bytes(chunk) for chunk in decode_chunks(answer.body, name="fetched")]
                first = term["range"]["start"] - entry["range"]["start"]
                part = b"".join(chunks[first : first + term["range"]["end"] - term["range"]["start"]])
                assert len(part) == term["unpacked_length"]
                parts.append(part)
    return b"".join(parts)[plan["offset_into_first_range"] :]


def test_a_reconstruction_leads_to_the_bytes_of_a_range(module_hub: Hub, golden: Golden) -> None:
    cas = open_cas(module_hub, "ranges")
    upload_golden(cas, golden)
    for name, data in golden.files.items():
        file_hash, last = golden.file_hashes[name], len(data) - 1
        whole = cas.reconstruct(file_hash).json()
        assert fetch(module_hub, whole) == data
        for start, stop in [(0, 0), (1, last), (last, last), (5000, 6000), (last - 3000, last + 999)]:
            plan = cas.reconstruct(file_hash, span=f"bytes={start}-{stop}").json()
            assert fetch(module_hub, plan)[: min(stop, last) + 1 - start] == data[start : stop + 1]
        outside = cas.reconstruct(file_hash, span=f"bytes={len(data)}-{len(data) + 5}")
        assert outside.status == 416
        assert outside.headers["content-range"] == f"bytes */{len(data)}"
    assert cas.reconstruct("0" * 64).status == 404
    assert cas.reconstruct(golden.file_hashes["text"], span="bytes=-5").status == 400


def test_signed_urls_work_without_a_token_until_they_expire_and_only_for_their_bytes(
    module_hub: Hub, golden: Golden
) -> None:
    cas = open_cas(module_hub, "signed")
    upload_golden(cas, golden)
    (entry,) = cas.reconstruct(golden.file_hashes["noise"]).json()["fetch_info"][golden.xorb_hash]
    first, last, url = entry["url_range"]["start"], entry["url_range"]["end"], entry["url"]
    good = ask(module_hub, "GET", url, span=f"bytes={first}-{last}")
    assert good.status == 206
    assert good.body == golden.xorb[first : last + 1]
    assert good.headers["content-range"] == f"bytes {first}-{last}/{len(golden.xorb)}"
    assert ask(module_hub, "GET", url).body == good.body  # without a Range: all that is signed
    assert ask(module_hub, "GET", url, span=f"bytes={first - 1}-{last}").status == 403
    assert ask(module_hub, "GET", url, span="bytes=0-10").status == 403
    assert ask(module_hub, "GET", url.replace(golden.xorb_hash, "0" * 64)).status == 403
    assert ask(module_hub, "GET", url.partition("?")[0]).status == 403
    middle = len(url) - 60  # the last characters of base64 may be padding
    other = "A" if url[middle] != "A" else "B"
    assert ask(module_hub, "GET", url[:middle] + other + url[middle + 1 :]).status == 403
    for expires, status in [(-1, 403), (60, 206)]:
        grant = XorbGrant(golden.xorb_hash, 0, 10, "models/hubshard/signed", int(time.time()) + expires)
        signed = f"/xet/data/{golden.xorb_hash}?grant={sign_grant(grant, secret_of(module_hub))}"
        assert ask(module_hub, "GET", signed, span="bytes=0-9").status == status
    token = f"/xet/data/{golden.xorb_hash}?grant={cas.read}"
    assert ask(module_hub, "GET", token, span="bytes=0-9").status == 403


def test_the_storage_has_another_name_after_garbage_was_collected(hub: Hub, golden: Golden) -> None:
    cas = open_cas(hub, "collected")
    assert urlsplit(xet_token(hub, "collected", "read").json()["casUrl"]).path == cas.base
    upload_golden(cas, golden)
    assert hub.gc(grace_seconds=3600).xorbs == 0
    assert urlsplit(xet_token(hub, "collected", "read").json()["casUrl"]).path == cas.base
    # No commit names what was uploaded.
    assert hub.gc(grace_seconds=-1).xorbs == 1
    assert urlsplit(xet_token(hub, "collected", "read").json()["casUrl"]).path != cas.base
    assert cas.reconstruct(golden.file_hashes["text"]).status == 404
    assert cas.post("/v1/shards", golden.shard).status == 400
    upload_golden(cas, golden)  # the old name goes on working
    assert fetch(hub, cas.reconstruct(golden.file_hashes["text"]).json()) == golden.files["text"]


@pytest.mark.parametrize("path", ["/v1/xorb-grants/default/x", "/v2/shards", "/v1/nonsense"])
def test_bodies_of_unknown_posts_are_read_and_the_connection_goes_on(module_hub: Hub, path: str) -> None:
    with closing(HTTPConnection("127.0.0.1", module_hub.port, timeout=60)) as connection:
        for _ in range(2):
            connection.request("POST", f"/xet/realm{path}", bytes(5_000_000), {"Authorization": "Bearer x"})
            answer = connection.getresponse()
            assert answer.status == 404
            answer.read()


def test_telemetry_is_taken_at_the_root_and_below_the_storage(module_hub: Hub) -> None:
    for path in ("/v1/telemetry", "/xet/realm/v1/telemetry"):
        assert ask(module_hub, "POST", path, body=b"{}").status == 204
