"""Publish to where no reader looks yet, or straight where nothing has to be found good first."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inputs import Inputs, hand_on, read_inputs
from login import log_in
from runner import ActionError, annotate, fail, set_outputs
from verbs import run_hubshard

if TYPE_CHECKING:
    from hub import Hub

_PREFIX = "hubshard/candidate/"


def main() -> None:
    """Run the step."""
    given = read_inputs()
    work = Path(tempfile.mkdtemp(prefix="hubshard-", dir=os.environ.get("RUNNER_TEMP") or None))
    set_outputs({"work": str(work), "inputs": hand_on(given)})
    log_in(given)
    if given.dry_run and not given.rollback_to:
        _write(work, run_hubshard(*_verb(given, given.revision), "--dry-run", *_checked(given), *_source(given)))
        return
    from hub import Hub  # it takes the Hub's client, which is slow to import

    _publish(given, Hub(given.repo_id), work)


def _publish(given: Inputs, hub: Hub, work: Path) -> None:
    if given.dry_run:
        _foresee(given, hub, work)
        return
    branches = hub.branches()
    head = (branches or {}).get(given.revision)
    _check_tag(given, hub, head)
    if given.create_pr:
        _propose(given, hub, work)
    elif given.rollback_to:
        _choose(given, hub, head, work)
    elif given.is_gated:
        _stage(given, hub, branches, head, work)
    else:
        record = run_hubshard(*_verb(given, given.revision), *_limits(given), *_source(given))
        _write(work, record)
        set_outputs({"commit": str(record["commit"]), "changed": _text(record["changed"]), "tag": given.tag})


def _foresee(given: Inputs, hub: Hub, work: Path) -> None:
    goal = _goal(given, hub)
    is_same = hub.resolve(given.revision) == goal or hub.files(given.revision) == hub.files(goal)
    annotate("notice", f"Dry run: {given.revision} {'has' if is_same else 'would get'} the files of {goal}")
    _write(work, {})


def _check_tag(given: Inputs, hub: Hub, head: str | None) -> None:
    """A release that was made already must not be made again over newer ones."""
    if not given.tag or given.move_tag or given.create_pr:
        return
    there = hub.tags().get(given.tag)
    if there is not None and there != head:
        raise ActionError(
            f"the tag {given.tag} is on {there} already, which is not where {given.revision} is: choose another tag, "
            "or set the input move-tag. Nothing was changed."
        )


def _propose(given: Inputs, hub: Hub, work: Path) -> None:
    if given.tag:
        annotate("notice", f"A pull request is not tagged: make the tag {given.tag} after it is merged")
    before = hub.open_pulls()
    record = run_hubshard(*_verb(given, given.revision), *_checked(given), *_source(given))
    address = record.get("pr_url") or ""
    number = int(address.rpartition("/")[2]) if address else 0
    record["changed"] = bool(address) and number not in before
    _write(work, record)
    set_outputs(
        {
            "commit": str(record["commit"]),
            "changed": _text(record["changed"]),
            "pull": str(number or ""),
            "pr-url": address,
            "gate": _text(given.is_gated),
            "check": _text(given.check),
        }
    )


def _choose(given: Inputs, hub: Hub, head: str | None, work: Path) -> None:
    goal = _goal(given, hub)
    if head is None:
        raise ActionError(f"{given.repo_id} has no branch {given.revision} to roll back")
    is_same = head == goal or hub.files(head) == hub.files(goal)
    _check_expected(given, head, is_ours=lambda: is_same)
    _write(work, {})
    _pass_on(given, base=head, commit=head if is_same else goal, branch="")


def _goal(given: Inputs, hub: Hub) -> str:
    goal = hub.resolve(given.rollback_to)
    if goal is None:
        raise ActionError(f"input rollback-to: {given.repo_id} has no revision {given.rollback_to}")
    return goal


def _stage(given: Inputs, hub: Hub, branches: dict[str, str] | None, head: str | None, work: Path) -> None:
    is_again = _check_expected(given, head, is_ours=lambda: _is_release_of(given, hub))
    branch = _candidate_branch(given)
    start = head or (branches or {}).get("main")
    set_outputs({"branch": branch})
    if branches is not None and start is not None:
        if branch in branches:  # of a killed run; what else it published must not go along
            hub.delete_branch(branch)
        hub.create_branch(branch, start)
    record = run_hubshard(*_verb(given, branch), *_source(given))
    commit, base = str(record["commit"]), head or hub.resolve(given.revision) or ""
    if is_again and commit != base:
        raise ActionError(f"{given.revision} of {given.repo_id} is at {base}, not at {given.expected_head}")
    _write(work, record)
    _pass_on(given, base=base, commit=commit, branch=branch)


def _candidate_branch(given: Inputs) -> str:
    # the same for a job that is run again, another for another release
    key = json.dumps([given.repo_id, given.revision, given.tag, given.variant, given.from_step])
    return _PREFIX + hashlib.sha256(key.encode()).hexdigest()[:16]


def _check_expected(given: Inputs, head: str | None, *, is_ours: Callable[[], bool]) -> bool:
    """Refuse a branch that is elsewhere than expected, unless this very release moved it; whether it did."""
    if not given.expected_head or (head or "").startswith(given.expected_head):
        return False
    if head is None or not is_ours():
        raise ActionError(
            f"{given.revision} of {given.repo_id} is at {head or 'no commit'}, not at {given.expected_head}: somebody "
            "was faster. Nothing was changed."
        )
    return True


def _is_release_of(given: Inputs, hub: Hub) -> bool:
    commits = hub.parents(given.revision)
    return len(commits) > 1 and commits[0][1] == given.title and commits[1][0].startswith(given.expected_head)


def _pass_on(given: Inputs, *, base: str, commit: str, branch: str) -> None:
    set_outputs(
        {
            "base": base,
            "commit": commit,
            "branch": branch,
            "gate": _text(given.is_gated),
            "check": _text(given.check),
            "release": "true",
        }
    )


def _verb(given: Inputs, revision: str) -> list[str]:
    verb = ["promote", f"--step={given.from_step}"] if given.from_step else ["publish"]
    visibility = {None: [], True: ["--private"], False: ["--public"]}[given.private]
    return [
        *verb,
        "--json",
        f"--revision={revision}",
        f"--max-shard-size={given.max_shard_size}",
        f"--message={given.title}",
        *_option("dtype", given.dtype),
        *_option("variant", given.variant),
        *visibility,
    ]


def _limits(given: Inputs) -> list[str]:
    tag = [*_option("tag", given.tag), *(["--move-tag"] if given.tag and given.move_tag else [])]
    return [*tag, *_option("expected-head", given.expected_head)]


def _checked(given: Inputs) -> list[str]:
    # a pull request is not tagged
    return ["--create-pr", *_option("expected-head", given.expected_head)] if given.create_pr else _limits(given)


def _source(given: Inputs) -> Sequence[str]:
    return ("--", given.repo_id) if given.from_step else ("--", given.path, given.repo_id)


def _option(name: str, value: str) -> list[str]:
    return [f"--{name}={value}"] if value else []


def _text(value: object) -> str:
    return "true" if value else "false"


def _write(work: Path, record: dict[str, Any]) -> None:
    (work / "record.json").write_text(json.dumps(record), "utf-8")


if __name__ == "__main__":
    try:
        main()
    except ActionError as error:
        fail(error)
