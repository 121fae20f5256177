"""Who publishes: whoever has the token, or the job itself by its identity."""

from __future__ import annotations

import os

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
