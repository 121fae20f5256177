"""Routes of the server itself: who am I, counters, the exchange of identity tokens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hubshard.hubserver import jwt
from hubshard.hubserver.access import repo_by_key
from hubshard.hubserver.errors import ApiError, bad_request, forbidden
from hubshard.hubserver.http import Call, base_url, route

if TYPE_CHECKING:
    from starlette.requests import Request

    from hubshard.hubserver.repos import Repo
    from hubshard.hubserver.state import HubState

__all__ = ["service_routes"]

_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
_ID_TOKEN = "urn:ietf:params:oauth:token-type:id_token"  # noqa: S105  a name from RFC 8693
_ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"  # noqa: S105  a name from RFC 8693
_TOKEN_SECONDS = 3600


def service_routes(state: HubState) -> list[Route]:
    """The routes of this module."""
    return [
        route(state, "GET", "/api/whoami-v2", _whoami, kind="whoami"),
        Route("/oauth/token", _Exchange(state).endpoint, methods=["POST"]),
        Route("/-/counters", _Counters(state).endpoint, methods=["GET", "DELETE"]),
    ]


def _whoami(call: Call) -> Response:
    user, accounts = call.principal, call.state.accounts
    if user.name is None:
        raise ApiError(401, "Invalid username or password.")
    orgs = [{"type": "org", "name": name, "roleInOrg": "write"} for name in accounts.organizations_of(user.name)]
    role = {"admin": "write", "repo": "fineGrained"}.get(user.role, user.role)
    return JSONResponse(
        {
            "type": "user",
            "id": user.name,
            "name": user.name,
            "fullname": user.name,
            "orgs": orgs,
            "auth": {"type": "access_token", "accessToken": {"displayName": "token", "role": role}},
        }
    )


class _Counters:
    def __init__(self, state: HubState) -> None:
        self._state = state

    async def endpoint(self, request: Request) -> Response:
        """Show the counts, or start again; asking is not counted."""
        if request.method == "DELETE":
            self._state.counters.reset()
        return JSONResponse(self._state.counters.as_dict())


class _Exchange:
    """RFC 8693: the identity token of a CI job for an access token to one repo."""

    def __init__(self, state: HubState) -> None:
        self._state = state

    async def endpoint(self, request: Request) -> Response:
        """Serve one exchange. The `Authorization` header plays no part."""
        self._state.counters.add_request("oidc_exchange")
        body = await request.body()
        is_json = "json" in request.headers.get("content-type", "")
        fields = _fields(body, is_json=is_json)
        return JSONResponse(await self._state.run(self._exchange, fields, base_url(request, self._state)))

    def _exchange(self, fields: dict[str, Any], audience: str) -> dict[str, Any]:
        if fields.get("grant_type") != _EXCHANGE or fields.get("subject_token_type") != _ID_TOKEN:
            raise bad_request("only the exchange of an id_token is offered (RFC 8693)")
        claims = self._claims(str(fields.get("subject_token", "")), audience)
        repo = self._repo(str(fields.get("resource", "")))
        if repo is None or not self._trusts(repo, claims):
            raise forbidden(
                f"no trusted publisher of {fields.get('resource')} matches the claims of this token:"
                f" sub={claims.get('sub')!r}, repository={claims.get('repository')!r}"
            )
        token = self._state.accounts.issue(repo.namespace, repo.key, seconds=_TOKEN_SECONDS)
        return {
            "access_token": token,
            "issued_token_type": _ACCESS_TOKEN,
            "token_type": "bearer",
            "expires_in": _TOKEN_SECONDS,
        }

    def _claims(self, token: str, audience: str) -> dict[str, Any]:
        secret = self._state.settings.oidc_secret
        if secret is None:
            raise bad_request("this server exchanges no identity tokens: it was started without an OIDC secret")
        try:
            claims = jwt.decode(token, secret.encode())
        except jwt.JwtError as error:
            raise ApiError(401, f"invalid_grant: {error}") from error
        if claims.get("aud") != audience or "exp" not in claims:
            raise ApiError(401, f"invalid_grant: the token is for {claims.get('aud')!r}, not for {audience!r}")
        return claims

    def _repo(self, resource: str) -> Repo | None:
        key = resource if resource.count("/") == 2 else f"models/{resource}"
        if key.count("/") != 2 or key.split("/")[0] not in {"models", "datasets", "spaces"}:
            raise bad_request(f"resource {resource!r} is not a repo: ns/name, datasets/ns/name or spaces/ns/name")
        return repo_by_key(self._state.db.connection(), key)

    def _trusts(self, repo: Repo, claims: dict[str, Any]) -> bool:
        rows = self._state.db.connection().execute("SELECT claims FROM publishers WHERE repo_id = ?", (repo.id,))
        wanted = [json.loads(row["claims"]) for row in rows.fetchall()]
        return any(trusted and trusted.items() <= claims.items() for trusted in wanted)


def _fields(body: bytes, *, is_json: bool) -> dict[str, Any]:
    if not is_json:
        return {key: values[-1] for key, values in parse_qs(body.decode()).items()}
    try:
        found = json.loads(body)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise bad_request("the body is not a JSON object")
    return found
