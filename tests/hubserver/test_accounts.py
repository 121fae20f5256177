"""Tokens, roles, signed claims."""

from __future__ import annotations

import time

import pytest

from hubshard.errors import FormatError
from hubshard.hubserver import jwt
from hubshard.hubserver.auth import Accounts, Principal, require_read, require_write
from hubshard.hubserver.errors import ApiError
from hubshard.hubserver.repos import Repo

SECRET = b"a secret of the server, 32 bytes"
TOKENS = {
    "t-alice": "alice",
    "t-read": "alice:read",
    "t-bob": "bob",
    "t-admin": "root:admin",
    "t-one": "alice:repo:alice/one",
    "t-data": "alice:repo:datasets/alice/one",
}


def repo(name: str = "alice/one", *, private: bool = False, kind: str = "model") -> Repo:
    namespace, _, short = name.partition("/")
    return Repo(1, kind, namespace, short, private, None, 0.0, 0.0, None)


@pytest.fixture
def accounts() -> Accounts:
    return Accounts(TOKENS, {"Acme": "alice, carol"}, SECRET)


def who(accounts: Accounts, token: str | None) -> Principal:
    return accounts.principal(None if token is None else f"Bearer {token}")


@pytest.mark.parametrize(
    ("token", "name", "may"),
    [
        ("t-alice", "alice/one", True),
        ("t-alice", "ALICE/other", True),
        ("t-alice", "acme/one", True),
        ("t-alice", "bob/one", False),
        ("t-bob", "acme/one", False),
        ("t-read", "alice/one", False),
        ("t-admin", "bob/one", True),
        ("t-one", "alice/one", True),
        ("t-one", "alice/two", False),
        ("t-data", "alice/one", False),
        (None, "alice/one", False),
    ],
)
def test_who_may_write(accounts: Accounts, token: str | None, name: str, may: bool) -> None:
    assert (who(accounts, token).why_not_write(repo(name)) is None) is may


def test_the_reason_names_the_missing_permission(accounts: Accounts) -> None:
    with pytest.raises(ApiError, match=r"role 'read'.*needs the role 'write'") as caught:
        require_write(who(accounts, "t-read"), repo())
    assert caught.value.status == 403
    with pytest.raises(ApiError, match="models/alice/one only") as caught:
        require_write(who(accounts, "t-one"), repo("alice/two"))
    assert caught.value.status == 403


@pytest.mark.parametrize(("token", "sees"), [("t-alice", True), ("t-read", True), ("t-one", True), ("t-bob", False)])
def test_a_private_repo_looks_missing_to_others(accounts: Accounts, token: str, sees: bool) -> None:
    if sees:
        require_read(who(accounts, token), repo(private=True))
        return
    with pytest.raises(ApiError) as caught:
        require_read(who(accounts, token), repo(private=True))
    assert (caught.value.status, caught.value.code) == (404, "RepoNotFound")


def test_everybody_with_a_token_that_writes_may_contribute_to_a_public_repo(accounts: Accounts) -> None:
    require_write(who(accounts, "t-bob"), repo(), contribute=True)
    for token in ("t-read", None):
        with pytest.raises(ApiError):
            require_write(who(accounts, token), repo(), contribute=True)
    with pytest.raises(ApiError):
        require_write(who(accounts, "t-bob"), repo(private=True), contribute=True)


def test_an_unknown_token_is_refused(accounts: Accounts) -> None:
    with pytest.raises(ApiError) as caught:
        who(accounts, "t-nobody")
    assert caught.value.message == "Invalid credentials in Authorization header"


def test_without_tokens_everybody_is_an_administrator() -> None:
    open_accounts = Accounts(None, None, SECRET)
    assert who(open_accounts, None) == who(open_accounts, "anything") == Principal("hubshard", "admin")


@pytest.mark.parametrize("spec", ["", ":read", "alice:writer", "alice:repo:x", "alice:repo"])
def test_a_role_that_does_not_exist_is_refused(spec: str) -> None:
    with pytest.raises(FormatError):
        Accounts({"t": spec}, None, SECRET)


def test_an_issued_token_writes_to_its_repo_until_it_expires(accounts: Accounts) -> None:
    token = accounts.issue("alice", "models/Alice/One", seconds=60)
    assert who(accounts, token).why_not_write(repo()) is None
    assert who(accounts, token).why_not_write(repo("alice/two")) is not None
    for dead in (accounts.issue("alice", "models/alice/one", seconds=-1), token[:-2], "hf_jwt_x.y.z"):
        with pytest.raises(ApiError) as caught:
            who(accounts, dead)
        assert caught.value.status == 401


def test_signed_claims_come_back() -> None:
    claims = {"a": 1, "exp": int(time.time()) + 60}
    assert jwt.decode(jwt.encode(claims, SECRET), SECRET) == claims


@pytest.mark.parametrize(
    ("token", "what"),
    [
        ("", "malformed"),
        ("a.b", "malformed"),
        ("a.b.c", "malformed"),
        (jwt.encode({}, b"other"), "signature"),
        (jwt.encode({"exp": 1}, SECRET), "expired"),
        (jwt.encode({"exp": "soon"}, SECRET), "expired"),
        (jwt.encode({"nbf": 4e9}, SECRET), "not valid yet"),
        ("eyJhbGciOiJub25lIn0.e30.", "HS256"),
    ],
)
def test_forged_expired_and_malformed_claims_are_refused(token: str, what: str) -> None:
    with pytest.raises(jwt.JwtError, match=what):
        jwt.decode(token, SECRET)


@pytest.mark.parametrize("token", ["", " ", "a b", "t\n", "t\u00fc"])
def test_a_token_that_no_client_can_send_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(FormatError, match="token of 'alice'") as caught:
        Accounts({"t-bob": "bob", token: "alice:read"}, None, SECRET)
    assert not token.strip() or token not in str(caught.value)
