"""Errors of huggingface_hub and of its HTTP client as ours, with the server's own words."""

from __future__ import annotations

import contextlib
import email.utils
import re
import time
from collections.abc import Iterator
from urllib.request import getproxies

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    OIDCError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import hf_raise_for_status, httpx, parse_ratelimit_headers

from hubshard.disk import MORE_FILES, is_out_of_files
from hubshard.errors import ConflictError, FormatError, HubshardError, NotFoundError, StoreError
from hubshard.store.patience import BusyError, NoConnectionError

__all__ = [
    "SignatureError",
    "from_http",
    "is_revision_missing",
    "is_transient",
    "is_unreachable",
    "raise_for_status",
    "signed",
    "status_of",
    "translated",
    "understood",
    "without_queries",
]

_SKEW_SECONDS = 120.0
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")
_QUERY = re.compile(r"(https?://[^\s?'\"<>]*)\?[^\s'\"<>)]*")


@contextlib.contextmanager
def translated(what: str, repo: str, *, needs: str = "read") -> Iterator[None]:
    """Raise our errors in the place of those of the client.

    Args:
        what: what is done, after "cannot": "commit to main".
        repo: "org/name", for messages.
        needs: the access that the token must have: "read" or "write".
    """
    try:
        yield
    except HfHubHTTPError as error:
        raise from_http(error, what, repo, needs=needs) from error
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        tls = _tls_hint(str(error))
        raise NoConnectionError(
            f"{repo}: cannot {what}: no connection to {_server_of(error)}: {error or 'it takes too long'}",
            hint=tls or _no_connection_hint(error),
            retryable=tls is None,
        ) from error
    except httpx.HTTPError as error:
        raise StoreError(
            f"{repo}: cannot {what}: {error or type(error).__name__}",
            hint=_files_hint(error) or "is the Hub reachable? try again",
            retryable=True,
        ) from error
    except OfflineModeIsEnabled as error:
        raise StoreError(f"{repo}: cannot {what}: offline mode is on", hint="unset HF_HUB_OFFLINE") from error
    except (LocalTokenNotFoundError, OIDCError) as error:
        raise StoreError(
            f"{repo}: cannot {what}: {error}", hint="log in with `hf auth login`, or pass a token"
        ) from error
    except HFValidationError as error:
        raise FormatError(f"{repo}: {error}") from error


class SignatureError(StoreError):
    """A storage refused a URL that the Hub has signed: it may have expired."""


@contextlib.contextmanager
def signed(what: str, repo: str) -> Iterator[None]:
    """Around requests by a signed URL: a refusal says nothing of the token, which such a request does not carry.

    Args:
        what: what is done, after "cannot".
        repo: "org/name", for messages.

    Raises:
        SignatureError: in the place of what `translated` makes of it.
    """
    try:
        yield
    except StoreError as error:
        cause = error.__cause__
        if not isinstance(cause, HfHubHTTPError) or cause.response.status_code not in {401, 403}:
            raise
        words = f"{_words(cause)}{_skew(cause)}"
        raise SignatureError(
            f"{repo}: cannot {what}: the storage refuses the URL that the Hub has signed: {words}",
            hint="is there a quota that is used up? is the clock right? run it again: it is signed anew",
        ) from cause


@contextlib.contextmanager
def understood(what: str, repo: str) -> Iterator[None]:
    """Raise StoreError where an answer is read that no Hub gives: a login page, or another server's JSON.

    Args:
        what: what was asked, after "cannot".
        repo: "org/name", for messages.
    """
    try:
        yield
    except HubshardError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{repo}: cannot {what}: the server answers with something else than a Hub would",
            hint="does HF_ENDPOINT name a Hub? does a proxy or a login page answer in its place?",
        ) from error


def raise_for_status(response: httpx.Response) -> None:
    """Raise huggingface_hub's error for an answer that is one, also where its body is JSON but no object."""
    try:
        hf_raise_for_status(response)
    except AttributeError as error:
        raise HfHubHTTPError(response.reason_phrase or "an error without words", response=response) from error


def from_http(error: HfHubHTTPError, what: str, repo: str, *, needs: str) -> HubshardError:
    """Our error for an answer of the Hub."""
    status, words = error.response.status_code, _words(error)
    if isinstance(error, RevisionNotFoundError | RemoteEntryNotFoundError):
        return NotFoundError(f"{repo}: cannot {what}: {words}")
    if isinstance(error, RepositoryNotFoundError):
        return _hidden(error, repo, words, needs=needs)
    if status in {401, 403}:
        return _refused(error, what, repo, needs=needs)
    message = f"{repo}: cannot {what}: {words} ({status})"
    return ConflictError(message) if status in {409, 412} else _failed(message, status, _retry_after(error))


def is_transient(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status in {408, 425, 429} or status >= 500


def _hidden(error: HfHubHTTPError, repo: str, words: str, *, needs: str) -> NotFoundError:
    if isinstance(error, GatedRepoError):
        message = f"{repo} is gated, and the token may not see its files ({words})"
        return NotFoundError(message, hint=f"ask for access on the page of {repo}")
    return NotFoundError(
        f"{repo} does not exist, or it is private and the token may not see it ({words})",
        hint=f"check the name; log in with `hf auth login`, or pass a token with {needs} access to {repo}",
    )


def _files_hint(error: Exception) -> str | None:
    return f"too many files were open; {MORE_FILES}" if is_out_of_files(error) else None


def _no_connection_hint(error: Exception) -> str:
    few = _files_hint(error)
    if few is not None:
        return few
    proxy = " does the proxy work that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names?"
    return "is there a network? does HF_ENDPOINT name a Hub?" + (proxy if getproxies() else "")


def _tls_hint(words: str) -> str | None:
    """What to do where a server was reached, and TLS with it will never be: in the words of OpenSSL."""
    if "CERTIFICATE_VERIFY_FAILED" in words:
        return (
            "is it the right server? if you trust who signed its certificate (a company's proxy, say), "
            "name the file of theirs in SSL_CERT_FILE"
        )
    if any(sign in words for sign in _NO_TLS):
        return "it does not speak TLS: should HF_ENDPOINT begin with http:// rather than https://?"
    return None


def _failed(message: str, status: int, wait_seconds: float | None) -> StoreError:
    if wait_seconds is not None and status in {429, 503}:
        return BusyError(
            message, wait_seconds=wait_seconds, hint=f"the server asks to come back in {wait_seconds:.0f} s"
        )
    hint = "does HF_ENDPOINT name a Hub?" if status == 404 else "try again later" if is_transient(status) else None
    return StoreError(message, hint=hint, retryable=is_transient(status))


def _refused(error: HfHubHTTPError, what: str, repo: str, *, needs: str) -> StoreError:
    sent = "authorization" in {name.lower() for name in error.response.request.headers}
    token = f"the token must have {needs} access to {repo}" if sent else "there is no token"
    message = f"{repo}: not allowed to {what}: {token}; the server says: {_words(error)}{_skew(error)}"
    return StoreError(message, hint=f"log in with `hf auth login`, or pass a token with {needs} access to {repo}")


def _server_of(error: httpx.RequestError) -> str:
    """The server that a request went to, without path and query: a signed URL is a secret."""
    try:
        return f"{error.request.url.scheme}://{error.request.url.netloc.decode()}"
    except RuntimeError:  # the error was made without a request
        return "the Hub"


def _words(error: HfHubHTTPError) -> str:
    """What the server itself said, on one line."""
    words = error.server_message or error.response.headers.get("X-Error-Message") or str(error)
    return "; ".join(line.strip() for line in without_queries(words).splitlines() if line.strip())


def without_queries(words: str) -> str:
    """Words for a message: the queries of URLs in them are left out, as they may hold a signature."""
    return _QUERY.sub(r"\1", words)


def _skew(error: HfHubHTTPError) -> str:
    """A signed URL may be refused because the clock here is wrong: say so where the server's clock differs."""
    ahead = 0.0
    with contextlib.suppress(KeyError, ValueError, TypeError, OverflowError):  # no date, or none that is one
        ahead = time.time() - email.utils.parsedate_to_datetime(error.response.headers["Date"]).timestamp()
    is_told = abs(ahead) >= _SKEW_SECONDS
    return f" (the clock here differs from the server's by {ahead:+.0f} s: set it)" if is_told else ""


def _retry_after(error: HfHubHTTPError) -> float | None:
    limit = parse_ratelimit_headers(error.response.headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds) + 1.0  # whole seconds, rounded down
    value = error.response.headers.get("Retry-After", "").strip()
    return float(value) if value.isdigit() else None


def is_unreachable(error: HubshardError) -> bool:
    """Whether no answer can be had from the Hub, now or at all: what is at hand may do instead."""
    may_pass = isinstance(error, StoreError) and error.retryable
    return may_pass or isinstance(error, NoConnectionError) or isinstance(error.__cause__, OfflineModeIsEnabled)


def is_revision_missing(error: HubshardError) -> bool:
    """Whether the Hub said that the repo is there, but not the branch, tag or commit."""
    return isinstance(error.__cause__, RevisionNotFoundError)


def status_of(error: HubshardError) -> int | None:
    """The HTTP status behind one of our errors, where an answer of the Hub is behind it."""
    cause = error.__cause__
    return int(cause.response.status_code) if isinstance(cause, HfHubHTTPError) else None
