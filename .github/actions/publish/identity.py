"""The job's identity, exchanged for a token of the Hub; and why the Hub does not take the job for a publisher."""

from __future__ import annotations

import base64
import binascii
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request

from hub import is_transient
from huggingface_hub import constants, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import httpx
from runner import ActionError

__all__ = ["exchange"]

_TRIES = 4
_CLAIMS = ("repository", "ref", "environment", "workflow_ref", "event_name", "sub", "aud")
_TIMEOUT_SECONDS = 30.0


def exchange(repo_id: str) -> None:
    """See whether the Hub's client gets a token for a repo, as it will in every process that follows.

    Raises:
        ActionError: it does not; says what the job's identity claims, where that may be the reason.
    """
    for attempt in range(_TRIES):
        try:
            get_token()
        except HfHubHTTPError as error:
            if not is_transient(error.response.status_code):
                raise ActionError(_diagnosis(repo_id, error)) from error
            last: Exception = error
        except httpx.HTTPError as error:
            last = error
        else:
            return
        if attempt < _TRIES - 1:
            time.sleep(0.5 * 2**attempt)
    raise ActionError(
        f"the job's identity could not be exchanged for a token of the Hub, {_TRIES} times: {_line(last)}. "
        "This says nothing about the claims: the server is slow or unreachable; run the job again."
    ) from last


def _diagnosis(repo_id: str, error: HfHubHTTPError) -> str:
    words, status = _line(error.server_message or error), error.response.status_code
    if not str(error.response.url).startswith(f"{constants.ENDPOINT}/"):
        return f"GitHub did not give the job its identity ({status}): {words}"
    claims = ", ".join(f"{name}={value}" for name, value in _claims().items())
    return (
        f"the Hub does not take this job for a Trusted Publisher of {repo_id}: {words} ({status}). "
        f"The job's identity says: {claims}. "
        f"Compare each with the Trusted Publishers in the settings of {repo_id}: a release runs on refs/tags/…, not on "
        "a branch; an environment has to be named on both sides or on neither; the workflow is the one that was "
        "started. The repo has to exist already."
    )


def _claims() -> dict[str, str]:
    """What the job's identity token says of it. The token itself is never shown."""
    try:
        payload = _identity().split(".")[1]
        found = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (OSError, urllib.error.URLError, IndexError, ValueError, binascii.Error):
        return {"unknown": "the identity token cannot be read"}
    return {name: str(found[name]) for name in _CLAIMS if name in found}


def _identity() -> str:
    given = os.environ.get("HF_OIDC_ID_TOKEN")
    if given:
        return given
    address = os.environ["ACTIONS_ID_TOKEN_REQUEST_URL"]
    joint = "&" if "?" in address else "?"
    query = urllib.parse.urlencode({"audience": constants.ENDPOINT})
    request = urllib.request.Request(f"{address}{joint}{query}")  # noqa: S310 - the runner's own address
    request.add_header("Authorization", f"Bearer {os.environ['ACTIONS_ID_TOKEN_REQUEST_TOKEN']}")
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310
        return str(json.load(answer)["value"])


def _line(text: object) -> str:
    return " ".join(str(text).split())
