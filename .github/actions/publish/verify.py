"""Read the candidate back: pulled to disk for the check, or from the Hub, file by file."""

from __future__ import annotations

import os
from pathlib import Path

from inputs import take_over
from login import log_in
from runner import ActionError, fail, set_outputs
from verbs import run_hubshard


def main() -> None:
    """Run the step."""
    given = take_over()
    log_in(given)
    target = f"{given.repo_id}@{os.environ['COMMIT']}"
    variant = [f"--variant={given.variant}"] if given.variant else []
    if given.check:
        folder = Path(os.environ["WORK"]) / "model"
        run_hubshard("pull", "--json", f"--local-dir={folder}", *variant, "--", target)  # each file by its SHA-256
        set_outputs({"model": str(folder)})
        target = str(folder)
    if given.verify:
        run_hubshard("verify", "--json", *variant, "--", target)


if __name__ == "__main__":
    try:
        main()
    except ActionError as error:
        fail(error)
