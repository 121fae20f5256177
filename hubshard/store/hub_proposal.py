"""Pull requests that publishes have opened."""

from __future__ import annotations

from hubshard.protocols import Revision
from hubshard.store.hub_client import HubClient
from hubshard.store.hub_commit import pull_request_of

__all__ = ["open_proposal"]


def open_proposal(client: HubClient, publish_id: str) -> Revision | None:
    """The pull request, among the newest, whose last commit carries a publish id that begins so, if it is open."""
    found = pull_request_of(client, publish_id)
    if found is None:
        return None
    number, made = found
    url, what = client.api_url("discussions", str(number)), f"look at the pull request {number}"
    is_open = client.send("GET", url, what).json()["status"] in {"open", "draft"}
    return Revision(f"refs/pr/{number}", made.commit) if is_open else None
