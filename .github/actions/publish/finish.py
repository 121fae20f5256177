"""Take away what nobody needs any more, whatever became of the release, and say what it did."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from inputs import Inputs, take_over
from login import log_in
from runner import ActionError, annotate, fail, plain, set_outputs, summarise

_GOOD = "success"
_URL = re.compile(r"https?://[\w.:/%-]+", re.ASCII)


def main() -> None:
    """Run the step."""
    given = take_over()
    work = Path(os.environ["WORK"])
    shutil.rmtree(work / "model", ignore_errors=True)
    outcome, record = _outcome(), _record(work)
    outputs = _outputs(given, record)
    found: dict[str, Any] = {"repo_id": given.repo_id, "commit": outputs["commit-oid"] or None}
    if outputs["commit-oid"] or os.environ.get("BRANCH") or os.environ.get("PULL"):
        log_in(given)
        found |= _with_hub(given, outcome, outputs)
        if "shards" not in record and "files" in found:  # a rollback takes them as they are
            outputs |= _counts(found["files"], record)
    else:
        found |= {"shards": record.get("shards", [])}
    manifest = work / "manifest.json"
    manifest.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    outputs["manifest"] = str(manifest)
    set_outputs(outputs)
    summarise(_summary(given, outcome, outputs))


def _counts(files: list[dict[str, Any]], record: dict[str, Any]) -> dict[str, str]:
    total = sum(file["size"] for file in files)
    return {
        "shards": str(sum(file["path"].endswith(".safetensors") for file in files)),
        "total-bytes": str(total),
        "skipped-bytes": str(total - record.get("sent_bytes", 0)),
    }


def _with_hub(given: Inputs, outcome: str, outputs: dict[str, str]) -> dict[str, Any]:
    """Clean up; what the commit holds."""
    from hub import Hub  # it takes the Hub's client, which is slow to import

    hub, branch, pull = Hub(given.repo_id), os.environ.get("BRANCH", ""), os.environ.get("PULL", "")
    commit = outputs["commit-oid"]
    try:
        for name in _left(branch, hub.branches() or {}):
            hub.delete_branch(name)
        if pull and outcome != _GOOD:
            hub.close_pull(int(pull), f"The {outcome} of this pull request failed, so it is closed.")
        return {"files": hub.files(commit)} if commit else {}
    except ActionError as error:
        annotate("warning", f"{error}. The rest was done.")
        return {}


def _left(branch: str, branches: Iterable[str]) -> list[str]:
    """The candidate, and, unless it is still to be finished by another run, what earlier runs of it had left."""
    is_done = os.environ.get("CANDIDATE_OUTCOME") == _GOOD
    staging = f"hubshard/staging/{branch}/"
    return [name for name in branches if branch and (name == branch or (is_done and name.startswith(staging)))]


def _outcome() -> str:
    """What became of the release: success, or the name of the step that did not succeed."""
    steps = {
        name: os.environ.get(f"{name.upper()}_OUTCOME", "") for name in ("candidate", "verify", "check", "release")
    }
    failed = [name for name, came in steps.items() if came not in {_GOOD, "skipped", ""}]
    return failed[0] if failed else _GOOD


def _record(work: Path) -> dict[str, Any]:
    try:
        found = json.loads((work / "record.json").read_text("utf-8"))
    except OSError:
        return {}
    return found if isinstance(found, dict) else {}


def _outputs(given: Inputs, record: dict[str, Any]) -> dict[str, str]:
    step = "RELEASE" if os.environ.get("NEEDS_RELEASE") else "CANDIDATE"
    commit, changed, tag = (os.environ.get(f"{step}_{name}", "") for name in ("COMMIT", "CHANGED", "TAG"))
    address, pull = os.environ.get("PR_URL", ""), os.environ.get("PULL", "")
    url = f"{(os.environ.get('HF_ENDPOINT') or 'https://huggingface.co').rstrip('/')}/{given.repo_id}"
    revision = f"refs/pr/{pull}" if pull else tag or given.revision
    return {
        "commit-oid": commit,
        "commit-url": f"{url}/commit/{commit}" if commit else "",
        "revision-url": f"{url}/tree/{quote(revision, safe='')}" if commit else "",
        "pr-url": address,
        "tag": tag,
        "shards": str(len(record.get("shards", ()))),
        "total-bytes": str(record.get("total_bytes", 0)),
        "uploaded-bytes": str(record.get("sent_bytes", 0)),
        "skipped-bytes": str(record.get("skipped_bytes", 0)),
        "deleted-files": json.dumps(record.get("deleted", [])),
        "changed": changed or "false",
    }


def _summary(given: Inputs, outcome: str, outputs: dict[str, str]) -> str:
    shown = {"repo": given.repo_id, "branch": given.revision, **outputs}
    shown["deleted-files"] = str(len(json.loads(outputs["deleted-files"])))
    rows = "".join(f"| {name} | {_cell(value)} |\n" for name, value in shown.items() if value)
    return f"### {plain(_state(given, outcome, outputs))}\n\n| | |\n| --- | --- |\n{rows}\n"


def _state(given: Inputs, outcome: str, outputs: dict[str, str]) -> str:
    is_new = outputs["changed"] == "true"
    if outcome == "release" and outputs["commit-oid"]:
        return "Released, but not tagged"
    if outcome != _GOOD:
        return f"Nothing was released: the step {outcome} failed"
    if given.dry_run:
        return "Dry run: nothing was changed"
    if given.create_pr:
        return "A pull request was opened" if is_new else "There is nothing new to propose"
    return "Released" if is_new else "Unchanged: the Hub has all of it already"


def _cell(value: str) -> str:
    return f'<a href="{value}">{plain(value)}</a>' if _URL.fullmatch(value) else plain(value)


if __name__ == "__main__":
    try:
        main()
    except ActionError as error:
        fail(error)
