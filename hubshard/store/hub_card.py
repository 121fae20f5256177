"""Model cards, as the Hub sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hubshard.errors import FormatError, StoreError
from hubshard.store.hub_client import HubClient
from hubshard.store.hub_errors import status_of

__all__ = ["check_card"]


def check_card(client: HubClient, text: str) -> Sequence[str]:
    """Ask the Hub whether it would take a README.md; its warnings.

    Raises:
        FormatError: the metadata is invalid, with the Hub's reasons.
    """
    body = {"content": text, "repoType": client.repo_type}
    try:
        return client.ask("POST", f"{client.endpoint}/api/validate-yaml", "check README.md", _warnings, json=body)
    except StoreError as error:
        if status_of(error) in {404, 405}:  # a Hub that does not offer it
            return ()
        if status_of(error) != 400:
            raise
        raise FormatError(f"README.md: {error}", hint="correct the metadata between the '---' lines") from error


def _warnings(answer: Any) -> Sequence[str]:
    return [str(warning.get("message")) for warning in answer.get("warnings", [])]
