"""Show readers what was found good: one commit that sends nothing large, then the tag."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hub import Hub
from inputs import Inputs, take_over
from login import log_in
from runner import ActionError, fail, set_outputs
from verbs import run_hubshard


def main() -> None:
    """Run the step."""
    given = take_over()
    log_in(given)
    hub = Hub(given.repo_id)
    candidate, base = os.environ["COMMIT"], os.environ["BASE"]
    released = _release(given, hub, candidate, base)
    set_outputs({"commit": released, "changed": "true" if released != base else "false"})
    if given.tag:
        hub.tag(given.tag, released, move=given.move_tag)
    set_outputs({"tag": given.tag})


def _release(given: Inputs, hub: Hub, candidate: str, base: str) -> str:
    head = (hub.branches() or {}).get(given.revision)
    if (head or "") != base:
        raise ActionError(
            f"{given.revision} of {given.repo_id} moved from {base or 'nothing'} to {head or 'nothing'} since the "
            "candidate was made from it: run the job again. Nothing was released."
        )
    if candidate == head:
        return candidate
    if given.tag and not given.move_tag and given.tag in hub.tags():
        raise ActionError(
            f"the tag {given.tag} names what {given.revision} holds now, and this is something else: choose another "
            "tag, or set the input move-tag. Nothing was released."
        )
    if head is None:
        hub.create_branch(given.revision, candidate)
        return candidate
    done = run_hubshard(
        "rollback",
        "--json",
        f"--to={candidate}",
        f"--revision={given.revision}",
        f"--expected-head={head}",
        f"--message={given.title}",
        "--",
        given.repo_id,
    )
    _add_to_record(done, is_rollback=bool(given.rollback_to))
    return str(done["commit"])


def _add_to_record(done: dict[str, Any], *, is_rollback: bool) -> None:
    place = Path(os.environ["WORK"]) / "record.json"
    record = json.loads(place.read_text("utf-8"))
    record["sent_bytes"] = record.get("sent_bytes", 0) + done["sent_bytes"]
    if is_rollback:
        record["deleted"] = done["removed"]
    place.write_text(json.dumps(record), "utf-8")


if __name__ == "__main__":
    try:
        main()
    except ActionError as error:
        fail(error)
