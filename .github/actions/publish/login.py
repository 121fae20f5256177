"""Who publishes: whoever has the token, or the job itself by its identity."""

from __future__ import annotations

import os
import urllib.parse

from inputs import Inputs
from runner import ActionError, mask

__all__ = ["log_in"]

_REQUEST_URL, _REQUEST_TOKEN = "ACTIONS_ID_TOKEN_REQUEST_URL", "ACTIONS_ID_TOKEN_REQUEST_TOKEN"


def log_in(given: Inputs) -> None:
    """Set the environment of this process, and of those that it starts, so that the Hub's client finds its token.

    A dry run without a token stays nobody: it needs no rights, so that a fork's pull request may have one.

    Raises:
        ActionError: the job has no identity, or the Hub does not trust it; says what the job's identity claims.
    """
    _check_endpoint()
    if given.token:
        mask(given.token)
        os.environ["HF_TOKEN"] = given.token
        os.environ.pop("HF_OIDC_RESOURCE", None)
        return
    if given.dry_run:
        return
    if not os.environ.get("HF_OIDC_ID_TOKEN") and not (os.environ.get(_REQUEST_URL) and os.environ.get(_REQUEST_TOKEN)):
        raise ActionError(
            "there is no token, and the job has no identity: give the job `permissions: id-token: write` and make it a "
            f"Trusted Publisher of {given.repo_id}, or set the input token. (Pull requests from forks get neither.)"
        )
    os.environ["HF_OIDC_RESOURCE"] = given.repo_id
    from identity import exchange  # it takes the Hub's client, which is slow to import

    exchange(given.repo_id)


def _check_endpoint() -> None:
    """An empty HF_ENDPOINT is that of a variable that is not set; the Hub's client would take it for a server."""
    endpoint = os.environ.get("HF_ENDPOINT", "").strip()
    if not endpoint:
        os.environ.pop("HF_ENDPOINT", None)
        return
    try:
        parts = urllib.parse.urlsplit(endpoint)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ActionError(f"HF_ENDPOINT is {endpoint!r}, which is no URL of a Hub: write it as https://huggingface.co")
    os.environ["HF_ENDPOINT"] = endpoint
