"""The inputs of the action, checked before anything is done with them."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from runner import ActionError

__all__ = ["Inputs", "hand_on", "read_inputs", "take_over"]

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# what git takes for a ref, less what a shell or a URL would read as something else
_REF = re.compile(r"[A-Za-z0-9][\w./+@-]*", re.ASCII)
_HUB_SOURCE = re.compile(r"hf://[\w./+@-]+", re.ASCII)
_WORD = re.compile(r"[\w.]+", re.ASCII)
_TOKEN = re.compile(r"[!-~]*")


@dataclass(frozen=True)
class Inputs:
    """What the workflow asks for. Empty text stands for an input that is not given.

    Attributes:
        path: an absolute path, or `hf://org/name[@revision]`; empty where a step is promoted or a rollback is done.
        repo_id: "org/name".
        revision: the branch to publish to.
        tag: to be made on the released commit.
        move_tag: whether the tag may exist elsewhere, and is moved then.
        max_shard_size: as hubshard takes it.
        dtype: to cast to.
        variant: as in `model.fp16.safetensors`.
        from_step: number of the resume step to promote.
        rollback_to: revision whose files are wanted again.
        create_pr: open a pull request instead.
        expected_head: commit that the branch must be at.
        private: visibility of a repo that is made; None to leave it to the Hub.
        verify: read the published files back before they are released.
        check: whether a command is to judge them.
        dry_run: change nothing.
        token: of the Hub; empty for a Trusted Publisher.
    """

    path: str
    repo_id: str
    revision: str
    tag: str
    move_tag: bool
    max_shard_size: str
    dtype: str
    variant: str
    from_step: str
    rollback_to: str
    create_pr: bool
    expected_head: str
    private: bool | None
    verify: bool
    check: bool
    dry_run: bool
    token: str

    @property
    def is_gated(self) -> bool:
        """Whether something has to be found good before it is released."""
        return self.verify or self.check

    @property
    def title(self) -> str:
        """Of the commit that releases."""
        what = f"Roll back to {self.rollback_to}" if self.rollback_to else "Release"
        return f"{what} {self.tag}".strip() if self.tag else f"{what} with hubshard"


def read_inputs() -> Inputs:
    """The inputs, from the environment.

    Raises:
        ActionError: one of them cannot be meant; names it.
    """
    found = Inputs(
        path=_path(),
        repo_id=_matching("repo-id", _REPO_ID, "org/name"),
        revision=_matching("revision", _REF, "the name of a branch, such as main"),
        tag=_optional("tag", _REF, "a name such as v1.0"),
        move_tag=_boolean("move-tag"),
        max_shard_size=_matching("max-shard-size", _WORD, "a size such as 5GB or 512MiB"),
        dtype=_optional("dtype", _WORD, "a dtype such as bfloat16"),
        variant=_optional("variant", re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII), "a name such as fp16"),
        from_step=_optional("from-step", re.compile(r"[0-9]{1,18}"), "the number of a step"),
        rollback_to=_optional("rollback-to", _REF, "a tag, branch or commit"),
        create_pr=_boolean("create-pr"),
        expected_head=_optional("expected-head", re.compile(r"[0-9a-f]{7,40}"), "a commit: 7 to 40 hex digits"),
        private=None if not _raw("private") else _boolean("private"),
        verify=_boolean("verify"),
        check=bool(_raw("check")),
        dry_run=_boolean("dry-run"),
        token=_token(),
    )
    _refuse_contradictions(found)
    return found


def hand_on(given: Inputs) -> str:
    """The checked inputs for the steps that follow, without the token."""
    return json.dumps({name: value for name, value in asdict(given).items() if name != "token"})


def take_over() -> Inputs:
    """The inputs that an earlier step has checked and handed on."""
    return Inputs(**json.loads(os.environ["INPUTS"]), token=_token())


def _raw(name: str) -> str:
    return os.environ.get("INPUT_" + name.upper().replace("-", "_"), "").strip()


def _matching(name: str, pattern: re.Pattern[str], wanted: str) -> str:
    value = _raw(name)
    if not pattern.fullmatch(value) or ".." in value:
        raise ActionError(f"input {name}: {value!r} is not {wanted}")
    return value


def _optional(name: str, pattern: re.Pattern[str], wanted: str) -> str:
    return _matching(name, pattern, wanted) if _raw(name) else ""


def _boolean(name: str) -> bool:
    value = _raw(name).lower() or "false"
    if value not in {"true", "false"}:
        raise ActionError(f"input {name}: {value!r} is neither true nor false")
    return value == "true"


def _token() -> str:
    value = _raw("token")
    if not _TOKEN.fullmatch(value):
        raise ActionError("input token: it holds a space or another character that no token has")
    return value


def _path() -> str:
    value = _raw("path")
    if not value or _HUB_SOURCE.fullmatch(value):
        return value
    # a build that failed to write org/model must not release somebody's org/model of the Hub
    try:
        is_there = Path(value).exists()
    except (OSError, ValueError):
        is_there = False
    if not is_there:
        hint = "did the build write it elsewhere? A repo on the Hub is written hf://org/name[@revision]"
        raise ActionError(f"input path: {value!r} does not exist; {hint}")
    return str(Path(value).absolute())


def _refuse_contradictions(given: Inputs) -> None:
    if given.revision.startswith(("refs/", "hubshard/")):
        raise ActionError(
            f"input revision: {given.revision!r} is no branch to release to; for a pull request set create-pr"
        )
    sources = {"path": given.path, "from-step": given.from_step, "rollback-to": given.rollback_to}
    named = [name for name, value in sources.items() if value]
    if len(named) != 1:
        found = " and ".join(named) or "none of them"
        raise ActionError(f"exactly one of the inputs path, from-step and rollback-to is needed; there is {found}")
    if given.create_pr and given.rollback_to:
        raise ActionError("inputs create-pr and rollback-to do not go together: a rollback moves the branch itself")
    if given.rollback_to and (given.dtype or given.variant):
        raise ActionError(
            "inputs rollback-to and dtype or variant do not go together: a rollback takes files as they are"
        )
