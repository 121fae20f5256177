"""Pull requests that publishes have opened."""

from __future__ import annotations

from typing import Any

from hubshard.protocols import Revision
from hubshard.store.commit import Made
from hubshard.store.hub_client import HubClient
from hubshard.store.hub_commit import history_of

__all__ = ["open_pull_request_of", "pull_request_of"]

_NEWEST = 5


def pull_request_of(client: HubClient, publish_id: str) -> tuple[int, Made] | None:
    """The newest pull request whose last commit carries a publish id that begins so: its number, and that commit.

    It is looked for among the five newest.
    """
    url = client.api_url("refs")
    numbers = client.ask("GET", url, "list pull requests", _numbers, params={"include_prs": "1"})
    for number in numbers[:_NEWEST]:
        made = history_of(client, f"refs/pr/{number}", until=None, most=1)
        if made and (made[0].publish_id or "").startswith(publish_id):
            return number, made[0]
    return None


def _numbers(answer: Any) -> list[int]:
    refs = answer.get("pullRequests") or []
    return sorted((int(str(ref["ref"]).rpartition("/")[2]) for ref in refs), reverse=True)


def open_pull_request_of(client: HubClient, publish_id: str) -> Revision | None:
    """What `pull_request_of` finds, if it is open."""
    found = pull_request_of(client, publish_id)
    if found is None:
        return None
    number, made = found
    url, what = client.api_url("discussions", str(number)), f"look at the pull request {number}"
    is_open = client.ask("GET", url, what, lambda answer: answer["status"] in {"open", "draft"})
    return Revision(f"refs/pr/{number}", made.commit) if is_open else None
