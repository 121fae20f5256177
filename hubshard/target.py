"""What a SOURCE or TARGET on the command line, or a string in the API, means."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from urllib.parse import urlsplit

from hubshard.errors import FormatError
from hubshard.messages import brief

__all__ = [
    "RepoTarget",
    "check_commit",
    "check_endpoint",
    "check_ref_name",
    "check_repo_id",
    "check_revision",
    "check_text",
    "parse_repo",
    "parse_target",
]

_SCHEME = "hf://"
_NAME = r"\w(?:[\w.-]{0,94}\w)?"
# What `git check-ref-format` forbids, and what would be read as a commit.
_NO_REF_NAME = re.compile(
    r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|^[./-]|\.lock(?:/|\Z)|[./]\Z|^@?\Z|^[0-9a-f]{40}\Z|^refs/"
)
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_MAX_REF_BYTES = 200
_REPO_ID = re.compile(rf"(?:{_NAME}/)?{_NAME}\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class RepoTarget:
    """A repo on the Hub.

    Attributes:
        repo_id: "org/name", or "name" for the token's own user.
        revision: branch, tag or commit; None for main.
    """

    repo_id: str
    revision: str | None = None

    def asked_for(self, revision: str | None) -> str | None:
        """The revision that is named here or besides; None where none is.

        Raises:
            FormatError: two are, and they differ, or an empty one.
        """
        if check_revision(revision) and self.revision and revision != self.revision:
            raise FormatError(f"two revisions are asked for, {self.revision!r} and {revision!r}", hint="leave one out")
        return revision or self.revision


def parse_target(text: str | Path) -> Path | RepoTarget:
    """Tell a path from a repo: `path`, `org/name[@revision]` or `hf://org/name[@revision]`; an existing path wins.

    What can only be a path (`./x`, `/x`, `~/x`, `C:/x`, a backslash) is one, whether it exists or not.

    Raises:
        FormatError: neither a path nor a valid repo id.
    """
    if isinstance(text, Path):
        return text
    if not text.strip():
        raise FormatError("an empty text is no path and no repo id", hint="write it as ./folder or org/name")
    explicit = text.startswith(_SCHEME)
    if not explicit and (_can_only_be_path(text) or os.path.exists(text)):  # noqa: PTH110 - False where Path.exists raises
        return _expanded(text)
    if not explicit and "/" not in text.partition("@")[0]:
        raise FormatError(
            f"{text!r} is no existing path, and no repo id such as org/name",
            hint=f"a new folder is written ./{text}",
        )
    return parse_repo(text)


def parse_repo(text: str) -> RepoTarget:
    """A repo where no path can be meant: `org/name[@revision]`, with or without `hf://`; or "name".

    Raises:
        FormatError: no valid repo id, or nothing after the "@".
    """
    repo_id, at, revision = text.removeprefix(_SCHEME).partition("@")
    if at and not (revision and revision.isprintable() and " " not in revision):
        raise FormatError(f"{text!r} names no revision after the '@'", hint="write it as org/name@revision")
    return RepoTarget(check_repo_id(repo_id), revision or None)


def _can_only_be_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or "\\" in text or PureWindowsPath(text).drive != ""


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise FormatError(f"{text!r}: there is no such user's home") from error


def check_ref_name(name: str, kind: str) -> str:
    """`name` itself, when a Hub would take it as the name of a new branch or tag.

    Args:
        name: of the branch or tag, without "refs/…/".
        kind: "branch" or "tag", for the message.

    Raises:
        FormatError: it would not.
    """
    if _NO_REF_NAME.search(name) or not name.isprintable() or len(name.encode(errors="replace")) > _MAX_REF_BYTES:
        raise FormatError(
            f"{brief(name)} is no name for a {kind}",
            hint="write it as v1.0 or team/run-3: no spaces, '..' or '~^:?*[\\'",
        )
    return name


def check_revision(name: str | None) -> str | None:
    """`name` itself; None stands for the usual one, an empty text for a variable that was not set.

    Raises:
        FormatError: it is empty.
    """
    if name is not None and not name.strip():
        raise FormatError("an empty text is no revision", hint="name a branch, a tag or a commit, or leave it out")
    return name


def check_commit(commit: str) -> str:
    """`commit` itself, when it can be the id of one, in full or its beginning.

    Raises:
        FormatError: it cannot.
    """
    if not _COMMIT.fullmatch(commit):
        raise FormatError(f"{brief(commit)} is no commit", hint="write its id, in full or its first 7 or more digits")
    return commit


def check_text(text: str, what: str) -> str:
    """`text` itself, when it can be sent.

    Args:
        text: given by people.
        what: it is, for the message.

    Raises:
        FormatError: it came as bytes that are no text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"{what} {brief(text)} holds bytes that are no text", hint="give it in UTF-8") from error
    return text


def check_repo_id(repo_id: str) -> str:
    """`repo_id` itself, when the Hub would take it.

    Raises:
        FormatError: it would not.
    """
    if not _REPO_ID.match(repo_id) or "--" in repo_id or ".." in repo_id or repo_id.endswith(".git"):
        raise FormatError(
            f"{repo_id!r} is no repo id",
            hint="write it as org/name: letters, digits, '-', '_' and '.', each at most 96 of them",
        )
    return repo_id


def check_endpoint(url: str) -> str:
    """The URL of a Hub, without a slash at its end.

    Raises:
        FormatError: it is no URL of a server.
    """
    try:
        parts = urlsplit(url)
        is_plain = url.isprintable() and not {" ", "?", "#"} & {*url}
        is_usable = is_plain and parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an address, a port that is none
        is_usable = False
    if not is_usable:
        raise FormatError(
            f"{url!r} is no URL of a Hub",
            hint="write it as https://huggingface.co: as `endpoint`, or in the environment as HF_ENDPOINT",
        )
    return url.rstrip("/")
