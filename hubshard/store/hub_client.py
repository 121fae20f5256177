"""Requests to one repo on the Hub: URLs, fresh headers, retries, errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from huggingface_hub import HfApi, constants
from huggingface_hub.utils import build_hf_headers, get_session, httpx

from hubshard.disk import hint_for
from hubshard.errors import FormatError, StoreError
from hubshard.store.forks import fork_without_session
from hubshard.store.hub_errors import raise_for_status, translated, understood
from hubshard.store.patience import Patience
from hubshard.target import check_endpoint, check_repo_id, check_text

__all__ = ["BUSY_STALLS", "PATHS_PER_REQUEST", "HubClient", "Token", "quoted", "without_token"]

Token = str | bool | Callable[[], str | None] | None
"""A token; None for the one of this machine (login, HF_TOKEN, or the CI's identity), False for none at all, or a
function that is asked before each request."""

T = TypeVar("T")

BUSY_STALLS = 20.0
"""So many times the patience with silence does a server get that has large work to do: a commit, a deletion."""
PATHS_PER_REQUEST = 500
"""How many paths the Hub is asked about at once."""

_CONNECT_SECONDS = 20.0
_STALLS = 2.0
_AUTHORIZATION = re.compile(r"Bearer [!-~]+")
_answered: set[tuple[str, str, int | None]] = set()  # servers that this process has had an answer from
_URL_PREFIXES = {"model": "", "dataset": "datasets/", "space": "spaces/"}

fork_without_session()


class HubClient:
    """One repo, seen through huggingface_hub's session.

    Args:
        repo_id: "org/name", or "name" for the token's own user.
        repo_type: "model", "dataset" or "space".
        token: see `Token`.
        endpoint: the Hub's URL; None for that of huggingface_hub.
        patience: with it.
    """

    def __init__(
        self, repo_id: str, *, repo_type: str, token: Token, endpoint: str | None, patience: Patience | None = None
    ) -> None:
        if repo_type not in _URL_PREFIXES:
            raise FormatError(f"{repo_type!r} is no type of repo", hint="one of model, dataset, space")
        self.repo_id = check_repo_id(repo_id)
        self.repo_type = repo_type
        self.endpoint = check_endpoint(endpoint or constants.ENDPOINT)
        self.patience = patience or Patience()
        self._token = token

    @property
    def repo(self) -> str:
        """The repo in messages."""
        return self.repo_id if self.repo_type == "model" else f"{self.repo_type} {self.repo_id}"

    def token(self) -> str | bool | None:
        """The token to send now."""
        return self._token() if callable(self._token) else self._token

    def headers(self) -> dict[str, str]:
        """Fresh headers of a request: a token may have been renewed since the last.

        Raises:
            FormatError: a token that no header can carry; it is not shown.
            StoreError: there is no token, or the CI's identity cannot be exchanged for one.
        """
        token, what = self.token(), "make the headers of a request"
        with translated(what, self.repo), understood(what, self.repo):  # the client may ask the Hub for them
            headers = dict(build_hf_headers(token=token, library_name="hubshard"))
        if not _AUTHORIZATION.fullmatch(headers.get("authorization", "Bearer -")):
            raise FormatError(
                f"{self.repo}: the token is empty, or holds a space or another character that no token has",
                hint="pass it as it was given, without quotes and line breaks",
            )
        return headers

    def headers_for(self, url: str) -> dict[str, str]:
        """Fresh headers of a request to `url`: the token goes to the Hub, and to no other server."""
        headers = self.headers()
        return without_token(headers) if self.is_elsewhere(url) else headers

    def is_elsewhere(self, url: str) -> bool:
        """Whether a URL leads to another server than the Hub."""
        return _origin(url) != _origin(self.endpoint)

    def api(self) -> HfApi:
        """huggingface_hub's own client, with the token of now."""
        return HfApi(endpoint=self.endpoint, token=self.token(), library_name="hubshard")

    def api_url(self, *parts: str) -> str:
        """The URL of an API route of the repo; each part is quoted as a whole."""
        return "/".join([f"{self.endpoint}/api/{self.repo_type}s/{self.repo_id}", *map(quoted, parts)])

    def web_url(self, *parts: str) -> str:
        """The URL of a page of the repo."""
        return "/".join([f"{self.endpoint}/{_URL_PREFIXES[self.repo_type]}{self.repo_id}", *parts])

    def resolve_url(self, commit: str, path: str) -> str:
        """Where a file's bytes are asked for."""
        return self.web_url("resolve", quoted(commit), quote(path))

    def lfs_url(self) -> str:
        """The LFS batch route."""
        return f"{self.web_url()}.git/info/lfs/objects/batch"

    def timeout(self, stalls: float = 1.0) -> httpx.Timeout:
        """What ends a request: so many times the silence that is a stall, for each read and write."""
        return httpx.Timeout(stalls * self.patience.stall_seconds, connect=_CONNECT_SECONDS)

    def send(
        self,
        method: str,
        url: str,
        what: str,
        *,
        needs: str = "read",
        retry: bool = True,
        auth: bool = True,
        headers: Mapping[str, str] | None = None,
        stalls: float = _STALLS,
        **body: Any,
    ) -> httpx.Response:
        """One request, tried again, with fresh headers, where that is safe.

        Args:
            method: of HTTP.
            url: whole.
            what: for messages, after "cannot".
            needs: the access that the token must have: "read" or "write".
            retry: False where it must not be sent twice.
            auth: False for signed URLs, which may lead to another server.
            headers: further ones.
            stalls: how many times the silence that is a stall is borne.
            body: `json`, `params` or `content` of the request.

        Raises:
            NotFoundError, ConflictError, StoreError: as the answer says.
        """
        timeout = self.timeout(stalls)
        attempt = partial(self._attempt, method, url, what, needs, headers, timeout=timeout, auth=auth, **body)
        most, is_known = None if retry else 0, _origin(url) in _answered
        return self.patience.insist(attempt, what, most=most, is_known=is_known)

    def _attempt(
        self, method: str, url: str, what: str, needs: str, headers: Mapping[str, str] | None, *, auth: bool, **how: Any
    ) -> httpx.Response:
        sent = {**(self.headers_for(url) if auth else {}), **(headers or {})}
        session = self._session(what)
        with translated(what, self.repo, needs=needs):
            response: httpx.Response = session.request(method, url, headers=sent, follow_redirects=auth, **how)
            _answered.add(_origin(url))
            raise_for_status(response)
        return response

    def _session(self, what: str) -> httpx.Client:
        try:
            return get_session()
        except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
            raise StoreError(
                f"{self.repo}: cannot {what}: {error}",
                hint=hint_for(error)
                or "do the variables for certificates (SSL_CERT_FILE, SSL_CERT_DIR) and proxies (HTTP_PROXY, "
                "HTTPS_PROXY, ALL_PROXY) say what is there?",
            ) from error

    def ask(self, method: str, url: str, what: str, take: Callable[[Any], T], **how: Any) -> T:
        """`send`, and what `take` finds in the JSON of the answer.

        Raises:
            StoreError: the answer is none of a Hub.
        """
        response = self.send(method, url, what, **how)
        with understood(what, self.repo):
            return take(response.json())

    def pages(self, url: str, what: str, take: Callable[[Any], T], **params: Any) -> Iterator[T]:
        """What `take` finds in the items of a list that comes in pages linked by `Link: rel="next"`."""
        response = self.send("GET", url, what, params=params or None)
        while True:
            with understood(what, self.repo):
                taken = [take(item) for item in response.json()]
            yield from taken
            following = response.links.get("next", {}).get("url")
            if following is None:
                return
            response = self.send("GET", following, what)


def without_token(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers for whoever must not see the token."""
    return {name: value for name, value in headers.items() if name.lower() != "authorization"}


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def quoted(part: str) -> str:
    """A part of a URL path, slashes and all."""
    return quote(check_text(part, "the name"), safe="")
