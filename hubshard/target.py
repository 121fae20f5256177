"""What a SOURCE or TARGET on the command line, or a string in the API, means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hubshard.errors import FormatError

__all__ = ["RepoTarget", "check_repo_id", "parse_target"]

_REPO_ID = re.compile(r"(?:[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?/)?[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class RepoTarget:
    """A repo on the Hub.

    Attributes:
        repo_id: "org/name", or "name" for the token's own user.
        revision: branch, tag or commit; None for main.
    """

    repo_id: str
    revision: str | None = None


def parse_target(text: str | Path) -> Path | RepoTarget:
    """Tell a path from a repo: `path`, `org/name[@revision]` or `hf://org/name[@revision]`; an existing path wins.

    Raises:
        FormatError: neither a path that exists nor a valid repo id.
    """
    if isinstance(text, Path):
        return text
    explicit = text.startswith("hf://")
    if not explicit and (Path(text).exists() or text.startswith((".", "/", "~")) or "\\" in text):
        return Path(text).expanduser()
    repo_id, _, revision = text.removeprefix("hf://").partition("@")
    if not explicit and "/" not in repo_id:
        raise FormatError(f"{text!r} is no existing path, and no repo id such as org/name")
    return RepoTarget(check_repo_id(repo_id), revision or None)


def check_repo_id(repo_id: str) -> str:
    """`repo_id` itself, when the Hub would take it.

    Raises:
        FormatError: it would not.
    """
    if (
        len(repo_id) > 96
        or not _REPO_ID.match(repo_id)
        or "--" in repo_id
        or ".." in repo_id
        or repo_id.endswith(".git")
    ):
        raise FormatError(
            f"{repo_id!r} is no repo id",
            hint="write it as org/name: letters, digits, '-', '_' and '.', at most 96 of them",
        )
    return repo_id
